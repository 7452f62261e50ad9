"""Vectors and scores equal those of sentence-transformers, for exports of torch.onnx with both of its exporters."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from genai import Embedder, Reranker
from genai.kernels.ir import HostNode, OpProgram
from genai.lowering.program import build_program
from tests.embed.conftest import MODELS

GOLDENS: dict[str, Any] = {
    path.parent.name: json.loads(path.read_text()) for path in sorted(MODELS.glob("*/golden.json"))
}
EMBEDDERS = [name for name, golden in GOLDENS.items() if "vectors" in golden]
RERANKERS = [name for name, golden in GOLDENS.items() if "scores" in golden]
# Their attention depends on the content of both tokens in a way that no kernel for flat batches computes.
AS_EXPORTED = {"deberta_v2", "deberta_v2_reranker"}


@pytest.fixture(scope="module", params=EMBEDDERS)
def named(request: pytest.FixtureRequest) -> Iterator[tuple[str, Embedder]]:
    with Embedder(MODELS / request.param, threads=2) as embedder:
        yield request.param, embedder


def test_there_are_fifteen_architectures() -> None:
    types = {json.loads((MODELS / name / "config.json").read_text())["model_type"] for name in EMBEDDERS}
    assert len(types) >= 15


def test_vectors(named: tuple[str, Embedder]) -> None:
    name, embedder = named
    golden = GOLDENS[name]
    assert embedder.info.flattened == (name not in AS_EXPORTED), embedder.info.reason
    for prompt, vectors in golden["vectors"].items():
        found = embedder.embed(golden["texts"], prompt_name=prompt or None)
        np.testing.assert_allclose(found, vectors, rtol=0, atol=1e-5)


def test_a_vector_does_not_depend_on_its_company(named: tuple[str, Embedder]) -> None:
    name, embedder = named
    texts = GOLDENS[name]["texts"]
    together = embedder.embed(texts * 3)
    for index, text in enumerate(texts):
        np.testing.assert_array_equal(together[index], embedder.embed(text))
        np.testing.assert_array_equal(together[index + len(texts)], together[index])


@pytest.mark.parametrize("name", RERANKERS)
def test_scores(name: str) -> None:
    golden = GOLDENS[name]
    expected = np.array(golden["scores"])
    expected = expected if expected.ndim == 1 else expected[:, -1]
    with Reranker(MODELS / name, threads=1) as reranker:
        assert reranker.info.flattened == (name not in AS_EXPORTED), reranker.info.reason
        found = reranker.score(golden["query"], golden["documents"])
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
        ranked = reranker.rank(golden["query"], golden["documents"], top_n=3)
        order = np.argsort(-expected, kind="stable")[:3]
        assert [one.index for one in ranked] == order.tolist()
        assert [one.document for one in ranked] == [golden["documents"][index] for index in order]
        for index, document in enumerate(golden["documents"]):
            assert reranker.score(golden["query"], [document])[0] == found[index]


@pytest.mark.parametrize("name", [*EMBEDDERS, *RERANKERS])
def test_no_operator_of_a_flat_batch_runs_in_numpy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    programs: list[OpProgram] = []

    def record(*args: Any, **kwargs: Any) -> OpProgram:
        programs.append(build_program(*args, **kwargs))
        return programs[-1]

    monkeypatch.setattr("genai.models.encoder.build_program", record)
    with (Embedder if name in EMBEDDERS else Reranker)(MODELS / name, threads=1):
        assert len(programs) == (name not in AS_EXPORTED)
        for program in programs:
            assert not [part.op_type for part in program.parts if isinstance(part, HostNode)]


@pytest.mark.parametrize("name", ["bert", "modernbert", "mpnet", "qwen3", "gemma3"])
def test_the_reference_device(name: str) -> None:
    golden = GOLDENS[name]
    with Embedder(MODELS / name, device="reference") as embedder:
        np.testing.assert_allclose(embedder.embed(golden["texts"]), golden["vectors"][""], rtol=0, atol=1e-5)

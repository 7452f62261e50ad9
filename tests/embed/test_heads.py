"""The sparse and multi-vector heads of BGE-M3 equal those computed with PyTorch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import genai
from genai import Embedder
from genai.convert.encoders.build import build_encoder
from genai.convert.options import ExportOptions
from genai.embed.heads import multi_vector_score, sparse_score
from genai.weight_files.torch_file import read_torch
from tests.cli.processes import run
from tests.embed.conftest import MODELS

FOLDER = MODELS / "bge_m3"
GOLDEN = json.loads((FOLDER / "golden.json").read_text())
TEXTS = GOLDEN["texts"]


def check(embedder: Embedder) -> None:
    for found, expected in zip(embedder.embed_sparse(TEXTS), GOLDEN["sparse"], strict=True):
        assert {str(id_) for id_ in found} == set(expected)
        for id_, weight in found.items():
            assert weight == pytest.approx(expected[str(id_)], abs=1e-5)
    for vectors, expected in zip(embedder.embed_multi(TEXTS), GOLDEN["multi"], strict=True):
        np.testing.assert_allclose(vectors, expected, rtol=0, atol=1e-5)


def test_heads(tmp_path: Path) -> None:
    assert sum(map(len, GOLDEN["sparse"])) > 25
    with Embedder(FOLDER, threads=1) as embedder:
        check(embedder)
        sparse, multi = embedder.embed_sparse(TEXTS[0]), embedder.embed_multi(TEXTS[0])
        assert isinstance(sparse, dict) and sparse == embedder.embed_sparse(TEXTS)[0]
        np.testing.assert_array_equal(multi, embedder.embed_multi(TEXTS)[0])
    with Embedder(build_encoder(FOLDER, tmp_path / "built", ExportOptions(precision="fp32")), threads=1) as embedder:
        check(embedder)


def test_heads_in_safetensors(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(FOLDER, tmp_path / "model"))
    for name in ("sparse_linear", "colbert_linear"):
        save_file(read_torch(folder / f"{name}.pt"), folder / f"{name}.safetensors")
        (folder / f"{name}.pt").unlink()
    with Embedder(folder, threads=1) as embedder:
        check(embedder)


def test_scores() -> None:
    assert sparse_score({1: 0.5, 2: 2.0, 9: 1.0}, {2: 3.0, 1: 1.0, 4: 7.0}) == 6.5
    query, document = np.eye(2, 3, dtype=np.float32), np.array([[0.6, 0.8, 0], [0, 0, 1]], np.float32)
    assert multi_vector_score(query, document) == pytest.approx(0.7)
    assert multi_vector_score(query[:0], document) == multi_vector_score(query, document[:0]) == 0


def test_models_without_heads(tmp_path: Path) -> None:
    with Embedder(MODELS / "bert", threads=1) as embedder:
        with pytest.raises(genai.UnsupportedModelError, match="the model has no sparse head"):
            embedder.embed_sparse("a")
        with pytest.raises(genai.UnsupportedModelError, match="the model has no multi-vector head"):
            embedder.embed_multi(["a"])
    folder = Path(shutil.copytree(FOLDER, tmp_path / "model"))
    (folder / "sparse_linear.pt").unlink()
    save_file({"weight": np.zeros((1, 7), np.float32)}, folder / "sparse_linear.safetensors")
    (folder / "colbert_linear.pt").write_bytes(b"no archive")
    with Embedder(folder, threads=1) as embedder:
        with pytest.raises(genai.ConfigError, match=r"weight \[1, 7\]"):
            embedder.embed_sparse("a")
        with pytest.raises(genai.InputError, match="the tensors cannot be read"):
            embedder.embed_multi("a")


def test_command() -> None:
    shown = [json.loads(line) for line in run("embed", FOLDER, "-p", TEXTS[0], "--kind", "sparse").stdout.splitlines()]
    assert [set(found) for found in shown] == [set(GOLDEN["sparse"][0])]
    shown = [json.loads(line) for line in run("embed", FOLDER, "-p", TEXTS[1], "--kind", "multi").stdout.splitlines()]
    np.testing.assert_allclose(shown[0], GOLDEN["multi"][1], rtol=0, atol=1e-5)
    refused = run("embed", FOLDER, "-p", "a", "--kind", "sparse", "--dimensions", "4")
    assert refused.returncode and "the kinds are dense, sparse and multi" in refused.stderr

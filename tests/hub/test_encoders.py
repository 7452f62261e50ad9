"""Encoders from the hub: which files are downloaded, and `genai embed`, `genai rerank` and others by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import genai
from genai.cli.app import run
from genai.errors import ModelFolderError, UnsupportedModelError
from genai.hub import built, store
from tests.embed.conftest import MODELS
from tools.local_hub import LocalHub

from .conftest import left

Capture = pytest.CaptureFixture[str]
TEXT = "The cat sits on a mat."


def files_of(name: str) -> dict[str, bytes]:
    """Return the files of a repository of sentence-transformers, without its graph."""
    folder = MODELS / name
    paths = [path for path in folder.rglob("*") if path.is_file() and "onnx" not in path.parts]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def checkpoint(name: str, to: Path) -> Path:
    return Path(shutil.copytree(MODELS / name, to, ignore=shutil.ignore_patterns("onnx")))


@pytest.fixture
def encoders(hub: LocalHub) -> LocalHub:
    """A hub with an encoder and a reranker."""
    more = {"pytorch_model.bin": b"x" * 9, "2_Dense/pytorch_model.bin": b"x" * 9, "openvino/model.bin": b"x"}
    hub.add("org/bert", {**files_of("bert"), **more, "README.md": b"a model"})
    hub.add("org/judge", files_of("bert_reranker"))
    return hub


def test_embed_a_name(encoders: LocalHub, cache: Path, capsys: Capture, tmp_path: Path) -> None:
    assert run(["embed", "org/bert", "-p", TEXT]) == 1
    said = capsys.readouterr().err
    assert "org/bert is not in the cache" in said and "--yes" in said
    assert left(cache) == []

    assert run(["embed", "org/bert", "-p", TEXT, "--yes"]) == 0
    vector = json.loads(capsys.readouterr().out)
    with genai.Embedder(checkpoint("bert", tmp_path / "bert")) as embedder:
        np.testing.assert_allclose(vector, embedder.embed([TEXT])[0], atol=1e-6)
    (model,) = store.models()
    names = {file.path for file in model.files}
    assert {"modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"} <= names
    assert "1_Pooling/config.json" in names
    assert not any(name.endswith((".bin", ".md")) for name in names)
    assert list(model.built_folder.glob("*/onnx/model.onnx"))
    assert built.last_use(model.folder)

    asked = len(encoders.requests)
    assert run(["embed", "bert", "-p", TEXT]) == 0  # from the cache
    assert json.loads(capsys.readouterr().out) == vector
    assert len(encoders.requests) == asked
    assert run(["info", "org/bert"]) == 0
    assert "genai embed" in capsys.readouterr().out
    assert run(["rm", "org/bert", "--yes"]) == 0
    assert left(cache) == []  # with its builds


def test_rerank_a_name(encoders: LocalHub, capsys: Capture, tmp_path: Path) -> None:
    assert run(["rerank", "org/judge", "-q", "the cat", "-p", TEXT, "-p", "A dog.", "--yes", "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    with genai.Reranker(checkpoint("bert_reranker", tmp_path / "judge")) as reranker:
        expected = {one.index: one.score for one in reranker.rank("the cat", [TEXT, "A dog."])}
    assert {one["index"]: one["score"] for one in found} == pytest.approx(expected, abs=1e-6)


def test_modules_with_weights(hub: LocalHub) -> None:
    hub.add("org/dense", {**files_of("bert"), "2_Dense/model.safetensors": b"w" * 40, "2_Dense/config.json": b"{}"})
    assert (genai.pull("org/dense", quiet=True) / "2_Dense" / "model.safetensors").read_bytes() == b"w" * 40


def test_python(encoders: LocalHub) -> None:
    with pytest.raises(ModelFolderError, match="org/bert is not in the cache") as caught:
        genai.Embedder("org/bert")
    assert "pull=True" in caught.value.fix and "`genai pull org/bert`" in caught.value.fix
    with genai.Embedder("org/bert", pull=True) as embedder:
        assert embedder.embed([TEXT]).shape == (1, embedder.dimensions)
    with genai.Reranker("org/judge", pull=True) as reranker:
        assert reranker.score("the cat", [TEXT]).shape == (1,)


def test_models_for_the_other_command(
    encoders: LocalHub, chatting: dict[str, bytes], capsys: Capture, tmp_path: Path
) -> None:
    assert run(["chat", "org/bert", "--yes", "-p", "Hi"]) == 1
    assert "is an encoder" in capsys.readouterr().err
    assert not any(path.endswith("model.safetensors") for path in encoders.paths())  # refused before the weights
    encoders.add("org/tiny", chatting)
    assert run(["embed", "org/tiny", "--yes", "-p", TEXT]) == 1
    assert "error: " in capsys.readouterr().err
    encoders.add("org/odd", {**files_of("bert"), "config.json": b'{"model_type": "odd"}'})
    with pytest.raises(UnsupportedModelError, match="odd"):
        genai.Embedder("org/odd", pull=True)

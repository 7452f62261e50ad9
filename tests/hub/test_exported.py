"""Repositories of exporters, without genai_config.json: `genai chat`, `pull`, `info` and `embed` by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import genai
from genai.cli.app import run
from genai.hub import store
from genai.models.folders import bundled_model
from tests.embed.conftest import MODELS
from tools.local_hub import LocalHub

from .conftest import left

Capture = pytest.CaptureFixture[str]
QUESTION, ANSWER = ["-p", "What is 12 + 7?", "--quiet"], "19"


@pytest.fixture(scope="module")
def graphs() -> dict[str, bytes]:
    """The bundled model in the layout of transformers.js, in two precisions."""
    folder = bundled_model()
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    config = json.loads(files["genai_config.json"])["model"]
    decoder = config["decoder"]
    names = ("hidden_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads")
    described = {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": config["vocab_size"],
        "max_position_embeddings": config["context_length"], "head_dim": decoder["head_size"],
        **{name: decoder[name] for name in names},
    }  # fmt: skip
    beside = {name: files[name] for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")}
    generation = {"eos_token_id": config["eos_token_id"]}
    return {
        **beside,
        "config.json": json.dumps(described).encode(),
        "generation_config.json": json.dumps(generation).encode(),
        "onnx/model_q4.onnx": files["model.onnx"],
        "onnx/model.onnx": files["model.onnx"],
        "onnx/model.onnx.data": files["model.onnx.data"],
        "README.md": b"a model",
    }


def with_own_data(files: dict[str, bytes]) -> dict[str, bytes]:
    """Return the repository with a file of weights for each graph: names of equal length need no other change."""
    renamed = {"onnx/model_q4.onnx": files["onnx/model_q4.onnx"].replace(b"model.onnx.data", b"model_q4.onnx_1")}
    return {**files, **renamed, "onnx/model_q4.onnx_1": files["onnx/model.onnx.data"]}


def test_chat_with_a_name(hub: LocalHub, graphs: dict[str, bytes], capsys: Capture) -> None:
    hub.add("org/pebble-ONNX", with_own_data(graphs))
    assert run(["info", "org/pebble-ONNX"]) == 0
    said = capsys.readouterr().out
    assert "onnx/model_q4.onnx (q4); others: fp32 (`genai pull org/pebble-ONNX:fp32`)" in " ".join(said.split())
    assert run(["chat", "org/pebble-ONNX", "--yes", *QUESTION]) == 0
    assert ANSWER in capsys.readouterr().out
    (model,) = store.models()
    paths = {file.path for file in model.files}
    assert {"onnx/model_q4.onnx", "onnx/model_q4.onnx_1", "config.json", "tokenizer.json"} <= paths
    assert not {"onnx/model.onnx", "onnx/model.onnx.data", "README.md"} & paths
    assert run(["list"]) == 0
    assert "q4" in capsys.readouterr().out
    assert run(["info", "org/pebble-ONNX"]) == 0
    assert "derived" in capsys.readouterr().out
    assert run(["chat", "org/pebble-ONNX", "--precision", "fp32", *QUESTION]) == 2
    assert "no graph in the precision 'fp32'" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["org/pebble-ONNX:fp32"], ["org/pebble-ONNX", "--precision", "fp32"]])
def test_another_precision(hub: LocalHub, graphs: dict[str, bytes], capsys: Capture, arguments: list[str]) -> None:
    hub.add("org/pebble-ONNX", with_own_data(graphs))
    assert run(["pull", *arguments]) == 0
    capsys.readouterr()
    (model,) = store.models()
    assert {"onnx/model.onnx", "onnx/model.onnx.data"} <= {file.path for file in model.files}
    assert run(["chat", model.name, *QUESTION]) == 0
    assert ANSWER in capsys.readouterr().out


def test_a_precision_that_the_repository_lacks(
    hub: LocalHub, cache: Path, graphs: dict[str, bytes], capsys: Capture
) -> None:
    hub.add("org/pebble-ONNX", with_own_data(graphs))
    assert run(["pull", "org/pebble-ONNX", "--precision", "fp16"]) == 1
    assert "`genai pull org/pebble-ONNX:q4`" in capsys.readouterr().err
    assert left(cache) == []


def test_embed_with_a_graph_only(hub: LocalHub, capsys: Capture) -> None:
    folder = MODELS / "bert"
    paths = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".safetensors"]
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
    hub.add("org/bert-ONNX", files)
    text = "The cat sits on a mat."
    assert run(["embed", "org/bert-ONNX", "-p", text, "--yes"]) == 0
    with genai.Embedder(folder) as embedder:
        assert json.loads(capsys.readouterr().out) == pytest.approx(embedder.embed([text])[0].tolist(), abs=1e-6)
    assert run(["info", "org/bert-ONNX"]) == 0
    assert "genai embed" in capsys.readouterr().out
    assert run(["chat", "org/bert-ONNX", *QUESTION]) == 1
    assert "`genai embed" in capsys.readouterr().err
    hub.add("org/other", files)
    assert run(["chat", "org/other", "--yes", *QUESTION]) == 1
    assert "`genai embed" in capsys.readouterr().err
    assert not any(path.endswith(".onnx") for path in hub.paths() if "org/other" in path)  # refused before the weights


def test_embed_with_a_quantised_graph_only(hub: LocalHub, capsys: Capture) -> None:
    folder = MODELS / "bert"
    files = {
        path.relative_to(folder).as_posix().replace("model.onnx", "model_quantized.onnx"): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".safetensors"
    }
    hub.add("org/small", files)
    assert run(["embed", "org/small", "-p", "A cat.", "--yes"]) == 0
    assert json.loads(capsys.readouterr().out)


def test_embed_with_a_decoder(hub: LocalHub, graphs: dict[str, bytes], capsys: Capture) -> None:
    hub.add("org/pebble-ONNX", with_own_data(graphs))
    assert run(["embed", "org/pebble-ONNX", "-p", "x", "--yes"]) == 1
    assert "generates text" in capsys.readouterr().err

"""Fixtures: an LLM over the bundled model, random-weight folders with its tokenizer, and a check of the cache."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import helper

import genai
from genai.convert import DecoderSpec, ExportOptions, LongRope, write_model_folder
from tools.random_weights import RandomWeights

SPEC: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 1536,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_size": 16,
    "context_length": 256,
    "eos_token_ids": (2, 0),
}
LONG_ROPE = LongRope(
    short_factor=tuple(1.0 + 0.05 * i for i in range(8)),
    long_factor=tuple(1.0 + 1.5 * i for i in range(8)),
    original_max_position_embeddings=96,
)
# name -> (changes of the spec, export options)
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "int4": ({}, {"precision": "int4"}),
    "fp32": ({}, {"precision": "fp32"}),
    "window": ({"sliding_window": 7, "model_type": "mistral"}, {"precision": "int4"}),
    "long-rope": ({"rope_scaling": LONG_ROPE, "model_type": "phi3"}, {"precision": "int4"}),
    "dense": ({}, {"precision": "int4"}),
    "dense-last-row": ({}, {"precision": "int4", "prune_lm_head": True}),
}


@pytest.fixture(scope="session")
def form_folder(tmp_path_factory: pytest.TempPathFactory, bundled_folder: Path) -> Callable[[str], Path]:
    """form_folder(name) -> a folder of that form with random weights and the bundled model's tokenizer."""
    root = tmp_path_factory.mktemp("llm-forms")

    def build(name: str) -> Path:
        folder = root / name
        if not folder.exists():
            changes, export = FORMS[name]
            spec = DecoderSpec(**{**SPEC, **changes})
            weights = RandomWeights(spec, seed=1)
            write_model_folder(folder, spec, ExportOptions(**export), weights, tokenizer_dir=bundled_folder)
            if name.startswith("dense"):
                _keep_from_being_flattened(folder / "model.onnx")
        return folder

    return build


def _keep_from_being_flattened(path: Path) -> None:
    """Add an output that mixes the values of tokens, so that the graph cannot be flattened."""
    model = onnx.load(path, load_external_data=False)
    model.graph.node.append(helper.make_node("ReduceSum", ["input_ids"], ["count"], keepdims=0))
    model.graph.output.append(helper.make_tensor_value_info("count", onnx.TensorProto.INT64, []))
    path.write_bytes(model.SerializeToString())


@pytest.fixture(scope="session")
def llm(bundled: genai.Model) -> Iterator[genai.LLM]:
    """Return an LLM over the bundled model."""
    with genai.LLM(bundled) as shared:
        yield shared


@pytest.fixture
def assert_all_given_back() -> Callable[[genai.Model], None]:
    """Assert that no block of the cache is in use."""

    def check(model: genai.Model) -> None:
        pool = model.decoder.pool  # type: ignore[attr-defined]
        assert not any(map(pool.references, range(pool.num_blocks))) and pool.num_free == pool.num_blocks

    return check


@pytest.fixture
def run_script(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run Python code in a separate process; a process that hangs is a failure."""

    def run(code: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-W", "error::ResourceWarning", "-c", code],
            cwd=Path(genai.__file__).parent.parent,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    return run

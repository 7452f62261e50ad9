"""Random-weight model folders, one per form of graph, built once per run with `onnx` alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from genai.convert import DecoderSpec, ExportOptions, LongRope, write_model_folder
from tools.random_weights import RandomWeights

SMALL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_size": 16,
    "context_length": 256,
}
LONG_ROPE = LongRope(
    short_factor=tuple(1.0 + 0.05 * i for i in range(8)),
    long_factor=tuple(1.0 + 1.5 * i for i in range(8)),
    original_max_position_embeddings=4096,
)
# name -> (spec changes, export options)
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fp32": ({}, {"precision": "fp32"}),
    "int4": ({}, {"precision": "int4"}),
    "int4-zero-points": ({}, {"precision": "int4", "symmetric": False}),
    "int4-block-128": (
        {"hidden_size": 128, "intermediate_size": 256, "head_size": 32},
        {"precision": "int4", "block_size": 128},
    ),
    "int8": ({}, {"precision": "int8"}),
    "window": ({"sliding_window": 7, "model_type": "mistral"}, {"precision": "int4"}),
    "separate-qkv": ({}, {"precision": "int4", "packed_qkv": False}),
    "tied-fp32": ({"tie_word_embeddings": True}, {"precision": "fp32"}),
    "tied-int4": ({"tie_word_embeddings": True}, {"precision": "int4"}),
    "biases": ({"qkv_bias": True, "o_bias": True, "mlp_bias": True, "model_type": "qwen2"}, {"precision": "int4"}),
    "biases-fp32": ({"qkv_bias": True, "model_type": "qwen2"}, {"precision": "fp32"}),
    "qk-norm": ({"qk_norm": True, "model_type": "qwen3"}, {"precision": "int4"}),
    "prune-head": ({}, {"precision": "int4", "prune_lm_head": True}),
    "partial-rotary": ({"partial_rotary_factor": 0.5, "head_size": 32}, {"precision": "fp32"}),
    "softcap": ({"attention_softcap": 20.0, "logit_softcap": 10.0}, {"precision": "fp32"}),
    "long-rope": (
        {"rope_scaling": LONG_ROPE, "model_type": "phi3", "context_length": 8192, "num_layers": 2},
        {"precision": "fp32"},
    ),
}


QUANTISED = [name for name, (_, options) in FORMS.items() if options["precision"] != "fp32"]


@pytest.fixture(scope="session")
def form_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """form_folder(name, accuracy_level=4) -> the folder of that form."""
    built: dict[tuple[str, int], Path] = {}
    root = tmp_path_factory.mktemp("forms")

    def build(name: str, accuracy_level: int = 4) -> Path:
        key = (name, accuracy_level)
        if key not in built:
            changes, options = FORMS[name]
            spec = DecoderSpec(**{**SMALL, **changes})
            folder = root / f"{name}-{accuracy_level}"
            export = ExportOptions(accuracy_level=accuracy_level, **options)
            write_model_folder(folder, spec, export, RandomWeights(spec, seed=1))
            built[key] = folder
        return built[key]

    return build


@pytest.fixture(params=[name for name in FORMS if name != "long-rope"])
def form(request: pytest.FixtureRequest) -> str:
    """Every form but the one with a long context."""
    return str(request.param)


@pytest.fixture(params=QUANTISED)
def quantised_form(request: pytest.FixtureRequest) -> str:
    """Every form with block-quantised weights."""
    return str(request.param)

"""Every variant of a folder: onnxruntime-genai loads it as it is and computes what the architecture says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from genai.convert import DecoderSpec, ExportOptions, Llama3Scaling, LongRope, write_model_folder
from tools.random_weights import RandomWeights

pytestmark = pytest.mark.oracle

LLAMA = DecoderSpec(
    model_type="llama",
    vocab_size=320,
    hidden_size=64,
    intermediate_size=96,
    num_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_size=16,
    context_length=256,
)
PHI3 = replace(
    LLAMA,
    model_type="phi3",
    num_layers=2,
    context_length=8192,
    rope_scaling=LongRope(
        short_factor=tuple(1.0 + 0.05 * i for i in range(8)),
        long_factor=tuple(1.5 + 0.5 * i for i in range(8)),
        original_max_position_embeddings=4096,
    ),
)
GEMMA2 = replace(
    LLAMA,
    model_type="gemma2",
    hidden_activation="gelu_tanh",
    tie_word_embeddings=True,
    post_norms=True,
    norm_weight_offset=1.0,
    embedding_scale=8.0,
    attention_scale=20**-0.5,
    attention_softcap=2.0,
    logit_softcap=3.0,
    sliding_window=8,
    sliding_layers=(0, 2),
)
SPECS = {
    "llama": LLAMA,
    "tied": replace(LLAMA, tie_word_embeddings=True),
    "biases": replace(LLAMA, qkv_bias=True, o_bias=True, mlp_bias=True),
    "qk_norm": replace(LLAMA, model_type="qwen3", qk_norm=True, tie_word_embeddings=True, head_size=32),
    "qk_norm_bias": replace(LLAMA, model_type="qwen3", qk_norm=True, qkv_bias=True),
    "one_kv_head": replace(LLAMA, num_key_value_heads=1),
    "partial_rotary": replace(LLAMA, partial_rotary_factor=0.5, head_size=32),
    "interleaved": replace(LLAMA, rope_interleaved=True),
    "gelu": replace(LLAMA, hidden_activation="gelu"),
    "llama3": replace(
        LLAMA,
        rope_theta=500.0,
        rope_scaling=Llama3Scaling(
            factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
        ),
    ),
    "softcap": replace(LLAMA, attention_softcap=2.0, logit_softcap=3.0),
    "window": replace(LLAMA, model_type="mistral", sliding_window=8),
    "one_window": replace(LLAMA, model_type="mistral", sliding_window=8, sliding_layers=(1,)),
    "gemma2": GEMMA2,
    "long_rope": PHI3,
}
FLOAT_OPTIONS = {
    "default": {},
    "separate_qkv": {"packed_qkv": False},
    "unfused_rope": {"fused_rope": False},
    "prune": {"prune_lm_head": True},
    "full_cache": {"windowed_kv_cache": False},
}
QUANTIZED_OPTIONS: dict[str, dict[str, Any]] = {
    "int4": {},
    "int8": {"precision": "int8"},
    "zero_points": {"symmetric": False},
    "int8_zero_points": {"precision": "int8", "symmetric": False},
    "block_16": {"block_size": 16},
    "block_128": {"block_size": 128},
    "block_256": {"block_size": 256},
    "separate_qkv": {"packed_qkv": False},
    "prune": {"prune_lm_head": True},
    "int8_head": {"head_precision": "int8", "embedding_precision": "int8"},
    "int4_head": {"precision": "int8", "head_precision": "int4", "embedding_precision": "int4"},
    "int8_head_zero_points": {"head_precision": "int8", "embedding_precision": "int8", "symmetric": False},
    "fp32_head": {"head_precision": "fp32", "embedding_precision": "fp32"},
    "int4_embedding": {"embedding_precision": "int4"},
    "block_128_embedding": {"block_size": 128, "embedding_precision": "int4"},
}
PROMPT = 20
TOKENS = [int(token) for token in np.random.default_rng(5).integers(3, 320, 28)]


def compare(spec: DecoderSpec, options: ExportOptions, tmp_path: Path, helpers: Any, tolerance: float) -> None:
    reference_logits, rounded_weights, og_logits = helpers
    weights = RandomWeights(spec, seed=1)
    folder = write_model_folder(tmp_path / "model", spec, options, weights)
    actual = og_logits(folder, TOKENS, PROMPT)
    expected = reference_logits(spec, rounded_weights(spec, options, weights), TOKENS)[-len(actual) :]
    assert len(actual) == (len(TOKENS) - PROMPT + 1 if options.prune_lm_head else len(TOKENS))
    assert expected.std() > 0.5
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * expected.std())


@pytest.fixture
def helpers(reference_logits: Any, rounded_weights: Any, og_logits: Any) -> Any:
    return reference_logits, rounded_weights, og_logits


@pytest.mark.parametrize("variant", SPECS)
def test_fp32_logits(variant: str, tmp_path: Path, helpers: Any) -> None:
    compare(SPECS[variant], ExportOptions(precision="fp32"), tmp_path, helpers, 2e-5)


@pytest.mark.parametrize("spec", ["llama", "biases", "qk_norm", "partial_rotary", "window", "long_rope"])
@pytest.mark.parametrize("variant", FLOAT_OPTIONS)
def test_fp32_graph_variants(spec: str, variant: str, tmp_path: Path, helpers: Any) -> None:
    options = ExportOptions(precision="fp32", **FLOAT_OPTIONS[variant])
    compare(SPECS[spec], options, tmp_path, helpers, 2e-5)


@pytest.mark.parametrize("spec", ["llama", "tied"])
@pytest.mark.parametrize("variant", QUANTIZED_OPTIONS)
def test_quantized_logits(spec: str, variant: str, tmp_path: Path, helpers: Any) -> None:
    options = ExportOptions(accuracy_level=1, **QUANTIZED_OPTIONS[variant])
    compare(SPECS[spec], options, tmp_path, helpers, 1e-4)

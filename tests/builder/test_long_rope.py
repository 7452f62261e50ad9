"""Crossing the original context length: onnxruntime-genai starts anew with the long tables, for every token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from genai.builder import DecoderSpec, ExportOptions, LongRope, write_model_folder
from genai.builder.random_weights import RandomWeights

# onnxruntime-genai knows the threshold of phi3 models by heart: 4096.
ORIGINAL = 4096


@pytest.mark.oracle
@pytest.mark.slow
def test_tokens_beyond_the_original_context(tmp_path: Path, reference_logits: Any, og_logits: Any) -> None:
    spec = DecoderSpec(
        model_type="phi3",
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_size=16,
        context_length=2 * ORIGINAL,
        rope_scaling=LongRope(
            short_factor=(1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7),
            long_factor=(2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0),
            original_max_position_embeddings=ORIGINAL,
        ),
    )
    weights = RandomWeights(spec, seed=3)
    folder = write_model_folder(tmp_path / "model", spec, ExportOptions(precision="fp32", prune_lm_head=True), weights)
    tokens = [int(token) for token in np.random.default_rng(2).integers(0, 64, ORIGINAL + 3)]
    actual = og_logits(folder, tokens, ORIGINAL - 1)
    lengths = range(ORIGINAL - 1, ORIGINAL + 4)
    expected = np.stack([reference_logits(spec, weights, tokens[:length])[-1] for length in lengths])
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-3 * expected.std())
    stale = reference_logits(spec, weights, tokens[:ORIGINAL])[-1]
    assert np.abs(expected[2] - stale).max() > 0.1

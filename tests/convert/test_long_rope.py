"""Crossing the original context length: all tokens are computed anew with the long tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from genai.convert import DecoderSpec, ExportOptions, LongRope, write_model_folder
from tools.random_weights import RandomWeights

# onnxruntime-genai knows phi3's threshold by heart, and only generate_next_token starts anew there: append_tokens, and
# get_logits at the threshold itself, go on with keys that the short tables have rotated.
ORIGINAL = 4096


@pytest.mark.oracle
@pytest.mark.slow
def test_tokens_beyond_the_original_context(tmp_path: Path, reference_logits: Any) -> None:
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
    prompt = [int(token) for token in np.random.default_rng(2).integers(0, 64, ORIGINAL - 1)]

    og = pytest.importorskip("onnxruntime_genai")
    model = og.Model(str(folder))
    params = og.GeneratorParams(model)
    params.set_search_options(max_length=ORIGINAL + 8)
    generator = og.Generator(model, params)
    generator.append_tokens(np.array([prompt], np.int32))
    for _ in range(3):
        generator.generate_next_token()
    tokens = [int(token) for token in generator.get_sequence(0)]
    assert len(tokens) == ORIGINAL + 2

    for length in range(ORIGINAL - 1, ORIGINAL + 2):
        assert tokens[length] == reference_logits(spec, weights, tokens[:length])[-1].argmax()
    expected = reference_logits(spec, weights, tokens)[-1]
    actual = np.array(generator.get_logits()).reshape(-1)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-3 * expected.std())

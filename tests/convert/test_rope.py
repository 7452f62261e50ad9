"""Cosine and sine tables against transformers' formulas, worked out in float64."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from genai.convert import DecoderSpec, Llama3Scaling, LongRope
from genai.convert.rope import Tables, long_rope_attention_factor, long_rope_tables, rotation_tables, scaled_frequencies


def rope_tables(spec: DecoderSpec) -> Tables:
    frequencies, factor = scaled_frequencies(spec)
    return rotation_tables(frequencies, range(spec.context_length), factor)


def test_plain(tiny: DecoderSpec) -> None:
    cos, sin = rope_tables(replace(tiny, rope_theta=5000.0))
    assert cos.shape == sin.shape == (40, 8)
    assert cos.dtype == sin.dtype == np.float32
    angle = 39 * 5000.0 ** (-6 / 16)
    np.testing.assert_allclose((cos[39, 3], sin[39, 3]), (math.cos(angle), math.sin(angle)), atol=1e-5)
    np.testing.assert_array_equal(cos[0], 1)


def test_partial(tiny: DecoderSpec) -> None:
    cos, _ = rope_tables(replace(tiny, partial_rotary_factor=0.5))
    assert cos.shape == (40, 4)
    np.testing.assert_allclose(cos[7, 1], math.cos(7 * 10000 ** (-2 / 8)), atol=1e-6)


def test_llama3_keeps_short_waves_stretches_long_ones_and_blends_between(tiny: DecoderSpec) -> None:
    scaling = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
    cos, _ = rope_tables(replace(tiny, rope_theta=100.0, rope_scaling=scaling))
    frequencies = 100.0 ** (-np.arange(0, 16, 2) / 16)
    wavelengths = 2 * math.pi / frequencies
    assert wavelengths[0] < 8 < wavelengths[1] < 32 < wavelengths[3]
    np.testing.assert_allclose(cos[3, 0], math.cos(3 * frequencies[0]), atol=1e-6)
    np.testing.assert_allclose(cos[3, 3:], np.cos(3 * frequencies[3:] / 8), atol=1e-6)
    kept = (32 / wavelengths[1] - 1) / 3
    blended = (1 - kept) * frequencies[1] / 8 + kept * frequencies[1]
    np.testing.assert_allclose(cos[3, 1], math.cos(3 * blended), atol=1e-6)


def test_long_rope_has_two_tables(tiny: DecoderSpec) -> None:
    scaling = LongRope(short_factor=(1.0,) * 8, long_factor=(4.0,) * 8, original_max_position_embeddings=10)
    spec = replace(tiny, rope_scaling=scaling)
    factor = math.sqrt(1 + math.log(4) / math.log(10))
    assert long_rope_attention_factor(spec, scaling) == factor
    (short_cos, _), (long_cos, long_sin) = long_rope_tables(spec, scaling)
    assert (short_cos.shape, long_cos.shape) == ((10, 8), (40, 8))
    np.testing.assert_allclose(short_cos[5, 0], factor * math.cos(5), rtol=1e-5)
    np.testing.assert_allclose(long_cos[20, 0], factor * math.cos(5), rtol=1e-5)
    np.testing.assert_allclose(long_sin[20, 0], factor * math.sin(5), rtol=1e-5)


def test_long_rope_attention_factor(tiny: DecoderSpec) -> None:
    given = LongRope(
        short_factor=(1.0,) * 8, long_factor=(1.0,) * 8, original_max_position_embeddings=10, attention_factor=1.25
    )
    assert long_rope_attention_factor(tiny, given) == 1.25
    unstretched = replace(given, attention_factor=None, original_max_position_embeddings=40)
    assert long_rope_attention_factor(tiny, unstretched) == 1.0

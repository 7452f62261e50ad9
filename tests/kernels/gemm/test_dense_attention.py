"""Attention over dense tensors against float64 NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from genai.kernels.cpu.arrays.gemm.dense_attention import DenseAttention

# Batch, heads, rows, length, size, width.
SHAPES = [(1, 1, 1, 1, 1, 1), (2, 3, 5, 7, 4, 6), (1, 2, 33, 300, 70, 64), (1, 2, 64, 17, 8, 3)]


def attention(query, keys, values, bias, scale):
    scores = query.astype(np.float64) @ keys.astype(np.float64) * scale
    scores = scores if bias is None else scores + bias
    with np.errstate(invalid="ignore"):
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return weights / weights.sum(-1, keepdims=True) @ values.astype(np.float64)


@pytest.mark.parametrize("bias", ["none", "keys", "all", "shared", "queries first"])
@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1, 1, 1), (2, 3, 5, 7, 4, 6), (1, 2, 33, 300, 70, 64), (1, 2, 64, 17, 8, 3)]
)
def test_equals_the_definition(everywhere, normal, shape, bias):
    batch, heads, rows, length, size, width = shape
    query = normal(batch, rows, heads, size).transpose(0, 2, 1, 3)
    keys = normal(batch, length, heads, size).transpose(0, 2, 3, 1)
    values = normal(batch, length, heads, width).transpose(0, 2, 1, 3)
    full = (batch, heads, rows, length)
    addend = {"none": None, "keys": np.broadcast_to(normal(batch, 1, 1, length), full), "all": normal(*full)}.get(bias)
    if bias == "shared":
        addend = np.broadcast_to(normal(batch, 1, rows, length), full)
    if bias == "queries first":
        addend = normal(batch, heads, length, rows).swapaxes(2, 3)
    found = everywhere(lambda threads: DenseAttention(threads, 0.5)(query, keys, values, addend))
    np.testing.assert_allclose(found, attention(query, keys, values, addend, 0.5), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("nan_is_zero", [False, True])
def test_hidden_rows(threads, normal, nan_is_zero):
    query, keys, values = normal(1, 1, 40, 8), normal(1, 1, 8, 20), normal(1, 1, 20, 8)
    bias = np.zeros((1, 1, 40, 20), np.float32)
    bias[..., 5:] = -np.inf
    bias[0, 0, 33] = -np.inf
    found = DenseAttention(threads, 1.0, nan_is_zero=nan_is_zero)(query, keys, values, bias)
    expected = attention(query, keys, values, bias, 1.0)
    expected[0, 0, 33] = 0 if nan_is_zero else np.nan
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_a_row_that_is_no_number(threads, normal):
    query, keys, values = normal(1, 1, 40, 8), normal(1, 1, 8, 20), normal(1, 1, 20, 8)
    query[0, 0, 7, 2] = np.nan
    found = DenseAttention(threads, 1.0)(query, keys, values, None)
    assert np.isnan(found[0, 0, 7]).all()
    assert np.isfinite(np.delete(found[0, 0], 7, axis=0)).all()


def test_what_does_not_fit(threads, normal):
    attend = DenseAttention(threads, 1.0)
    query, keys, values = normal(1, 1, 4, 8), normal(1, 1, 8, 5), normal(1, 1, 5, 8)
    with pytest.raises(ValueError, match="do not match"):
        attend(query, keys[:, :, :7], values, None)
    with pytest.raises(ValueError, match="bias is"):
        attend(query, keys, values, normal(1, 1, 5, 4))

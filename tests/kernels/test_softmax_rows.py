"""Softmax over the last and over other axes against float64 NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from genai.kernels.cpu.arrays.functions import softmax_columns, softmax_rows
from genai.kernels.cpu.program.thread_pool import Threads


@pytest.fixture(params=[1, 2])
def threads(request):
    return Threads(request.param)


@pytest.mark.parametrize("shape", [(1,), (3, 17), (2, 3, 64), (400, 401), (5, 0)])
def test_equals_the_definition(threads, rng, shape):
    x = (rng.standard_normal(shape) * 20).astype(np.float32)
    found = softmax_rows(threads, x)
    weights = np.exp(x.astype(np.float64) - x.max(axis=-1, keepdims=True, initial=-np.inf))
    expected = weights / weights.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(softmax_rows(threads, x, logarithm=True), np.log(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 17), (3, 65, 16), (40, 30, 33), (2, 5, 0), (2, 0, 5)])
def test_columns(threads, rng, shape):
    x = (rng.standard_normal(shape) * 20).astype(np.float32)
    if x.size > 100:
        x[0, :, 0], x[1, 2, 1], x[1, 1:, 3] = -np.inf, np.nan, -np.inf
    with np.errstate(invalid="ignore", divide="ignore"):
        weights = np.exp(x.astype(np.float64) - x.max(axis=1, keepdims=True, initial=-np.inf))
        expected = weights / weights.sum(axis=1, keepdims=True)
        logarithms = np.log(expected)
    np.testing.assert_allclose(softmax_columns(threads, x), expected, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(softmax_columns(threads, x, logarithm=True), logarithms, rtol=1e-5, atol=1e-6)


def test_rows_that_are_no_numbers(threads):
    x = np.zeros((5, 20), np.float32)
    x[1, 3], x[2], x[3, 5:], x[4, 9] = np.nan, -np.inf, -np.inf, np.inf
    found = softmax_rows(threads, x)
    assert np.isnan(found[1:3]).all()
    np.testing.assert_allclose(found[3], [0.2] * 5 + [0] * 15, rtol=1e-6)
    assert np.isnan(found[4, 9])
    logarithms = softmax_rows(threads, x, logarithm=True)
    assert np.isnan(logarithms[[1, 2, 4], [0, 0, 9]]).all()
    np.testing.assert_allclose(logarithms[3], [np.log(0.2)] * 5 + [-np.inf] * 15, rtol=1e-6)


def test_other_types(threads):
    with pytest.raises(ValueError, match="x is float64"):
        softmax_rows(threads, np.zeros(3))

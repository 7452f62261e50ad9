"""RMS norm and layer norm against the NumPy references."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from genai.kernels.cpu.arrays import functions
from genai.kernels.cpu.arrays.functions import norm_of_sum
from genai.kernels.cpu.program.thread_pool import Threads
from genai.kernels.reference.functions import norm

Normal = Callable[..., np.ndarray]

any_size = pytest.mark.parametrize("size", [1, 31, 32, 33, 64, 100, 2048])


def assert_close(ours: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(ours, expected, rtol=3e-6, atol=3e-6)


@any_size
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_rms_norm(normal: Normal, size: int, tokens: int) -> None:
    x, weight = normal(tokens, size) * 3, normal(size)
    assert_close(functions.norm(x, weight, 1e-5), norm(x, weight, 1e-5))


@any_size
@pytest.mark.parametrize("with_bias", [False, True])
def test_layer_norm(normal: Normal, size: int, with_bias: bool) -> None:
    x, weight, bias = normal(3, size) + 2, normal(size), normal(size) if with_bias else None
    ours = functions.norm(x, weight, 1e-5, bias=bias, centred=True)
    assert_close(ours, norm(x, weight, 1e-5, 0 if bias is None else bias, centred=True))


@any_size
@pytest.mark.parametrize("with_bias", [False, True])
def test_add_rms_norm(normal: Normal, size: int, with_bias: bool) -> None:
    x, residual, weight = normal(3, size), normal(3, size), normal(size)
    input_bias = normal(size) if with_bias else None
    expected = x.astype(np.float64) + residual + (0 if input_bias is None else input_bias)
    out, total = norm_of_sum(x, residual, weight, 1e-5, input_bias=input_bias)
    assert_close(out, norm(expected, weight, 1e-5))
    assert_close(total, expected)


@any_size
@pytest.mark.parametrize("with_bias", [False, True])
def test_add_layer_norm(normal: Normal, size: int, with_bias: bool) -> None:
    x, residual, weight = normal(3, size), normal(3, size), normal(size)
    bias, input_bias = (normal(size), normal(size)) if with_bias else (None, None)
    expected = x.astype(np.float64) + residual + (0 if input_bias is None else input_bias)
    out, total = norm_of_sum(x, residual, weight, 1e-5, bias=bias, input_bias=input_bias, centred=True)
    assert_close(out, norm(expected, weight, 1e-5, 0 if bias is None else bias, centred=True))
    assert_close(total, expected)


@pytest.mark.parametrize("factor", [0.0, 1e-40, 1e-20, 1e15])
def test_extreme_magnitudes(normal: Normal, factor: float) -> None:
    x, weight = (normal(2, 70) * factor).astype(np.float32), normal(70)
    assert_close(functions.norm(x, weight, 1e-6), norm(x, weight, 1e-6))


def test_outlier_channel(normal: Normal) -> None:
    x, weight = normal(2, 70), normal(70)
    x[:, 3] = 1e4
    assert_close(functions.norm(x, weight, 1e-6), norm(x, weight, 1e-6))
    assert_close(functions.norm(x, weight, 1e-6, centred=True), norm(x, weight, 1e-6, centred=True))


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_infinities_and_nans_stay_visible_in_their_row(normal: Normal, bad: float) -> None:
    x, weight = normal(3, 40), np.ones(40, np.float32)
    clean = functions.norm(x, weight, 1e-5)
    x[1, 7] = bad
    out = functions.norm(x, weight, 1e-5)
    assert np.isnan(out[1, 7])
    np.testing.assert_array_equal(out[[0, 2]], clean[[0, 2]])


def test_rows_and_threads_do_not_change_a_bit(normal: Normal, threads: Threads) -> None:
    x, residual, weight = normal(9, 100), normal(9, 100), normal(100)
    together = norm_of_sum(x, residual, weight, 1e-5, threads=threads)
    for i in range(9):
        alone = norm_of_sum(x[i : i + 1], residual[i : i + 1], weight, 1e-5)
        np.testing.assert_array_equal(alone[0][0], together[0][i])
        np.testing.assert_array_equal(alone[1][0], together[1][i])


@pytest.mark.parametrize(
    "change",
    [
        {"x": np.zeros((2, 9))},
        {"x": np.zeros(9, np.float32)},
        {"x": np.zeros((2, 18), np.float32)[:, ::2]},
        {"weight": np.zeros(8, np.float32)},
    ],
)
def test_norm_refuses(change: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"x": np.zeros((2, 9), np.float32), "weight": np.zeros(9, np.float32), "epsilon": 1e-5}
    with pytest.raises(ValueError, match="expected"):
        functions.norm(**{**arguments, **change})


@pytest.mark.parametrize("name", ["residual", "weight", "bias", "input_bias"])
def test_norm_of_sum_refuses(name: str) -> None:
    vector, matrix = np.zeros(9, np.float32), np.zeros((2, 9), np.float32)
    arguments: dict[str, Any] = {"x": matrix, "residual": matrix, "weight": vector, "bias": vector, "epsilon": 1e-5}
    with pytest.raises(ValueError, match=f"{name} is float32"):
        norm_of_sum(**{**arguments, name: np.zeros((2, 10) if name == "residual" else 10, np.float32)}, centred=True)

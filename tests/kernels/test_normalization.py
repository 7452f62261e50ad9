"""RMS norm and layer norm against the NumPy references."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from genai.kernels.cpu.normalization import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from genai.kernels.reference.normalization import (
    layer_normalization,
    simplified_layer_normalization,
    skip_layer_normalization,
    skip_simplified_layer_normalization,
)

Normal = Callable[..., np.ndarray]

any_size = pytest.mark.parametrize("size", [1, 31, 32, 33, 64, 100, 2048])


def assert_close(ours: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(ours, expected, rtol=3e-6, atol=3e-6)


@any_size
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_rms_norm(normal: Normal, size: int, tokens: int) -> None:
    x, weight = normal(tokens, size) * 3, normal(size)
    assert_close(rms_norm(x, weight, 1e-5), simplified_layer_normalization(x, weight, epsilon=1e-5))


def test_rms_norm_per_head_in_place_in_packed_qkv(normal: Normal) -> None:
    packed, weight = normal(4, 8, 24), normal(24)
    expected = packed.copy()
    expected[:, 2:5] = simplified_layer_normalization(packed[:, 2:5], weight, epsilon=1e-6)
    heads = packed[:, 2:5]
    assert rms_norm(heads, weight, 1e-6, heads) is heads
    assert_close(packed, expected)


@any_size
@pytest.mark.parametrize("with_bias", [False, True])
def test_layer_norm(normal: Normal, size: int, with_bias: bool) -> None:
    x, weight, bias = normal(3, size) + 2, normal(size), normal(size) if with_bias else None
    assert_close(layer_norm(x, weight, bias, 1e-5), layer_normalization(x, weight, bias, epsilon=1e-5))


@any_size
@pytest.mark.parametrize("with_bias", [False, True])
def test_add_rms_norm(normal: Normal, size: int, with_bias: bool) -> None:
    x, residual, weight = normal(3, size), normal(3, size), normal(size)
    input_bias = normal(size) if with_bias else None
    expected = skip_simplified_layer_normalization(x, residual, weight, input_bias, epsilon=1e-5)
    ours = add_rms_norm(x, residual, weight, 1e-5, input_bias=input_bias)
    for mine, other in zip(ours, expected, strict=True):
        assert_close(mine, other)


@any_size
@pytest.mark.parametrize("with_bias", [False, True])
def test_add_layer_norm(normal: Normal, size: int, with_bias: bool) -> None:
    x, residual, weight = normal(3, size), normal(3, size), normal(size)
    bias, input_bias = (normal(size), normal(size)) if with_bias else (None, None)
    expected = skip_layer_normalization(x, residual, weight, bias, input_bias, epsilon=1e-5)
    ours = add_layer_norm(x, residual, weight, bias, 1e-5, input_bias=input_bias)
    for mine, other in zip(ours, expected, strict=True):
        assert_close(mine, other)


def test_sum_may_overwrite_its_inputs(normal: Normal) -> None:
    x, residual, weight = normal(3, 50), normal(3, 50), normal(50)
    expected = add_rms_norm(x, residual, weight, 1e-5)
    out, total = add_rms_norm(x, residual, weight, 1e-5, x, residual)
    assert out is x
    assert total is residual
    np.testing.assert_array_equal(out, expected[0])
    np.testing.assert_array_equal(total, expected[1])


@pytest.mark.parametrize("factor", [0.0, 1e-40, 1e-20, 1e15])
def test_extreme_magnitudes(normal: Normal, factor: float) -> None:
    x, weight = (normal(2, 70) * factor).astype(np.float32), normal(70)
    assert_close(rms_norm(x, weight, 1e-6), simplified_layer_normalization(x, weight, epsilon=1e-6))


def test_outlier_channel(normal: Normal) -> None:
    x, weight = normal(2, 70), normal(70)
    x[:, 3] = 1e4
    assert_close(rms_norm(x, weight, 1e-6), simplified_layer_normalization(x, weight, epsilon=1e-6))
    assert_close(layer_norm(x, weight, None, 1e-6), layer_normalization(x, weight, epsilon=1e-6))


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_infinities_and_nans_stay_visible_in_their_row(normal: Normal, bad: float) -> None:
    x, weight = normal(3, 40), np.ones(40, np.float32)
    clean = rms_norm(x, weight, 1e-5)
    x[1, 7] = bad
    out = rms_norm(x, weight, 1e-5)
    assert np.isnan(out[1, 7])
    np.testing.assert_array_equal(out[[0, 2]], clean[[0, 2]])


def test_rows_and_threads_do_not_change_a_bit(normal: Normal, team: Any) -> None:
    x, residual, weight = normal(9, 100), normal(9, 100), normal(100)
    together = add_rms_norm(x, residual, weight, 1e-5, team=team)
    for i in range(9):
        alone = add_rms_norm(x[i : i + 1], residual[i : i + 1], weight, 1e-5)
        np.testing.assert_array_equal(alone[0][0], together[0][i])
        np.testing.assert_array_equal(alone[1][0], together[1][i])


@pytest.mark.parametrize(
    "change",
    [
        {"x": np.zeros((2, 9))},
        {"x": np.zeros(9, np.float32)},
        {"x": np.zeros((2, 18), np.float32)[:, ::2]},
        {"weight": np.zeros(8, np.float32)},
        {"out": np.zeros((3, 9), np.float32)},
    ],
)
def test_rms_norm_refuses(change: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"x": np.zeros((2, 9), np.float32), "weight": np.zeros(9, np.float32), "epsilon": 1e-5}
    with pytest.raises(ValueError, match="expected"):
        rms_norm(**{**arguments, **change})


@pytest.mark.parametrize("name", ["residual", "weight", "bias", "out", "out_sum", "input_bias"])
def test_add_layer_norm_refuses(name: str) -> None:
    vector, matrix = np.zeros(9, np.float32), np.zeros((2, 9), np.float32)
    arguments: dict[str, Any] = {"x": matrix, "residual": matrix, "weight": vector, "bias": vector, "epsilon": 1e-5}
    with pytest.raises(ValueError, match=f"{name} is float32"):
        add_layer_norm(
            **{**arguments, name: np.zeros((2, 10) if name in ("residual", "out", "out_sum") else 10, np.float32)}
        )

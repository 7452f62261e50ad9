"""Activation functions against the NumPy references."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from genai.kernels.cpu.arrays.functions import activation, gated
from genai.kernels.cpu.program.thread_pool import Threads
from genai.kernels.reference.functions import UNARY

Normal = Callable[..., np.ndarray]

SPECIAL = np.array(
    [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-40, 3e38, -3e38, 88.8, -88.8, -104.0, 5.0], np.float32
)

# Names of functions with their parameters.
ALONE: list[tuple[Any, ...]] = [("silu",), ("quick_gelu", 1.702), ("quick_gelu", 0.7), ("gelu",), ("gelu_tanh",)]


def definition(name: str, x: np.ndarray, *parameters: float) -> np.ndarray:
    with np.errstate(all="ignore"):
        return UNARY[name](x.astype(np.float64), *parameters).astype(np.float32)


def assert_close(ours: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(ours, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("function", ALONE, ids=str)
@pytest.mark.parametrize("shape", [(0, 3), (1,), (31,), (3, 100), (2, 3, 64), (2, 9000)])
def test_equals_reference(normal: Normal, function: tuple[Any, ...], shape: tuple[int, ...]) -> None:
    (name, *parameters), x = function, normal(*shape) * 4
    assert_close(activation(name, x, *parameters), definition(name, x, *parameters))


@pytest.mark.parametrize("function", ALONE, ids=str)
def test_special_numbers(function: tuple[Any, ...]) -> None:
    name, *parameters = function
    assert_close(activation(name, SPECIAL, *parameters), definition(name, SPECIAL, *parameters))


@pytest.mark.parametrize("width", [1, 33, 64, 500])
def test_gated_units(normal: Normal, width: int) -> None:
    gate, up = normal(5, width) * 3, normal(5, width)
    assert_close(gated("silu", gate, up), definition("silu", gate) * up)
    assert_close(gated("gelu_tanh", gate, up), definition("gelu_tanh", gate) * up)


def test_halves_of_a_fused_projection(normal: Normal) -> None:
    fused = normal(4, 100)
    gate, up = fused[:, :50], fused[:, 50:]
    np.testing.assert_array_equal(gated("silu", gate, up), gated("silu", gate.copy(), up.copy()))


def test_threads_and_rows_do_not_change_a_bit(normal: Normal, threads: Threads) -> None:
    gate, up = normal(7, 100), normal(7, 100)
    together = gated("silu", gate, up, threads=threads)
    one_by_one = [gated("silu", gate[i : i + 1], up[i : i + 1]) for i in range(7)]
    np.testing.assert_array_equal(together, np.concatenate(one_by_one))
    x = normal(3, 5000)
    np.testing.assert_array_equal(activation("gelu", x, threads=threads), activation("gelu", x))


@pytest.mark.parametrize(
    "change",
    [
        {"gate": np.zeros((2, 4))},
        {"up": np.zeros((2, 5), np.float32)},
        {"up": np.zeros((2, 8), np.float32)[:, ::2]},
    ],
)
def test_gated_refuses(change: dict[str, Any]) -> None:
    given = {"gate": np.zeros((2, 4), np.float32), "up": np.zeros((2, 4), np.float32), **change}
    with pytest.raises(ValueError, match="expected"):
        gated("silu", **given)


def test_elementwise_refuses() -> None:
    x = np.zeros(4, np.float32)
    with pytest.raises(ValueError, match="x is float64"):
        activation("gelu", np.zeros(4))
    for run in (lambda: activation("guess", x), lambda: gated("guess", x[None], x[None])):
        with pytest.raises(ValueError, match="guess"):
            run()
    with pytest.raises(ValueError, match="quick_gelu"):
        activation("quick_gelu", x)

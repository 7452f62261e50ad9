"""Activation functions against the NumPy references."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from genai.kernels.cpu.activations import geglu, gelu, quick_gelu, silu, swiglu
from genai.kernels.reference import activations as reference

Normal = Callable[..., np.ndarray]

SPECIAL = np.array(
    [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-40, 3e38, -3e38, 88.8, -88.8, -104.0, 5.0], np.float32
)

ALONE: dict[str, tuple[Callable[..., np.ndarray], Callable[..., np.ndarray]]] = {
    "silu": (silu, reference.silu),
    "quick_gelu": (quick_gelu, reference.quick_gelu),
    "quick_gelu 1": (lambda x, **kw: quick_gelu(x, alpha=0.7, **kw), lambda x: reference.quick_gelu(x, alpha=0.7)),
    "gelu": (gelu, reference.gelu),
    "gelu tanh": (
        lambda x, **kw: gelu(x, approximate=True, **kw),
        lambda x: reference.gelu(x, approximate="tanh"),
    ),
}


def assert_close(ours: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(ours, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize("shape", [(0, 3), (1,), (31,), (3, 100), (2, 3, 64), (2, 9000)])
def test_equals_reference(normal: Normal, name: str, shape: tuple[int, ...]) -> None:
    ours, expected = ALONE[name]
    x = normal(*shape) * 4
    out = np.empty_like(x)
    assert ours(x, out=out) is out
    assert_close(out, expected(x))


@pytest.mark.parametrize("name", ["silu", "quick_gelu", "gelu", "gelu tanh"])
def test_special_numbers(name: str) -> None:
    ours, expected = ALONE[name]
    assert_close(ours(SPECIAL), expected(SPECIAL))


@pytest.mark.parametrize("width", [1, 33, 64, 500])
def test_gated_units(normal: Normal, width: int) -> None:
    gate, up = normal(5, width) * 3, normal(5, width)
    assert_close(swiglu(gate, up), reference.swiglu(gate, up))
    assert_close(geglu(gate, up), reference.gelu(gate, approximate="tanh") * up)
    out = np.empty_like(gate)
    assert swiglu(gate, up, out) is out
    np.testing.assert_array_equal(out, swiglu(gate, up))


def test_halves_of_a_fused_projection(normal: Normal) -> None:
    fused = normal(4, 100)
    gate, up = fused[:, :50], fused[:, 50:]
    np.testing.assert_array_equal(swiglu(gate, up), swiglu(gate.copy(), up.copy()))


def test_threads_and_rows_do_not_change_a_bit(normal: Normal, team: Any) -> None:
    gate, up = normal(7, 100), normal(7, 100)
    together = swiglu(gate, up, team=team)
    np.testing.assert_array_equal(together, np.concatenate([swiglu(gate[i : i + 1], up[i : i + 1]) for i in range(7)]))
    x = normal(3, 5000)
    np.testing.assert_array_equal(gelu(x, team=team), gelu(x))


@pytest.mark.parametrize(
    "change",
    [
        {"gate": np.zeros((2, 4))},
        {"up": np.zeros((2, 5), np.float32)},
        {"up": np.zeros((2, 8), np.float32)[:, ::2]},
        {"out": np.zeros((3, 4), np.float32)},
    ],
)
def test_swiglu_refuses(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        swiglu(**{"gate": np.zeros((2, 4), np.float32), "up": np.zeros((2, 4), np.float32), **change})


@pytest.mark.parametrize("function", [gelu, silu])
def test_elementwise_refuses(function: Callable[..., np.ndarray]) -> None:
    with pytest.raises(ValueError, match="x is float64"):
        function(np.zeros(4))
    with pytest.raises(ValueError, match="out is float32"):
        function(np.zeros(4, np.float32), np.zeros(5, np.float32))

"""RoPE against the NumPy reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from genai.kernels.cpu.rope import rope
from genai.kernels.reference.rope import rotate

Normal = Callable[..., np.ndarray]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_size", "rotary"), [(2, 2), (32, 32), (64, 16), (80, 40), (128, 128)])
def test_equals_reference(
    rng: np.random.Generator, normal: Normal, interleaved: bool, head_size: int, rotary: int, team: Any
) -> None:
    x, cos, sin = normal(7, 3, head_size), normal(50, rotary // 2), normal(50, rotary // 2)
    positions = rng.integers(0, 50, 7)
    expected = rotate(x[None], positions[None], cos, sin, interleaved)[0]
    assert rope(x, positions, cos, sin, interleaved, team=team) is x
    np.testing.assert_allclose(x, expected, rtol=1e-6, atol=1e-6)


def test_rotates_a_slice_of_packed_qkv_in_place(normal: Normal) -> None:
    packed, cos, sin = normal(4, 6, 16), normal(9, 8), normal(9, 8)
    expected = packed.copy()
    expected[:, :4] = rotate(packed[None, :, :4], np.arange(4)[None], cos, sin)[0]
    rope(packed[:, :4], np.arange(4), cos, sin)
    np.testing.assert_allclose(packed, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_infinities_and_nans_stay(normal: Normal, bad: float) -> None:
    x = normal(2, 1, 8)
    x[0, 0, 1] = bad
    rope(x, np.array([1, 1]), normal(4, 4), normal(4, 4))
    assert not np.isfinite(x[0, 0, [1, 5]]).any()
    assert np.isfinite(x[0, 0, [0, 2, 3, 4, 6, 7]]).all()
    assert np.isfinite(x[1]).all()


@pytest.mark.parametrize("position", [-1, 4])
def test_refuses_positions_outside_the_tables(normal: Normal, position: int) -> None:
    with pytest.raises(IndexError, match="position outside the rotary tables"):
        rope(normal(1, 1, 8), np.array([position]), normal(4, 4), normal(4, 4))


@pytest.mark.parametrize(
    "change",
    [
        {"x": np.zeros((2, 8), np.float32)},
        {"x": np.zeros((2, 1, 16), np.float32)[:, :, ::2]},
        {"positions": np.zeros(2, np.int32)},
        {"positions": np.zeros(3, np.int64)},
        {"sin": np.zeros((4, 3), np.float32)},
        {"cos": np.zeros((4, 5), np.float32), "sin": np.zeros((4, 5), np.float32)},
    ],
)
def test_refuses(change: dict[str, Any]) -> None:
    table = np.zeros((4, 4), np.float32)
    arguments: dict[str, Any] = {
        "x": np.zeros((2, 1, 8), np.float32), "positions": np.zeros(2, np.int64), "cos": table, "sin": table,
    }  # fmt: skip
    with pytest.raises(ValueError, match="expected"):
        rope(**{**arguments, **change})


def test_refuses_read_only_heads() -> None:
    x, table = np.zeros((1, 1, 8), np.float32), np.zeros((4, 4), np.float32)
    x.flags.writeable = False
    with pytest.raises(ValueError, match="x is read-only"):
        rope(x, np.zeros(1, np.int64), table, table)

"""Sums of weighted elements along two axes, against NumPy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from genai.kernels.cpu.arrays.interpolation import Interpolation, Taps
from genai.kernels.cpu.program import thread_pool
from genai.kernels.cpu.program.thread_pool import Threads

# Planes, rows, columns, numbers per column, results' rows and columns, taps of rows and of columns.
CASES = [
    (1, 1, 1, 1, 1, 1, 1, 1),
    (3, 5, 7, 1, 10, 14, 2, 2),
    (40, 4, 5, 1, 9, 33, 2, 2),
    (2, 6, 5, 16, 40, 11, 2, 2),
    (2, 6, 5, 32, 3, 2, 4, 4),
    (1, 9, 8, 3, 50, 20, 2, 2),
    (2, 9, 8, 17, 5, 3, 5, 3),
    (4, 1, 30, 1, 1, 7, 1, 6),
    (2, 3, 3, 1, 0, 4, 2, 2),
    (0, 3, 3, 1, 2, 4, 2, 2),
    (2, 3, 3, 0, 2, 4, 2, 2),
]


def random_taps(rng: np.random.Generator, extent: int, results: int, count: int) -> Taps:
    """Neighbouring elements in any order of places, as at the edges of images."""
    first = rng.integers(-1, extent, results)
    return [
        (np.clip(first + tap, 0, extent - 1), rng.standard_normal(results).astype(np.float32)) for tap in range(count)
    ]


def summed(x: np.ndarray, taps: Taps, axis: int) -> np.ndarray:
    parts = [
        np.take(x, index, axis) * weights.reshape([-1 if i == axis else 1 for i in range(x.ndim)])
        for index, weights in taps
    ]
    return sum(parts[1:], start=parts[0])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sums(
    case: tuple[int, ...], rng: np.random.Generator, normal: Callable[..., np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thread_pool, "_MIN_SHARED_WORK", 0.0)
    planes, x_rows, x_columns, inner, out_rows, out_columns, row_taps, column_taps = case
    x = normal(planes, x_rows, x_columns, inner)
    if x.size:
        x.reshape(-1)[:: max(x.size // 3, 1)] = np.inf
    rows, columns = random_taps(rng, x_rows, out_rows, row_taps), random_taps(rng, x_columns, out_columns, column_taps)
    interpolate = Interpolation(x.shape, rows, columns)
    with np.errstate(invalid="ignore"):
        expected = summed(summed(x, columns, 2), rows, 1)
    for threads in (None, Threads(3)):
        np.testing.assert_array_equal(interpolate(x, threads), expected)


def test_taps_that_do_not_match() -> None:
    one, two = (np.zeros(1, np.int64), np.ones(1, np.float32)), (np.zeros(2, np.int64), np.ones(2, np.float32))
    for rows in ([], [one, two]):
        with pytest.raises(ValueError, match="rows have taps of the sizes"):
            Interpolation((1, 2, 3, 1), rows, [one])
    with pytest.raises(IndexError, match="columns are from 3 to 3, expected 0 to 2"):
        Interpolation((1, 2, 3, 1), [one], [(np.array([3]), np.ones(1, np.float32))])
    with pytest.raises(ValueError, match=r"x is float32 \[1, 2, 4, 1\]"):
        Interpolation((1, 2, 3, 1), [one], [one])(np.zeros((1, 2, 4, 1), np.float32))

"""What rounds blocks of weights, against NumPy in float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from genai.kernels.cpu.arrays.rounding import Points, WeighedBlocks, closest_codes, ranges, rounded_to_half

SIZES = (16, 32, 40, 77, 256)
WHOLE = Points(np.arange(16, dtype=np.float32), whole=True)
OTHER = Points(np.array([-127, -83, -10, 1, 13, 38, 89, 113], np.float32), whole=False)


def blocks_of(normal: Callable[..., np.ndarray], size: int, points: Points) -> tuple[np.ndarray, ...]:
    """Values [6, 5, size] with scales, one of which is 0, and zeros [6, 5] that suit the points."""
    values = normal(6, 5, size)
    scales = (np.abs(normal(6, 5)) + 0.1) / np.float32(np.abs(points.values).max() / 2)
    scales[1, 2] = 0
    zeros = np.full((6, 5), 8 if points.whole else 0, np.float32)
    zeros[2, 3] += 1
    return values, scales.astype(np.float32), zeros


def places_of(values: np.ndarray, scales: np.ndarray, zeros: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        inverse = np.where(scales == 0, 0, np.float32(1) / scales).astype(np.float32)
    return values * inverse[..., None] + zeros[..., None]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("points", [WHOLE, OTHER], ids=["whole", "other"])
def test_codes_are_the_closest(normal: Callable[..., np.ndarray], size: int, points: Points) -> None:
    values, scales, zeros = blocks_of(normal, size, points)
    found = closest_codes(values, scales, zeros, points)
    distances = np.abs(points.values - places_of(values, scales, zeros)[..., None])
    assert found.dtype == np.uint8 and found.shape == values.shape
    chosen = np.take_along_axis(distances, found[..., None].astype(int), -1)[..., 0]
    np.testing.assert_allclose(chosen, distances.min(axis=-1), atol=1e-5)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("points", [WHOLE, OTHER], ids=["whole", "other"])
@pytest.mark.parametrize("weighed", [False, True])
def test_scales_that_fit(normal: Callable[..., np.ndarray], size: int, points: Points, weighed: bool) -> None:
    values, scales, zeros = blocks_of(normal, size, points)
    weights = np.abs(normal(5, size)) + np.float32(0.1) if weighed else None
    blocks = WeighedBlocks(values, weights, points)
    w = (1.0 if weights is None else weights).astype(np.float64) if weighed else np.ones(size)
    p = points.values[closest_codes(values, scales, zeros, points)].astype(np.float64) - zeros[..., None]
    across = (w * p * p).sum(axis=-1)
    wanted = np.where(across > 0, (w * values * p).sum(axis=-1) / np.where(across > 0, across, 1), scales)
    np.testing.assert_allclose(blocks.fitted(scales, zeros), wanted, rtol=1e-4)
    blocks.keep_better(scales, zeros)
    errors = (w * (values - p * scales[..., None]) ** 2).sum(axis=-1)
    np.testing.assert_allclose(blocks.errors, errors, rtol=1e-4)
    np.testing.assert_array_equal(blocks.scales, scales)
    before = blocks.errors.copy()
    others = scales * np.where(
        np.arange(5) % 2, np.float32(0.2), blocks.fitted(scales, zeros) / (scales + (scales == 0))
    )
    others = others.astype(np.float32)
    blocks.keep_better(others, zeros)  # keeps the better of both, block by block
    better = blocks.errors < before
    assert (blocks.errors <= before).all() and better.any() and not better.all()
    np.testing.assert_array_equal(blocks.scales, np.where(better, others, scales))


@pytest.mark.parametrize("size", SIZES)
def test_ranges(normal: Callable[..., np.ndarray], size: int) -> None:
    values = normal(3, 7, size) + np.float32(2)  # zeros behind the end of a block would show
    low, high = ranges(values)
    np.testing.assert_array_equal(low, values.min(axis=-1))
    np.testing.assert_array_equal(high, values.max(axis=-1))


def test_halves(normal: Callable[..., np.ndarray]) -> None:
    numbers = np.concatenate([normal(50), [0, 1e-9, -3e-7, 6e-5, 65504, 65520, 1e6, -1e30]]).astype(np.float32)
    found = rounded_to_half(numbers)
    with np.errstate(over="ignore"):
        halves = numbers.astype(np.float16).astype(np.float32)
    close = np.abs(halves - numbers) <= np.abs(numbers) * 2.0**-11
    np.testing.assert_array_equal(found, np.where(close, halves, numbers))


def test_what_does_not_fit_is_refused(normal: Callable[..., np.ndarray]) -> None:
    values, scales, zeros = blocks_of(normal, 32, WHOLE)
    with pytest.raises(ValueError, match=r"factors \[6, 4\] do not match values \[6, 5, 32\]"):
        closest_codes(values, scales[:, :4], zeros, WHOLE)
    with pytest.raises(ValueError, match=r"weights \[4, 32\] do not match"):
        WeighedBlocks(values, normal(4, 32), WHOLE)

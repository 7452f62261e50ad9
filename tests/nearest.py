"""Rounding to nearest for any format, written independently of `genai.quant.methods`; tests make weights with it."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.kernels.weights import ROW, QuantizationError, QuantizedWeight, WeightFormat, repeated, uniform_grid
from genai.quant.grids import count_below
from genai.quant.two_levels import _half

Float32 = NDArray[np.float32]
# Number of floats in a chunk of rows, so that a chunk and its temporaries fit in a core's cache.
_CHUNK_FLOATS = 1 << 16
# Below this, float16 has fewer than four significant bits; the integers compensate for errors above it.
_SMALLEST_HALF, _LARGEST_HALF = 2.0**-21, 65504.0


def round_to_nearest(
    weight: NDArray[Any], form: WeightFormat, grid: Float32 | None = None, *, half_scales: bool = True
) -> QuantizedWeight:
    """Quantise a matrix [n, k] by its values only, without calibration data.

    Without offsets, a block's value of largest magnitude becomes the grid's value of largest magnitude. With offsets,
    the block's range, extended to contain 0, spans the grid. The scale of a group is that of its largest block.

    Args:
        weight: matrix of any float type, [n, k].
        grid: float32 [2 ** bits]; None for integers: centred on zero without offsets, starting at 0 with offsets.
        half_scales: True to round scales to float16 before quantising, where float16 can hold them; scales of whole
            rows stay float32.

    Raises:
        QuantizationError: weight is not a matrix or contains NaN or infinity, or the grid does not fit.
    """
    if weight.ndim != 2 or 0 in weight.shape:
        raise QuantizationError(f"weight has shape {list(weight.shape)}, expected a matrix with at least one element")
    half_scales = half_scales and form.group_size != ROW
    grid = uniform_grid(form.bits, centred=not form.offset_bits) if grid is None else np.asarray(grid, np.float32)
    if grid.shape != (1 << form.bits,) or not np.isfinite(grid).all() or not grid.any():
        raise QuantizationError(f"grid is {list(grid.shape)}, expected {1 << form.bits} finite numbers, not all zero")
    if form.offset_bits and grid.min() != 0:
        raise QuantizationError(f"grid begins at {grid.min()}, expected 0: offsets take away, and never add")
    n, k = weight.shape
    step = max(1, _CHUNK_FLOATS // form.padded(k))
    firsts = range(0, n, step)
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        parts = list(pool.map(lambda at: _rounded_rows(weight[at : at + step], at, form, grid, half_scales), firsts))
    columns = (np.concatenate(arrays) if arrays[0] is not None else None for arrays in zip(*parts, strict=True))
    codes, scales, multipliers, offset_scales, offsets = columns
    if form.offset_bits and not form.multiplier_bits:
        offset_scales = scales
    assert codes is not None and scales is not None
    return QuantizedWeight.from_codes(form, codes[:, :k], grid, scales, multipliers, offset_scales, offsets)


@dataclass(frozen=True)
class _Factors:
    """The factors of some rows: floats [rows, groups] and integers [rows, blocks]; see QuantizedWeight."""

    scales: Float32
    multipliers: NDArray[np.int16] | None = None
    offset_scales: Float32 | None = None
    offsets: NDArray[np.uint8] | None = None


def _rounded_rows(
    weight: NDArray[Any], first: int, form: WeightFormat, grid: Float32, half_scales: bool
) -> tuple[NDArray[Any] | None, ...]:
    rows, k = weight.shape
    values = np.zeros((rows, form.padded(k)), np.float32)
    with np.errstate(over="ignore"):
        values[:, :k] = weight
    blocks = form.blocks(k)
    cut = values.reshape(rows, blocks, -1)
    low, high = cut.min(axis=2), cut.max(axis=2)
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        row, block = np.argwhere(~(np.isfinite(low) & np.isfinite(high)))[0]
        raise QuantizationError(f"weight has NaN or infinite values in row {first + row}, block {block}")
    found = _factors(low, high, form, grid, form.groups(k), half_scales)
    codes = nearest_codes(
        values, grid, factors(found.scales, found.multipliers, blocks),
        None if found.offsets is None else factors(_or(found.offset_scales, found.scales), found.offsets, blocks),
    )  # fmt: skip
    return codes, found.scales, found.multipliers, found.offset_scales, found.offsets


def _or(first: Float32 | None, second: Float32) -> Float32:
    return second if first is None else first


def factors(floats: Float32, integers: NDArray[Any] | None, blocks: int) -> Float32:
    """Return float32 [rows, blocks]: numbers per group [rows, groups] times integers per block (None stands for 1)."""
    spread = repeated(floats, blocks)
    return spread if integers is None else (spread * integers.astype(np.float32)).astype(np.float32)


def nearest_codes(values: Float32, grid: Float32, scales: Float32, offsets: Float32 | None = None) -> NDArray[np.uint8]:
    """Return the codes of the values nearest to the weights, where a code stands for scale * grid[code] - offset.

    Args:
        values: float32 [rows, padded columns].
        grid: float32 [2 ** bits], in any order.
        scales, offsets: float32 [rows, blocks], see `factors`. Where a scale is 0, all codes are equally near, and the
            code of the grid's value nearest to 0 is used.
    """
    rows, width = values.shape
    cut = values.reshape(rows, scales.shape[1], -1)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(1) / scales
    inverse[~np.isfinite(inverse)] = 0
    moved = cut if offsets is None else cut + offsets[:, :, None]
    order = np.argsort(grid, kind="stable")
    middles = (grid[order][1:] + grid[order][:-1]) / 2
    ordered = (moved * inverse[:, :, None]).reshape(rows, width)
    steps = np.diff(grid[order])
    if np.all(steps == 1):  # integers: rounding is much faster than a search
        places = np.clip(np.floor(ordered - grid[order][0] + np.float32(0.5)), 0, len(grid) - 1).astype(np.uint8)
    else:
        places = count_below(middles, ordered)
    codes: NDArray[np.uint8] = order.astype(np.uint8)[places]
    return codes


def _factors(low: Float32, high: Float32, form: WeightFormat, grid: Float32, groups: int, half: bool) -> _Factors:
    """Return the factors of blocks with these smallest and largest values, [rows, blocks]."""
    if form.offset_bits:
        low, high = np.minimum(low, np.float32(0)), np.maximum(high, np.float32(0))
        with np.errstate(over="ignore"):
            exact = (high - low) / (grid.max() - grid.min())
        minima = exact * grid.min() - low
    else:
        reach = grid[np.argmax(np.abs(grid))]
        exact = np.where(np.abs(high) > np.abs(low), high, low) / reach
        if form.multiplier_bits and not form.signed:
            exact = np.abs(exact)
    if not form.multiplier_bits:
        scales = _half(exact) if half else exact
        if not form.offset_bits:
            return _Factors(scales)
        most = (1 << form.offset_bits) - 1
        points = np.divide(minima, scales, out=np.zeros_like(minima), where=scales != 0)
        return _Factors(scales, None, None, np.floor(np.clip(points, 0, most) + np.float32(0.5)).astype(np.uint8))
    most = (1 << form.multiplier_bits) - 1 - form.multiplier_zero
    scales, multipliers = _integers(exact, groups, most, half)
    if not form.offset_bits:
        return _Factors(scales, multipliers.astype(np.int16))
    offset_scales, offsets = _integers(minima, groups, (1 << form.offset_bits) - 1, half)
    return _Factors(scales, multipliers.astype(np.int16), offset_scales, offsets.astype(np.uint8))


def _integers(exact: Float32, groups: int, most: int, half: bool) -> tuple[Float32, Float32]:
    """Return one float per group, set by its largest block, and numbers per block as integers up to `most` times it."""
    rows, blocks = exact.shape
    cut = exact.reshape(rows, groups, -1)
    floats = np.abs(cut).max(axis=2) / np.float32(most)
    floats = _half(floats) if half else floats
    spread = repeated(floats, blocks)
    quotient = np.divide(exact, spread, out=np.zeros_like(exact), where=spread != 0)
    return floats, np.clip(np.rint(quotient), -most, most)

"""The loops of a product with a block-quantised matrix.

The rows of a weight tile are the lanes of a vector, and the loops walk over the columns. Up to four activation rows
share one pass over the weights. A row's sums are made by the same operations in the same order whether it comes alone
or with others, so its result depends neither on the batch nor on threads.

Activations are integers (see `quantize`), whose sums are exact within a block, or any float32 numbers. Against 8-bit
weights the integers come as float32 too: their sums stay below 2 ** 24, so they are as exact, and faster than in
32-bit integer lanes. Then, and only then, x_scales is given to a float32 kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .jit import Kernel, kernel
from .lazy import inline
from .memory import stack_array
from .vector import (
    LANES,
    load,
    multiply_add,
    splat_float32,
    splat_int16,
    splat_int32,
    store,
    to_float32,
    to_int16,
    to_int32,
)

# Bytes of an INT4 block whose products are summed in 16-bit lanes: 8 * 2 nibbles * 15 * 127 = 30480 < 2 ** 15.
_CHUNK = 8
# Activation rows that share a pass over the weights.
_ROWS = 4


@inline
def _contribution(total: Any, x_scales: Any, x_sums: Any, row: int, block: int, scale: Any, zero_point: Any) -> Any:
    """A block's share of the result; the zero point is taken off after the sum: sum (w - z) q = sum w q - z sum q."""
    return (to_float32(total) - zero_point * x_sums[row, block]) * (scale * x_scales[row, block])


@inline
def _int4_by_int8(
    x: Any, x_scales: Any, x_sums: Any, row: int, data: Any, tile: int, block: int, scale: Any, zero_point: Any
) -> Any:
    half = data.shape[2]
    first = block * 2 * half
    total = splat_int32(0)
    for chunk in range(0, half, _CHUNK):
        part = splat_int16(0)
        for i in range(chunk, chunk + _CHUNK):
            packed = to_int16(load(data, (tile, block, i, 0)))
            part = part + (packed & 15) * x[row, first + i] + (packed >> 4) * x[row, first + half + i]
        total = total + to_int32(part)
    return _contribution(total, x_scales, x_sums, row, block, scale, zero_point)


@inline
def _int4_by_int8_4_rows(
    x: Any, x_scales: Any, x_sums: Any, row: int, data: Any, tile: int, block: int, scale: Any, zero_point: Any
) -> Any:
    half = data.shape[2]
    first = block * 2 * half
    total_0 = total_1 = total_2 = total_3 = splat_int32(0)
    for chunk in range(0, half, _CHUNK):
        part_0 = part_1 = part_2 = part_3 = splat_int16(0)
        for i in range(chunk, chunk + _CHUNK):
            packed = to_int16(load(data, (tile, block, i, 0)))
            low, high = packed & 15, packed >> 4
            part_0 = part_0 + low * x[row, first + i] + high * x[row, first + half + i]
            part_1 = part_1 + low * x[row + 1, first + i] + high * x[row + 1, first + half + i]
            part_2 = part_2 + low * x[row + 2, first + i] + high * x[row + 2, first + half + i]
            part_3 = part_3 + low * x[row + 3, first + i] + high * x[row + 3, first + half + i]
        total_0 = total_0 + to_int32(part_0)
        total_1 = total_1 + to_int32(part_1)
        total_2 = total_2 + to_int32(part_2)
        total_3 = total_3 + to_int32(part_3)
    return (
        _contribution(total_0, x_scales, x_sums, row, block, scale, zero_point),
        _contribution(total_1, x_scales, x_sums, row + 1, block, scale, zero_point),
        _contribution(total_2, x_scales, x_sums, row + 2, block, scale, zero_point),
        _contribution(total_3, x_scales, x_sums, row + 3, block, scale, zero_point),
    )


@inline
def _int4_by_float32(
    x: Any, x_scales: Any, x_sums: Any, row: int, data: Any, tile: int, block: int, scale: Any, zero_point: Any
) -> Any:
    half = data.shape[2]
    first = block * 2 * half
    total = splat_float32(0.0)
    for i in range(half):
        packed = to_int32(load(data, (tile, block, i, 0)))
        low, high = to_float32(packed & 15) - zero_point, to_float32(packed >> 4) - zero_point
        total = multiply_add(high, x[row, first + half + i], multiply_add(low, x[row, first + i], total))
    return total * scale


@inline
def _int4_by_float32_4_rows(
    x: Any, x_scales: Any, x_sums: Any, row: int, data: Any, tile: int, block: int, scale: Any, zero_point: Any
) -> Any:
    half = data.shape[2]
    first = block * 2 * half
    total_0 = total_1 = total_2 = total_3 = splat_float32(0.0)
    for i in range(half):
        packed = to_int32(load(data, (tile, block, i, 0)))
        low, high = to_float32(packed & 15) - zero_point, to_float32(packed >> 4) - zero_point
        i_low, i_high = first + i, first + half + i
        total_0 = multiply_add(high, x[row, i_high], multiply_add(low, x[row, i_low], total_0))
        total_1 = multiply_add(high, x[row + 1, i_high], multiply_add(low, x[row + 1, i_low], total_1))
        total_2 = multiply_add(high, x[row + 2, i_high], multiply_add(low, x[row + 2, i_low], total_2))
        total_3 = multiply_add(high, x[row + 3, i_high], multiply_add(low, x[row + 3, i_low], total_3))
    return total_0 * scale, total_1 * scale, total_2 * scale, total_3 * scale


@inline
def _scaled(total: Any, x_scales: Any, row: int, block: int, scale: Any) -> Any:
    if x_scales.shape[0] == 0:
        return total * scale
    return total * (scale * x_scales[row, block])


@inline
def _int8_by_float32(
    x: Any, x_scales: Any, x_sums: Any, row: int, data: Any, tile: int, block: int, scale: Any, zero_point: Any
) -> Any:
    size = data.shape[2]
    first = block * size
    total = splat_float32(0.0)
    for i in range(size):
        weight = to_float32(load(data, (tile, block, i, 0))) - zero_point
        total = multiply_add(weight, x[row, first + i], total)
    return _scaled(total, x_scales, row, block, scale)


@inline
def _int8_by_float32_4_rows(
    x: Any, x_scales: Any, x_sums: Any, row: int, data: Any, tile: int, block: int, scale: Any, zero_point: Any
) -> Any:
    size = data.shape[2]
    first = block * size
    total_0 = total_1 = total_2 = total_3 = splat_float32(0.0)
    for i in range(size):
        weight = to_float32(load(data, (tile, block, i, 0))) - zero_point
        total_0 = multiply_add(weight, x[row, first + i], total_0)
        total_1 = multiply_add(weight, x[row + 1, first + i], total_1)
        total_2 = multiply_add(weight, x[row + 2, first + i], total_2)
        total_3 = multiply_add(weight, x[row + 3, first + i], total_3)
    return (
        _scaled(total_0, x_scales, row, block, scale),
        _scaled(total_1, x_scales, row + 1, block, scale),
        _scaled(total_2, x_scales, row + 2, block, scale),
        _scaled(total_3, x_scales, row + 3, block, scale),
    )


@inline
def _write(sums: Any, scratch: Any, bias: Any, addend: Any, out: Any, row: int, tile: int) -> None:
    """out = sums + bias + addend, for those rows of the tile that exist."""
    store(scratch, (0,), sums)
    first = tile * LANES
    for column in range(first, min(first + LANES, out.shape[1])):
        value = scratch[column - first]
        if bias.shape[0] > 0:
            value += bias[column]
        if addend.shape[0] > 0:
            value += addend[row, column]
        out[row, column] = value


_lanes = stack_array("float32", LANES)

_SIGNATURE = (
    "void({x}[:, ::1], float32[:, ::1], float32[:, ::1], uint8[:, :, :, ::1], float32[:, :, ::1], "
    "float32[:, :, ::1], float32, float32[::1], float32[:, ::1], float32[:, ::1], int64, int64)"
)


def _make(name: str, activation: str, one_row: Callable[..., Any], four_rows: Callable[..., Any]) -> Kernel:
    """The walk over tiles, rows and blocks. x is padded to whole blocks; absent arrays have no entries."""

    def multiply(
        x: Any, x_scales: Any, x_sums: Any, data: Any, scales: Any, zero_points: Any, default_zero_point: float,
        bias: Any, addend: Any, out: Any, begin: int, end: int,
    ) -> None:  # fmt: skip
        scratch = _lanes()
        rows, blocks = x.shape[0], data.shape[1]
        whole = rows // _ROWS * _ROWS
        zero_point = splat_float32(default_zero_point)
        for tile in range(begin, end):
            for row in range(0, whole, _ROWS):
                sums_0 = sums_1 = sums_2 = sums_3 = splat_float32(0.0)
                for block in range(blocks):
                    if zero_points.shape[0] > 0:
                        zero_point = load(zero_points, (tile, block, 0))
                    parts = four_rows(
                        x, x_scales, x_sums, row, data, tile, block, load(scales, (tile, block, 0)), zero_point
                    )
                    sums_0 = sums_0 + parts[0]
                    sums_1 = sums_1 + parts[1]
                    sums_2 = sums_2 + parts[2]
                    sums_3 = sums_3 + parts[3]
                _write(sums_0, scratch, bias, addend, out, row, tile)
                _write(sums_1, scratch, bias, addend, out, row + 1, tile)
                _write(sums_2, scratch, bias, addend, out, row + 2, tile)
                _write(sums_3, scratch, bias, addend, out, row + 3, tile)
            for row in range(whole, rows):
                sums = splat_float32(0.0)
                for block in range(blocks):
                    if zero_points.shape[0] > 0:
                        zero_point = load(zero_points, (tile, block, 0))
                    sums = sums + one_row(
                        x, x_scales, x_sums, row, data, tile, block, load(scales, (tile, block, 0)), zero_point
                    )
                _write(sums, scratch, bias, addend, out, row, tile)

    multiply.__name__ = name
    return kernel(_SIGNATURE.format(x=activation))(multiply)


int4_by_int8 = _make("int4_by_int8", "int16", _int4_by_int8, _int4_by_int8_4_rows)
int4_by_float32 = _make("int4_by_float32", "float32", _int4_by_float32, _int4_by_float32_4_rows)
int8_by_float32 = _make("int8_by_float32", "float32", _int8_by_float32, _int8_by_float32_4_rows)

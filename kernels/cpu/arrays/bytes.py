"""Conversion of float32 numbers to and from 8-bit integers with a single scale and zero point; pads of bytes."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...checks import Float32
from ..jit import memory
from ..jit.arguments import Address, Arguments, Binding
from ..jit.dsl import inline
from ..jit.native import NativeOp, native_op
from ..jit.variants import once
from ..jit.vector import (
    LANES,
    maximum,
    minimum,
    reduce_add,
    reduce_max,
    splat_float32,
    splat_int32,
    to_float32,
    to_int32,
)
from ..jit.vector_math import rounded
from ..program.bound_program import NodeProgram, run_alone
from ..program.calls import Call, Items
from ..program.thread_pool import Threads, fixed_address, own_memory
from .copying import operand

_PIECE = 4096
_NANOSECONDS_PER_ELEMENT = 0.15
_BYTES = (np.int8, np.uint8)
_STEPS = 255.0


class PieceArguments(Arguments):
    """`count` numbers in pieces, which are the items, and the destination for the results.

    `qparams` holds the scale and zero point, float32 [2]. Results are clipped to [`low`, `high`]. `ranges` is the
    result of `value_range`. `scale` (float32) and `zero` (uint8) are the destinations for the scale and zero point that
    were found.
    """

    x: Address
    out: Address
    count: int
    qparams: Address = None
    low: float = 0.0
    high: float = 0.0
    ranges: Address = None
    scale: Address = None
    zero: Address = None


@inline
def _round_pieces(arguments: PieceArguments, begin: int, end: int, scale: Any, point: Any, low: Any, high: Any) -> None:
    """Compute round(x / scale), clipped to [low, high], plus point, for pieces [begin, end)."""
    x, out, last = arguments.x, arguments.out, min(end * _PIECE, arguments.count)
    whole = last - last % LANES
    for first in range(begin * _PIECE, whole, LANES):
        value = minimum(maximum(memory.load_float32(x + 4 * first) / scale, low), high)
        memory.store_bytes(out + first, rounded(value) + point)
    if whole < last:
        value = minimum(maximum(memory.load_first(x + 4 * whole, last - whole) / scale, low), high)
        memory.store_as_bytes(out + whole, rounded(value) + point, last - whole)


@native_op(PieceArguments)
def quantize_bytes(arguments: PieceArguments, context: int, begin: int, end: int, scratch: int) -> int:
    """Compute round(x / scale) + point, saturated. Items are pieces."""
    scale, point = memory.read_float32(arguments.qparams), memory.read_float32(arguments.qparams + 4)
    low, high = arguments.low - point, arguments.high - point
    _round_pieces(arguments, begin, end, splat_float32(scale), splat_float32(point), low, high)
    return 0


@once
def dequantize_op(dtype: Any) -> NativeOp:
    """Return the operator (x - point) * scale for int8 or uint8. Items are pieces."""
    load, read = (memory.load_int8, memory.read_int8) if dtype == np.int8 else (memory.load_uint8, memory.read_uint8)

    def dequantize(arguments: PieceArguments, context: int, begin: int, end: int, scratch: int) -> int:
        x, out, count = arguments.x, arguments.out, arguments.count
        scale, point = memory.read_float32(arguments.qparams), memory.read_float32(arguments.qparams + 4)
        last = min(end * _PIECE, count)
        whole = last - last % LANES
        for first in range(begin * _PIECE, whole, LANES):
            memory.store_float32(out + 4 * first, (to_float32(to_int32(load(x + first))) - point) * scale)
        for index in range(whole, last):
            memory.write_float32(out + 4 * index, (np.float32(read(x + index)) - point) * scale)
        return 0

    return native_op(PieceArguments, name=f"dequantize_{np.dtype(dtype).name}")(dequantize)


@native_op(PieceArguments)
def value_range(arguments: PieceArguments, context: int, begin: int, end: int, scratch: int) -> int:
    """Write the min and max of each piece, including 0, to float32 [pieces, 2]. A NaN or infinity results in NaN."""
    x, out, count = arguments.x, arguments.out, arguments.count
    for piece in range(begin, end):
        least = most = poison = other = splat_float32(0.0)
        last = min((piece + 1) * _PIECE, count)
        whole = last - last % (2 * LANES)
        for first in range(piece * _PIECE, whole, 2 * LANES):
            one, two = memory.load_float32(x + 4 * first), memory.load_float32(x + 4 * (first + LANES))
            least, most = minimum(least, minimum(one, two)), maximum(most, maximum(one, two))
            poison, other = poison + (one - one), other + (two - two)  # 0, or NaN
        for first in range(whole, last, LANES):
            value = memory.load_first(x + 4 * first, min(last - first, LANES))
            least, most = minimum(least, value), maximum(most, value)
            poison = poison + (value - value)
        nothing = reduce_add(poison + other)
        memory.write_float32(out + 8 * piece, nothing - reduce_max(0.0 - least))
        memory.write_float32(out + 8 * piece + 4, nothing + reduce_max(most))
    return 0


@native_op(PieceArguments)
def quantize_to_range(arguments: PieceArguments, context: int, begin: int, end: int, scratch: int) -> int:
    """Quantise to uint8 over the range of all pieces (items). If it is empty or infinite, the results are 0."""
    count, ranges, out = arguments.count, arguments.ranges, arguments.out
    least = most = poison = np.float32(0.0)
    for piece in range(-(-count // _PIECE)):
        low, high = memory.read_float32(ranges + 8 * piece), memory.read_float32(ranges + 8 * piece + 4)
        least, most, poison = min(least, low), max(most, high), poison + (high - high)
    one = (most - least) / np.float32(_STEPS)
    if poison == 0.0 and 0.0 < one < np.inf:
        scale = splat_float32(one)
        point = minimum(maximum(rounded(splat_float32(0.0 - least) / scale), 0.0), _STEPS)
        _round_pieces(arguments, begin, end, scale, point, 0.0 - point, _STEPS - point)
        zero = reduce_max(point)
    else:
        one = np.float32(1.0) if poison == 0.0 and one == 0.0 else _odd_scale(arguments.x, count)
        zero = np.float32(0.0)
        for index in range(begin * _PIECE, min(end * _PIECE, count)):
            memory.write_int8(out + index, 0)
    if begin == 0:
        memory.write_float32(arguments.scale, one)
        memory.write_int8(arguments.zero, int(zero))
    return 0


@inline
def _odd_scale(x: int, count: int) -> Any:
    """Return the scale of numbers with an infinite range: infinity, or NaN if one of them is NaN."""
    found = np.float32(np.inf)
    for index in range(count):
        value = memory.read_float32(x + 4 * index)
        if value != value:
            found = value
    return found


def quantized_to_range(
    threads: Threads, x: Float32
) -> tuple[NDArray[np.uint8], NDArray[np.float32], NDArray[np.uint8]]:
    """Return x quantised to uint8 over the range of x and 0, the scale and the zero point, both without axes.

    If all numbers are 0, the scale is 1. If the range is not finite, the scale is infinite or NaN, and the bytes are 0.
    """
    if x.dtype != np.float32 or not x.size:
        raise ValueError(f"x is {x.dtype} {list(x.shape)}, expected float32 with at least one element")
    out, scale, zero = np.empty(x.shape, np.uint8), np.empty((), np.float32), np.empty((), np.uint8)
    ranges = own_memory("ranges", 8 * -(-x.size // _PIECE))
    _range_program(x.size).run(threads, x=np.ascontiguousarray(x), out=out, ranges=ranges, scale=scale, zero=zero)
    return out, scale, zero


@lru_cache(maxsize=512)
def _range_program(size: int) -> NodeProgram:
    items = Items(factor=-(-size // _PIECE))
    x, out, ranges, scale, zero = map(Binding, ("x", "out", "ranges", "scale", "zero"))
    measured = PieceArguments(x=x, out=ranges, count=size)
    rounded = PieceArguments(x=x, out=out, count=size, ranges=ranges, scale=scale, zero=zero)
    phases = [[Call(value_range, measured, items)], [Call(quantize_to_range, rounded, items)]]
    return NodeProgram(phases, 2 * size * _NANOSECONDS_PER_ELEMENT)


def quantized_bytes(threads: Threads, x: Float32, scale: float, point: int, dtype: Any) -> NDArray[Any]:
    """Return round(x / scale) + point as int8 or uint8, saturated, ties to even; x has any shape."""
    if x.dtype != np.float32 or dtype not in _BYTES:
        raise ValueError(f"cannot convert {x.dtype} to {dtype}, expected float32 to int8 or uint8")
    low, high = (-128, 127) if dtype == np.int8 else (0, 255)
    return _converted(threads, quantize_bytes, x, scale, point, dtype, low=low, high=high)


def dequantized_bytes(threads: Threads, x: NDArray[Any], scale: float, point: int) -> Float32:
    """Return (x - point) * scale as float32, for int8 or uint8 x of any shape."""
    if x.dtype not in _BYTES:
        raise ValueError(f"x is {x.dtype}, expected int8 or uint8")
    return _converted(threads, dequantize_op(x.dtype), x, scale, point, np.float32)


def _converted(
    threads: Threads, op: NativeOp, x: NDArray[Any], scale: float, point: int, dtype: Any, **limits: int
) -> NDArray[Any]:
    x = operand(x)
    out, qparams = np.empty(x.shape, dtype), fixed_address(np.array((scale, point), np.float32))
    if x.size:
        items, nanoseconds = Items(factor=-(-x.size // _PIECE)), x.size * _NANOSECONDS_PER_ELEMENT
        run_alone(op, items, nanoseconds, threads, x=x, out=out, count=x.size, qparams=qparams, **limits)
    return out


class PadBytesArguments(Arguments):
    """Images of bytes [x_slices][x_rows][x_width], and images [slices][rows][width] that contain them.

    They start at slice `front`, row `top` and column `left`. `fill` is the byte around them, four times.
    """

    x: Address
    out: Address
    x_slices: int
    x_rows: int
    x_width: int
    slices: int
    rows: int
    width: int
    front: int
    top: int
    left: int
    fill: int


@inline
def _fill_bytes(out: int, count: int, fill: int) -> None:
    whole = count - count % (4 * LANES)
    for first in range(0, whole, 4 * LANES):
        memory.store_int32(out + first, splat_int32(fill))
    for index in range(whole, count):
        memory.write_int8(out + index, fill)


@inline
def _copy_bytes(x: int, out: int, count: int) -> None:
    words = count // 4
    for first in range(0, words, LANES):
        left = min(LANES, words - first)
        memory.store_first(out + 4 * first, memory.load_first(x + 4 * first, left), left)
    for index in range(4 * words, count):
        memory.write_int8(out + index, memory.read_int8(x + index))


@native_op(PadBytesArguments)
def pad_bytes(arguments: PadBytesArguments, context: int, begin: int, end: int, scratch: int) -> int:
    """Copy images and surround them with a byte. Items are rows of the result."""
    rows, width, x_rows, x_width = arguments.rows, arguments.width, arguments.x_rows, arguments.x_width
    slices, x_slices, top, left = arguments.slices, arguments.x_slices, arguments.top, arguments.left
    for item in range(begin, end):
        plane = item // rows
        image = plane // slices
        row, piece = item - plane * rows - top, plane - image * slices - arguments.front
        out = arguments.out + item * width
        if 0 <= row < x_rows and 0 <= piece < x_slices:
            _fill_bytes(out, left, arguments.fill)
            _copy_bytes(arguments.x + ((image * x_slices + piece) * x_rows + row) * x_width, out + left, x_width)
            _fill_bytes(out + left + x_width, width - left - x_width, arguments.fill)
        else:
            _fill_bytes(out, width, arguments.fill)
    return 0

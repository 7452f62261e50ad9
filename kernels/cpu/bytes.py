"""float32 numbers to 8-bit ones of one scale and zero point, and back."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from .checks import Float32
from .jit import NativeOp, native_op
from .lazy import inline, intrinsic, types
from .memory import (
    float_word,
    load_first,
    load_int8,
    load_uint8,
    read_float32,
    read_int8,
    read_uint8,
    store_float32,
    word,
    write_float32,
    write_int8,
)
from .tape.program import Call, Hole, Items, argument_word
from .tape.replay import Crew, Replay
from .vector import (
    FLOAT32,
    LANES,
    maximum,
    minimum,
    reduce_add,
    reduce_max,
    splat_float32,
    to_float32,
    to_int32,
)

# Arguments of the operators.
X, OUT, COUNT, SCALE, POINT, LOW, HIGH = range(7)
_PIECE = 4096
_NANOSECONDS_PER_ELEMENT = 0.15
# Adding 1.5 * 2 ** 23 rounds a small float32 to an integer, halves to even.
_ROUND = 12582912.0
_BYTES = (np.int8, np.uint8)
_NAMES = ("scale", "point", "low", "high")
_NO_NUMBERS = (0.0, 0.0, 0.0, 0.0)


@intrinsic
def store_bytes(typing_context: Any, address: Any, vector: Any) -> Any:
    """A float32 vector of whole numbers, each within int8 or within uint8, as LANES bytes."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        wide = builder.fptosi(args[1], ir.VectorType(ir.IntType(32), LANES))
        narrow = builder.trunc(wide, ir.VectorType(ir.IntType(8), LANES))
        builder.store(narrow, builder.inttoptr(args[0], ir.PointerType()), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, FLOAT32), lower


@inline
def _round_pieces(
    arguments: int, begin: int, end: int, scale: Any, point: Any, low: Any, high: Any, scratch: int
) -> None:
    """round(x / scale) within [low, high], + point, to the bytes of pieces [begin, end). Scratch: a vector."""
    x, out, count = word(arguments, X), word(arguments, OUT), word(arguments, COUNT)
    for first in range(begin * _PIECE, min(end * _PIECE, count), LANES):
        left = min(count - first, LANES)
        value = minimum(maximum(load_first(x + 4 * first, left) / scale, low), high)
        value = ((value + _ROUND) - _ROUND) + point
        if left == LANES:
            store_bytes(out + first, value)
        else:
            store_bytes(scratch, value)
            for index in range(left):
                write_int8(out + first + index, read_int8(scratch + index))


@native_op
def quantize_bytes(arguments: int, context: int, begin: int, end: int, scratch: int) -> int:
    """round(x / scale) + point, saturated; items are pieces. Scratch: a vector."""
    scale, point = float_word(arguments, SCALE), float_word(arguments, POINT)
    low, high = float_word(arguments, LOW) - point, float_word(arguments, HIGH) - point
    _round_pieces(arguments, begin, end, splat_float32(scale), splat_float32(point), low, high, scratch)
    return 0


def _dequantizing(name: str, load: Any, read: Any) -> NativeOp:
    def dequantize(arguments: int, context: int, begin: int, end: int, scratch: int) -> int:
        x, out, count = word(arguments, X), word(arguments, OUT), word(arguments, COUNT)
        scale, point = float_word(arguments, SCALE), float_word(arguments, POINT)
        last = min(end * _PIECE, count)
        whole = last - last % LANES
        for first in range(begin * _PIECE, whole, LANES):
            store_float32(out + 4 * first, (to_float32(to_int32(load(x + first))) - point) * scale)
        for index in range(whole, last):
            write_float32(out + 4 * index, (np.float32(read(x + index)) - point) * scale)
        return 0

    dequantize.__name__ = name
    return native_op(dequantize)


@cache
def dequantize_op(dtype: Any) -> NativeOp:
    """(x - point) * scale of int8 or uint8; items are pieces."""
    if dtype == np.int8:
        return _dequantizing("dequantize_int8", load_int8, read_int8)
    return _dequantizing("dequantize_uint8", load_uint8, read_uint8)


@native_op
def value_range(arguments: int, context: int, begin: int, end: int, scratch: int) -> int:
    """Least and largest number of every piece and 0, to float32 [pieces, 2]; NaN if one is NaN or infinite."""
    x, out, count = word(arguments, X), word(arguments, OUT), word(arguments, COUNT)
    for piece in range(begin, end):
        least, most, poison = splat_float32(0.0), splat_float32(0.0), splat_float32(0.0)
        for first in range(piece * _PIECE, min((piece + 1) * _PIECE, count), LANES):
            value = load_first(x + 4 * first, min(count - first, LANES))
            least, most = minimum(least, value), maximum(most, value)
            poison = poison + (value - value)  # 0, or NaN
        nothing = reduce_add(poison)
        write_float32(out + 8 * piece, nothing - reduce_max(0.0 - least))
        write_float32(out + 8 * piece + 4, nothing + reduce_max(most))
    return 0


# Arguments of `quantize_to_range`, beside X, OUT and COUNT: what `value_range` found, and where scale and point go.
RANGES, FOUND = 3, 4
_STEPS = 255.0


@native_op
def quantize_to_range(arguments: int, context: int, begin: int, end: int, scratch: int) -> int:
    """To uint8 over the range of all pieces; nothing is written if that is empty or infinite. Scratch: a vector."""
    count, ranges, found = word(arguments, COUNT), word(arguments, RANGES), word(arguments, FOUND)
    least, most = splat_float32(0.0), splat_float32(0.0)
    for piece in range(-(-count // _PIECE)):
        low, high = read_float32(ranges + 8 * piece), read_float32(ranges + 8 * piece + 4)
        if low != low or high != high:
            return 0
        least, most = minimum(least, splat_float32(low)), maximum(most, splat_float32(high))
    scale = (most - least) / _STEPS
    one = reduce_max(scale)
    if not 0.0 < one < np.inf:
        return 0
    point = minimum(maximum(((0.0 - least) / scale + _ROUND) - _ROUND, 0.0), _STEPS)
    if begin == 0:
        write_float32(found, one)
        write_float32(found + 4, reduce_max(point))
    _round_pieces(arguments, begin, end, scale, point, 0.0 - point, _STEPS - point, scratch)
    return 0


def quantized_to_range(crew: Crew, x: Float32) -> tuple[NDArray[np.uint8], np.float32, int] | None:
    """uint8 values over the range of x and 0, their scale and zero point (ONNX's DynamicQuantizeLinear).

    None where that range is empty, or not finite.

    Raises:
        ValueError: x is of another type, or empty.
    """
    if x.dtype != np.float32 or not x.size:
        raise ValueError(f"x is {x.dtype} {list(x.shape)}, expected float32 with elements")
    x = np.ascontiguousarray(x)
    out, found = np.empty(x.shape, np.uint8), np.zeros(2, np.float32)
    ranges = crew.buffer("ranges", 8 * -(-x.size // _PIECE))
    addresses = {"x": x.ctypes.data, "out": out.ctypes.data, "ranges": ranges, "found": found.ctypes.data}
    crew.run(_range_replay(x.size), addresses)
    return (out, found[0], int(found[1])) if found[0] > 0 else None


@lru_cache(maxsize=512)
def _range_replay(size: int) -> Replay:
    items = Items(factor=-(-size // _PIECE))
    measure = Call(value_range, (Hole("x"), Hole("ranges"), size), items)
    quantize = Call(
        quantize_to_range, (Hole("x"), Hole("out"), size, Hole("ranges"), Hole("found")), items, scratch=4 * LANES
    )
    return Replay([[measure], [quantize]], 2 * size * _NANOSECONDS_PER_ELEMENT)


def quantized_bytes(crew: Crew, x: Float32, scale: float, point: int, dtype: Any) -> NDArray[Any]:
    """round(x / scale) + point as int8 or uint8, saturated, halves to even; x of any shape.

    Raises:
        ValueError: a type does not fit.
    """
    info = np.iinfo(dtype)
    if x.dtype != np.float32 or dtype not in _BYTES:
        raise ValueError(f"{x.dtype} cannot become {dtype} here")
    numbers = (float(scale), float(point), float(info.min), float(info.max))
    return _run(crew, quantize_bytes, x, np.dtype(dtype), numbers)


def dequantized_bytes(crew: Crew, x: NDArray[Any], scale: float, point: int) -> Float32:
    """(x - point) * scale of int8 or uint8 as float32; x of any shape.

    Raises:
        ValueError: a type does not fit.
    """
    if x.dtype not in _BYTES:
        raise ValueError(f"x is {x.dtype}, expected int8 or uint8")
    return _run(crew, dequantize_op(x.dtype), x, np.dtype(np.float32), (float(scale), float(point), 0.0, 0.0))


def _run(crew: Crew, op: NativeOp, x: NDArray[Any], dtype: np.dtype[Any], numbers: tuple[float, ...]) -> NDArray[Any]:
    x = np.ascontiguousarray(x)
    out = np.empty(x.shape, dtype)
    if x.size:
        crew.run(_replay(op, x.size), {"x": x.ctypes.data, "out": out.ctypes.data, **_words(numbers)})
    return out


@lru_cache(maxsize=512)
def _replay(op: NativeOp, size: int) -> Replay:
    """The call for arrays of a size; numbers are filled in like addresses."""
    items = Items(factor=-(-size // _PIECE))
    call = Call(op, (Hole("x"), Hole("out"), size, *map(Hole, _NAMES)), items, scratch=4 * LANES)
    return Replay([[call]], size * _NANOSECONDS_PER_ELEMENT)


def _words(numbers: tuple[float, ...]) -> dict[str, int]:
    return {name: argument_word(number) for name, number in zip(_NAMES, numbers, strict=True)}

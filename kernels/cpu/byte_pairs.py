"""Sums and products of two arrays of 8-bit numbers, each of a scale and zero point, rounded to 8 bits again."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .bytes import store_bytes
from .jit import NativeOp, native_op
from .lazy import inline
from .memory import float_word, load_uint8, read_uint8, word, write_int8
from .tape.program import Call, Hole, Items, argument_word
from .tape.replay import Crew, Replay
from .vector import LANES, maximum, minimum, splat_int32, to_float32, to_int32

# Arguments: per operand its address, bytes from one row and column to the next, a bit to flip, scale and zero point.
(
    A, A_ROW, A_STEP, A_FLIP, A_SCALE, A_POINT, B, B_ROW, B_STEP, B_FLIP, B_SCALE, B_POINT, OUT, WIDTH, SCALE, POINT,
    LOW, HIGH,
) = range(18)  # fmt: skip
_PIECE = 4096
_NANOSECONDS_PER_ELEMENT = 0.2
_ROUND = 12582912.0  # 1.5 * 2 ** 23: adding it rounds a small float32 to an integer, halves to even
_BYTES = (np.int8, np.uint8)
_HALF = 128


@dataclass(frozen=True)
class Form:
    """One scale and zero point."""

    scale: float
    point: int


@inline
def _numbers(arguments: int, first: int, row: int, column: int, left: int, scratch: int) -> Any:
    """The next numbers of operand A (first = 0) or B (6), dequantised."""
    step, flip = word(arguments, first + A_STEP), word(arguments, first + A_FLIP)
    scale, point = float_word(arguments, first + A_SCALE), float_word(arguments, first + A_POINT)
    at = word(arguments, first + A) + row * word(arguments, first + A_ROW) + column * step
    if step == 0:
        values = splat_int32(read_uint8(at))
    else:
        if left < LANES:
            for index in range(left):
                write_int8(scratch + index, read_uint8(at + index))
            at = scratch
        values = to_int32(load_uint8(at))
    values = values + flip - ((values & flip) << 1)  # exclusive or
    return (to_float32(values) - point) * scale


@cache
def combine_op(name: str) -> NativeOp:
    """out = round((a + b) / scale) + point, or of a * b; items are pieces of rows. Scratch: a vector."""
    is_sum = name == "Add"

    def combine(arguments: int, context: int, begin: int, end: int, scratch: int) -> int:
        width = word(arguments, WIDTH)
        pieces = -(-width // _PIECE)
        scale, point = float_word(arguments, SCALE), float_word(arguments, POINT)
        low, high = float_word(arguments, LOW) - point, float_word(arguments, HIGH) - point
        for item in range(begin, end):
            row = item // pieces
            first = (item - row * pieces) * _PIECE
            for column in range(first, min(first + _PIECE, width), LANES):
                left = min(width - column, LANES)
                a = _numbers(arguments, A, row, column, left, scratch)
                b = _numbers(arguments, B, row, column, left, scratch)
                value = minimum(maximum((a + b if is_sum else a * b) / scale, low), high)
                value = ((value + _ROUND) - _ROUND) + point
                out = word(arguments, OUT) + row * width + column
                if left == LANES:
                    store_bytes(out, value)
                else:
                    store_bytes(scratch, value)
                    for index in range(left):
                        write_int8(out + index, read_uint8(scratch + index))
        return 0

    combine.__name__ = f"combine_bytes_{name.lower()}"
    return native_op(combine)


def combined_bytes(
    crew: Crew, name: str, a: NDArray[Any], a_form: Form, b: NDArray[Any], b_form: Form, form: Form, dtype: Any
) -> NDArray[Any] | None:
    """a + b ("Add") or a * b ("Mul") of int8 or uint8 arrays as int8 or uint8.

    None where the shapes are neither equal, nor one of them a last axis of the other, nor a single number.
    """
    if b.size > a.size:
        a, a_form, b, b_form = b, b_form, a, a_form
    layout = _layout(a, b)
    if layout is None or not all(given in _BYTES for given in (a.dtype, b.dtype, dtype)):
        return None
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
    out = np.empty(a.shape, dtype)
    info = np.iinfo(dtype)
    numbers = {
        "a scale": a_form.scale, "a point": a_form.point + _moved(a.dtype), "b scale": b_form.scale,
        "b point": b_form.point + _moved(b.dtype), "scale": form.scale, "point": form.point, "low": info.min,
        "high": info.max,
    }  # fmt: skip
    words = {key: argument_word(float(value)) for key, value in numbers.items()}
    replay = _replay(combine_op(name), *layout, a.dtype == np.int8, b.dtype == np.int8)
    crew.run(replay, {"a": a.ctypes.data, "b": b.ctypes.data, "out": out.ctypes.data, **words})
    return out


def _layout(a: NDArray[Any], b: NDArray[Any]) -> tuple[int, int, int, int] | None:
    """Rows, their width, and the second operand's bytes from one row and one column to the next."""
    if not a.size or b.ndim > a.ndim:
        return None
    if a.shape == b.shape:
        return 1, a.size, 0, 1
    if b.size == 1:
        return 1, a.size, 0, 0
    if b.size == b.shape[-1] == a.shape[-1]:
        return a.size // b.size, b.size, 0, 1
    return None


def _moved(dtype: Any) -> int:
    return _HALF if dtype == np.int8 else 0


@lru_cache(maxsize=512)
def _replay(op: NativeOp, rows: int, width: int, b_row: int, b_step: int, a_signed: bool, b_signed: bool) -> Replay:
    arguments = (
        Hole("a"), width, 1, _HALF * a_signed, Hole("a scale"), Hole("a point"),
        Hole("b"), b_row, b_step, _HALF * b_signed, Hole("b scale"), Hole("b point"),
        Hole("out"), width, Hole("scale"), Hole("point"), Hole("low"), Hole("high"),
    )  # fmt: skip
    items = Items(factor=rows * -(-width // _PIECE))
    return Replay([[Call(op, arguments, items, scratch=4 * LANES)]], rows * width * _NANOSECONDS_PER_ELEMENT)

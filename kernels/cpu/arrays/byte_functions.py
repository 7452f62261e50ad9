"""Functions of 8-bit numbers with 8-bit results: table lookups, and sums and products of arrays."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..jit.arguments import Address, Arguments, Binding
from ..jit.dsl import inline
from ..jit.memory import load_bytes, read_float32, read_uint8, store_as_bytes, write_int8
from ..jit.native import NativeOp, native_op
from ..jit.variants import once
from ..jit.vector import LANES, maximum, minimum, splat_int32, to_float32, to_int32
from ..jit.vector_math import rounded
from ..program.bound_program import NodeProgram, run_alone
from ..program.calls import Call, Items
from ..program.thread_pool import Threads, fixed_address
from .copying import operand

_TABLE_PIECE = 8192
_NANOSECONDS_PER_BYTE = 0.5
_ENTRIES = 256
_PIECE = 4096
_NANOSECONDS_PER_ELEMENT = 0.2
_BYTES = (np.int8, np.uint8)
_HALF = 128
_QPARAMS_BYTES = 8


class ByteTableArguments(Arguments):
    """`count` bytes, and the table of 256 entries in which they are looked up."""

    x: Address
    table: Address
    out: Address
    count: int


@native_op(ByteTableArguments)
def look_up_bytes(arguments: ByteTableArguments, context: int, begin: int, end: int, scratch: int) -> int:
    """Compute out = table[x]. Items are pieces."""
    x, table, out = arguments.x, arguments.table, arguments.out
    last = min(end * _TABLE_PIECE, arguments.count)
    for index in range(begin * _TABLE_PIECE, last):
        write_int8(out + index, read_uint8(table + np.int64(read_uint8(x + index))))
    return 0


def looked_up(threads: Threads, x: NDArray[Any], table: NDArray[Any]) -> NDArray[Any]:
    """Return table[x] for bytes x of any shape, in the table's type. int8 values are reinterpreted as uint8 indices."""
    if x.dtype.itemsize != 1 or table.dtype.itemsize != 1 or table.shape != (_ENTRIES,):
        raise ValueError(
            f"x is {x.dtype} and table is {table.dtype} {list(table.shape)}, expected bytes and {_ENTRIES} bytes"
        )
    x, table = operand(x), np.ascontiguousarray(table)
    out = np.empty(x.shape, table.dtype)
    if x.size:
        items, nanoseconds = Items(factor=-(-x.size // _TABLE_PIECE)), x.size * _NANOSECONDS_PER_BYTE
        run_alone(look_up_bytes, items, nanoseconds, threads, x=x, table=table, out=out, count=x.size)
    return out


class OperandArguments(Arguments):
    """An operand: bytes between rows and between columns, a bit to flip, and scale and zero point as float32 [2]."""

    address: Address
    row: int
    step: int
    flip: int
    qparams: Address


class BytePairsArguments(Arguments):
    """Two operands, and rows of `width` result bytes in [`low`, `high`], with the result's scale and zero point."""

    a: OperandArguments
    b: OperandArguments
    out: Address
    width: int
    qparams: Address
    low: float
    high: float


@dataclass(frozen=True)
class QParams:
    """A scale and a zero point."""

    scale: float
    point: int


@inline
def _numbers(operand: OperandArguments, row: int, column: int, left: int) -> Any:
    """Return the next numbers of an operand, dequantised."""
    step, flip = operand.step, operand.flip
    scale, point = read_float32(operand.qparams), read_float32(operand.qparams + 4)
    at = operand.address + row * operand.row + column * step
    if step == 0:
        values = splat_int32(read_uint8(at))
    else:
        values = to_int32(load_bytes(at, left))
    values = values + flip - ((values & flip) << 1)  # exclusive or
    return (to_float32(values) - point) * scale


@once
def combine_op(name: str) -> NativeOp:
    """Return the operator out = round((a + b) / scale) + point, or the same with a * b. Items are pieces of rows."""
    is_sum = name == "Add"

    def combine(arguments: BytePairsArguments, context: int, begin: int, end: int, scratch: int) -> int:
        width = arguments.width
        pieces = -(-width // _PIECE)
        scale, point = read_float32(arguments.qparams), read_float32(arguments.qparams + 4)
        low, high = arguments.low - point, arguments.high - point
        for item in range(begin, end):
            row = item // pieces
            first = (item - row * pieces) * _PIECE
            for column in range(first, min(first + _PIECE, width), LANES):
                left = min(width - column, LANES)
                a = _numbers(arguments.a, row, column, left)
                b = _numbers(arguments.b, row, column, left)
                value = minimum(maximum((a + b if is_sum else a * b) / scale, low), high)
                store_as_bytes(arguments.out + row * width + column, rounded(value) + point, left)
        return 0

    return native_op(BytePairsArguments, name=f"combine_bytes_{name.lower()}")(combine)


def combined_bytes(
    threads: Threads, name: str, a: NDArray[Any], a_qparams: QParams, b: NDArray[Any], b_qparams: QParams,
    qparams: QParams, dtype: Any,
) -> NDArray[Any] | None:  # fmt: skip
    """Return a + b ("Add") or a * b ("Mul") of int8 or uint8 arrays as int8 or uint8.

    Returns None unless the shapes are equal, or one array is a single number or has only the other's last axis.
    """
    if b.size > a.size:
        a, a_qparams, b, b_qparams = b, b_qparams, a, a_qparams
    layout = _layout(a, b)
    if layout is None or not all(given in _BYTES for given in (a.dtype, b.dtype, dtype)):
        return None
    a, b = operand(a), operand(b)
    out = np.empty(a.shape, dtype)
    a_flip, b_flip = (_HALF if given.dtype == np.int8 else 0 for given in (a, b))
    given = (
        (a_qparams.scale, a_qparams.point + a_flip),
        (b_qparams.scale, b_qparams.point + b_flip),
        (qparams.scale, qparams.point),
    )
    all_qparams = fixed_address(np.array(given, np.float32))
    program = _pair_program(combine_op(name), *layout, a_flip, b_flip, out.dtype)
    program.run(threads, a=a, b=b, out=out, all_qparams=all_qparams)
    return out


def _layout(a: NDArray[Any], b: NDArray[Any]) -> tuple[int, int, int, int] | None:
    """Return the number of rows, their width, and the second operand's bytes between rows and between columns."""
    if not a.size or b.ndim > a.ndim:
        return None
    if a.shape == b.shape:
        return 1, a.size, 0, 1
    if b.size == 1:
        return 1, a.size, 0, 0
    if b.size == b.shape[-1] == a.shape[-1]:
        return a.size // b.size, b.size, 0, 1
    return None


@lru_cache(maxsize=512)
def _pair_program(
    op: NativeOp, rows: int, width: int, b_row: int, b_step: int, a_flip: int, b_flip: int, dtype: Any
) -> NodeProgram:
    info = np.iinfo(dtype)
    a, b, all_qparams = Binding("a"), Binding("b"), Binding("all_qparams")
    arguments = BytePairsArguments(
        a=OperandArguments(address=a, row=width, step=1, flip=a_flip, qparams=all_qparams),
        b=OperandArguments(address=b, row=b_row, step=b_step, flip=b_flip, qparams=all_qparams + _QPARAMS_BYTES),
        out=Binding("out"), width=width, qparams=all_qparams + 2 * _QPARAMS_BYTES, low=info.min, high=info.max,
    )  # fmt: skip
    call = Call(op, arguments, Items(factor=rows * -(-width // _PIECE)))
    return NodeProgram([[call]], rows * width * _NANOSECONDS_PER_ELEMENT)

"""The operators of functions of one or two numbers, element by element.

Where an operand comes from is two steps, from a row to the next and from a column to the next, either of which may be
zero: rows, a vector for all rows, a number per row and a single number are all the same to an operator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..jit import NativeOp, native_op
from ..memory import float_word, read_float32, word
from ..tape.program import Call, Rows
from ..vector import LANES, splat_float32
from .lanes import load, store
from .layout import PIECE, piece_items, pieces_of

A, A_STRIDE, A_STEP, B, B_STRIDE, B_STEP, OUT, OUT_STRIDE, WIDTH, PIECES, P, Q = range(12)

# Address of an operand, bytes from a row and from a column to the next, and what keeps the memory alive.
Place = tuple[int, int, int, Any]
NOWHERE: Place = (0, 0, 0, None)


def place_rows(rows: Rows) -> Place:
    """Where rows are."""
    return rows.address, rows.stride, 4, rows.held


def call(op: NativeOp, label: str, a: Place, b: Place, out: Rows, numbers: tuple[float, float]) -> Call:
    """The call of an operator of this module on operands that have been checked."""
    arguments = (*a[:3], *b[:3], out.address, out.stride, out.width, pieces_of(out.width), *numbers)
    return Call(op, arguments, piece_items(out), held=(a[3], b[3], out.held), label=label)


def op_of_one(name: str, function: Callable[..., Any]) -> NativeOp:
    """out = function(a, p, q) for rows a; items are pieces of rows."""

    def op(arguments: int, context: int, begin: int, end: int, scratch: int) -> int:
        width, pieces = word(arguments, WIDTH), word(arguments, PIECES)
        p, q = float_word(arguments, P), float_word(arguments, Q)
        for item in range(begin, end):
            row = item // pieces
            first = (item - row * pieces) * PIECE
            last = min(width, first + PIECE)
            a = word(arguments, A) + row * word(arguments, A_STRIDE)
            out = word(arguments, OUT) + row * word(arguments, OUT_STRIDE)
            for column in range(first, last, LANES):
                left = last - column
                store(out + 4 * column, function(load(a + 4 * column, left), p, q), left)
        return 0

    op.__name__ = name
    return native_op(op)


def op_of_two(name: str, function: Callable[..., Any]) -> NativeOp:
    """out = function(a, b, p, q); items are pieces of rows."""

    def op(arguments: int, context: int, begin: int, end: int, scratch: int) -> int:
        width, pieces = word(arguments, WIDTH), word(arguments, PIECES)
        a_step, b_step = word(arguments, A_STEP), word(arguments, B_STEP)
        p, q = float_word(arguments, P), float_word(arguments, Q)
        for item in range(begin, end):
            row = item // pieces
            first = (item - row * pieces) * PIECE
            last = min(width, first + PIECE)
            a = word(arguments, A) + row * word(arguments, A_STRIDE)
            b = word(arguments, B) + row * word(arguments, B_STRIDE)
            out = word(arguments, OUT) + row * word(arguments, OUT_STRIDE)
            a_number, b_number = splat_float32(read_float32(a)), splat_float32(read_float32(b))
            for column in range(first, last, LANES):
                left = last - column
                a_values = load(a + 4 * column, left) if a_step else a_number
                b_values = load(b + 4 * column, left) if b_step else b_number
                store(out + 4 * column, function(a_values, b_values, p, q), left)
        return 0

    op.__name__ = name
    return native_op(op)

"""A function of two numbers, element by element, with broadcasting; and activations that gate another projection.

Where an operand comes from is two steps, from a row to the next and from a column to the next, either of which may be
zero: rows, a vector for all rows, a number per row and a single number are all the same to the operator.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..functions import inline
from ..jit import NativeOp, native_op
from ..memory import read_float32
from ..tape.program import Call, Rows
from ..vector import LANES, splat_float32
from . import functions
from .lanes import integer, load, number, store
from .layout import PIECE, check_rows, check_vector, piece_items, pieces_of
from .unary import UNARY, check_function

A, A_STRIDE, A_STEP, B, B_STRIDE, B_STEP, OUT, OUT_STRIDE, WIDTH, PIECES, P, Q = range(12)

# Rows; a float32 vector [width] or [1] for all rows; a number.
Operand = Rows | NDArray[np.float32] | float

BINARY: dict[str, Callable[..., Any]] = {
    "add": functions.add,
    "divide": functions.divide,
    "maximum": functions.larger,
    "minimum": functions.smaller,
    "multiply": functions.multiply,
    "power": functions.raised,
    "subtract": functions.subtract,
}


def binary(function: str, a: Operand, b: Operand, out: Rows) -> Call:
    """out = function(a, b), element by element.

    Args:
        function: a key of BINARY. "power" is slow: for fixed exponents such as 2 or 0.5 multiply or take the root.
        a, b: rows as wide as out, or of width 1 (a number per row); a float32 vector [width] or [1]; or a number.
        out: rows; may be an operand as wide as itself, but not one of width 1 unless out has width 1 too.

    Raises:
        ValueError: no such function, or an operand that does not fit.
    """
    if function not in BINARY:
        raise ValueError(f"no function of two operands is named {function!r}; there are {', '.join(BINARY)}")
    return _call(binary_op(function), function, a, b, out, (0.0, 0.0))


def gate(activation: str, gate: Rows, up: Rows, out: Rows, *parameters: float) -> Call:
    """out = activation(gate) * up (SwiGLU, GEGLU: Shazeer 2020).

    Args:
        activation: a key of UNARY, such as "silu" or "gelu_tanh".
        gate, up, out: rows of one width; out may be gate or up.
        parameters: those of the activation.

    Raises:
        ValueError: no such activation, or another number of parameters; rows that do not fit.
    """
    numbers = check_function(activation, parameters)
    check_rows("gate", gate, out.counted, out.width)
    check_rows("up", up, out.counted, out.width)
    return _call(gate_op(activation), f"{activation} gate", gate, up, out, numbers)


def _call(op: NativeOp, label: str, a: Operand, b: Operand, out: Rows, numbers: tuple[float, float]) -> Call:
    first, second = _placed("a", a, out), _placed("b", b, out)
    arguments = (*first[:3], *second[:3], out.address, out.stride, out.width, pieces_of(out.width), *numbers)
    return Call(op, arguments, piece_items(out), held=(first[3], second[3], out.held), label=label)


def _placed(name: str, operand: Operand, out: Rows) -> tuple[int, int, int, Any]:
    """Address, bytes from row to row and from column to column, and what keeps the memory alive."""
    if isinstance(operand, Rows):
        check_rows(name, operand, out.counted, 1 if operand.width == 1 else out.width)
        return operand.address, operand.stride, 0 if operand.width == 1 else 4, operand.held
    if not isinstance(operand, np.ndarray):
        operand = np.array([operand], np.float32)
    check_vector(name, operand, (out.width, 1))
    return operand.ctypes.data, 0, 0 if operand.size == 1 else 4, operand


@cache
def binary_op(name: str) -> NativeOp:
    """The operator of a function of two operands; items are pieces of rows."""
    function = BINARY[name]

    @inline
    def combine(a: Any, b: Any, p: float, q: float) -> Any:
        return function(a, b)

    return _op(f"binary_{name}", combine)


@cache
def gate_op(name: str) -> NativeOp:
    """The operator of an activation that gates another operand; items are pieces of rows."""
    activation = UNARY[name].function

    @inline
    def combine(a: Any, b: Any, p: float, q: float) -> Any:
        return activation(a, p, q) * b

    return _op(f"gate_{name}", combine)


def _op(name: str, combine: Callable[..., Any]) -> NativeOp:
    def op(arguments: int, context: int, begin: int, end: int, scratch: int) -> int:
        width, pieces = integer(arguments, WIDTH), integer(arguments, PIECES)
        a_step, b_step = integer(arguments, A_STEP), integer(arguments, B_STEP)
        p, q = number(arguments, P), number(arguments, Q)
        for item in range(begin, end):
            row = item // pieces
            first = (item - row * pieces) * PIECE
            last = min(width, first + PIECE)
            a = integer(arguments, A) + row * integer(arguments, A_STRIDE)
            b = integer(arguments, B) + row * integer(arguments, B_STRIDE)
            out = integer(arguments, OUT) + row * integer(arguments, OUT_STRIDE)
            a_number, b_number = splat_float32(read_float32(a)), splat_float32(read_float32(b))
            for column in range(first, last, LANES):
                left = last - column
                a_values = load(a + 4 * column, left) if a_step else a_number
                b_values = load(b + 4 * column, left) if b_step else b_number
                store(out + 4 * column, combine(a_values, b_values, p, q), left)
        return 0

    op.__name__ = name
    return native_op(op)

"""Elementwise functions of one or two numbers, with broadcasting, and activations that gate another projection.

An operand has two steps in bytes: between rows, and between columns. Either step may be zero, so an operator handles
rows, a vector for all rows, one number per row and a single number in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..jit.arguments import Address, Arguments, Held
from ..jit.dsl import inline
from ..jit.memory import load, read_float32, store
from ..jit.native import NativeOp, native_op
from ..jit.variants import once
from ..jit.vector import LANES, splat_float32
from ..jit.vector_math import BINARY, UNARY
from ..program.calls import PIECE, Call, Rows, check_rows, check_vector, piece_items, pieces_of, row_at


class StridedOperand(Arguments, kw_only=False):
    """An operand: an address, the bytes between rows, and the bytes between columns."""

    address: Address
    stride: int
    step: int
    held: Held = None


class ElementwiseArguments(Arguments):
    """Operands, the result, and the two parameters that every function takes."""

    a: StridedOperand
    b: StridedOperand
    out: Rows
    pieces: int
    p: float
    q: float


# Rows, or a float32 vector [width] or [1] for all rows.
Operand = Rows | NDArray[np.float32]


def unary(function: str, x: Rows, out: Rows, *parameters: float) -> Call:
    """Return a call that computes out = function(x). `function` is a key of UNARY; out may be x itself."""
    numbers = check_function(function, parameters)
    check_rows("x", x, out.counted, out.width)
    return _call(unary_op(function), _strided("x", x, out), _strided("x", x, out), out, numbers)


def check_function(function: str, parameters: tuple[float, ...]) -> tuple[float, float]:
    """Return the two parameters that every function takes, used or not. Raises ValueError for wrong parameters."""
    if function not in UNARY:
        raise ValueError(f"{function!r} is not a function of rows; choose from {', '.join(UNARY)}")
    names = UNARY[function].parameters
    if len(parameters) != len(names):
        raise ValueError(f"{function} takes {len(names)} parameters {list(names)}, got {list(parameters)}")
    first, second = [*map(float, parameters), 0.0, 0.0][:2]
    return first, second


def binary(function: str, a: Operand, b: Operand, out: Rows) -> Call:
    """Return a call that computes out = function(a, b), element by element.

    Args:
        function: a key of BINARY; "power" is slow.
        a, b: rows as wide as out, or of width 1 (one number per row); or a float32 vector [width] or [1].
        out: rows; may be an operand of the same width. Rows of width 1 may be out only if out also has width 1.
    """
    if function not in BINARY:
        raise ValueError(f"{function!r} is not a function of two operands; choose from {', '.join(BINARY)}")
    return _call(binary_op(function), _strided("a", a, out), _strided("b", b, out), out, (0.0, 0.0))


def gate(activation: str, gate: Rows, up: Rows, out: Rows, *parameters: float) -> Call:
    """Return a call that computes out = activation(gate) * up (SwiGLU, GEGLU: Shazeer 2020).

    `activation` is a key of UNARY. out may be gate or up itself.
    """
    numbers = check_function(activation, parameters)
    for name, rows in (("gate", gate), ("up", up)):
        check_rows(name, rows, out.counted, out.width)
    operands = _strided("gate", gate, out), _strided("up", up, out)
    return _call(gate_op(activation), *operands, out, numbers)


def _strided(name: str, operand: Operand, out: Rows) -> StridedOperand:
    if isinstance(operand, Rows):
        check_rows(name, operand, out.counted, 1 if operand.width == 1 else out.width)
        return StridedOperand(operand.address, operand.stride, 0 if operand.width == 1 else 4, operand.held)
    check_vector(name, operand, (out.width, 1))
    return StridedOperand(operand, 0, 0 if operand.size == 1 else 4)


def _call(op: NativeOp, a: StridedOperand, b: StridedOperand, out: Rows, numbers: tuple[float, float]) -> Call:
    p, q = numbers
    arguments = ElementwiseArguments(a=a, b=b, out=out, pieces=pieces_of(out.width), p=p, q=q)
    return Call(op, arguments, piece_items(out))


@once
def unary_op(name: str) -> NativeOp:
    """Return the operator of a function of UNARY. The operator ignores its second operand."""
    function = UNARY[name].function
    return _op(f"unary_{name}", lambda a, b, p, q: function(a, p, q))


@once
def binary_op(name: str) -> NativeOp:
    """Return the operator of a function of BINARY."""
    function = BINARY[name]
    return _op(f"binary_{name}", lambda a, b, p, q: function(a, b))


@once
def gate_op(name: str) -> NativeOp:
    """Return the operator that multiplies an activation of UNARY by a second operand."""
    activation = UNARY[name].function
    return _op(f"gate_{name}", lambda a, b, p, q: activation(a, p, q) * b)


def _op(name: str, function: Callable[..., Any]) -> NativeOp:
    """Return the operator that computes out = function(a, b, p, q). Items are pieces of rows."""
    combine = inline(function)

    def op(arguments: ElementwiseArguments, context: int, begin: int, end: int, scratch: int) -> int:
        width, pieces = arguments.out.width, arguments.pieces
        a_step, b_step = arguments.a.step, arguments.b.step
        p, q = arguments.p, arguments.q
        for item in range(begin, end):
            row = item // pieces
            first = (item - row * pieces) * PIECE
            last = min(width, first + PIECE)
            a, b, out = row_at(arguments.a, row), row_at(arguments.b, row), row_at(arguments.out, row)
            a_number, b_number = splat_float32(read_float32(a)), splat_float32(read_float32(b))
            for column in range(first, last, LANES):
                left = last - column
                a_values = load(a + 4 * column, left) if a_step else a_number
                b_values = load(b + 4 * column, left) if b_step else b_number
                store(out + 4 * column, combine(a_values, b_values, p, q), left)
        return 0

    return native_op(ElementwiseArguments, name=name)(op)

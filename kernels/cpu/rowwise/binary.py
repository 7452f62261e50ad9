"""A function of two numbers, element by element, with broadcasting; and activations that gate another projection."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..jit import NativeOp
from ..lazy import inline
from ..tape.program import Call, Rows
from . import elementwise, functions
from .layout import check_rows, check_vector
from .unary import UNARY, check_function, unary

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
# Powers that are a function of one operand, and a hundred times faster as such.
_POWERS = {-1.0: "reciprocal", 0.5: "sqrt", 1.0: "copy", 2.0: "square", 3.0: "cube"}


def binary(function: str, a: Operand, b: Operand, out: Rows) -> Call:
    """out = function(a, b), element by element.

    Args:
        function: a key of BINARY. "power" is slow, except to the numbers -1, 0.5, 1, 2 and 3.
        a, b: rows as wide as out, or of width 1 (a number per row); a float32 vector [width] or [1]; or a number.
        out: rows; may be an operand as wide as itself, but not one of width 1 unless out has width 1 too.

    Raises:
        ValueError: no such function, or an operand that does not fit.
    """
    if function not in BINARY:
        raise ValueError(f"no function of two operands is named {function!r}; there are {', '.join(BINARY)}")
    if (
        function == "power"
        and isinstance(a, Rows)
        and a.width == out.width
        and isinstance(b, (int, float))
        and b in _POWERS
    ):
        return unary(_POWERS[b], a, out)
    places = _place("a", a, out), _place("b", b, out)
    return elementwise.call(binary_op(function), function, *places, out, (0.0, 0.0))


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
    for name, rows in (("gate", gate), ("up", up)):
        check_rows(name, rows, out.counted, out.width)
    places = elementwise.place_rows(gate), elementwise.place_rows(up)
    return elementwise.call(gate_op(activation), f"{activation} gate", *places, out, numbers)


def _place(name: str, operand: Operand, out: Rows) -> elementwise.Place:
    if isinstance(operand, Rows):
        check_rows(name, operand, out.counted, 1 if operand.width == 1 else out.width)
        return operand.address, operand.stride, 0 if operand.width == 1 else 4, operand.held
    if not isinstance(operand, np.ndarray):
        operand = np.array([operand], np.float32)
    check_vector(name, operand, (out.width, 1))
    return operand.ctypes.data, 0, 0 if operand.size == 1 else 4, operand


@cache
def binary_op(name: str) -> NativeOp:
    """The operator of a function of BINARY."""
    function = BINARY[name]

    @inline
    def combine(a: Any, b: Any, p: float, q: float) -> Any:
        return function(a, b)

    return elementwise.op_of_two(f"binary_{name}", combine)


@cache
def gate_op(name: str) -> NativeOp:
    """The operator of an activation of UNARY that gates another operand."""
    activation = UNARY[name].function

    @inline
    def combine(a: Any, b: Any, p: float, q: float) -> Any:
        return activation(a, p, q) * b

    return elementwise.op_of_two(f"gate_{name}", combine)

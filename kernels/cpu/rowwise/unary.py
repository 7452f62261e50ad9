"""A function of every number of some rows: out = f(x)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from ..jit import NativeOp, native_op
from ..tape.program import Call, Rows
from ..vector import LANES
from . import functions
from .lanes import integer, load, number, store
from .layout import PIECE, check_rows, piece_items, pieces_of

X, X_STRIDE, OUT, OUT_STRIDE, WIDTH, PIECES, P, Q = range(8)


@dataclass(frozen=True)
class Unary:
    """A function of a vector and two numbers, and the names of those that it uses."""

    function: Callable[..., Any]
    parameters: tuple[str, ...] = ()


UNARY = {
    "abs": Unary(functions.magnitude),
    "clip": Unary(functions.clip, ("low", "high")),
    "copy": Unary(functions.copied),
    "elu": Unary(functions.elu, ("alpha",)),
    "erf": Unary(functions.error_function),
    "exp": Unary(functions.exponential),
    "gelu": Unary(functions.gelu),
    "gelu_tanh": Unary(functions.gelu_tanh),
    "hard_sigmoid": Unary(functions.hard_sigmoid, ("alpha", "beta")),
    "hard_swish": Unary(functions.hard_swish),
    "leaky_relu": Unary(functions.leaky_relu, ("alpha",)),
    "log": Unary(functions.logarithm),
    "neg": Unary(functions.negative),
    "quick_gelu": Unary(functions.quick_gelu, ("alpha",)),
    "reciprocal": Unary(functions.reciprocal),
    "relu": Unary(functions.relu),
    "round_to_float16": Unary(functions.as_float16),
    "sigmoid": Unary(functions.logistic),
    "silu": Unary(functions.silu),
    "softcap": Unary(functions.softcap, ("cap",)),
    "softplus": Unary(functions.softplus),
    "sqrt": Unary(functions.root),
    "tanh": Unary(functions.hyperbolic_tangent),
}


def unary(function: str, x: Rows, out: Rows, *parameters: float) -> Call:
    """out = function(x), element by element.

    Args:
        function: a key of UNARY.
        x: rows, or parts of rows. out: as many of the same width; may be x itself.
        parameters: those that UNARY names for the function.

    Raises:
        ValueError: no such function, or another number of parameters; rows that do not fit.
    """
    numbers = check_function(function, parameters)
    check_rows("x", x, out.counted, out.width)
    arguments = (x.address, x.stride, out.address, out.stride, out.width, pieces_of(out.width), *numbers)
    return Call(unary_op(function), arguments, piece_items(out), held=(x.held, out.held), label=function)


def check_function(function: str, parameters: tuple[float, ...]) -> tuple[float, float]:
    """The two parameters that every function takes, used or not.

    Raises:
        ValueError: no such function, or another number of parameters.
    """
    if function not in UNARY:
        raise ValueError(f"no function of rows is named {function!r}; there are {', '.join(UNARY)}")
    names = UNARY[function].parameters
    if len(parameters) != len(names):
        raise ValueError(f"{function} takes {len(names)} parameters {list(names)}, got {list(parameters)}")
    first, second = [*map(float, parameters), 0.0, 0.0][:2]
    return first, second


@cache
def unary_op(name: str) -> NativeOp:
    """The operator of a function; items are pieces of rows."""
    function = UNARY[name].function

    def op(arguments: int, context: int, begin: int, end: int, scratch: int) -> int:
        width, pieces = integer(arguments, WIDTH), integer(arguments, PIECES)
        p, q = number(arguments, P), number(arguments, Q)
        for item in range(begin, end):
            row = item // pieces
            first = (item - row * pieces) * PIECE
            last = min(width, first + PIECE)
            x = integer(arguments, X) + row * integer(arguments, X_STRIDE)
            out = integer(arguments, OUT) + row * integer(arguments, OUT_STRIDE)
            for column in range(first, last, LANES):
                left = last - column
                store(out + 4 * column, function(load(x + 4 * column, left), p, q), left)
        return 0

    op.__name__ = f"unary_{name}"
    return native_op(op)

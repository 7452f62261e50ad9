"""A function of every number of some rows: out = f(x)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from ..jit import NativeOp
from ..tape.program import Call, Rows
from . import elementwise, functions
from .layout import check_rows


@dataclass(frozen=True)
class Unary:
    """A function of a vector and two numbers, and the names of those that it uses."""

    function: Callable[..., Any]
    parameters: tuple[str, ...] = ()


UNARY = {
    "abs": Unary(functions.magnitude),
    "clip": Unary(functions.clip, ("low", "high")),
    "copy": Unary(functions.copied),
    "cube": Unary(functions.cube),
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
    "square": Unary(functions.square),
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
    place = elementwise.place_rows(x)
    return elementwise.call(unary_op(function), function, place, elementwise.NOWHERE, out, numbers)


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
    """The operator of a function of UNARY."""
    return elementwise.op_of_one(f"unary_{name}", UNARY[name].function)

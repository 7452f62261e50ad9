"""Element-wise operators of ai.onnx. ONNX and NumPy have the same broadcasting rules."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial, reduce
from typing import Any, Literal

import numpy as np

from genai.kernels.cpu.arrays.copying import contiguous, operand
from genai.kernels.cpu.arrays.elements import chosen, compared, logical
from genai.kernels.cpu.arrays.functions import activation, combined
from genai.kernels.cpu.program.thread_pool import Threads, recorder_of_thread

from ..onnx.types import DataType, TensorType, Type, broadcast_dims
from .registry import operator
from .shape_rules import NodeTypes, shape_rule
from .support import narrowed, session_threads, widened

_UNARY: dict[str, Callable[[Any], Any]] = {
    "Abs": np.abs, "Acos": np.arccos, "Acosh": np.arccosh, "Asin": np.arcsin, "Asinh": np.arcsinh, "Atan": np.arctan,
    "Atanh": np.arctanh, "BitwiseNot": np.invert, "Ceil": np.ceil, "Cos": np.cos, "Cosh": np.cosh,
    "Floor": np.floor, "IsNaN": np.isnan, "Log": np.log, "Neg": np.negative, "Not": np.logical_not, "Round": np.rint,
    "Sign": np.sign, "Sin": np.sin, "Sinh": np.sinh, "Sqrt": np.sqrt, "Tan": np.tan,
    "Identity": lambda x: x,
    "Reciprocal": lambda x: x.dtype.type(1) / x,
}  # fmt: skip
_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "Add": np.add, "And": np.logical_and, "BitwiseAnd": np.bitwise_and, "BitwiseOr": np.bitwise_or,
    "BitwiseXor": np.bitwise_xor, "Equal": np.equal, "Greater": np.greater, "GreaterOrEqual": np.greater_equal,
    "Less": np.less, "LessOrEqual": np.less_equal, "Mul": np.multiply, "Or": np.logical_or, "Sub": np.subtract,
    "Xor": np.logical_xor,
}  # fmt: skip
# Before this operator set, attributes (axis, broadcast) controlled broadcasting.
_BROADCAST_VERSION = 7


def _aligned(function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """Return the form before operator set 7: input 1's axes align with input 0's, starting at `axis`."""

    def aligned(a: Any, b: Any, *, axis: int | None = None, broadcast: bool = False) -> Any:
        if broadcast and axis is not None and b.ndim:
            trailing = a.ndim - (axis % max(a.ndim, 1)) - b.ndim
            b = b.reshape(*b.shape, *[1] * max(trailing, 0))
        return function(a, b)

    return aligned


def divided(a: Any, b: Any) -> Any:
    """Divide a by b; integer division truncates towards zero, as in C, and a divisor of 0 gives 0."""
    if a.dtype.kind not in "iu":
        return np.divide(a, b)
    quotient = np.floor_divide(a, b)
    inexact = (np.remainder(a, b) != 0) & ((a < 0) != (b < 0))
    return (quotient + inexact).astype(a.dtype)


def power(base: Any, exponent: Any) -> Any:
    """Compute base ** exponent in the base's type; integers to negative powers are computed as floats."""
    if base.dtype.kind in "iu" and exponent.dtype.kind == "i" and np.any(exponent < 0):
        return np.power(base.astype(np.float64), exponent).astype(base.dtype)
    if base.dtype == _FLOAT32 and exponent.size == 1 and exponent.ndim <= base.ndim and exponent.reshape(-1)[0] == 2:
        return activation("square", base) if is_recorded(base) else np.square(base)
    return np.power(base, exponent).astype(base.dtype, copy=False)


_FLOAT32 = np.dtype(np.float32)
# The operators that compiled functions of two operands compute, if float32 operands are broadcast.
_COMPILED = {"Add": "add", "Div": "divide", "Mul": "multiply", "Sub": "subtract"}
# NumPy is faster for results with fewer elements, unless the calls of several nodes become one program.
_MIN_RESULT = 4096
# Smaller operands are copied if they are not contiguous, because recorded programs need contiguous operands. The order
# of a result in memory, and therefore the rounding of later sums, must not depend on whether programs are recorded.
_MOST_COPIED = 1 << 16


def _broadcasting(name: str, function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """Return the function; if float32 operands of a session are broadcast, they are combined in a compiled kernel."""
    known = _COMPILED[name]

    def of_two(a: Any, b: Any, *, threads: Threads | None) -> Any:
        is_float32 = threads is not None and a.dtype == b.dtype == _FLOAT32
        if is_float32 and max(a.size, b.size) <= _MOST_COPIED:
            a, b = operand(a), operand(b)
        is_large = a.shape != b.shape and a.size != b.size and max(a.size, b.size) >= _MIN_RESULT
        if is_float32 and (is_large or recorder_of_thread() is not None):
            found = combined(known, a, b, threads=threads)
            if found is not None:
                return found
        return function(a, b)

    return of_two


@operator("PRelu", since_version=_BROADCAST_VERSION)
def prelu(x: Any, slope: Any, *, threads: Threads | None) -> Any:
    """x, times the slope where x is negative."""
    whole, slopes = widened(x), widened(slope)
    if whole.dtype == slopes.dtype == _FLOAT32:
        found = combined("prelu", np.ascontiguousarray(whole).reshape(x.shape), slopes, threads=threads)
        if found is not None:
            return narrowed(found, x.dtype)
    return np.where(x < 0, x * slope, x)


# Functions whose results are the same numbers in NumPy, which is faster, and in a compiled kernel.
_EXACT = {"Abs": "abs", "Neg": "neg", "Sqrt": "sqrt"}


def is_recorded(x: Any) -> bool:
    """Return True if a compiled function of float32 x can become a part of a recorded program."""
    return bool(recorder_of_thread() is not None and x.dtype == _FLOAT32 and x.flags.c_contiguous)


def _exact(name: str, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: activation(_EXACT[name], x) if is_recorded(x) else function(x)


_COMPARISONS = frozenset({"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"})
_LOGIC = frozenset({"And", "Not", "Or", "Xor"})


def _recordable(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function; small arrays of recorded programs are computed in a compiled kernel."""
    compute = logical if name in _LOGIC else compared

    def of_two(a: Any, b: Any) -> Any:
        found = None if recorder_of_thread() is None else compute(name, a, b)
        return function(a, b) if found is None else found

    def of_one(x: Any) -> Any:
        found = None if recorder_of_thread() is None else logical(name, x)
        return function(x) if found is None else found

    return of_one if name == "Not" else of_two


for _name, _function in _UNARY.items():
    _one = _recordable(_name, _function) if _name in _LOGIC else _function
    operator(_name)(_exact(_name, _function) if _name in _EXACT else _one)
for _name, _pair in {**_BINARY, "Div": divided, "Pow": power}.items():
    _newer = _recordable(_name, _pair) if _name in _COMPARISONS | _LOGIC else _pair
    _newer = _broadcasting(_name, _pair) if _name in _COMPILED else _newer
    operator(_name, since_version=_BROADCAST_VERSION, threads=session_threads)(_newer)
    operator(_name)(_aligned(_pair))


@operator("BitShift", since_version=11)
def bit_shift(x: Any, amount: Any, *, direction: Literal["LEFT", "RIGHT"]) -> Any:
    """Shift left or right; shifting by the width of the type or more gives 0."""
    return (np.left_shift if direction == "LEFT" else np.right_shift)(x, amount)


@operator("IsInf", since_version=10)
def is_inf(x: Any, *, detect_positive: bool = True, detect_negative: bool = True) -> Any:
    """Detect infinities of the selected signs."""
    infinite = np.isinf(x)
    if not detect_positive:
        infinite &= x < 0
    if not detect_negative:
        infinite &= x > 0
    return infinite


@operator("Mean", since_version=8)
def mean(*values: Any) -> Any:
    """The mean of the inputs."""
    total = reduce(np.add, values)
    return (total / len(values)).astype(total.dtype)


@operator("Where", since_version=9)
def where(condition: Any, x: Any, y: Any) -> Any:
    """x where the condition is true, otherwise y."""
    found = None if recorder_of_thread() is None else chosen(condition, x, y)
    return np.where(condition, x, y) if found is None else found


# The result has the sign of the divisor, or of the dividend if fmod is set.
operator("Mod", since_version=10)(lambda a, b, *, fmod=False: (np.fmod if fmod else np.mod)(a, b))
operator("Max", since_version=8)(lambda *values: reduce(np.maximum, values))
operator("Min", since_version=8)(lambda *values: reduce(np.minimum, values))


@operator("Sum", since_version=8, threads=session_threads)
def total(*values: Any, threads: Threads | None) -> Any:
    """The sum of the inputs."""
    return reduce(partial(_broadcasting("Add", np.add), threads=threads), values)


def compiled(
    function: str, x: Any, *parameters: float, otherwise: Callable[[Any], Any] | None = None, threads: Threads | None
) -> Any:
    """Return a compiled function of x in x's type.

    Args:
        function: name of the function (see `genai.kernels.cpu.jit.vector_math`).
        x: array of any layout; floats narrower than float32 are computed in float32.
        parameters: parameters of the function.
        otherwise: function for wider types; None = they are computed in float32.
    """
    if x.dtype == _FLOAT32 and x.flags.c_contiguous:
        return activation(function, x, *parameters, threads=threads)
    wide = widened(x)
    if otherwise is not None and wide.dtype != np.float32:
        return np.asarray(otherwise(wide)).astype(x.dtype, copy=False)
    whole = contiguous(wide.astype(np.float32, copy=False)).reshape(x.shape)
    return narrowed(activation(function, whole, *parameters, threads=threads), x.dtype)


@operator("Relu")
def relu(x: Any, *, threads: Threads | None) -> Any:
    """x, or 0 where x is negative."""
    return compiled("relu", x, otherwise=_without_negatives, threads=threads)


def _without_negatives(x: Any) -> Any:
    # For float64, np.clip takes half the time of np.maximum.
    return np.clip(x, 0, np.inf) if x.dtype == np.float64 else np.maximum(x, x.dtype.type(0))


operator("Exp")(lambda x, *, threads: compiled("exp", x, otherwise=np.exp, threads=threads))
operator("Tanh")(lambda x, *, threads: compiled("tanh", x, otherwise=np.tanh, threads=threads))

_each_erf = np.vectorize(math.erf, otypes=[np.float64])


def exact_erf(x: Any) -> Any:
    return _each_erf(x) if x.size else x


@operator("Erf", since_version=9)
def erf(x: Any, *, threads: Threads | None) -> Any:
    """The error function: compiled float32, also for narrower floats; float64 is computed element by element."""
    if x.dtype == np.float64 or x.dtype.kind in "iu":
        return exact_erf(x).astype(x.dtype)
    return compiled("erf", x, threads=threads)


@shape_rule("LessOrEqual", "GreaterOrEqual", domain="")
def comparison_shape(types: NodeTypes) -> list[Type | None]:
    """Return the broadcast shape. ONNX infers no shape for versions before 16, which are functions."""
    first, second = types.shape(0), types.shape(1)
    shape = None if first is None or second is None else broadcast_dims(first, second)
    return [TensorType(DataType.BOOL, shape)]

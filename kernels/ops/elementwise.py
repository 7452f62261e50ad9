"""Element by element operators of ai.onnx, with NumPy broadcasting (the ONNX rule is the same)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..registry import Kernel, KernelError, NodeSpec, register
from .support import from_function

_UNARY: dict[str, Callable[[Any], Any]] = {
    "Abs": np.abs,
    "Acos": np.arccos,
    "Acosh": np.arccosh,
    "Asin": np.arcsin,
    "Asinh": np.arcsinh,
    "Atan": np.arctan,
    "Atanh": np.arctanh,
    "BitwiseNot": np.invert,
    "Ceil": np.ceil,
    "Cos": np.cos,
    "Cosh": np.cosh,
    "Exp": np.exp,
    "Floor": np.floor,
    "Identity": lambda x: x,
    "IsNaN": np.isnan,
    "Log": np.log,
    "Neg": np.negative,
    "Not": np.logical_not,
    "Reciprocal": lambda x: x.dtype.type(1) / x,
    "Relu": lambda x: np.maximum(x, x.dtype.type(0)),
    "Round": np.rint,
    "Sign": np.sign,
    "Sin": np.sin,
    "Sinh": np.sinh,
    "Sqrt": np.sqrt,
    "Tan": np.tan,
    "Tanh": np.tanh,
}
_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "Add": np.add,
    "And": np.logical_and,
    "BitwiseAnd": np.bitwise_and,
    "BitwiseOr": np.bitwise_or,
    "BitwiseXor": np.bitwise_xor,
    "Equal": np.equal,
    "Greater": np.greater,
    "GreaterOrEqual": np.greater_equal,
    "Less": np.less,
    "LessOrEqual": np.less_equal,
    "Mul": np.multiply,
    "Or": np.logical_or,
    "Sub": np.subtract,
    "Xor": np.logical_xor,
}
# Operators whose broadcasting was an attribute (axis, broadcast) before operator set 7.
_BROADCAST_VERSION = 7


def _unary(function: Callable[[Any], Any]) -> Callable[[NodeSpec], Kernel]:
    def factory(spec: NodeSpec) -> Kernel:
        def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
            return (function(inputs[0]),)

        return kernel

    return factory


def _binary(function: Callable[[Any, Any], Any]) -> Callable[[NodeSpec], Kernel]:
    def factory(spec: NodeSpec) -> Kernel:
        def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
            return (function(inputs[0], inputs[1]),)

        return kernel

    return factory


def _aligned(function: Callable[[Any, Any], Any]) -> Callable[[NodeSpec], Kernel]:
    """The form before operator set 7: the second input lies along axes of the first that begin at `axis`."""

    def factory(spec: NodeSpec) -> Kernel:
        axis, broadcast = spec.attributes.get("axis"), bool(spec.attributes.get("broadcast", 0))

        def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
            a, b = inputs
            if broadcast and axis is not None and b.ndim:
                trailing = a.ndim - (axis % max(a.ndim, 1)) - b.ndim
                b = b.reshape(*b.shape, *[1] * max(trailing, 0))
            return (function(a, b),)

        return kernel

    return factory


for _name, _function in _UNARY.items():
    register(_name)(_unary(_function))
for _name, _pair in _BINARY.items():
    register(_name, since_version=_BROADCAST_VERSION)(_binary(_pair))
    register(_name)(_aligned(_pair))


def divided(a: Any, b: Any) -> Any:
    """a / b; integers divide towards zero, as in C, and give 0 for a divisor of 0."""
    if a.dtype.kind not in "iu":
        return np.divide(a, b)
    quotient = np.floor_divide(a, b)
    inexact = (np.remainder(a, b) != 0) & ((a < 0) != (b < 0))
    return (quotient + inexact).astype(a.dtype)


register("Div", since_version=_BROADCAST_VERSION)(_binary(divided))
register("Div")(_aligned(divided))


@register("Mod", since_version=10)
def mod(spec: NodeSpec) -> Kernel:
    """The remainder with the divisor's sign, or with fmod=1 the dividend's."""
    function = np.fmod if spec.attributes.get("fmod", 0) else np.mod

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        return (function(*inputs),)

    return kernel


@register("BitShift", since_version=11)
def bit_shift(spec: NodeSpec) -> Kernel:
    """Shift left or right; shifts by the width of the type or more leave nothing."""
    direction = spec.attributes.get("direction")
    if direction not in ("LEFT", "RIGHT"):
        raise KernelError(f"BitShift: direction is {direction!r}, expected LEFT or RIGHT")
    function = np.left_shift if direction == "LEFT" else np.right_shift

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x, amount = inputs
        return (function(x, amount),)

    return kernel


@register("IsInf", since_version=10)
def is_inf(spec: NodeSpec) -> Kernel:
    """Infinities of the signs asked for."""
    positive, negative = (bool(spec.attributes.get(f"detect_{sign}", 1)) for sign in ("positive", "negative"))

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x = np.asarray(inputs[0])
        infinite = np.isinf(x)
        if not positive:
            infinite &= x < 0
        if not negative:
            infinite &= x > 0
        return (infinite,)

    return kernel


def _mean(*values: Any) -> Any:
    total = values[0]
    for value in values[1:]:
        total = total + value
    return (total / len(values)).astype(total.dtype)


register("Mean", since_version=8)(from_function(_mean))


def power(base: Any, exponent: Any) -> Any:
    """base ** exponent in the type of the base; negative powers of integers are computed as floats."""
    if base.dtype.kind in "iu" and exponent.dtype.kind == "i" and np.any(exponent < 0):
        return np.power(base.astype(np.float64), exponent).astype(base.dtype)
    return np.power(base, exponent).astype(base.dtype, copy=False)


register("Pow", since_version=_BROADCAST_VERSION)(_binary(power))
register("Pow")(_aligned(power))


@register("Where", since_version=9)
def where(spec: NodeSpec) -> Kernel:
    """Choose per element."""

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        return (np.where(*inputs),)

    return kernel


def _reduce_inputs(function: Callable[[Any, Any], Any]) -> Callable[[NodeSpec], Kernel]:
    def factory(spec: NodeSpec) -> Kernel:
        def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
            result = inputs[0]
            for value in inputs[1:]:
                result = function(result, value)
            return (result,)

        return kernel

    return factory


register("Max", since_version=8)(_reduce_inputs(np.maximum))
register("Min", since_version=8)(_reduce_inputs(np.minimum))
register("Sum", since_version=8)(_reduce_inputs(np.add))


def gelu_of(x: Any, *, approximate: bool, team: Any) -> Any:
    """GELU in x's type, exact (erf) or by tanh (Hendrycks & Gimpel 2016); computed in float32."""
    from ..cpu.activations import gelu as cpu_gelu

    wide = np.ascontiguousarray(x, np.float32)
    rows = wide.reshape(-1, x.shape[-1]) if x.ndim else wide.reshape(1, 1)
    return cpu_gelu(rows, approximate=approximate, team=team).reshape(x.shape).astype(x.dtype, copy=False)


@register("Erf", since_version=9)
def erf(spec: NodeSpec) -> Kernel:
    """The error function: float32 by us (also for narrower floats), float64 element by element."""
    from ..cpu.activations import erf as cpu_erf

    exact = np.vectorize(math.erf, otypes=[np.float64])

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x = np.asarray(inputs[0])
        if x.dtype == np.float64 or x.dtype.kind in "iu":
            return (exact(x).astype(x.dtype) if x.size else x,)
        wide = np.ascontiguousarray(x, np.float32).reshape(x.shape)
        return (cpu_erf(wide, team=spec.options.get("team")).astype(x.dtype, copy=False),)

    return kernel


@register("Gelu", since_version=20)
@register("Gelu", domain="com.microsoft")
def gelu(spec: NodeSpec) -> Kernel:
    """GELU; the attribute `approximate` chooses the form."""
    approximate = spec.attributes.get("approximate", "none") == "tanh"

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        return (gelu_of(inputs[0], approximate=approximate, team=spec.options.get("team")),)

    return kernel


@register("QuickGelu", domain="com.microsoft")
def quick_gelu(spec: NodeSpec) -> Kernel:
    """x * sigmoid(alpha * x)."""
    from ..cpu.activations import quick_gelu as cpu_quick_gelu

    alpha = float(spec.attributes.get("alpha", 1.702))
    team = spec.options.get("team")

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x = np.ascontiguousarray(inputs[0], np.float32)
        return (cpu_quick_gelu(x.reshape(-1, x.shape[-1]), alpha=alpha, team=team).reshape(x.shape),)

    return kernel


@register("FastGelu", domain="com.microsoft")
def fast_gelu(spec: NodeSpec) -> Kernel:
    """GELU by tanh, of x (+ bias)."""

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x = inputs[0] if len(inputs) < 2 or inputs[1] is None else inputs[0] + inputs[1]
        return (gelu_of(x, approximate=True, team=spec.options.get("team")),)

    return kernel

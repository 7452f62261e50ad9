"""Element by element operators of ai.onnx, with NumPy broadcasting (the ONNX rule is the same)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..registry import Array, Kernel, KernelError, NodeSpec, register

_UNARY: dict[str, Callable[[Any], Any]] = {
    "Abs": np.abs,
    "Ceil": np.ceil,
    "Cos": np.cos,
    "Exp": np.exp,
    "Floor": np.floor,
    "Identity": lambda x: x,
    "IsNaN": np.isnan,
    "Log": np.log,
    "Neg": np.negative,
    "Not": np.logical_not,
    "Reciprocal": np.reciprocal,
    "Relu": lambda x: np.maximum(x, x.dtype.type(0)),
    "Round": np.rint,
    "Sign": np.sign,
    "Sin": np.sin,
    "Sqrt": np.sqrt,
    "Tanh": np.tanh,
}
_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "Add": np.add,
    "And": np.logical_and,
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


for _name, _function in _UNARY.items():
    register(_name)(_unary(_function))
for _name, _pair in _BINARY.items():
    register(_name, since_version=_BROADCAST_VERSION)(_binary(_pair))


@register("Div", since_version=_BROADCAST_VERSION)
def div(spec: NodeSpec) -> Kernel:
    """Integers divide towards zero, as in C."""

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        a, b = inputs
        if not np.issubdtype(a.dtype, np.integer):
            return (np.divide(a, b),)
        quotient = np.floor_divide(a, b)
        inexact = (np.remainder(a, b) != 0) & ((a < 0) != (b < 0))
        return ((quotient + inexact).astype(a.dtype),)

    return kernel


@register("Sigmoid")
def sigmoid(spec: NodeSpec) -> Kernel:
    """1 / (1 + exp(-x)), without overflow for large |x|."""

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x = inputs[0]
        decay = np.exp(-np.abs(x))
        return (np.where(x >= 0, 1, decay) / (1 + decay),)

    return kernel


@register("Pow", since_version=12)
def power(spec: NodeSpec) -> Kernel:
    """The result has the type of the base."""

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        base, exponent = inputs
        return (np.power(base, exponent).astype(base.dtype, copy=False),)

    return kernel


@register("Where", since_version=9)
def where(spec: NodeSpec) -> Kernel:
    """Choose per element."""

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        return (np.where(*inputs),)

    return kernel


@register("Clip", since_version=11)
def clip(spec: NodeSpec) -> Kernel:
    """Limit to [min, max]; either may be absent."""

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x = inputs[0]
        low = inputs[1] if len(inputs) > 1 else None
        high = inputs[2] if len(inputs) > 2 else None
        if low is not None:
            x = np.maximum(x, low)
        return (x if high is None else np.minimum(x, high),)

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

# ONNX TensorProto numbers of the types that a decoder casts between; others go to onnx.reference.
_CAST_DTYPES = {
    1: np.float32, 2: np.uint8, 3: np.int8, 4: np.uint16, 5: np.int16, 6: np.int32, 7: np.int64, 9: np.bool_,
    10: np.float16, 11: np.float64, 12: np.uint32, 13: np.uint64,
}  # fmt: skip


@register("Cast", since_version=9)
def cast(spec: NodeSpec) -> Kernel:
    """Between NumPy's own number types; KernelError for others, so that they are borrowed."""
    target = int(spec.attributes["to"])
    if target not in _CAST_DTYPES:
        raise KernelError(f"Cast to ONNX type {target} has no NumPy type of its own")
    dtype = np.dtype(_CAST_DTYPES[target])

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x: Array = inputs[0]
        if x.dtype.kind not in "biuf":
            raise KernelError(f"Cast from {x.dtype} is not supported here")
        return (x.astype(dtype, copy=False),)

    return kernel


@register("Gelu", since_version=20)
@register("Gelu", domain="com.microsoft")
def gelu(spec: NodeSpec) -> Kernel:
    """GELU, exact (erf) or approximate="tanh" (Hendrycks & Gimpel 2016)."""
    from ..cpu.activations import gelu as cpu_gelu

    approximate = spec.attributes.get("approximate", "none") == "tanh"
    team = spec.options.get("team")

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x = np.ascontiguousarray(inputs[0], np.float32)
        return (cpu_gelu(x.reshape(-1, x.shape[-1]), approximate=approximate, team=team).reshape(x.shape),)

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
    from ..cpu.activations import gelu as cpu_gelu

    team = spec.options.get("team")

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x = inputs[0] if len(inputs) < 2 or inputs[1] is None else inputs[0] + inputs[1]
        x = np.ascontiguousarray(x, np.float32)
        return (cpu_gelu(x.reshape(-1, x.shape[-1]), approximate=True, team=team).reshape(x.shape),)

    return kernel

"""Linear quantisation of ai.onnx, and products of 8-bit integers (see exact.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..cpu.bytes import dequantized_bytes, quantized_bytes, quantized_to_range
from ..registry import Kernel, KernelError, NodeSpec, register
from .casting import cast_array, dtype_of, number_of
from .integer_products import IntegerProduct
from .support import checked_axis, optional, widened

_BYTES = (np.int8, np.uint8)
# Smaller arrays are left to NumPy.
_MIN_COMPILED = 2048


def along(parameter: Any, x: Any, axis: int, block_size: int) -> Any:
    """A scale or zero point in a form that broadcasts to x: one, one per position of an axis, or one per block."""
    if parameter.ndim == 0 or (parameter.size == 1 and parameter.ndim == 1 and not block_size):
        return parameter.reshape(())
    axis = checked_axis(axis, x.ndim)
    if block_size:
        repeated = np.repeat(parameter, block_size, axis=axis)
        return repeated[tuple(slice(size) for size in x.shape)]
    if parameter.ndim != 1 or parameter.shape[0] != x.shape[axis]:
        raise KernelError(f"scales of shape {list(parameter.shape)} do not fit axis {axis} of {list(x.shape)}")
    return parameter.reshape([-1 if i == axis else 1 for i in range(x.ndim)])


@register("QuantizeLinear", since_version=10)
@register("QuantizeLinear", domain="com.microsoft")
def quantize_linear(spec: NodeSpec) -> Kernel:
    """round(x / scale) + zero point, saturated; halves round to even."""
    axis, block_size = int(spec.attributes.get("axis", 1)), int(spec.attributes.get("block_size", 0))
    output = int(spec.attributes.get("output_dtype", 0))
    precision = int(spec.attributes.get("precision", 0))
    saturate = bool(spec.attributes.get("saturate", 1))
    crew = spec.options.get("crew")

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x, scale, points = inputs[0], inputs[1], optional(inputs, 2)
        dtype = points.dtype if points is not None else dtype_of(output or 2)
        if crew is not None and not precision and dtype in _BYTES and _compiled(x, scale, points):
            return (quantized_bytes(crew, x, scale.item(), 0 if points is None else points.item(), dtype),)
        if precision:
            scaled = x.astype(dtype_of(precision)) / along(scale.astype(dtype_of(precision)), x, axis, block_size)
        else:
            scaled = x / along(scale.astype(x.dtype, copy=False) if x.dtype.kind != "i" else scale, x, axis, block_size)
        offset = None if points is None else along(points, x, axis, block_size)
        return (quantized(scaled, offset, dtype, saturate=saturate),)

    return kernel


def _compiled(x: Any, scale: Any, points: Any) -> bool:
    """Whether one float32 scale and one zero point, and x if it matters, are what compiled kernels take."""
    fits = scale.dtype == np.float32 and scale.size == 1 and (points is None or points.size == 1)
    return fits and (x is None or (x.dtype == np.float32 and x.size >= _MIN_COMPILED))


def quantized(scaled: Any, zero_point: Any, dtype: Any, *, saturate: bool = True) -> Any:
    """Scaled values as integers (rounded, shifted, saturated) or as narrow floats (cast)."""
    limits = integer_limits(dtype)
    if limits is None:
        wide = widened(scaled)
        return cast_array(
            wide if zero_point is None else wide + widened(zero_point), number_of(dtype), saturate=saturate
        )
    rounded = np.rint(widened(scaled))
    if zero_point is not None:
        rounded = rounded + zero_point.astype(rounded.dtype)
    return np.clip(rounded, *limits).astype(np.int32 if dtype.isbuiltin != 1 else dtype).astype(dtype, copy=False)


def integer_limits(dtype: Any) -> tuple[int, int] | None:
    """Least and largest value of an integer type, also of 2 and 4 bits; None for floats."""
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return int(info.min), int(info.max)
    return {"int4": (-8, 7), "uint4": (0, 15), "int2": (-2, 1), "uint2": (0, 3)}.get(dtype.name)


@register("DequantizeLinear", since_version=10)
@register("DequantizeLinear", domain="com.microsoft")
def dequantize_linear(spec: NodeSpec) -> Kernel:
    """(x - zero point) * scale, in the type of the scale or `output_dtype`."""
    axis, block_size = int(spec.attributes.get("axis", 1)), int(spec.attributes.get("block_size", 0))
    output = int(spec.attributes.get("output_dtype", 0))
    crew = spec.options.get("crew")

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x, scale, points = inputs[0], inputs[1], optional(inputs, 2)
        dtype = dtype_of(output) if output else scale.dtype
        fits = x.dtype in _BYTES and x.size >= _MIN_COMPILED and dtype == np.float32 and _compiled(None, scale, points)
        if crew is not None and fits:
            return (dequantized_bytes(crew, x, scale.item(), 0 if points is None else points.item()),)
        values = x.astype(np.float64 if x.dtype.itemsize == 4 and x.dtype.kind == "i" else np.float32)
        if points is not None:
            values = values - along(points, x, axis, block_size).astype(values.dtype)
        return ((values * along(widened(scale), x, axis, block_size)).astype(dtype),)

    return kernel


@register("DynamicQuantizeLinear", since_version=11)
def dynamic_quantize_linear(spec: NodeSpec) -> Kernel:
    """To uint8 over the range of x, zero included."""

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        return dynamically_quantized(inputs[0], spec.options.get("crew"))

    return kernel


def dynamically_quantized(x: Any, crew: Any = None) -> tuple[Any, Any, Any]:
    """uint8 values, their scale and zero point."""
    if crew is not None and x.dtype == np.float32 and x.size >= _MIN_COMPILED:
        found = quantized_to_range(crew, x)
        if found is not None:
            return found[0], np.asarray(found[1]), np.asarray(found[2], np.uint8)
    low, high = np.float32(min(x.min(initial=0), 0)), np.float32(max(x.max(initial=0), 0))
    scale = (high - low) / np.float32(255)
    point = np.clip(np.rint(-low / scale), 0, 255) if scale else np.float32(0)
    scaled = np.rint(x / scale) if scale else np.zeros_like(x)
    scaled += point
    return np.clip(scaled, 0, 255, out=scaled).astype(np.uint8), np.asarray(scale), np.asarray(point, np.uint8)


@register("MatMulInteger", since_version=10)
def matmul_integer(spec: NodeSpec) -> Kernel:
    """Product of 8-bit integers less their zero points, in int32."""
    multiply = IntegerProduct(spec, 1, 3)

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        return (multiply(inputs[0], inputs[1], optional(inputs, 2), optional(inputs, 3)),)

    return kernel


def requantized(total: Any, factor: Any, zero_point: Any, dtype: Any) -> Any:
    """int32 sums times a factor, in another quantised form."""
    return quantized(total * np.asarray(factor, np.float32), np.asarray(zero_point), dtype)


@register("QLinearMatMul", since_version=10)
def qlinear_matmul(spec: NodeSpec) -> Kernel:
    """A product of quantised matrices, quantised again."""
    multiply = IntegerProduct(spec, 3, 5)

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero = inputs
        rows = a_scale.reshape(-1, 1) if a_scale.size > 1 else a_scale
        factor = widened(rows) * widened(b_scale) / widened(y_scale)
        found = multiply.rounded(a, factor, y_zero, a_zero, b, b_zero)
        if found is not None:
            return (found,)
        total = multiply(a, b, a_zero, b_zero)
        return (requantized(total, factor, y_zero, y_zero.dtype),)

    return kernel

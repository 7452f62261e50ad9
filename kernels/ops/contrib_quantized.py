"""8-bit operators of com.microsoft, as onnxruntime's quantiser writes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..cpu.byte_pairs import Form, combined_bytes
from ..cpu.byte_tables import looked_up
from ..registry import Kernel, KernelError, NodeSpec, register
from .activations import sigmoid
from .integer_products import IntegerProduct
from .pooling import average_pool
from .quantization import dynamically_quantized, quantized
from .support import optional

MS = "com.microsoft"
# Smaller arrays are left to NumPy.
_MIN_COMPILED = 2048


def dequantized(x: Any, scale: Any, zero_point: Any) -> Any:
    """(x - zero point) * scale as float32, for one scale."""
    values = x.astype(np.float32)
    if zero_point is not None:
        values -= np.float32(np.asarray(zero_point).reshape(-1)[0])
    return values * np.float32(np.asarray(scale).reshape(-1)[0])


def requantised(values: Any, scale: Any, zero_point: Any, dtype: Any) -> Any:
    """float32 values as 8-bit ones of a scale and zero point."""
    point = None if zero_point is None else np.asarray(zero_point).reshape(-1)[0]
    return quantized(values / np.float32(np.asarray(scale).reshape(-1)[0]), point, dtype)


_ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {"Add": np.add, "Mul": np.multiply}


@register("QuantizedBinary", domain="genai")
def quantized_binary(spec: NodeSpec) -> Kernel:
    """a + b or a * b (ours): a, its scale and zero point, b likewise, then those of the result.

    Attribute: function, "Add" or "Mul".
    """
    return _arithmetic(spec, str(spec.attributes["function"]))


def _arithmetic(spec: NodeSpec, name: str) -> Kernel:
    if name not in _ARITHMETIC:
        raise KernelError(f"{spec.op_type}: the function {name!r} is unknown")
    crew = spec.options.get("crew")

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        a, b, point = inputs[0], inputs[3], optional(inputs, 7)
        dtype = a.dtype if point is None else point.dtype
        forms = [_form(inputs[i], optional(inputs, i + 1)) for i in (1, 4, 6)]
        if crew is not None and max(a.size, b.size) >= _MIN_COMPILED and None not in forms:
            found = combined_bytes(crew, name, a, forms[0], b, forms[1], forms[2], dtype)
            if found is not None:
                return (found,)
        result = _ARITHMETIC[name](dequantized(*inputs[:3]), dequantized(*inputs[3:6]))
        return (requantised(result, inputs[6], point, dtype),)

    return kernel


def _form(scale: Any, point: Any) -> Any:
    """A scale and zero point as numbers, or None where there are several."""
    if np.size(scale) != 1 or (point is not None and np.size(point) != 1):
        return None
    return Form(float(np.asarray(scale).reshape(-1)[0]), 0 if point is None else int(np.asarray(point).reshape(-1)[0]))


register("QLinearAdd", domain=MS)(lambda spec: _arithmetic(spec, "Add"))
register("QLinearMul", domain=MS)(lambda spec: _arithmetic(spec, "Mul"))


def _unary(function: Callable[..., Any], **defaults: float) -> Callable[[NodeSpec], Kernel]:
    def factory(spec: NodeSpec) -> Kernel:
        values = {name: float(spec.attributes.get(name, default)) for name, default in defaults.items()}

        def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
            result = function(dequantized(*inputs[:3]), **values)
            return (requantised(result, inputs[3], optional(inputs, 4), inputs[0].dtype),)

        return kernel

    return factory


register("QLinearSigmoid", domain=MS)(_unary(sigmoid))
register("QLinearLeakyRelu", domain=MS)(_unary(lambda x, alpha: np.where(x < 0, x * np.float32(alpha), x), alpha=0.01))


@register("QLinearSoftmax", domain=MS)
def qlinear_softmax(spec: NodeSpec) -> Kernel:
    """Softmax along an axis; for operator sets before 13 over all axes from it on."""
    axis, along_one = int(spec.attributes.get("axis", -1)), int(spec.attributes.get("opset", 13)) >= 13

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x = dequantized(*inputs[:3])
        axes: Any = axis if along_one else tuple(range(axis % x.ndim, x.ndim))
        weights = np.exp(x - x.max(axis=axes, keepdims=True))
        weights /= weights.sum(axis=axes, keepdims=True)
        return (requantised(weights, inputs[3], optional(inputs, 4), inputs[0].dtype),)

    return kernel


@register("QLinearConcat", domain=MS)
def qlinear_concat(spec: NodeSpec) -> Kernel:
    """Inputs of their own scales joined in one."""
    axis = int(spec.attributes["axis"])

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        parts = [dequantized(*inputs[i : i + 3]) for i in range(2, len(inputs), 3)]
        return (requantised(np.concatenate(parts, axis=axis), inputs[0], inputs[1], inputs[1].dtype),)

    return kernel


@register("QLinearWhere", domain=MS)
def qlinear_where(spec: NodeSpec) -> Kernel:
    """Choose per element between two quantised values."""

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        chosen = np.where(inputs[0], dequantized(*inputs[1:4]), dequantized(*inputs[4:7]))
        return (requantised(chosen, inputs[7], inputs[8], inputs[1].dtype),)

    return kernel


@register("QLinearGlobalAveragePool", domain=MS)
def qlinear_global_average_pool(spec: NodeSpec) -> Kernel:
    """The mean over all spatial axes."""
    if spec.attributes.get("channels_last", 0):
        raise KernelError("QLinearGlobalAveragePool with channels last is not supported")

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x = dequantized(*inputs[:3])
        mean = x.mean(axis=tuple(range(2, x.ndim)), keepdims=True)
        return (requantised(mean, inputs[3], optional(inputs, 4), inputs[0].dtype),)

    return kernel


@register("QLinearAveragePool", domain=MS)
def qlinear_average_pool(spec: NodeSpec) -> Kernel:
    """The mean of each window."""
    if spec.attributes.get("channels_last", 0):
        raise KernelError("QLinearAveragePool with channels last is not supported")
    pool = average_pool(spec)

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        (mean,) = pool(context, [dequantized(*inputs[:3])])
        return (requantised(mean, inputs[3], optional(inputs, 4), inputs[0].dtype),)

    return kernel


@register("QGemm", domain=MS)
def qgemm(spec: NodeSpec) -> Kernel:
    """alpha * A' @ B' + C of 8-bit matrices; float32 where no output scale is given. C is int32 at scale a * b."""
    a = spec.attributes
    alpha = np.float32(a.get("alpha", 1.0))
    trans_a, trans_b = bool(a.get("transA", 0)), bool(a.get("transB", 0))
    multiply = IntegerProduct(spec, 3, 5, transposed=trans_b)

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        left, a_scale, a_zero, right, b_scale, b_zero = inputs[:6]
        total = multiply(left.T if trans_a else left, right, a_zero, b_zero)
        bias = optional(inputs, 6)
        values = (total if bias is None else total + bias) * (alpha * a_scale * b_scale)
        scale = optional(inputs, 7)
        if scale is None:
            return (values.astype(np.float32, copy=False),)
        return (requantised(values, scale, optional(inputs, 8), left.dtype),)

    return kernel


@register("MatMulIntegerToFloat", domain=MS)
def matmul_integer_to_float(spec: NodeSpec) -> Kernel:
    """An 8-bit product times its scales, plus a bias."""
    multiply = IntegerProduct(spec, 1, 5)

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        a, b, a_scale, b_scale = inputs[:4]
        bias = optional(inputs, 6)
        found = multiply.scaled(a, a_scale * b_scale, bias, optional(inputs, 4))
        if found is not None:
            return (found,)
        total = multiply(a, b, optional(inputs, 4), optional(inputs, 5))
        result = total * (a_scale * b_scale)
        return ((result if bias is None else result + bias).astype(np.float32, copy=False),)

    return kernel


@register("ByteTable", domain="genai")
def byte_table(spec: NodeSpec) -> Kernel:
    """table[x] (ours): x of 8 bits, the table's 256 entries in the order of x's bits as uint8."""
    crew = spec.options.get("crew")

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x, table = inputs[:2]
        if crew is None or x.size < _MIN_COMPILED:
            return (table[x.view(np.uint8)],)
        return (looked_up(crew, x, table),)

    return kernel


@register("IntegerLinear", domain="genai")
def integer_linear(spec: NodeSpec) -> Kernel:
    """function(MatMulIntegerToFloat) + addend (ours): its inputs, of which the matrix is constant, and the addend.

    Attribute: function, what `cpu.rowwise.unary` knows; none by default.
    """
    multiply, function = IntegerProduct(spec, 1, 5), str(spec.attributes.get("function", "")) or "copy"

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        a, a_scale, b_scale, point = inputs[0], inputs[2], inputs[3], optional(inputs, 4)
        bias, addend = optional(inputs, 6), optional(inputs, 7)
        found = multiply.scaled(a, a_scale * b_scale, bias, point, addend=addend, function=function)
        if found is None:
            raise KernelError("IntegerLinear needs a constant matrix of bytes, and scales and a bias that fit it")
        return (found,)

    return kernel


@register("DynamicQuantizeMatMul", domain=MS)
def dynamic_quantize_matmul(spec: NodeSpec) -> Kernel:
    """A float matrix quantised on the way, times an 8-bit one."""
    multiply = IntegerProduct(spec, 1, 3)

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        a, b, b_scale = inputs[:3]
        values, scale, point = dynamically_quantized(a, spec.options.get("crew"))
        bias = optional(inputs, 4)
        found = multiply.scaled(values, scale * b_scale, bias, point)
        if found is not None:
            return (found,)
        result = multiply(values, b, point, optional(inputs, 3)) * (scale * b_scale)
        return ((result if bias is None else result + bias).astype(np.float32, copy=False),)

    return kernel

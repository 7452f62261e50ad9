"""8-bit operators of com.microsoft, in the form that onnxruntime's quantiser writes."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Literal

import numpy as np

from genai.kernels.cpu.arrays.byte_functions import QParams, combined_bytes, looked_up
from genai.kernels.cpu.program.thread_pool import Threads

from ..onnx.node import MS, OURS
from ..onnx.types import DataType, TensorType, Type
from . import pooling
from .activations import leaky_relu, sigmoid
from .casting import dynamically_quantized, quantized
from .contrib import embed_layer_normalization
from .integer_products import IntegerProduct
from .pooling import WindowMaker, average_pool, window_maker
from .reduction import softmax
from .registry import KernelError, Maker, NodeSpec, operator, scalar
from .shape_rules import NodeTypes, shape_rule
from .support import checked_indices, mean

# NumPy handles arrays smaller than this.
_MIN_COMPILED = 2048


def dequantized(x: Any, scale: Any, zero_point: Any) -> Any:
    """Return (x - zero point) * scale as float32, for a single scale."""
    values = x.astype(np.float32)
    if zero_point is not None:
        values -= np.float32(np.asarray(zero_point).reshape(-1)[0])
    return values * np.float32(np.asarray(scale).reshape(-1)[0])


def requantised(values: Any, scale: Any, zero_point: Any, dtype: Any) -> Any:
    """Quantise float32 values to 8 bits with a scale and zero point."""
    point = None if zero_point is None else np.asarray(zero_point).reshape(-1)[0]
    return quantized(values / np.float32(np.asarray(scale).reshape(-1)[0]), point, dtype)


_ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {"Add": np.add, "Mul": np.multiply}


@operator("QuantizedBinary", domain=OURS)
@operator("QLinearAdd", "QLinearMul", domain=MS)
def arithmetic(
    a: Any, a_scale: Any, a_zero: Any, b: Any, b_scale: Any, b_zero: Any, y_scale: Any, y_zero: Any = None, *,
    function: Literal["Add", "Mul"] | None = None, threads: Threads | None, spec: NodeSpec,
) -> Any:  # fmt: skip
    """a + b or a * b; the attribute `function` selects the operation of QuantizedBinary (domain genai)."""
    name = function or spec.op_type.removeprefix("QLinear")
    dtype = a.dtype if y_zero is None else y_zero.dtype
    quantizations = [
        _single_quantization(scale, point) for scale, point in ((a_scale, a_zero), (b_scale, b_zero), (y_scale, y_zero))
    ]
    if threads is not None and max(a.size, b.size) >= _MIN_COMPILED and None not in quantizations:
        compiled = combined_bytes(threads, name, a, quantizations[0], b, quantizations[1], quantizations[2], dtype)
        if compiled is not None:
            return compiled
    result = _ARITHMETIC[name](dequantized(a, a_scale, a_zero), dequantized(b, b_scale, b_zero))
    return requantised(result, y_scale, y_zero, dtype)


def _single_quantization(scale: Any, point: Any) -> Any:
    """Return a scale and zero point as numbers, or None if there are several."""
    if np.size(scale) != 1 or (point is not None and np.size(point) != 1):
        return None
    return QParams(float(scalar(scale)), 0 if point is None else int(scalar(point)))


def _on_floats(name: str, **makers: Maker) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that registers a float function as an operator on quantised values.

    The operator's inputs are x with its scale and zero point, and the scale and zero point of the result.
    """

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def quantised(x: Any, scale: Any, point: Any, y_scale: Any, y_point: Any = None, **attributes: Any) -> Any:
            return requantised(function(dequantized(x, scale, point), **attributes), y_scale, y_point, x.dtype)

        operator(name, domain=MS, since_version=1, **makers)(quantised)
        return function

    return add


_on_floats("QLinearSigmoid")(sigmoid)
_on_floats("QLinearLeakyRelu")(leaky_relu)


@_on_floats("QLinearSoftmax")
def qlinear_softmax(x: Any, *, axis: int = -1, opset: int = 13) -> Any:
    """Softmax along an axis; before operator set 13, over `axis` and all axes after it."""
    return softmax(x, axis if opset >= 13 else tuple(range(axis % x.ndim, x.ndim)))


@_on_floats("QLinearAveragePool", make_windows=window_maker)
def qlinear_average_pool(
    x: Any, *, channels_last: bool = False, count_include_pad: bool = False, make_windows: WindowMaker
) -> Any:
    """The mean of each window."""
    pooled = average_pool(
        pooling.channels_first(x) if channels_last else x,
        count_include_pad=count_include_pad,
        make_windows=make_windows,
    )
    return pooling.channels_last(pooled) if channels_last else pooled


@operator("QEmbedLayerNormalization", domain=MS)
def quantised_embed_layer_normalization(
    ids: Any, segments: Any, words: Any, places: Any, kinds: Any, gamma: Any, beta: Any, mask: Any, *rest: Any,
    epsilon: float = 1e-12,
) -> Any:  # fmt: skip
    """EmbedLayerNormalization with 8-bit tables and weights; only the rows in use are dequantised.

    `rest` contains the scales of the words, places, kinds, gamma and beta, and then their zero points.
    """
    scales, points = rest[:5], (*rest[5:], None, None, None, None, None)
    checked_indices("QEmbedLayerNormalization: ids", ids, len(words))
    checked_indices("QEmbedLayerNormalization: positions", np.arange(ids.shape[1]), len(places))
    used, indices = np.unique(ids, return_inverse=True)
    tables = [words[used], places[: ids.shape[1]], kinds, gamma, beta]
    words, places, kinds, gamma, beta = (
        None if table is None else dequantized(table, scale, point)
        for table, scale, point in zip(tables, scales, points, strict=False)
    )
    embedded = embed_layer_normalization(
        indices.reshape(ids.shape), segments, words, places, kinds, gamma, beta, mask, epsilon=epsilon
    )
    return embedded[:2]


@shape_rule("QEmbedLayerNormalization")
def quantised_embed_layer_normalization_types(types: NodeTypes) -> list[Type | None]:
    """Y [batch, sequence, hidden size], and one int32 per sequence."""
    ids, words = types.shape(0, rank=2), types.shape(2, rank=2)
    batch, sequence = ids or (None, None)
    return [
        TensorType(DataType.FLOAT, (batch, sequence, words[1] if words else None)),
        TensorType(DataType.INT32, (batch,)),
    ]


@operator("QLinearConcat", domain=MS)
def qlinear_concat(scale: Any, point: Any, *values: Any, axis: int) -> Any:
    """Concatenate inputs that have separate scales."""
    parts = [dequantized(*values[i : i + 3]) for i in range(0, len(values), 3)]
    return requantised(np.concatenate(parts, axis=axis), scale, point, point.dtype)


@operator("QLinearWhere", domain=MS)
def qlinear_where(
    condition: Any, x: Any, x_scale: Any, x_zero: Any, y: Any, y_scale: Any, y_zero: Any, z_scale: Any, z_zero: Any
) -> Any:
    """Choose per element between two quantised values."""
    chosen = np.where(condition, dequantized(x, x_scale, x_zero), dequantized(y, y_scale, y_zero))
    return requantised(chosen, z_scale, z_zero, x.dtype)


@_on_floats("QLinearGlobalAveragePool")
def qlinear_global_average_pool(x: Any, *, channels_last: bool = False) -> Any:
    """The mean over all spatial axes."""
    return mean(x, tuple(range(1, x.ndim - 1) if channels_last else range(2, x.ndim)))


@operator(
    "QGemm", domain=MS, multiply=lambda spec: IntegerProduct(spec, 3, 5, transposed=bool(spec.attributes.get("transB")))
)
def qgemm(
    a: Any, a_scale: Any, a_zero: Any, b: Any, b_scale: Any, b_zero: Any, bias: Any = None, y_scale: Any = None,
    y_zero: Any = None, *, alpha: float = 1.0, transA: bool = False, multiply: IntegerProduct,
) -> Any:  # fmt: skip
    """alpha * A' @ B' + C of 8-bit matrices; C is int32 with scale alpha * a_scale * b_scale. No y_scale: float32."""
    total = multiply(a.T if transA else a, b, a_zero, b_zero)
    values = (total if bias is None else total + bias) * (np.float32(alpha) * a_scale * b_scale)
    return values.astype(np.float32, copy=False) if y_scale is None else requantised(values, y_scale, y_zero, a.dtype)


@operator("MatMulIntegerToFloat", domain=MS, multiply=lambda spec: IntegerProduct(spec, 1, 5))
def matmul_integer_to_float(
    a: Any, b: Any, a_scale: Any, b_scale: Any, a_zero: Any = None, b_zero: Any = None, bias: Any = None, *,
    multiply: IntegerProduct,
) -> Any:  # fmt: skip
    """The product of two 8-bit matrices, times their scales, plus a bias."""
    return multiply.as_floats(a, b, a_scale * b_scale, bias, a_zero, b_zero)


@operator("ByteTable", domain=OURS)
def byte_table(x: Any, table: Any, *, threads: Threads | None) -> Any:
    """table[x] (domain genai) for 8-bit x; the 256 entries are ordered by x's bits as uint8."""
    if threads is None or x.size < _MIN_COMPILED:
        return table[x.view(np.uint8)]
    return looked_up(threads, x, table)


@operator("IntegerLinear", domain=OURS, multiply=lambda spec: IntegerProduct(spec, 1, 5))
def integer_linear(
    a: Any, b: Any, a_scale: Any, b_scale: Any, a_zero: Any = None, b_zero: Any = None, bias: Any = None,
    addend: Any = None, *, function: str = "", multiply: IntegerProduct,
) -> Any:  # fmt: skip
    """function(MatMulIntegerToFloat(...)) + addend (domain genai), for a constant matrix b.

    Attribute: function, one of `cpu.functions`; if it is absent, no function is applied.
    """
    result = multiply.scaled(a, a_scale * b_scale, bias, a_zero, addend=addend, function=function or "copy")
    if result is None:
        raise KernelError(
            "IntegerLinear: the weight must be a constant int8 or uint8 matrix, and the scales and the bias must "
            "match its shape"
        )
    return result


@operator("DynamicQuantizeMatMul", domain=MS, multiply=lambda spec: IntegerProduct(spec, 1, 3))
def dynamic_quantize_matmul(
    a: Any, b: Any, b_scale: Any, b_zero: Any = None, bias: Any = None, *, multiply: IntegerProduct,
    threads: Threads | None,
) -> Any:  # fmt: skip
    """A float matrix, quantised dynamically, times an 8-bit matrix."""
    values, scale, point = dynamically_quantized(a, threads=threads)
    return multiply.as_floats(values, b, scale * b_scale, bias, point, b_zero)

"""Fused operators of com.microsoft: scaled matmuls, fused activations, embeddings and attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from genai.kernels.cpu.program.thread_pool import Threads

from ..onnx.node import MS
from ..onnx.types import Dim, TensorType, Type
from .activations import sigmoid
from .attention import attend, join_heads, split_heads
from .convolution import NO_LIMITS, conv, packed_convolution
from .group_query_attention import present_types
from .integer_products import IntegerProduct
from .matmul import gemm, product
from .registry import Kernel, KernelError, NodeSpec, from_function, operator, register, scalar
from .shape_rules import NodeTypes, divided, shape_rule, times
from .support import checked_indices, mean, optional, widened


def _activation(name: str, parameters: Sequence[float]) -> Callable[[Any], Any] | None:
    """Return a named activation with its parameters, in place where NumPy supports that; None for an empty name."""
    first, second = (*parameters, 0.0, 0.0)[:2]
    functions: dict[str, Callable[[Any], Any]] = {
        "Relu": lambda x: np.maximum(x, 0, out=x),
        "Sigmoid": sigmoid,
        "Tanh": lambda x: np.tanh(x, out=x),
        "LeakyRelu": lambda x: np.where(x < 0, x * x.dtype.type(first), x),
        "Clip": lambda x: np.clip(x, first, second, out=x),
        "HardSigmoid": lambda x: np.clip(x * x.dtype.type(first) + x.dtype.type(second), 0, 1),
    }
    if not name:
        return None
    if name not in functions:
        raise KernelError(f"the activation {name!r} is not supported")
    return functions[name]


@operator("FusedMatMul", "TransposeMatMul", domain=MS)
def fused_matmul(
    a: Any, b: Any, *, alpha: float = 1.0, transA: bool = False, transB: bool = False, transBatchA: bool = False,
    transBatchB: bool = False, threads: Threads | None,
) -> Any:  # fmt: skip
    """alpha * A' @ B', each operand optionally transposed in its last two axes or its batch axes."""
    result = product(_transposed(a, transA, transBatchA), _transposed(b, transB, transBatchB), threads)
    return result * result.dtype.type(alpha) if alpha != 1.0 else result


operator("GatedAdd", domain=MS)(lambda x, y, gate: x + y * gate)
operator("ExpandDims", domain=MS)(lambda x, axis: np.expand_dims(x, int(scalar(axis))))
operator("BiasAdd", domain=MS)(lambda x, bias, skip: x + bias + skip)


@operator("Inverse", domain=MS)
def inverse(x: Any) -> Any:
    """Invert each matrix. A singular matrix results in infinities and NaN, from divisions by zero pivots."""
    matrices = widened(x)
    try:
        inverses = np.linalg.inv(matrices)
    except np.linalg.LinAlgError:
        if matrices.ndim < 2 or matrices.shape[-1] != matrices.shape[-2]:
            raise
        inverses = np.empty_like(matrices)
        for index in np.ndindex(matrices.shape[:-2]):
            try:
                inverses[index] = np.linalg.inv(matrices[index])
            except np.linalg.LinAlgError:
                inverses[index] = _inverse_of_singular(matrices[index])
    return inverses.astype(x.dtype, copy=False)


def _inverse_of_singular(x: Any) -> Any:
    """Invert by LU factors with row exchanges, as onnxruntime (Eigen) does; columns with a zero pivot are skipped."""
    upper, result = np.array(x), np.eye(len(x), dtype=x.dtype)
    for column in range(len(x)):
        pivot = column + int(np.argmax(np.abs(upper[column:, column])))
        if upper[pivot, column] == 0:
            continue
        for matrix in (upper, result):
            matrix[[column, pivot]] = matrix[[pivot, column]]
        factors = upper[column + 1 :, column] / upper[column, column]
        for matrix in (upper, result):
            matrix[column + 1 :] -= factors[:, None] * matrix[column]
    with np.errstate(all="ignore"):
        for row in range(len(x) - 1, -1, -1):
            for later in range(row + 1, len(x)):
                result[row] -= upper[row, later] * result[later]
            result[row] /= upper[row, row]
    return result


def _transposed(x: Any, last: bool, batch: bool) -> Any:
    if batch and x.ndim > 2:
        x = np.moveaxis(x, 0, -2)
    return np.swapaxes(x, -1, -2) if last and x.ndim > 1 else x


def _with_activation(spec: NodeSpec, inner: Kernel, parameters: Sequence[float]) -> Kernel:
    activate = _activation(str(spec.attributes.get("activation", "")), parameters)

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        (result,) = inner(context, inputs)
        return (result if activate is None else activate(result),)

    return kernel


@register("FusedGemm", domain=MS)
def fused_gemm(spec: NodeSpec) -> Kernel:
    """Gemm followed by an activation."""
    parameters = [float(spec.attributes.get(f"activation_{name}", 0.0)) for name in ("alpha", "beta")]
    return _with_activation(spec, gemm(spec), parameters)


@register("FusedConv", domain=MS)
def fused_conv(spec: NodeSpec) -> Kernel:
    """Conv, plus an optional addend, followed by an activation."""
    parameters = [float(value) for value in spec.attributes.get("activation_params") or ()]
    limits = {"Relu": (0.0, math.inf), "Clip": (*parameters, 0.0, 0.0)[:2]}.get(spec.attributes.get("activation", ""))
    if limits is not None and not spec.has(3):
        return conv(spec, (limits[0], limits[1]))
    if limits is not None or not spec.attributes.get("activation"):
        packed = packed_convolution(spec, NO_LIMITS if limits is None else (limits[0], limits[1]))
        if packed is not None:
            return packed
    inner = conv(spec)

    def added(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        (result,) = inner(context, inputs[:3])
        addend = optional(inputs, 3)
        return (result if addend is None else np.add(result, addend, out=result),)

    return _with_activation(spec, added, parameters)


@operator("EmbedLayerNormalization", domain=MS)
def embed_layer_normalization(
    ids: Any, segments: Any, words: Any, position_table: Any, kinds: Any, gamma: Any, beta: Any, mask: Any = None,
    positions: Any = None, *, epsilon: float = 1e-12,
) -> Any:  # fmt: skip
    """Layer norm of the sum of word, position and segment embeddings; then each row's number of unmasked tokens."""
    for name, table, indices in (
        ("ids", words, ids),
        ("positions", position_table, positions),
        ("kinds", kinds, segments),
    ):
        if indices is not None:
            checked_indices(f"EmbedLayerNormalization: {name}", indices, len(table))
    total = widened(words[ids]) + widened(position_table[np.arange(ids.shape[1]) if positions is None else positions])
    if segments is not None:
        total = total + widened(kinds[segments])
    centred = total - mean(total, (-1,))
    inverse = 1 / np.sqrt(mean(np.square(centred), (-1,)) + np.float32(epsilon))
    normed = (centred * inverse * gamma + beta).astype(words.dtype, copy=False)
    counts = np.zeros(len(ids)) if mask is None else np.asarray(mask).sum(axis=1)
    return normed, counts.astype(np.int32), total.astype(words.dtype, copy=False)


def _packed_core(spec: NodeSpec) -> Callable[..., tuple[Any, ...]]:
    """Return a function that computes attention from queries, keys and values projected side by side."""
    for name in ("do_rotary", "past_present_share_buffer"):
        if spec.attributes.get(name, 0):
            raise KernelError(f"{spec.op_type}: the attribute {name} is not supported")
    a, threads = spec.attributes, spec.options.get("threads")
    heads, causal, scale = int(a["num_heads"]), bool(a.get("unidirectional", 0)), float(a.get("scale", 0.0))
    filler = float(a.get("mask_filter_value", -10000.0))

    def core(projected: Any, mask: Any, past: Any, bias: Any) -> tuple[Any, ...]:
        sizes = [int(size) for size in a.get("qkv_hidden_sizes") or [projected.shape[2] // 3] * 3]
        parts = np.split(projected, np.cumsum(sizes)[:2].tolist(), axis=-1)
        query, key, value = (split_heads(x, heads) for x in parts)
        if past is not None:
            key, value = np.concatenate([past[0], key], axis=2), np.concatenate([past[1], value], axis=2)
        before = 0 if past is None else past.shape[3]
        addend = mask_bias(mask, len(query), query.shape[2], key.shape[2], filler)
        if bias is not None:
            addend = bias if addend is None else addend + bias
        past_length = before if causal else None
        out = attend(query, key, value, addend, scale=scale, past_length=past_length, threads=threads)
        return join_heads(out), np.stack([key, value]) if key.shape == value.shape else None

    return core


def mask_bias(mask: Any, batch: int, rows: int, columns: int, filler: float) -> Any:
    """Convert a mask of any supported form to addends that broadcast to [batch, heads, rows, columns].

    Forms: [batch] lengths; [2 * batch] ends, then starts; [batch, columns]; [batch, rows, columns]; 4-D with one head.
    """
    if mask is None:
        return None
    mask = np.asarray(mask)
    steps = np.arange(columns)
    if mask.ndim == 1 and len(mask) == batch:
        keep = (steps < mask[:, None])[:, None, None]
    elif mask.ndim == 1 and len(mask) == 2 * batch:
        keep = ((steps < mask[:batch, None]) & (steps >= mask[batch:, None]))[:, None, None]
    elif mask.ndim == 2:
        keep = mask[:, None, None, :] != 0
    elif mask.ndim == 3:
        keep = mask[:, None] != 0
    elif mask.ndim == 4:
        keep = mask[:, :, columns - rows : columns, :columns] != 0
    else:
        raise KernelError(
            f"a mask of shape {list(mask.shape)} matches neither the batch size {batch} nor the number of keys, "
            f"{columns}"
        )
    return np.where(keep, np.float32(0), np.float32(filler))


@operator("Attention", domain=MS, core=_packed_core)
def packed_attention(
    x: Any, weight: Any, bias: Any = None, mask: Any = None, past: Any = None, addend: Any = None, *,
    core: Callable[..., tuple[Any, ...]],
) -> Any:  # fmt: skip
    """Attention of com.microsoft: projection, attention and cache update in one node."""
    projected = widened(x) @ widened(weight)
    if bias is not None:
        projected = projected + widened(bias)
    return tuple(None if y is None else y.astype(x.dtype, copy=False) for y in core(projected, mask, past, addend))


@operator("QAttention", domain=MS, core=_packed_core, multiply=lambda spec: IntegerProduct(spec, 1, 7))
def quantised_attention(
    x: Any, weight: Any, bias: Any, x_scale: Any, w_scale: Any, mask: Any = None, x_zero: Any = None,
    w_zero: Any = None, past: Any = None, *, core: Callable[..., tuple[Any, ...]], multiply: IntegerProduct,
) -> Any:  # fmt: skip
    """Attention of com.microsoft with 8-bit input and weight."""
    total = multiply(x, weight, x_zero, w_zero)
    return core(total * (x_scale * w_scale) + bias, mask, past, None)


@register("MultiHeadAttention", domain=MS)
def multi_head_attention(spec: NodeSpec) -> Kernel:
    """Attention over projected Q, K and V: separate, packed QKV [batch, T, heads, 3, size], or packed KV."""
    if spec.has(8) or spec.has(9) or any(spec.outputs[3:]):
        raise KernelError(
            "MultiHeadAttention: a shared cache buffer and attention scores as an output are not supported"
        )
    return from_function(_multi_head)(spec)


def _multi_head(
    query: Any, key: Any = None, value: Any = None, bias: Any = None, mask: Any = None, addend: Any = None,
    past_key: Any = None, past_value: Any = None, *, num_heads: int, scale: float = 0.0, unidirectional: bool = False,
    mask_filter_value: float = -10000.0, threads: Threads | None,
) -> Any:  # fmt: skip
    dtype, before = query.dtype, 0
    query, key, value = _query_key_value(widened(query), key, value, bias, num_heads)
    if past_key is not None:
        before = past_key.shape[2]
        key = np.concatenate([widened(past_key), key], axis=2)
        value = np.concatenate([widened(past_value), value], axis=2)
    hidden = mask_bias(mask, len(query), query.shape[2], key.shape[2], mask_filter_value)
    if addend is not None:
        hidden = widened(addend) if hidden is None else hidden + widened(addend)
    past_length = before if unidirectional else None
    out = attend(query, key, value, hidden, scale=scale, past_length=past_length, threads=threads)
    return tuple(x.astype(dtype, copy=False) for x in (join_heads(out), key, value))


def _query_key_value(query: Any, key: Any, value: Any, bias: Any, heads: int) -> tuple[Any, Any, Any]:
    if query.ndim == 5:
        query, key, value = (query[:, :, :, i].transpose(0, 2, 1, 3) for i in range(3))
        return query, key, value
    if key is None:
        raise KernelError(
            "MultiHeadAttention: the node has no keys, and its query input is not packed QKV [batch, T, heads, 3, size]"
        )
    key = widened(key)
    if key.ndim == 5:
        query = query if bias is None else query + widened(bias)[: query.shape[-1]]
        return split_heads(query, heads), key[:, :, :, 0].transpose(0, 2, 1, 3), key[:, :, :, 1].transpose(0, 2, 1, 3)
    value = widened(value)
    if bias is not None:
        width, key_width = query.shape[-1], key.shape[-1] if key.ndim == 3 else query.shape[-1]
        parts = np.split(widened(bias), [width, width + key_width])
        query = query + parts[0]
        if key.ndim == 3:
            key, value = key + parts[1], value + parts[2]
    return split_heads(query, heads), split_heads(key, heads), split_heads(value, heads)


@shape_rule("MultiHeadAttention")
def multi_head_attention_types(types: NodeTypes) -> list[Type | None]:
    """Y [batch, sequence, value width]; inputs are separate, packed QKV [B, S, N, 3, H] or KV [B, L, N, 2, H]."""
    query, heads = types.tensor(0), types.attribute("num_heads", 0)
    if query is None or not query.shape or len(query.shape) not in (3, 5):
        return [] if query is None else [TensorType(query.dtype)]
    batch, sequence = query.shape[:2]
    width: Dim = None
    if len(query.shape) == 5:
        width = times(query.shape[4], heads)
    elif (value := types.shape(2)) is not None:
        width = value[2] if len(value) == 3 else times(value[-1], heads)
    elif (packed := types.shape(1, rank=5)) is not None:
        width = times(packed[4], heads)
    present = present_types(types, 6, query, batch, heads, divided(width, heads))
    return [TensorType(query.dtype, (batch, sequence, width)), *present]

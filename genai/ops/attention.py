"""Attention over dense tensors and rotary embeddings of ai.onnx; com.microsoft's operators share the code."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

from genai.kernels.cpu.arrays.blas import matmul
from genai.kernels.cpu.arrays.gemm.dense_attention import DenseAttention
from genai.kernels.cpu.program.thread_pool import Threads

from ..onnx.node import OURS
from . import borrowed
from .registry import Kernel, KernelError, NodeSpec, from_function, operator, register
from .support import broadcast, checked_indices

Shape: TypeAlias = tuple[int, ...]
# The attributes that `attended` supports; onnx.reference runs nodes with any other attribute.
_KNOWN = {"is_causal", "kv_num_heads", "q_num_heads", "scale", "softcap", "qk_matmul_output_mode"}


def attend(
    query: Any, key: Any, value: Any, bias: Any = None, *, scale: float = 0.0, softcap: float = 0.0,
    past_length: int | None = None, fully_masked_is_zero: bool = False, threads: Threads | None = None,
) -> Any:  # fmt: skip
    """Return softmax(scale * query @ key' + bias) @ value.

    Args:
        query: array [batch, heads, T, size].
        key, value: arrays [batch, kv_heads, S, size]; kv_heads divides heads.
        bias: addends that broadcast to [batch, heads, T, S]; -inf masks a key.
        scale: factor of the scores; 0 = 1 / sqrt(size).
        past_length: number of past keys: query i attends to keys up to past_length + i. None = no causal mask.
    """
    heads, kv_heads = query.shape[1], key.shape[1]
    if heads != kv_heads:
        if kv_heads == 0 or heads % kv_heads:
            raise KernelError(
                f"the number of query heads, {heads}, is not a multiple of the number of key heads, {kv_heads}"
            )
        key, value = (np.repeat(x, heads // kv_heads, axis=1) for x in (key, value))
    scaled = query * query.dtype.type(scale or 1 / math.sqrt(query.shape[-1]))
    scores = matmul(scaled, np.swapaxes(key, -1, -2), threads)
    if softcap:
        scores = np.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias
    if past_length is not None:
        rows, columns = np.ogrid[: scores.shape[-2], : scores.shape[-1]]
        scores = np.where(columns <= rows + past_length, scores, scores.dtype.type(-np.inf))
    return matmul(_probabilities(scores, zero=fully_masked_is_zero), value, threads)


def _probabilities(scores: Any, *, zero: bool) -> Any:
    largest = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    if zero:
        largest = np.where(np.isneginf(largest), 0, largest).astype(scores.dtype)
    np.subtract(scores, largest, out=scores)
    np.exp(scores, out=scores)
    total = scores.sum(axis=-1, keepdims=True)
    if zero:
        total = np.where(total == 0, 1, total).astype(scores.dtype)
    scores /= total
    return scores


def split_heads(x: Any, heads: int) -> Any:
    """Reshape [batch, T, heads * size] to [batch, heads, T, size]; 4-D values are returned unchanged."""
    if x.ndim == 4:
        return x
    if heads < 1 or x.ndim != 3 or x.shape[2] % heads:
        raise KernelError(f"a value of shape {list(x.shape)} cannot be split into {heads} heads")
    return x.reshape(*x.shape[:2], heads, x.shape[2] // heads).transpose(0, 2, 1, 3)


def join_heads(x: Any) -> Any:
    """Reshape [batch, heads, T, size] to [batch, T, heads * size]."""
    batch, heads, length, size = x.shape
    return x.transpose(0, 2, 1, 3).reshape(batch, length, heads * size)


@register("Attention", since_version=23)
def attention(spec: NodeSpec) -> Kernel:
    """Attention of ai.onnx. onnx.reference runs nodes with windows, padded caches or masked scores as an output."""
    others = set(spec.attributes) - _KNOWN
    if others or spec.has(6) or (any(spec.outputs[3:]) and spec.attributes.get("qk_matmul_output_mode", 0)):
        raise KernelError(
            "Attention: this kernel does not support cache lengths, masked scores as an output, or the "
            f"attributes {sorted(others)}"
        )
    return from_function(attended, definition=borrowed.definition)(spec)


def attended(
    query: Any, key: Any, value: Any, mask: Any = None, past_key: Any = None, past_value: Any = None, *,
    q_num_heads: int = 0, kv_num_heads: int = 0, is_causal: bool = False, scale: float = 0.0, softcap: float = 0.0,
    threads: Threads | None, definition: Callable[..., Any], spec: NodeSpec,
) -> Any:  # fmt: skip
    """Compute float32 in our kernels; onnx.reference runs other types, for which ONNX rounds after each step."""
    if query.dtype != np.float32:
        return definition(query, key, value, mask, past_key, past_value)
    is_3d = query.ndim == 3
    query, key, value = split_heads(query, q_num_heads), *(split_heads(x, kv_num_heads) for x in (key, value))
    past = 0
    if past_key is not None:
        past = past_key.shape[2]
        key, value = np.concatenate([past_key, key], axis=2), np.concatenate([past_value, value], axis=2)
    out = attend(
        query, key, value, None if mask is None else _as_addends(mask, key.shape[2], query.dtype), scale=scale,
        softcap=softcap, past_length=past if is_causal else None, fully_masked_is_zero=True, threads=threads,
    )  # fmt: skip
    out = join_heads(out) if is_3d else out
    if not any(spec.outputs[3:]):
        return out, key, value
    keys = np.repeat(key, query.shape[1] // key.shape[1], axis=1).swapaxes(2, 3)
    return out, key, value, query * np.float32(scale or 1 / math.sqrt(query.shape[-1])) @ keys


def _as_addends(mask: Any, length: int, dtype: Any) -> Any:
    """Convert a mask to addends; keys after the end of a shorter mask are masked."""
    bias = np.where(mask, 0, -np.inf).astype(dtype) if mask.dtype == bool else mask.astype(dtype)
    missing = max(length - bias.shape[-1], 0)
    return np.pad(bias, [(0, 0)] * (bias.ndim - 1) + [(0, missing)], constant_values=-np.inf) if missing else bias


def rotated(x: Any, cos: Any, sin: Any, *, interleaved: bool, rotary_size: int = 0) -> Any:
    """Rotate pairs of elements of the last axis (Su et al. 2021); cos and sin broadcast to [..., rotary_size / 2]."""
    size = rotary_size or x.shape[-1]
    turned, rest = x[..., :size], x[..., size:]
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
        pair = np.stack([first * cos - second * sin, first * sin + second * cos], axis=-1)
        turned = pair.reshape(turned.shape)
    else:
        first, second = np.split(turned, 2, axis=-1)
        turned = np.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)
    return np.concatenate([turned, rest], axis=-1) if rest.shape[-1] else turned


@operator("RotaryEmbedding", since_version=23)
def rotary_embedding(
    x: Any, cos: Any, sin: Any, positions: Any = None, *, interleaved: bool = False, rotary_embedding_dim: int = 0,
    num_heads: int = 0,
) -> Any:  # fmt: skip
    """Rotate [batch, heads, T, size], or [batch, T, heads * size] with num_heads.

    The tables cos and sin have one row per position if `positions` is given, else one row per token.
    """
    by_head = split_heads(x, num_heads)
    if positions is not None:
        positions = checked_indices("RotaryEmbedding: position_ids", positions, min(len(cos), len(sin)))
        cos, sin = cos[positions], sin[positions]
    half = (rotary_embedding_dim or by_head.shape[-1]) // 2
    cos, sin = cos[:, None, ..., :half], sin[:, None, ..., :half]
    result = rotated(by_head, cos, sin, interleaved=interleaved, rotary_size=rotary_embedding_dim)
    return (join_heads(result) if x.ndim == 3 else result).astype(x.dtype, copy=False)


def _compiled(spec: NodeSpec) -> Any:
    """Return compiled attention, or None if there are no threads."""
    a, threads = spec.attributes, spec.options.get("threads")
    if threads is None:
        return None
    return DenseAttention(threads, float(a.get("scale", 1.0)), nan_is_zero=bool(a.get("nan_is_zero", 0)))


@operator("DenseAttention", domain=OURS, compiled=_compiled)
def dense_attention(
    query: Any, keys: Any, values: Any, bias: Any = None, *, scale: float = 1.0, nan_is_zero: bool = False,
    compiled: Any,
) -> Any:  # fmt: skip
    """Return softmax(scale * query @ keys + bias) @ values, all in float32; batch axes broadcast.

    Args:
        query: array [B, H, T, size].
        keys: array [B, H, size, S], already transposed for the matmul.
        values: array [B, H, S, width].
        bias: addends that broadcast with [B, H, T, S]; -inf masks a key.
        nan_is_zero: True to replace NaN weights by 0, as in fully masked rows.
    """
    inputs = query, keys, values
    shape = _score_shape(query.shape, keys.shape, values.shape, None if bias is None else bias.shape)
    ends = (shape[2], query.shape[3]), (keys.shape[2], shape[3]), values.shape[2:]
    operands = [broadcast(x, (*shape[:2], *end)) for x, end in zip(inputs, ends, strict=True)]
    addend = None if bias is None else broadcast(bias, shape)
    is_float = all(x.dtype == np.float32 for x in (*inputs, bias) if x is not None)
    if compiled is not None and shape[3] and query.shape[3] and is_float:
        return compiled(*operands, addend)
    query, keys, values = operands
    scores = np.matmul(query * np.float32(scale), keys)
    weights = _probabilities(scores if addend is None else scores + addend, zero=False)
    return np.matmul(np.where(np.isnan(weights), 0, weights) if nan_is_zero else weights, values)


@lru_cache(maxsize=256)
def _score_shape(query: Shape, keys: Shape, values: Shape, bias: Shape | None) -> Shape:
    """Return the shape [B, H, T, S] of the scores, broadcast with the bias, from the shapes of the operands."""
    batch = np.broadcast_shapes(query[:2], keys[:2], values[:2])
    shape = (*batch, query[2], keys[3])
    shape = shape if bias is None else np.broadcast_shapes(shape, bias)
    if query[3] != keys[2] or shape[3] != values[2]:
        shapes = [list(x) for x in (query, keys, values)]
        raise KernelError(
            f"DenseAttention: the queries, keys and values have shapes {shapes}, which do not match scores of "
            f"shape {list(shape)}"
        )
    return shape

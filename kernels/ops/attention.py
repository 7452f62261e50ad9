"""Attention over dense tensors, and rotary embeddings, of ai.onnx; the arithmetic is shared with com.microsoft's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..cpu.blas import matmul
from ..registry import Kernel, KernelError, NodeSpec, register
from .support import optional

MS = "com.microsoft"


def attend(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    *,
    scale: float = 0.0,
    softcap: float = 0.0,
    past_length: int | None = None,
    fully_masked_is_zero: bool = False,
    team: Any = None,
) -> Any:
    """softmax(scale * query @ key' + bias) @ value.

    Args:
        query: [batch, heads, T, size]; key and value: [batch, kv_heads, S, size], kv_heads dividing heads.
        bias: broadcast to [batch, heads, T, S]; -inf hides.
        scale: 0 = 1 / sqrt(size).
        past_length: row i sees keys up to past_length + i; None: all.
    """
    heads, kv_heads = query.shape[1], key.shape[1]
    if heads != kv_heads:
        if kv_heads == 0 or heads % kv_heads:
            raise KernelError(f"{heads} query heads over {kv_heads} key heads")
        key, value = (np.repeat(x, heads // kv_heads, axis=1) for x in (key, value))
    scaled = query * query.dtype.type(scale or 1 / math.sqrt(query.shape[-1]))
    scores = matmul(scaled, np.swapaxes(key, -1, -2), team)
    if softcap:
        scores = np.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias
    if past_length is not None:
        rows, columns = np.ogrid[: scores.shape[-2], : scores.shape[-1]]
        scores = np.where(columns <= rows + past_length, scores, scores.dtype.type(-np.inf))
    return matmul(_probabilities(scores, zero=fully_masked_is_zero), value, team)


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
    """[batch, T, heads * size] to [batch, heads, T, size]; 4-D values stay."""
    if x.ndim == 4:
        return x
    if heads < 1 or x.ndim != 3 or x.shape[2] % heads:
        raise KernelError(f"a value of shape {list(x.shape)} cannot be split into {heads} heads")
    return x.reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3)


def join_heads(x: Any) -> Any:
    """[batch, heads, T, size] to [batch, T, heads * size]."""
    batch, heads, length, size = x.shape
    return x.transpose(0, 2, 1, 3).reshape(batch, length, heads * size)


@register("Attention", since_version=23)
def attention(spec: NodeSpec) -> Kernel:
    """The standard operator in its common form; windows, padded caches and extra outputs are borrowed."""
    a = spec.attributes
    if len(spec.outputs) > 3 and spec.outputs[3]:
        raise KernelError("Attention: the product as an output is borrowed")
    if (
        spec.has(6)
        or a.get("softmax_precision")
        or int(a.get("left_window_size", -1)) != -1
        or "local_window_size" in a
    ):
        raise KernelError("Attention: this form is borrowed")
    known = {"is_causal", "kv_num_heads", "q_num_heads", "scale", "softcap", "qk_matmul_output_mode"}
    if set(a) - known:
        raise KernelError(f"Attention: {sorted(set(a) - known)} are borrowed")
    heads, kv_heads = int(a.get("q_num_heads", 0)), int(a.get("kv_num_heads", 0))
    causal, scale, softcap = bool(a.get("is_causal", 0)), float(a.get("scale", 0.0)), float(a.get("softcap", 0.0))

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        if inputs[0].dtype != np.float32:
            raise _Narrow
        query, key, value = inputs[:3]
        is_3d = query.ndim == 3
        query, key, value = split_heads(query, heads), split_heads(key, kv_heads), split_heads(value, kv_heads)
        mask, past_key, past_value = (optional(inputs, i) for i in (3, 4, 5))
        past = 0
        if past_key is not None:
            past = past_key.shape[2]
            key, value = np.concatenate([past_key, key], axis=2), np.concatenate([past_value, value], axis=2)
        bias = None if mask is None else _mask_bias(mask, key.shape[2], query.dtype)
        out = attend(
            query, key, value, bias, scale=scale, softcap=softcap,
            past_length=past if causal else None, fully_masked_is_zero=True,
        )  # fmt: skip
        return (join_heads(out) if is_3d else out), key, value

    return _with_borrowed(spec, kernel)


class _NarrowType(Exception):
    """The element type is one that the definition rounds step by step."""


_Narrow = _NarrowType()


def _with_borrowed(spec: NodeSpec, kernel: Kernel) -> Kernel:
    """float32 by us; other types by the definition, made when first needed."""
    from .borrowed import make

    others: list[Kernel] = []

    def chosen(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        try:
            return kernel(context, inputs)
        except _NarrowType:
            if not others:
                others.append(make(spec))
            return others[0](context, inputs)

    return chosen


def _mask_bias(mask: Any, length: int, dtype: Any) -> Any:
    """A mask as addends; where it is shorter than the keys, the rest is hidden."""
    bias = np.where(mask, 0, -np.inf).astype(dtype) if mask.dtype == bool else mask.astype(dtype)
    missing = length - bias.shape[-1]
    if missing > 0:
        bias = np.pad(bias, [(0, 0)] * (bias.ndim - 1) + [(0, missing)], constant_values=-np.inf)
    return bias


def rotated(x: Any, cos: Any, sin: Any, *, interleaved: bool, rotary_size: int = 0) -> Any:
    """Rotate pairs of the last axis (Su et al. 2021); cos and sin broadcast to [..., rotary_size / 2]."""
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


@register("RotaryEmbedding", since_version=23)
def rotary_embedding(spec: NodeSpec) -> Kernel:
    """[batch, heads, T, size], or [batch, T, heads * size] with num_heads; tables by position, or given per token."""
    a = spec.attributes
    interleaved, size = bool(a.get("interleaved", 0)), int(a.get("rotary_embedding_dim", 0))
    heads = int(a.get("num_heads", 0))

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x, cos, sin, positions = inputs[0], inputs[1], inputs[2], optional(inputs, 3)
        is_3d = x.ndim == 3
        by_head = split_heads(x, heads)
        if positions is not None:
            cos, sin = cos[positions], sin[positions]
        cos, sin = cos[:, None], sin[:, None]
        half = (size or by_head.shape[-1]) // 2
        result = rotated(by_head, cos[..., :half], sin[..., :half], interleaved=interleaved, rotary_size=size)
        return ((join_heads(result) if is_3d else result).astype(x.dtype, copy=False),)

    return kernel

"""Attention of com.microsoft over dense tensors: the packed form of BERT and GPT-2, and MultiHeadAttention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..registry import Kernel, KernelError, NodeSpec, register
from .attention import attend, join_heads, split_heads
from .integer_products import IntegerProduct
from .support import optional, widened

MS = "com.microsoft"


def _refuse(spec: NodeSpec, *names: str) -> None:
    for name in names:
        if spec.attributes.get(name, 0):
            raise KernelError(f"{spec.op_type} with {name} is not supported")


def mask_bias(mask: Any, batch: int, rows: int, columns: int, filler: float) -> Any:
    """Any of the forms of a mask as addends to [batch, heads, rows, columns].

    Forms: [batch] lengths, [2 * batch] ends then starts, [batch, columns], [batch, rows, columns], or 4-D of one head.
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
        raise KernelError(f"a mask of shape {list(mask.shape)} fits neither batch {batch} nor length {columns}")
    return np.where(keep, np.float32(0), np.float32(filler))


class _PackedAttention:
    """softmax(Q K') V of one projection of the input to queries, keys and values side by side."""

    def __init__(self, spec: NodeSpec) -> None:
        _refuse(spec, "do_rotary", "past_present_share_buffer")
        a = spec.attributes
        self.heads = int(a["num_heads"])
        self.causal = bool(a.get("unidirectional", 0))
        self.scale = float(a.get("scale", 0.0))
        self.filler = float(a.get("mask_filter_value", -10000.0))
        sizes = a.get("qkv_hidden_sizes")
        self.sizes = [int(size) for size in sizes] if sizes else None

    def __call__(self, projected: Any, mask: Any, past: Any, bias: Any) -> tuple[Any, ...]:
        batch, length, width = projected.shape
        sizes = self.sizes or [width // 3] * 3
        query, key, value = np.split(projected, np.cumsum(sizes)[:2].tolist(), axis=-1)
        query, key, value = (split_heads(x, self.heads) for x in (query, key, value))
        before = 0
        if past is not None:
            before = past.shape[3]
            key, value = np.concatenate([past[0], key], axis=2), np.concatenate([past[1], value], axis=2)
        addend = mask_bias(mask, batch, length, key.shape[2], self.filler)
        if bias is not None:
            addend = bias if addend is None else addend + bias
        out = attend(query, key, value, addend, scale=self.scale, past_length=before if self.causal else None)
        present = np.stack([key, value]) if key.shape == value.shape else None
        return join_heads(out), present


@register("Attention", domain=MS)
def packed_attention(spec: NodeSpec) -> Kernel:
    """Projection, attention and cache in one node."""
    core = _PackedAttention(spec)

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x, weight, bias = inputs[0], inputs[1], optional(inputs, 2)
        projected = widened(x) @ widened(weight)
        if bias is not None:
            projected = projected + widened(bias)
        results = core(projected, optional(inputs, 3), optional(inputs, 4), optional(inputs, 5))
        return tuple(None if y is None else y.astype(x.dtype, copy=False) for y in results)

    return kernel


@register("QAttention", domain=MS)
def quantised_attention(spec: NodeSpec) -> Kernel:
    """The same with 8-bit input and weight."""
    core, multiply = _PackedAttention(spec), IntegerProduct(spec, 1, 7)

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x, weight, bias, x_scale, w_scale = inputs[:5]
        total = multiply(x, weight, optional(inputs, 6), optional(inputs, 7))
        return core(total * (x_scale * w_scale) + bias, optional(inputs, 5), optional(inputs, 8), None)

    return kernel


@register("MultiHeadAttention", domain=MS)
def multi_head_attention(spec: NodeSpec) -> Kernel:
    """Queries, keys and values already projected: apart, or packed as [batch, T, heads, 3, size] or with KV packed."""
    a = spec.attributes
    heads, scale, causal = int(a["num_heads"]), float(a.get("scale", 0.0)), bool(a.get("unidirectional", 0))
    filler = float(a.get("mask_filter_value", -10000.0))
    if spec.has(8) or spec.has(9) or any(spec.outputs[3:]):
        raise KernelError("MultiHeadAttention with a shared cache buffer or scores as an output is not supported")

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        dtype = inputs[0].dtype
        query, key, value = _query_key_value(inputs, heads)
        past_key, past_value = optional(inputs, 6), optional(inputs, 7)
        before = 0
        if past_key is not None:
            before = past_key.shape[2]
            key = np.concatenate([widened(past_key), key], axis=2)
            value = np.concatenate([widened(past_value), value], axis=2)
        bias = mask_bias(optional(inputs, 4), len(query), query.shape[2], key.shape[2], filler)
        more = optional(inputs, 5)
        if more is not None:
            bias = widened(more) if bias is None else bias + widened(more)
        out = attend(query, key, value, bias, scale=scale, past_length=before if causal else None)
        return tuple(x.astype(dtype, copy=False) for x in (join_heads(out), key, value))

    return kernel


def _query_key_value(inputs: Sequence[Any], heads: int) -> tuple[Any, Any, Any]:
    query, key, value, bias = widened(inputs[0]), optional(inputs, 1), optional(inputs, 2), optional(inputs, 3)
    if query.ndim == 5:
        query, key, value = (query[:, :, :, i].transpose(0, 2, 1, 3) for i in range(3))
        return query, key, value
    if key is None:
        raise KernelError("MultiHeadAttention: no keys beside queries that are not packed")
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

"""Attention over dense tensors: GroupQueryAttention and MultiHeadAttention of com.microsoft."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .normalization import simplified_layer_normalization
from .rope import rotate

Array = NDArray[Any]
Float64 = NDArray[np.float64]


def attend(
    q: Array,
    k: Array,
    v: Array,
    visible: Array,
    *,
    scale: float,
    softcap: float = 0.0,
    bias: Array | None = None,
    sink: float | None = None,
) -> Float64:
    """One head: softmax of capped scores over the visible keys, times values.

    Args:
        q: [rows, head_size]. k: [keys, head_size]. v: [keys, v_head_size].
        visible: bool [rows, keys]. bias: added to the scores, [rows, keys].
        softcap: scores become softcap * tanh(score / softcap); 0 = off.
        sink: a score that takes part in the softmax with a value of zero.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        scores = q.astype(np.float64) @ k.astype(np.float64).T * scale
        if softcap > 0:
            scores = softcap * np.tanh(scores / softcap)
        if bias is not None:
            scores = scores + bias
        scores = np.where(visible, scores, -np.inf)
        if sink is not None:
            scores = np.concatenate([scores, np.full((len(scores), 1), float(sink))], axis=1)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights = (weights / weights.sum(axis=1, keepdims=True))[:, : len(k)]
        # An invisible key has no part in the result, not even 0 * infinity.
        result: Float64 = np.stack([row[seen] @ v[seen] for row, seen in zip(weights, visible, strict=True)])
        return result


def causal_mask(query_positions: Array, keys: int, window: int = -1) -> Array:
    """bool [rows, keys]: keys up to the row's own position, the last `window` of them (-1 = all)."""
    distance = query_positions[:, None] - np.arange(keys)[None, :]
    return (distance >= 0) & ((distance < window) if window > 0 else True)


def group_query_attention(
    query: Array,
    key: Array | None,
    value: Array | None,
    past_key: Array | None,
    past_value: Array | None,
    seqlens_k: Array,
    total_sequence_length: Array | int,
    cos_cache: Array | None = None,
    sin_cache: Array | None = None,
    position_ids: Array | None = None,
    attention_bias: Array | None = None,
    head_sink: Array | None = None,
    q_norm_weight: Array | None = None,
    k_norm_weight: Array | None = None,
    *,
    num_heads: int,
    kv_num_heads: int,
    scale: float = 0.0,
    softcap: float = 0.0,
    local_window_size: int = -1,
    do_rotary: bool = False,
    rotary_interleaved: bool = False,
    smooth_softmax: bool = False,
    causal: bool = True,
    qk_norm_epsilon: float = 1e-6,
) -> tuple[Array, Array, Array]:
    """com.microsoft::GroupQueryAttention with a float cache.

    Args:
        query: [batch, sequence, heads * head_size], or with key and value None packed query, key and value.
        past_key, past_value: [batch, kv_heads, past, head_size], or None.
        seqlens_k: [batch], tokens in the cache after this step, less one. Rows of a first prompt that are padded on
            the right have fewer than `sequence` tokens.
        total_sequence_length: the longest of the batch; equal to `sequence` for a first prompt.
        cos_cache, sin_cache: [max_positions, rotary_dim / 2].
        attention_bias: [batch or 1, heads or 1, sequence, total_sequence_length].
        head_sink: [heads]. q_norm_weight, k_norm_weight: [head_size], RMS norm per head before the rotation.

    Returns:
        Output [batch, sequence, heads * head_size], present key and present value
        [batch, kv_heads, max(past, total_sequence_length), head_size]. Padded rows hold nothing of meaning.
    """
    q, k, v = _split_heads(query, key, value, num_heads, kv_num_heads)
    batch, length = q.shape[:2]
    longest = int(np.asarray(total_sequence_length).reshape(-1)[0])
    totals = seqlens_k.reshape(-1).astype(np.int64) + 1
    pasts = np.zeros_like(totals) if length == longest else totals - length
    if q_norm_weight is not None and k_norm_weight is not None:
        q = simplified_layer_normalization(q, q_norm_weight, epsilon=qk_norm_epsilon)
        k = simplified_layer_normalization(k, k_norm_weight, epsilon=qk_norm_epsilon)
    positions = pasts[:, None] + np.arange(length)
    if do_rotary and cos_cache is not None and sin_cache is not None:
        rotary_positions = positions if position_ids is None else position_ids
        q = rotate(q, rotary_positions, cos_cache, sin_cache, rotary_interleaved)
        k = rotate(k, rotary_positions, cos_cache, sin_cache, rotary_interleaved)
    capacity = max(longest, 0 if past_key is None else past_key.shape[2])
    present_key = _append(past_key, k, pasts, capacity)
    present_value = _append(past_value, v, pasts, capacity)
    output = np.zeros((batch, length, num_heads, v.shape[3]), query.dtype)
    for b in range(batch):
        keys = int(max(totals[b], pasts[b] + length))
        if causal:
            visible = causal_mask(positions[b], keys, local_window_size)
        else:
            visible = np.broadcast_to(np.arange(keys) < totals[b], (length, keys))
        for head in range(num_heads):
            kv_head = head // (num_heads // kv_num_heads)
            bias = None
            if attention_bias is not None:
                bias = attention_bias[b % len(attention_bias), head % attention_bias.shape[1]][:, :keys]
            sink = float(head_sink[head]) if head_sink is not None else 0.0 if smooth_softmax else None
            output[b, :, head] = attend(
                q[b, :, head],
                present_key[b, kv_head, :keys],
                present_value[b, kv_head, :keys],
                visible,
                scale=scale or 1 / math.sqrt(q.shape[3]),
                softcap=softcap,
                bias=bias,
                sink=sink,
            )
    return output.reshape(batch, length, -1), present_key, present_value


def multi_head_attention(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    key_padding_mask: Array | None = None,
    attention_bias: Array | None = None,
    past_key: Array | None = None,
    past_value: Array | None = None,
    *,
    num_heads: int,
    scale: float = 0.0,
    unidirectional: bool = False,
) -> tuple[Array, Array, Array]:
    """com.microsoft::MultiHeadAttention with separate inputs.

    Args:
        query: [batch, sequence, hidden]. key: [batch, keys, hidden]. value: [batch, keys, v_hidden].
        bias: [hidden + hidden + v_hidden], of the three projections.
        key_padding_mask: [batch, past + keys], 0 = padding. attention_bias: as in `group_query_attention`.
        past_key, past_value: [batch, heads, past, head_size], or None.

    Returns:
        Output [batch, sequence, v_hidden], present key and present value [batch, heads, past + keys, head_size].
    """
    if bias is not None:
        parts = np.split(bias, [query.shape[2], query.shape[2] + key.shape[2]])
        query, key, value = query + parts[0], key + parts[1], value + parts[2]
    q, k, v = (x.reshape(*x.shape[:2], num_heads, -1) for x in (query, key, value))
    past = 0 if past_key is None else past_key.shape[2]
    starts = np.full(len(q), past)
    present_key = _append(past_key, k, starts, past + k.shape[1])
    present_value = _append(past_value, v, starts, past + k.shape[1])
    keys = present_key.shape[2]
    output = np.zeros((*q.shape[:3], v.shape[3]), query.dtype)
    for b in range(len(q)):
        visible = np.ones((q.shape[1], keys), bool)
        if unidirectional:
            visible &= causal_mask(past + np.arange(q.shape[1]), keys)
        if key_padding_mask is not None:
            visible &= key_padding_mask[b].astype(bool)[None, :]
        for head in range(num_heads):
            term = None
            if attention_bias is not None:
                term = attention_bias[b % len(attention_bias), head % attention_bias.shape[1]]
            output[b, :, head] = attend(
                q[b, :, head],
                present_key[b, head],
                present_value[b, head],
                visible,
                scale=scale or 1 / math.sqrt(q.shape[3]),
                bias=term,
            )
    return output.reshape(*q.shape[:2], -1), present_key, present_value


def _split_heads(
    query: Array, key: Array | None, value: Array | None, num_heads: int, kv_num_heads: int
) -> tuple[Array, Array, Array]:
    """Query, key and value as [batch, sequence, heads, head_size]."""
    if key is None or value is None:
        head_size = query.shape[2] // (num_heads + 2 * kv_num_heads)
        sizes = [num_heads * head_size, (num_heads + kv_num_heads) * head_size]
        query, key, value = np.split(query, sizes, axis=2)
    return (
        query.reshape(*query.shape[:2], num_heads, -1),
        key.reshape(*key.shape[:2], kv_num_heads, -1),
        value.reshape(*value.shape[:2], kv_num_heads, -1),
    )


def _append(past: Array | None, new: Array, starts: Array, capacity: int) -> Array:
    """The cache [batch, heads, capacity, size] with new [batch, sequence, heads, size] written from `starts` on."""
    batch, length, heads, size = new.shape
    present = np.zeros((batch, heads, capacity, size), new.dtype)
    if past is not None:
        present[:, :, : past.shape[2]] = past
    for b, start in enumerate(starts):
        present[b, :, start : start + length] = np.swapaxes(new[b], 0, 1)[:, : capacity - start]
    return present

"""Rotary position embedding (Su et al. 2021), and attention over one sequence and over the pages of a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..cache_layout import PAGE_TOKENS, PagedLayer
from ..device import StepContext, StepError
from ..ir import Attention, Rope
from .functions import Array, Float64, norm
from .pages import read_pages, write_pages


def rotate(x: Array, cosine: Array, sine: Array, interleaved: bool = False) -> Float64:
    """Rotate x [..., heads, head_size] by cosine and sine [..., pairs]; for pairs see `device.KeyRotation`."""
    half, result = cosine.shape[-1], x.astype(np.float64)
    cosine, sine = (table.astype(np.float64)[..., None, :] for table in (cosine, sine))
    pairs = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(0, half), slice(half, 2 * half))
    first, second = (result[..., part].copy() for part in pairs)
    result[..., pairs[0]] = first * cosine - second * sine
    result[..., pairs[1]] = second * cosine + first * sine
    return result


def split_heads(op: Attention, query: Array, key: Any = None, value: Any = None) -> list[Array]:
    """Return query [..., heads, head_size], key and value [..., kv_heads, size], unless they are stored.

    If `op` is packed, `query` holds all three.
    """
    if op.stored:
        return [query.reshape(*query.shape[:-1], op.heads, op.head_size)]
    if key is None:
        widths = np.array([op.heads, op.kv_heads]) * op.head_size
        query, key, value = np.split(query, np.cumsum(widths), axis=-1)
    counts = (op.heads, op.kv_heads, op.kv_heads)
    return [x.reshape(*x.shape[:-1], n, x.shape[-1] // n) for x, n in zip((query, key, value), counts, strict=True)]


def rotated(x: Array, weight: Array | None, epsilon: float, rotation: tuple[Array, Array, bool] | None) -> Float64:
    """Normalise heads [..., heads, head_size] if there is a weight, then rotate them if there is a rotation."""
    wide: Float64 = x.astype(np.float64) if weight is None else norm(x, weight, epsilon)
    return wide if rotation is None else rotate(wide, *rotation)


def attend(
    op: Attention, q: Array, k: Array, v: Array, positions: Array, sinks: Array | None, bias: Array | None = None
) -> Float64:
    """Attend with rows q [T, heads, head_size] of a sequence to the visible keys and values [keys, kv_heads, size]."""
    distance, window = positions[:, None] - np.arange(len(k)), op.window
    visible = (distance >= 0) | (not op.causal)
    if window > 0:
        visible &= (distance < window) & (distance > -window)
    if op.chunk:
        visible &= np.arange(len(k)) >= positions[:, None] // op.chunk * op.chunk
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    out = np.zeros((*q.shape[:2], v.shape[2]))
    for head in range(op.heads):
        kv_head = head * op.kv_heads // op.heads
        scores = q[:, head] @ k[:, kv_head].T * (op.scale or 1 / math.sqrt(op.head_size))
        if op.softcap > 0:
            scores = op.softcap * np.tanh(scores / op.softcap)
        if bias is not None:
            scores = scores + bias[head, bias.shape[1] // 2 - distance]
        scores = np.where(visible, scores, -np.inf)
        if sinks is not None or op.smooth_softmax:
            sink = 0.0 if sinks is None else float(sinks[head])
            scores = np.concatenate([scores, np.full((len(scores), 1), sink)], axis=1)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights = weights / weights.sum(axis=1, keepdims=True)
        for row, seen in enumerate(visible):  # an invisible key adds nothing to the result, not even 0 * infinity
            out[row, head] = weights[row, : len(k)][seen] @ v[seen, kv_head]
    return out


def attention(
    op: Attention, rows: Sequence[Any], layer: PagedLayer, step: StepContext, constant: Callable[[str], Any]
) -> Float64:
    """Compute the attention of query, key and value (or None), [T, ...], and return [T, heads * v_head_size]."""
    q, *fresh = split_heads(op, *rows)
    rotation = rotations(op.rope, step, constant)
    q = rotated(q, constant(op.q_norm), op.epsilon, rotation)
    if fresh:
        k = rotated(fresh[0], constant(op.k_norm), op.epsilon, rotation)
        slots = step.page_tables[layer.group].slot_mapping
        within(slots, layer.num_blocks * PAGE_TOKENS, "slot outside the cache")
        write_pages(layer, slots, k, fresh[1])
    out = attend_pages(op, q, layer, step, constant(op.sinks), constant(op.bias))
    return out.reshape(len(out), op.heads * op.v_head_size)


def rotations(rope: Rope | None, step: StepContext, constant: Callable[[str], Any]) -> tuple[Array, Array, bool] | None:
    """Return the arguments of `rotate`: cosine and sine of every row, [T, pairs], from the table of its sequence."""
    if rope is None:
        return None
    tables = [(constant(c), constant(s)) for c, s in ((rope.cos, rope.sin), (rope.long_cos, rope.long_sin)) if c]
    table_of_row = np.minimum(np.repeat(step.rope_table, np.diff(step.cu_seqlens_q)), len(tables) - 1)
    cosine, sine = np.empty((2, len(step.positions), tables[0][0].shape[1]))
    for index, (cos, sin) in enumerate(tables):
        rows = table_of_row == index
        within(step.positions[rows], len(cos), "position outside the rotary tables")
        cosine[rows], sine[rows] = cos[step.positions[rows]], sin[step.positions[rows]]
    return cosine, sine, rope.interleaved


def attend_pages(
    op: Attention, q: Array, layer: PagedLayer, step: StepContext, sinks: Array | None, bias: Array | None = None
) -> Float64:
    """Attend with rows [T, heads, head_size] to the pages of their sequences."""
    if not op.causal:
        step.check_whole_sequences()
    out, tables = np.zeros((*q.shape[:2], layer.v_head_size)), step.page_tables[layer.group].block_tables
    for sequence, length in enumerate(step.context_lens):
        rows = slice(step.cu_seqlens_q[sequence], step.cu_seqlens_q[sequence + 1])
        table, pages = tables[sequence], -(-length // PAGE_TOKENS)
        within(step.positions[rows], length, "position outside its sequence")
        within(pages - 1, len(table), "context longer than its block table")
        if bias is not None:
            within(length - 1, bias.shape[1] // 2 + 1, "position outside the attention bias")
        within(table[:pages], layer.num_blocks, "block table entry outside the cache")
        keys, values = read_pages(layer, table[:pages])
        out[rows] = attend(op, q[rows], keys[:length], values[:length], step.positions[rows], sinks, bias)
    return out


def within(numbers: Any, limit: int, refusal: str) -> None:
    """Raise StepError unless all numbers are 0 to limit - 1."""
    for number in np.ravel(numbers):
        if not 0 <= number < limit:
            raise StepError(f"{refusal}: {number} is not in the range 0 to {limit - 1}")

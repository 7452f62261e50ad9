"""Grouped-query attention over paged keys and values, for decode and prefill rows mixed in one call.

Softmax is streamed over fixed chunks of the context (Milakov & Gimelshein 2018; FlashAttention, Dao et al. 2022): a
running maximum, a running sum and a running weighted mean of values. Chunks start at multiples of CHUNK_TOKENS, so a
row's result does not depend on the other rows, nor on how the sequence was cut into steps.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..formats import PagedLayer
from .checks import NO_VECTOR, Float32, check, check_rows, output
from .functions import exp, inline, tanh
from .jit import Kernel, kernel
from .team import Team, run
from .vector import (
    LANES,
    load,
    load_row,
    maximum,
    multiply_add,
    reduce_add,
    reduce_max,
    splat_float32,
    store,
    store_row,
)

CHUNK_TOKENS = 64
# Tokens of one sequence that share the conversion of a chunk of keys and values to float32.
_QUERY_TOKENS = 16
_NANOSECONDS_PER_SCORE_ELEMENT = 0.1

_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)
# Finite, so that the difference of two of them is zero and not NaN.
_LOWEST = np.float32(-3.0e38)


@inline
def _padded(size: int) -> int:
    return -(-size // LANES) * LANES


@inline
def _load_chunk(pages: Any, head: int, tables: Any, sequence: int, first: int, last: int, rows: Any) -> None:
    """Positions [first, last) of one sequence and head, as float32 rows padded with zeros."""
    block_size = pages.shape[2]
    position = first
    while position < last:
        index, offset = divmod(position, block_size)
        block = tables[sequence, index]
        for item in range(offset, min(block_size, offset + last - position)):
            for i in range(0, pages.shape[3], LANES):
                store(rows, (position % CHUNK_TOKENS, i), load_row(pages, (block, head, item, i)))
            position += 1


@inline
def _visible_span(positions: Any, token: int, count: int, length: int, window: int) -> Any:
    """The keys [first, last) that any of these tokens sees."""
    first, last = positions[token], np.int64(0)
    for index in range(token, token + count):
        position = positions[index]
        if position < 0 or position >= length:
            raise IndexError("position outside its sequence")
        first = min(first, max(0, position - window + 1) if window > 0 else 0)
        last = max(last, position + 1)
    return first, last


@inline
def _check_pages(pages: Any, tables: Any, sequence: int, first: int, last: int) -> None:
    """The pages of positions [first, last) are in the cache."""
    block_size = pages.shape[2]
    needed = -(-last // block_size)
    if needed > tables.shape[1]:
        raise IndexError("context longer than its block table")
    for index in range(first // block_size, needed):
        if tables[sequence, index] < 0 or tables[sequence, index] >= pages.shape[0]:
            raise IndexError("block table entry outside the cache")


@inline
def _dot(a: Any, row_a: int, b: Any, row_b: int) -> Any:
    total = splat_float32(0.0)
    for i in range(0, a.shape[1], LANES):
        total = multiply_add(load(a, (row_a, i)), load(b, (row_b, i)), total)
    return reduce_add(total)


@inline
def _scores(queries: Any, row: int, keys: Any, first: int, last: int, softcap: float, scores: Any) -> Any:
    """Scores of a query row against positions [first, last) of a chunk, -inf elsewhere; returns their maximum."""
    for i in range(first, last):
        scores[i] = _dot(queries, row, keys, i)
    if softcap > 0.0:
        for i in range(0, CHUNK_TOKENS, LANES):
            store(scores, (i,), tanh(load(scores, (i,)) / softcap) * softcap)
    for i in range(first):
        scores[i] = -np.inf
    for i in range(last, CHUNK_TOKENS):
        scores[i] = -np.inf
    largest = splat_float32(-np.inf)
    for i in range(0, CHUNK_TOKENS, LANES):
        largest = maximum(largest, load(scores, (i,)))
    return reduce_max(largest)


@inline
def _add_chunk(rows: Any, row: int, chunk: Any, first: int, last: int, softcap: float) -> None:
    """Bring positions [first, last) of a chunk into a row's running softmax."""
    queries, means, maxima, sums = rows
    keys, values, scores = chunk
    old = maxima[row]
    new = max(old, _scores(queries, row, keys, first, last, softcap, scores))
    shrink = np.float32(math.exp(old - new))
    total = splat_float32(0.0)
    for i in range(0, CHUNK_TOKENS, LANES):
        weights = exp(load(scores, (i,)) - new)
        total = total + weights
        store(scores, (i,), weights)
    maxima[row] = new
    sums[row] = sums[row] * shrink + reduce_add(total)
    for i in range(0, means.shape[1], LANES):
        mean = load(means, (row, i)) * shrink
        for key in range(first, last):
            mean = multiply_add(load(values, (key, i)), scores[key], mean)
        store(means, (row, i), mean)


@inline
def _start_rows(rows: Any, q: Any, token: int, count: int, head: int, group: int, scale: float, sinks: Any) -> None:
    """Scaled queries, and softmaxes that are empty or hold the head's sink (of value zero)."""
    queries, means, maxima, sums = rows
    has_sink = sinks.shape[0] > 0
    for row in range(count * group):
        q_head = head * group + row % group
        for i in range(0, q.shape[2], LANES):
            store(queries, (row, i), load_row(q, (token + row // group, q_head, i)) * scale)
        for i in range(0, means.shape[1], LANES):
            store(means, (row, i), splat_float32(0.0))
        maxima[row] = sinks[q_head] if has_sink else _LOWEST
        sums[row] = 1 if has_sink else 0


@inline
def _finish_rows(rows: Any, out: Any, token: int, count: int, head: int, group: int) -> None:
    _, means, _, sums = rows
    for row in range(count * group):
        for i in range(0, out.shape[2], LANES):
            result = load(means, (row, i)) / sums[row]
            store_row(out, (token + row // group, head * group + row % group, i), result)


def _make(name: str, storage: str) -> Kernel:
    def attend(
        q: Any, key_pages: Any, value_pages: Any, query_start: Any, context_lengths: Any, positions: Any,
        tables: Any, sinks: Any, scale: float, softcap: float, window: int, out: Any, begin: int, end: int,
    ) -> None:  # fmt: skip
        """Items [begin, end) of kv_heads * tokens, the tokens of a head being neighbours."""
        tokens = q.shape[0]
        group = q.shape[1] // key_pages.shape[1]
        num_rows = group * min(tokens, _QUERY_TOKENS)
        width, value_width = _padded(key_pages.shape[3]), _padded(value_pages.shape[3])
        queries, means = np.empty((num_rows, width), np.float32), np.empty((num_rows, value_width), np.float32)
        rows = (queries, means, np.empty(num_rows, np.float32), np.empty(num_rows, np.float32))
        keys, values = np.empty((CHUNK_TOKENS, width), np.float32), np.empty((CHUNK_TOKENS, value_width), np.float32)
        chunk = (keys, values, np.zeros(CHUNK_TOKENS, np.float32))
        item = begin
        while item < end:
            head, token = divmod(item, tokens)
            sequence = 0
            while query_start[sequence + 1] <= token:
                sequence += 1
            count = min(_QUERY_TOKENS, query_start[sequence + 1] - token, end - item)
            first_key, last_key = _visible_span(positions, token, count, context_lengths[sequence], window)
            _check_pages(key_pages, tables, sequence, first_key, last_key)
            _start_rows(rows, q, token, count, head, group, scale, sinks)
            for start in range(first_key // CHUNK_TOKENS * CHUNK_TOKENS, last_key, CHUNK_TOKENS):
                low, high = max(start, first_key), min(start + CHUNK_TOKENS, last_key)
                _load_chunk(key_pages, head, tables, sequence, low, high, keys)
                _load_chunk(value_pages, head, tables, sequence, low, high, values)
                for row in range(count * group):
                    position = positions[token + row // group]
                    first = max(start, position - window + 1) if window > 0 else start
                    last = min(high, position + 1)
                    if first < last:
                        _add_chunk(rows, row, chunk, first - start, last - start, softcap)
            _finish_rows(rows, out, token, count, head, group)
            item += count

    attend.__name__ = name
    return kernel(
        f"void(float32[:,:,:], {storage}[:,:,:,::1], {storage}[:,:,:,::1], int32[::1], int32[::1], int64[::1], "
        "int32[:,::1], float32[::1], float32, float32, int64, float32[:,:,::1], int64, int64)"
    )(attend)


attend_float32 = _make("attend_float32", "float32")
attend_float16 = _make("attend_float16", "uint16")


def paged_attention(
    q: Float32,
    layer: PagedLayer,
    *,
    query_start: NDArray[np.int32],
    context_lengths: NDArray[np.int32],
    positions: NDArray[np.int64],
    block_tables: NDArray[np.int32],
    scale: float | None = None,
    softcap: float = 0.0,
    window: int = -1,
    sinks: Float32 | None = None,
    smooth_softmax: bool = False,
    out: Float32 | None = None,
    team: Team | None = None,
) -> Float32:
    """softmax(q k / sqrt(d)) v for every row over the keys up to its position, which are in the cache already.

    Args:
        q: float32 [T, heads, head_size]; each token's heads must be contiguous, so a slice of packed QKV will do.
            Query heads h * group to (h + 1) * group - 1 use KV head h.
        layer: the pages.
        query_start: int32 [S + 1], rows query_start[s]:query_start[s + 1] belong to sequence s.
        context_lengths: int32 [S], tokens of each sequence in the cache, this step's included.
        positions: int64 [T], index of each row's token in its sequence.
        block_tables: int32 [S, max_blocks], pages of each sequence in order.
        scale: factor on scores; None or 0 = 1 / sqrt(head_size).
        softcap: scores become softcap * tanh(score / softcap); 0 = off.
        window: a row sees its own token and window - 1 before it; -1 = all before it.
        sinks: float32 [heads], a score per head that takes part in the softmax with a value of zero.
        smooth_softmax: a sink of 0 for every head.
        out: float32 [T, heads, v_head_size] or None.

    Raises:
        ValueError: a shape or type does not fit.
        IndexError: a position is outside its sequence, or a page outside the cache.
    """
    tokens, heads = q.shape[:2]
    sequences = context_lengths.shape[0]
    check_rows("q", q, (None, None, layer.head_size))
    check("query_start", query_start, (sequences + 1,), _INT32)
    check("context_lengths", context_lengths, (sequences,), _INT32)
    check("positions", positions, (tokens,), _INT64)
    check("block_tables", block_tables, (sequences, None), _INT32)
    out = output("out", out, (tokens, heads, layer.v_head_size))
    if heads % layer.kv_heads:
        raise ValueError(f"q has {heads} heads, expected a multiple of the cache's {layer.kv_heads} KV heads")
    if query_start[0] != 0 or query_start[-1] != tokens:
        raise ValueError(f"query_start runs from {query_start[0]} to {query_start[-1]}, expected 0 to {tokens}")
    if window == 0 or window < -1:
        raise ValueError(f"window is {window}, expected -1 or a positive number of tokens")
    if sinks is not None:
        check("sinks", sinks, (heads,))
    elif smooth_softmax:
        sinks = np.zeros(heads, np.float32)
    arguments = (
        q,
        layer.key_storage,
        layer.value_storage,
        query_start,
        context_lengths,
        positions,
        block_tables,
        NO_VECTOR if sinks is None else sinks,
        scale or 1 / math.sqrt(layer.head_size),
        softcap,
        window,
        out,
    )
    kernel = attend_float32 if layer.key_storage is layer.keys else attend_float16
    longest = block_tables.shape[1] * layer.block_size
    work = tokens * longest * heads * layer.head_size * _NANOSECONDS_PER_SCORE_ELEMENT
    run(team, kernel, arguments, layer.kv_heads * tokens, work=work)
    return out

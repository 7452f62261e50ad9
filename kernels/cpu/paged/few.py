"""Attention of the FEW rows, in float32: the context of a row is cut into pieces at multiples of PIECE_TOKENS.

One item of the first operator is a piece and a KV head, for all query heads that share it; its result (maximum, sum of
weights, weighted sum of values per head) goes to the step's PARTIALS. A second operator merges the pieces of a row
(flash decoding, Dao et al. 2023). So all threads work on one long sequence, and what a row gets depends on nothing but
its position and window. The pages to come are fetched while one is worked on.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from ...formats import PAGE_TOKENS
from ..functions import exp2_of_negative, inline, tanh
from ..jit import NativeOp, native_op
from ..memory import load_float32, read_float32, read_int32, read_int64, store_first, store_float32, write_float32, write_int64
from ..tape.context import Refusal, Word
from ..vector import LANES, maximum, multiply_add, reduce_add, reduce_max, splat_float32
from .arguments import (
    GROUP,
    KV_HEADS,
    NO_MAXIMUM,
    OUT,
    OUT_STRIDE,
    Q_NORM,
    QUERY,
    QUERY_FACTOR,
    QUERY_STRIDE,
    SCORE_CAP,
    SINKS,
    V_HEAD_SIZE,
    context_length,
    first_visible,
    integer,
    list_pages,
    number,
    position_of,
    sequence_of,
)
from .heads import check_rotary, head_floats, make_head_ready
from .products import add_page_values, between, multiply_page_keys, padded, rows_at_once

PIECE_TOKENS = 512
SPLIT_WORDS = 2  # of an entry of SPLITS
_PIECE_PAGES = PIECE_TOKENS // PAGE_TOKENS
_AHEAD = 2  # pages
_PAGE_LIST_BYTES = 8 * (2 * _PIECE_PAGES + _AHEAD + 6)
_SCORE_BYTES = 4 * PIECE_TOKENS
_MAXIMUM, _SUM, _HEADER = 0, 4, 4 * LANES  # bytes of a partial result; then the weighted values


def partial_floats(heads: int, v_head_size: int) -> int:
    """float32 numbers that a layer's attention keeps in PARTIALS for one piece."""
    return heads * (_HEADER // 4 + padded(v_head_size))


def _rows(group: int) -> int:
    """Query heads that one pass over a page serves: equal parts of the group."""
    return -(-group // -(-group // rows_at_once()))


def few_scratch(group: int, head_size: int, v_head_size: int) -> int:
    """Bytes of scratch that `few_op` needs."""
    heads = -(-group // _rows(group)) * _rows(group)
    floats = (heads + 1) * head_floats(head_size) + heads * padded(v_head_size)
    return _PAGE_LIST_BYTES + 4 * floats + heads * _SCORE_BYTES


@cache
def few_op(group: int, head_size: int, v_head_size: int, half: bool) -> NativeOp:
    """Attention of one row to one piece of its context."""
    rows, query_floats, v_floats = _rows(group), head_floats(head_size), padded(v_head_size)
    heads = -(-group // rows) * rows
    multiply_keys = multiply_page_keys(rows, head_size, query_floats, half, True)
    add_values = add_page_values(rows, v_head_size, half, True)
    queries_at = _PAGE_LIST_BYTES
    work_at = queries_at + 4 * heads * query_floats
    scores_at = work_at + 4 * query_floats
    sums_at = scores_at + heads * _SCORE_BYTES

    @inline
    def load_queries(arguments: int, context: int, row: int, position: int, head: int, scratch: int) -> None:
        source = integer(arguments, QUERY) + row * integer(arguments, QUERY_STRIDE) + 4 * head * group * head_size
        factor, norm = number(arguments, QUERY_FACTOR), integer(arguments, Q_NORM)
        for h in range(group):
            ready = scratch + queries_at + 4 * h * query_floats
            part = source + 4 * h * head_size
            make_head_ready(arguments, context, row, position, part, norm, factor, scratch + work_at, ready)
        for i in range(4 * group * query_floats, 4 * heads * query_floats, 4 * LANES):
            store_float32(scratch + queries_at + i, splat_float32(0.0))
        for i in range(0, 4 * heads * v_floats, 4 * LANES):
            store_float32(scratch + sums_at + i, splat_float32(0.0))

    @inline
    def attend(arguments: int, context: int, split: int, head: int, scratch: int) -> Any:
        entry = read_int64(context + 8 * Word.SPLITS) + 4 * SPLIT_WORDS * split
        row, start = np.int64(read_int32(entry)), np.int64(read_int32(entry + 4)) * PIECE_TOKENS
        position, sequence = position_of(context, row), sequence_of(context, row)
        if position < start or position >= context_length(context, sequence):
            return Refusal.POSITION.value
        status = check_rotary(arguments, context, row, position)
        # Keys of this piece that the row sees, counted from its start.
        low = max(first_visible(arguments, position) - start, np.int64(0))
        high = min(position + 1 - start, np.int64(PIECE_TOKENS))
        if status != 0 or low >= high:
            return status
        first, pages = low // PAGE_TOKENS, (high + PAGE_TOKENS - 1) // PAGE_TOKENS - low // PAGE_TOKENS
        page = start // PAGE_TOKENS + first
        status = list_pages(arguments, context, sequence, page, page + pages, head, scratch, scratch + 8 * pages)
        if status != 0:
            return status
        for i in range(_AHEAD):
            write_int64(scratch + 8 * (2 * pages + i), read_int64(scratch + 8 * (2 * pages - 1)))
        load_queries(arguments, context, row, position, head, scratch)
        for i in range(pages):
            for h in range(0, heads, rows):
                multiply_keys(
                    read_int64(scratch + 8 * i),
                    read_int64(scratch + 8 * (i + _AHEAD)),
                    scratch + queries_at + 4 * h * query_floats,
                    scratch + scores_at + h * _SCORE_BYTES + 4 * (first + i) * PAGE_TOKENS,
                    _SCORE_BYTES,
                )
        partial = read_int64(context + 8 * Word.PARTIALS) + (
            (split * integer(arguments, KV_HEADS) + head) * group * (_HEADER + 4 * v_floats)
        )
        for h in range(group):
            scores = scratch + scores_at + h * _SCORE_BYTES
            _weigh(scores, low, high, number(arguments, SCORE_CAP), partial + h * (_HEADER + 4 * v_floats))
        for i in range(pages):
            before = (first + i) * PAGE_TOKENS
            for h in range(0, heads, rows):
                add_values(
                    read_int64(scratch + 8 * (pages + i)),
                    read_int64(scratch + 8 * (pages + i + _AHEAD)),
                    max(low - before, np.int64(0)),
                    min(high - before, np.int64(PAGE_TOKENS)),
                    scratch + scores_at + h * _SCORE_BYTES + 4 * before,
                    _SCORE_BYTES,
                    scratch + sums_at + 4 * h * v_floats,
                )
        for h in range(group):
            values = partial + h * (_HEADER + 4 * v_floats) + _HEADER
            for i in range(0, 4 * v_floats, 4 * LANES):
                store_float32(values + i, load_float32(scratch + sums_at + 4 * h * v_floats + i))
        return 0

    def attend_pieces(arguments: int, context: int, begin: int, end: int, scratch: int) -> int:
        kv_heads = integer(arguments, KV_HEADS)
        for item in range(begin, end):
            status = attend(arguments, context, item // kv_heads, item % kv_heads, scratch)
            if status != 0:
                return status
        return 0

    kind = "float16" if half else "float32"
    attend_pieces.__name__ = f"attend_pieces_{kind}_{group}x{head_size}x{v_head_size}"
    return native_op(attend_pieces)


@inline
def _weigh(scores: int, low: int, high: int, cap: float, partial: int) -> None:
    """Scores of keys [low, high) of a piece become weights; their maximum and sum go to a partial result."""
    begin, end = low // PAGE_TOKENS * PAGE_TOKENS, high
    largest = splat_float32(NO_MAXIMUM)
    for i in range(begin, end, LANES):
        score = load_float32(scores + 4 * i)
        if cap > 0:
            score = tanh(score) * cap
        score = between(score, i, low, high)
        store_float32(scores + 4 * i, score)
        largest = maximum(largest, score)
    top = reduce_max(largest)
    total = splat_float32(0.0)
    for i in range(begin, end, LANES):
        weight = exp2_of_negative(load_float32(scores + 4 * i) - top)
        store_float32(scores + 4 * i, weight)
        total = total + weight
    write_float32(partial + _MAXIMUM, top)
    write_float32(partial + _SUM, reduce_add(total))


@inline
def _power(x: float) -> Any:
    """2 ** x of one number."""
    return reduce_max(exp2_of_negative(splat_float32(x)))


@inline
def _merge(partial: int, step: int, pieces: int, width: int, sink: float, has_sink: bool, out: int) -> None:
    """One head: `pieces` partial results, `step` bytes apart, and the sink become a row of attention."""
    top, total = NO_MAXIMUM, np.float32(0.0)
    if has_sink:
        top = sink
    for i in range(pieces):
        top = max(top, read_float32(partial + i * step + _MAXIMUM))
    if has_sink:
        total = _power(sink - top)
    for i in range(pieces):
        place = partial + i * step
        share = _power(read_float32(place + _MAXIMUM) - top)
        total += read_float32(place + _SUM) * share
        write_float32(place + _SUM, share)
    for j in range(0, width, LANES):
        value = splat_float32(0.0)
        for i in range(pieces):
            place = partial + i * step
            value = multiply_add(load_float32(place + _HEADER + 4 * j), read_float32(place + _SUM), value)
        store_first(out + 4 * j, value / total, min(width - j, LANES))


@native_op
def merge_pieces(arguments: int, context: int, begin: int, end: int, scratch: int) -> int:
    """The pieces of a row become its result: the item of a row's first piece and a KV head does it, the others nothing."""
    kv_heads, group = integer(arguments, KV_HEADS), integer(arguments, GROUP)
    width = integer(arguments, V_HEAD_SIZE)
    record = _HEADER + 4 * ((width + LANES - 1) // LANES * LANES)
    sinks = integer(arguments, SINKS)
    for item in range(begin, end):
        split, head = item // kv_heads, item % kv_heads
        entry = read_int64(context + 8 * Word.SPLITS) + 4 * SPLIT_WORDS * split
        if read_int32(entry + 4) == 0:
            row = np.int64(read_int32(entry))
            position = position_of(context, row)
            first = first_visible(arguments, position) // PIECE_TOKENS
            pieces = position // PIECE_TOKENS + 1 - first
            step = kv_heads * group * record
            partials = read_int64(context + 8 * Word.PARTIALS) + (split + first) * step + head * group * record
            out = integer(arguments, OUT) + row * integer(arguments, OUT_STRIDE) + 4 * head * group * width
            for h in range(group):
                sink = read_float32(sinks + 4 * (head * group + h)) if sinks != 0 else NO_MAXIMUM
                _merge(partials + h * record, step, pieces, width, sink, sinks != 0, out + 4 * h * width)
    return 0

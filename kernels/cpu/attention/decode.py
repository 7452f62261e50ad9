"""Attention of the decode rows, by splits of the context: in float32, or in integers if the pages are packed.

Splits start at multiples of SPLIT_TOKENS. An item of the first operator is a split and a KV head, and covers all query
heads that share the KV head. The operator stores the item's result (maximum, sum of weights and weighted sum of values
per head) in the step's PARTIALS. A second operator merges the splits of a row (flash decoding, Dao et al. 2023). So all
threads can work on one long sequence, and a row's result depends only on its position and window. While a page is
processed, the next pages are prefetched.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...cache_layout import PAGE_TOKENS, PagedLayer
from ..jit import memory
from ..jit.dsl import inline
from ..jit.native import native_op
from ..jit.vector import LANES, maximum, multiply_add, reduce_add, reduce_max, splat_float32
from ..jit.vector_math import exp2_of_negative, tanh
from ..program.calls import row_at
from ..program.driver import call_operator
from ..program.step_table import ErrorCode, StepField
from .arguments import (
    NO_MAXIMUM,
    AttentionArguments,
    context_length,
    first_visible,
    list_pages,
    position_of,
    sequence_of,
)
from .hadamard import hadamard_transform
from .heads import head_bytes, head_stride
from .int8_products import most_packed_rows
from .latent import value_page_bytes
from .packing import PACKED_WEIGHTS, pack_stride
from .pages import PACKED_BITS
from .products import between, most_rows

SPLIT_TOKENS = 512
SPLIT_FIELDS = 2  # numbers in an entry of ROW_SPLITS
WEIGHT_BYTES = 4 * SPLIT_TOKENS  # bytes of a query head's weights
_SPLIT_PAGES = SPLIT_TOKENS // PAGE_TOKENS
_AHEAD = 2  # pages to prefetch ahead
_LINE = 64
_PAGE_LIST_BYTES = 8 * (2 * _SPLIT_PAGES + _AHEAD + 6)
_MAXIMUM, _SUM, _VALUES = 0, 4, 4 * LANES  # offsets in a partial result; the weighted values come last


def partial_floats(heads: int, v_head_size: int) -> int:
    """Return the number of float32 numbers in PARTIALS for one split of a layer."""
    return heads * (_VALUES // 4 + -(-v_head_size // LANES) * LANES)


def heads_per_pass(group: int, kind: str) -> int:
    """Return the number of query heads per pass over a page. The passes divide the group as evenly as possible."""
    most = most_packed_rows() if kind in PACKED_BITS else most_rows()
    return -(-group // -(-group // most))


def decode_scratch(group: int, layer: PagedLayer) -> int:
    """Return the bytes of scratch that `attend_splits` needs."""
    rows = heads_per_pass(group, layer.kind)
    heads = -(-group // rows) * rows
    sums = 4 * -(-layer.v_head_size // LANES) * LANES
    packed = layer.packed.value_groups * PACKED_WEIGHTS if layer.packed else 0
    heads_and_queries = (heads + 1) * head_bytes(layer.head_size) + heads * (WEIGHT_BYTES + sums + packed)
    return _PAGE_LIST_BYTES + heads_and_queries + value_page_bytes(layer)


@native_op(AttentionArguments)
def attend_splits(arguments: AttentionArguments, context: int, begin: int, end: int, scratch: int) -> int:
    """Compute the attention of a row over a split of its context. An item is an entry of ROW_SPLITS and a KV head."""
    kv_heads = arguments.kv_heads
    for item in range(begin, end):
        split, head = item // kv_heads, item % kv_heads
        entry = memory.read_int64(context + 8 * StepField.ROW_SPLITS) + 4 * SPLIT_FIELDS * split
        row, start = np.int64(memory.read_int32(entry)), np.int64(memory.read_int32(entry + 4)) * SPLIT_TOKENS
        position, sequence = position_of(context, row), sequence_of(context, row)
        if position < start or position >= context_length(context, sequence):
            return ErrorCode.POSITION.value
        # Keys of this split that the row sees, relative to its start.
        low = max(first_visible(arguments, position) - start, np.int64(0))
        high = min(position + 1 - start, np.int64(SPLIT_TOKENS))
        if low < high:
            # The positions below are relative to the start of the page that contains `low`.
            first = low // PAGE_TOKENS
            pages = (high - 1) // PAGE_TOKENS + 1 - first
            page = start // PAGE_TOKENS + first
            status: int = list_pages(
                arguments, context, sequence, page, page + pages, head, scratch, scratch + 8 * pages
            )
            if status != 0:
                return status
            status = _attend(
                arguments, context, row, split, head, pages, low - first * PAGE_TOKENS, high - first * PAGE_TOKENS,
                scratch,
            )  # fmt: skip
            if status != 0:
                return status
    return 0


@inline
def _attend(
    arguments: AttentionArguments, context: int, row: int, split: int, head: int, pages: int, low: int, high: int,
    scratch: int,
) -> Any:  # fmt: skip
    """Process a row with tokens [low, high) of `pages` pages, whose addresses are at the start of the scratch."""
    group, rows = arguments.group, arguments.rows_at_once
    heads = (group + rows - 1) // rows * rows
    query_bytes = head_stride(arguments.head_size)
    value_bytes = 4 * ((arguments.v_head_size + LANES - 1) // LANES * LANES)
    queries = scratch + _PAGE_LIST_BYTES + query_bytes
    weights = queries + heads * query_bytes
    sums = weights + heads * WEIGHT_BYTES
    soon: Any = min(pages, np.int64(_AHEAD))
    for i in range(soon):  # prefetched while the queries are prepared
        first_page = memory.read_int64(scratch + 8 * i)
        for line in range(0, arguments.key_page, _LINE):
            memory.prefetch(first_page + line)
    status = call_operator(arguments.make_ready, arguments, context, row, head, queries)
    if status != 0:
        return status
    for i in range(group * query_bytes, heads * query_bytes, 4 * LANES):
        memory.store_float32(queries + i, splat_float32(0.0))
    if arguments.pack_queries != 0:
        call_operator(arguments.pack_queries, arguments, queries, group, 0, 0)
    for i in range(0, heads * value_bytes, 4 * LANES):
        memory.store_float32(sums + i, splat_float32(0.0))
    for i in range(_AHEAD):
        memory.write_int64(scratch + 8 * (2 * pages + i), memory.read_int64(scratch + 8 * (2 * pages - 1)))
    multiply = arguments.multiply_keys
    for i in range(pages):
        page, ahead = memory.read_int64(scratch + 8 * i), memory.read_int64(scratch + 8 * (i + _AHEAD))
        for h in range(0, heads, rows):
            scores = weights + h * WEIGHT_BYTES + 4 * PAGE_TOKENS * i
            call_operator(multiply, page, ahead, queries + h * query_bytes, scores, WEIGHT_BYTES)
    partial_bytes = _VALUES + value_bytes
    partial = memory.read_int64(context + 8 * StepField.PARTIALS)
    partial += (split * arguments.kv_heads + head) * group * partial_bytes
    for h in range(group):
        scores = weights + h * WEIGHT_BYTES
        call_operator(arguments.weigh, arguments, scores, low, high, partial + h * partial_bytes)
    if arguments.pack_weights != 0:
        _add_packed_values(arguments, pages, rows, heads, value_bytes, scratch, weights, sums)
    else:
        _add_values(arguments, pages, low, high, rows, heads, value_bytes, scratch, weights, sums)
    for h in range(group):
        for i in range(0, value_bytes, 4 * LANES):
            total = memory.load_float32(sums + h * value_bytes + i)
            memory.store_float32(partial + h * partial_bytes + _VALUES + i, total)
    return 0


@inline
def _value_page(arguments: AttentionArguments, addresses: int, pages: int, i: int, room: int) -> Any:
    """Return the address of page i of the values. If keys are the values, the page is written to `room`."""
    page: Any = memory.read_int64(addresses + 8 * (pages + i))
    if arguments.keys_to_values != 0:
        page = np.int64(room)
        call_operator(arguments.keys_to_values, arguments, memory.read_int64(addresses + 8 * i), page, 0, 0)
    return page


@inline
def _add_values(
    arguments: AttentionArguments, pages: int, low: int, high: int, rows: int, heads: int, value_bytes: int,
    addresses: int, weights: int, sums: int,
) -> None:  # fmt: skip
    """Add the weighted values of tokens [low, high). Other tokens are skipped, because 0 * infinity is NaN."""
    token_bytes, add = arguments.value_page // PAGE_TOKENS, arguments.add_values
    room = sums + heads * value_bytes
    for i in range(pages):
        first: Any = max(low - i * PAGE_TOKENS, np.int64(0))
        last: Any = min(high - i * PAGE_TOKENS, np.int64(PAGE_TOKENS))
        page = _value_page(arguments, addresses, pages, i, room) + first * token_bytes
        ahead = memory.read_int64(addresses + 8 * (pages + i + _AHEAD)) + first * token_bytes
        for h in range(0, heads, rows):
            share = weights + h * WEIGHT_BYTES + 4 * (i * PAGE_TOKENS + first)
            call_operator(add, page, ahead, last - first, share, sums + h * value_bytes)


@inline
def _add_packed_values(
    arguments: AttentionArguments, pages: int, rows: int, heads: int, value_bytes: int, addresses: int, weights: int,
    sums: int,
) -> None:  # fmt: skip
    """Add the weighted values of packed pages. Tokens that the row does not see have weights of 0."""
    packed = sums + heads * value_bytes
    stride = pack_stride(arguments)
    for i in range(arguments.group * stride, heads * stride, 4 * LANES):
        memory.store_float32(packed + i, splat_float32(0.0))
    for i in range(pages):
        page = _value_page(arguments, addresses, pages, i, packed + heads * stride)
        ahead = memory.read_int64(addresses + 8 * (pages + i + _AHEAD))
        call_operator(arguments.pack_weights, arguments, weights + 4 * PAGE_TOKENS * i, WEIGHT_BYTES, page, packed)
        for h in range(0, heads, rows):
            call_operator(arguments.add_values, page, ahead, 0, packed + h * stride, sums + h * value_bytes)


@native_op(AttentionArguments)
def weigh_split(arguments: AttentionArguments, scores: int, low: int, high: int, partial: int) -> int:
    """Implement `weigh`: turn the scores of tokens [low, high) into weights, and write a partial result.

    Other tokens, up to the end of the last page, get weights of 0. The partial result receives the maximum of the
    scores and the sum of the weights.
    """
    cap, end = arguments.score_cap, (high + PAGE_TOKENS - 1) // PAGE_TOKENS * PAGE_TOKENS
    largest = splat_float32(NO_MAXIMUM)
    for i in range(0, end, LANES):
        score = memory.load_float32(scores + 4 * i)
        if cap > 0:
            score = tanh(score) * cap
        score = between(score, i, low, high)
        memory.store_float32(scores + 4 * i, score)
        largest = maximum(largest, score)
    top = reduce_max(largest)
    total = splat_float32(0.0)
    for i in range(0, end, LANES):
        weight = exp2_of_negative(memory.load_float32(scores + 4 * i) - top)
        memory.store_float32(scores + 4 * i, weight)
        total = total + weight
    memory.write_float32(partial + _MAXIMUM, top)
    memory.write_float32(partial + _SUM, reduce_add(total))
    return 0


@inline
def _power(x: float) -> Any:
    """Return 2 ** x for a single number."""
    return reduce_max(exp2_of_negative(splat_float32(x)))


@inline
def _merge(partial: int, step: int, splits: int, width: int, sink: float, has_sink: bool, out: int) -> None:
    """Merge the partial results of `splits` splits, `step` bytes apart, and the sink into one head of a row."""
    top: Any = NO_MAXIMUM
    total = np.float32(0.0)
    if has_sink:
        top = sink
    for i in range(splits):
        top = max(top, memory.read_float32(partial + i * step + _MAXIMUM))
    if has_sink:
        total = _power(sink - top)
    for i in range(splits):
        address = partial + i * step
        share = _power(memory.read_float32(address + _MAXIMUM) - top)
        total += memory.read_float32(address + _SUM) * share
        memory.write_float32(address + _SUM, share)
    for j in range(0, width, LANES):
        value = splat_float32(0.0)
        for i in range(splits):
            address = partial + i * step
            value = multiply_add(
                memory.load_float32(address + _VALUES + 4 * j), memory.read_float32(address + _SUM), value
            )
        memory.store_first(out + 4 * j, value / total, min(width - j, LANES))


@native_op(AttentionArguments)
def merge_splits(arguments: AttentionArguments, context: int, begin: int, end: int, scratch: int) -> int:
    """Merge splits into rows. For each KV head, the item of a row's first split does the work; other items do none."""
    kv_heads, group = arguments.kv_heads, arguments.group
    width, sinks = arguments.v_head_size, arguments.sinks
    partial_bytes = _VALUES + 4 * ((width + LANES - 1) // LANES * LANES)
    step = kv_heads * group * partial_bytes
    for item in range(begin, end):
        split, head = item // kv_heads, item % kv_heads
        entry = memory.read_int64(context + 8 * StepField.ROW_SPLITS) + 4 * SPLIT_FIELDS * split
        if memory.read_int32(entry + 4) == 0:
            row = np.int64(memory.read_int32(entry))
            position = position_of(context, row)
            first = first_visible(arguments, position) // SPLIT_TOKENS
            splits = position // SPLIT_TOKENS + 1 - first
            partials = memory.read_int64(context + 8 * StepField.PARTIALS) + (split + first) * step
            partials += head * group * partial_bytes
            out = row_at(arguments.out, row) + 4 * head * group * width
            for h in range(group):
                sink = memory.read_float32(sinks + 4 * (head * group + h)) if sinks != 0 else NO_MAXIMUM
                _merge(partials + h * partial_bytes, step, splits, width, sink, sinks != 0, out + 4 * h * width)
                if arguments.hadamard != 0:
                    hadamard_transform(out + 4 * h * width, width)
    return 0

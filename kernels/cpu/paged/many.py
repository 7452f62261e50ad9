"""Attention of the MANY rows: a block of a sequence's tokens and a KV head against chunks of the context.

Softmax is streamed over chunks that begin at multiples of CHUNK_TOKENS (Milakov & Gimelshein 2018; FlashAttention, Dao et
al. 2022): a running maximum, sum and weighted sum per row. What a chunk adds to a row depends on the row alone, and one
that the row does not see changes no bit of it, so results do not depend on how a sequence is cut into steps or blocks.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from ...formats import PAGE_TOKENS
from ..functions import exp2_of_negative, inline, tanh
from ..isa import isa
from ..jit import NativeOp, native_op
from ..memory import (
    load_first,
    load_first_half,
    load_float32,
    read_float32,
    read_int32,
    read_int64,
    read_uint8,
    store_first,
    store_float32,
    write_float32,
    write_int8,
)
from ..tape.context import Refusal, Word
from ..tiles import configure_tiles, release_tiles
from ..vector import LANES, maximum, multiply_add, reduce_add, reduce_max, splat_float32
from .arguments import (
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
    TILE_CONFIG,
    context_length,
    first_visible,
    integer,
    list_pages,
    number,
    position_of,
)
from .heads import check_rotary, make_head_ready
from .panels import CHUNK_PAGES, CHUNK_TOKENS, SCORE_STRIDE, Panels
from .products import any_above, between
from .tile_products import tile_products
from .vectors import vector_products

BLOCK_WORDS = 3  # of an entry of ROW_BLOCKS


def uses_tiles(half: bool) -> bool:
    """Whether products are computed in tiles of bfloat16: never where the cache is float32."""
    return half and isa() == "amx"


def many_scratch(group: int, head_size: int, v_head_size: int) -> int:
    """Bytes of scratch that `many_op` needs."""
    return Panels(group, head_size, v_head_size).bytes


@cache
def many_op(group: int, head_size: int, v_head_size: int, half: bool) -> NativeOp:
    """Attention of a block of neighbouring tokens of one sequence; an item is a block and a KV head."""
    panels, tiles = Panels(group, head_size, v_head_size), uses_tiles(half)
    if tiles:
        products = tile_products(panels, head_size, v_head_size)
    else:
        products = vector_products(panels, head_size, v_head_size, half)
    rows_at_once = products.rows
    load_query, clear_queries, load_keys, load_values = (
        products.load_query,
        products.clear_queries,
        products.load_keys,
        products.load_values,
    )
    multiply_keys, store_weights, weight_of, multiply_values = (
        products.multiply_keys,
        products.store_weights,
        products.weight,
        products.multiply_values,
    )
    load_value = load_first_half if half else load_first
    value_bytes = v_head_size * (2 if half else 4)
    pages_at, usable_at, work_at, ready_at = panels.pages, panels.usable, panels.work, panels.ready
    scores_at, sums_at, sum_stride = panels.scores, panels.sums, panels.sum_stride
    maxima_at, totals_at = panels.maxima, panels.totals

    @inline
    def start(arguments: int, context: int, row: int, count: int, position: int, head: int, scratch: int) -> None:
        """Queries made ready, and softmaxes that are empty or hold the head's sink (of value zero)."""
        factor, norm, sinks = number(arguments, QUERY_FACTOR), integer(arguments, Q_NORM), integer(arguments, SINKS)
        for r in range(count * group):
            token, q_head = r // group, head * group + r % group
            source = integer(arguments, QUERY) + (row + token) * integer(arguments, QUERY_STRIDE) + 4 * q_head * head_size
            make_head_ready(
                arguments, context, row + token, position + token, source, norm, factor, scratch + work_at,
                scratch + ready_at,
            )  # fmt: skip
            load_query(scratch, r)
            for i in range(0, sum_stride, 4 * LANES):
                store_float32(scratch + sums_at + r * sum_stride + i, splat_float32(0.0))
            store_float32(scratch + totals_at + 4 * LANES * r, splat_float32(0.0))
            write_float32(scratch + maxima_at + 4 * r, NO_MAXIMUM)
            if sinks != 0:
                write_float32(scratch + totals_at + 4 * LANES * r, np.float32(1.0))
                write_float32(scratch + maxima_at + 4 * r, read_float32(sinks + 4 * q_head))
        clear_queries(scratch, count * group)

    @inline
    def value_of(scratch: int, token: int, i: int) -> Any:
        """LANES numbers of a token's values."""
        page = read_int64(scratch + pages_at + 8 * (CHUNK_PAGES + token // PAGE_TOKENS))
        place = page + token % PAGE_TOKENS * value_bytes + i * (value_bytes // v_head_size)
        return load_value(place, min(v_head_size - i, LANES))

    @inline
    def load_chunk(scratch: int, low: int, high: int) -> Any:
        """Panels of keys and values; returns whether some of the seen tokens [low, high) have values that are not finite.

        Those are left out of the panel, because 0 * infinity would reach the rows that do not see them.
        """
        for page in range(low // PAGE_TOKENS, (high + PAGE_TOKENS - 1) // PAGE_TOKENS):
            load_keys(scratch, page)
        for token in range(CHUNK_TOKENS):
            write_int8(scratch + usable_at + token, np.int8(low <= token < high))
        if reduce_add(load_values(scratch)) == 0:
            return False
        for token in range(low, high):
            probe = splat_float32(0.0)
            for i in range(0, v_head_size, LANES):
                probe = probe + value_of(scratch, token, i) * 0.0
            write_int8(scratch + usable_at + token, np.int8(reduce_add(probe) == 0))
        load_values(scratch)
        return True

    @inline
    def add_infinite(scratch: int, r: int, low: int, high: int) -> None:
        """The values that were left out of the panel, for a row that sees tokens [low, high) of the chunk."""
        for token in range(low, high):
            if read_uint8(scratch + usable_at + token) == 0:
                share = weight_of(scratch, r, token, read_float32(scratch + maxima_at + 4 * r))
                for i in range(0, v_head_size, LANES):
                    place = scratch + sums_at + r * sum_stride + 4 * i
                    store_float32(place, multiply_add(value_of(scratch, token, i), share, load_float32(place)))

    @inline
    def weigh(scratch: int, r: int, pages: int) -> None:
        """Scores of a row become weights, and its running softmax takes them in."""
        scores = scratch + scores_at + r % rows_at_once * SCORE_STRIDE
        largest = splat_float32(NO_MAXIMUM)
        for i in range(0, pages * PAGE_TOKENS, 2 * LANES):
            pair = maximum(load_float32(scores + 4 * i), load_float32(scores + 4 * i + 4 * LANES))
            largest = maximum(largest, pair)
        top, total = read_float32(scratch + maxima_at + 4 * r), load_float32(scratch + totals_at + 4 * LANES * r)
        if any_above(largest, top):
            new = reduce_max(largest)
            shrink = exp2_of_negative(splat_float32(top - new))
            total = total * shrink
            for i in range(0, sum_stride, 4 * LANES):
                place = scratch + sums_at + r * sum_stride + i
                store_float32(place, load_float32(place) * shrink)
            top = new
            write_float32(scratch + maxima_at + 4 * r, top)
        for page in range(pages):
            place = scores + 4 * PAGE_TOKENS * page
            first = exp2_of_negative(load_float32(place) - top)
            second = exp2_of_negative(load_float32(place + 4 * LANES) - top)
            total = total + (first + second)
            store_weights(scratch, r, page, first, second)
        store_float32(scratch + totals_at + 4 * LANES * r, total)

    @inline
    def cap_and_mask(scratch: int, r: int, pages: int, cap: float, low: int, high: int) -> None:
        """Scores as the model caps them, -inf outside [low, high)."""
        scores = scratch + scores_at + r % rows_at_once * SCORE_STRIDE
        for i in range(0, pages * PAGE_TOKENS, LANES):
            score = load_float32(scores + 4 * i)
            if cap > 0:
                score = tanh(score) * cap
            store_float32(scores + 4 * i, between(score, i, low, high))

    @inline
    def attend_rows(arguments: int, scratch: int, first: int, last: int, position: int, start: int, special: bool) -> None:
        """Rows [first, last) of the block against the chunk that begins at `start`; `position` is the block's first."""
        lowest, highest = position + first // group, position + (last - 1) // group
        seen = first_visible(arguments, lowest)
        if start > highest or start + CHUNK_TOKENS <= seen:
            return
        pages = min((highest - start) // PAGE_TOKENS + 1, np.int64(CHUNK_PAGES))
        multiply_keys(scratch, first, pages)
        cap = number(arguments, SCORE_CAP)
        is_cut = start + pages * PAGE_TOKENS > lowest + 1 or start < first_visible(arguments, highest)
        for r in range(first, last):
            at = position + r // group
            low, high = first_visible(arguments, at) - start, at + 1 - start
            if is_cut or cap > 0:
                cap_and_mask(scratch, r, pages, cap, low, high)
            weigh(scratch, r, pages)
        multiply_values(scratch, first, pages)
        if special:
            for r in range(first, last):
                at = position + r // group
                low, high = first_visible(arguments, at) - start, at + 1 - start
                add_infinite(scratch, r, max(low, np.int64(0)), min(high, np.int64(CHUNK_TOKENS)))

    @inline
    def finish(arguments: int, row: int, count: int, head: int, scratch: int) -> None:
        for r in range(count * group):
            out = integer(arguments, OUT) + (row + r // group) * integer(arguments, OUT_STRIDE)
            out += 4 * (head * group + r % group) * v_head_size
            total = reduce_add(load_float32(scratch + totals_at + 4 * LANES * r))
            for i in range(0, v_head_size, LANES):
                value = load_float32(scratch + sums_at + r * sum_stride + 4 * i) / total
                store_first(out + 4 * i, value, min(v_head_size - i, LANES))

    @inline
    def check(arguments: int, context: int, sequence: int, row: int, count: int, position: int) -> Any:
        """The tokens follow each other inside their sequence and the rotary tables."""
        last = position_of(context, row + count - 1)
        if position < 0 or last != position + count - 1 or last >= context_length(context, sequence):
            return Refusal.POSITION.value
        return check_rotary(arguments, context, row, last)

    @inline
    def attend(arguments: int, context: int, block: int, head: int, scratch: int) -> Any:
        entry = read_int64(context + 8 * Word.ROW_BLOCKS) + 4 * BLOCK_WORDS * block
        sequence, row = np.int64(read_int32(entry)), np.int64(read_int32(entry + 4))
        count = np.int64(read_int32(entry + 8))
        position = position_of(context, row)
        status = check(arguments, context, sequence, row, count, position)
        if status != 0:
            return status
        start(arguments, context, row, count, position, head, scratch)
        seen, end = first_visible(arguments, position), position + count
        for chunk in range(seen // CHUNK_TOKENS, (end + CHUNK_TOKENS - 1) // CHUNK_TOKENS):
            begin = chunk * CHUNK_TOKENS
            low, high = max(seen - begin, np.int64(0)), min(end - begin, np.int64(CHUNK_TOKENS))
            page, pages_of = low // PAGE_TOKENS, scratch + pages_at + 8 * (low // PAGE_TOKENS)
            status = list_pages(
                arguments, context, sequence, begin // PAGE_TOKENS + page, (begin + high - 1) // PAGE_TOKENS + 1, head,
                pages_of, pages_of + 8 * CHUNK_PAGES,
            )  # fmt: skip
            if status != 0:
                return status
            special = load_chunk(scratch, low, high)
            for first in range(0, count * group, rows_at_once):
                last = min(first + rows_at_once, count * group)
                attend_rows(arguments, scratch, first, last, position, begin, special)
        finish(arguments, row, count, head, scratch)
        return 0

    def attend_blocks(arguments: int, context: int, begin: int, end: int, scratch: int) -> int:
        kv_heads = integer(arguments, KV_HEADS)
        status = 0
        if tiles:
            configure_tiles(integer(arguments, TILE_CONFIG))
        for item in range(begin, end):
            if status == 0:
                status = attend(arguments, context, item // kv_heads, item % kv_heads, scratch)
        if tiles:
            release_tiles()
        return status

    kind = "bfloat16_tiles" if tiles else "float16" if half else "float32"
    attend_blocks.__name__ = f"attend_blocks_{kind}_{group}x{head_size}x{v_head_size}"
    return native_op(attend_blocks)


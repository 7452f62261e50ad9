"""Attention of the prefill rows: a block of a sequence's tokens and a KV head against chunks of the context.

Softmax is streamed over chunks that start at multiples of CHUNK_TOKENS (Milakov & Gimelshein 2018; FlashAttention,
Dao et al. 2022): each row has a running maximum, sum and weighted sum. A chunk's contribution to a row depends only on
that row, and a chunk that the row does not see leaves the row bit-identical. So results do not depend on how a
sequence is divided into steps or blocks.

Products are computed in tiles of bfloat16 or in vectors of float32, by functions of `amx_products` or
`vector_products`:

- load_queries(arguments, scratch, row): stores the READY heads of a token as rows of QUERIES, starting at `row`.
  clear_queries(arguments, scratch, first): sets rows to zero, from `first` to the end of its group of rows.
- load_keys_of(kind of pages)(arguments, scratch, page): converts a page to a part of KEYS. load_values_of(kind)
  (arguments, scratch): converts the USABLE values to VALUES and sets the other values to zero. The function returns a
  vector that is zero if all converted values are finite.
- store_weights(scores, page, first, second): stores a row's weights for a page. weight_of(scores, token): reads the
  weight of a token.
- `multiply_group`(arguments, scratch, row, begin, end): computes the scores of a group of rows for the tokens of pages
  [begin, end).
- `add_group`(arguments, scratch, row, pages, -): adds the group's weighted values to SUMS.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...cache_layout import PAGE_TOKENS
from ..jit import memory
from ..jit.amx import configure_tiles, release_tiles
from ..jit.dsl import inline
from ..jit.isa import isa
from ..jit.native import NativeOp, native_op
from ..jit.variants import once
from ..jit.vector import LANES, maximum, multiply_add, reduce_add, reduce_max, splat_float32
from ..jit.vector_math import exp2_of_negative, rough_exp2_of_negative, tanh
from ..program.calls import row_at
from ..program.driver import call_operator
from ..program.step_table import ErrorCode, StepField
from . import amx_products, vector_products
from .arguments import (
    NO_MAXIMUM,
    AttentionArguments,
    context_length,
    end_visible,
    first_visible,
    list_pages,
    position_of,
)
from .hadamard import hadamard_transform
from .pages import value_vector_of
from .panels import CHUNK_PAGES, CHUNK_TOKENS, SCORE_BYTES, Panel, open_panels, panel, scores_of, set_panel, value_page
from .products import any_above, between, most_rows

BLOCK_FIELDS = 3  # numbers in an entry of ROW_BLOCKS
_TOKENS_AHEAD = 2  # queries are prefetched this many tokens ahead


def uses_tiles(kind: str) -> bool:
    """Return True if products are computed in tiles of bfloat16: never if the cache is float32."""
    return kind != "float32" and isa() == "amx"


def prefill_rows(kind: str) -> int:
    """Return the number of query rows of a group."""
    return amx_products.TILE_PRODUCT_ROWS if uses_tiles(kind) else most_rows()


@inline
def _start_row(arguments: AttentionArguments, scratch: int, r: int, q_head: int) -> None:
    """Initialise a row's softmax: either empty, or with only the head's sink (whose value is zero)."""
    sums, stride = panel(scratch, Panel.SUMS), panel(scratch, Panel.SUM_BYTES)
    total, largest = panel(scratch, Panel.TOTALS) + 4 * LANES * r, panel(scratch, Panel.MAXIMA) + 4 * r
    for i in range(r * stride, (r + 1) * stride, 4 * LANES):
        memory.store_float32(sums + i, splat_float32(0.0))
    memory.store_float32(total, splat_float32(0.0))
    memory.write_float32(largest, NO_MAXIMUM)
    sinks = arguments.sinks
    if sinks != 0:
        memory.write_float32(total, np.float32(1.0))
        memory.write_float32(largest, memory.read_float32(sinks + 4 * q_head))


@inline
def _cap_and_mask(scores: int, pages: int, cap: float, bias: int, low: int, high: int) -> None:
    """Cap a row's scores if the model caps them, add the bias (0 = none), and set scores outside [low, high) to -inf.

    `bias` is the address of the number for the chunk's first token.
    """
    for i in range(0, pages * PAGE_TOKENS, LANES):
        score = memory.load_float32(scores + 4 * i)
        if cap > 0:
            score = tanh(score) * cap
        if bias != 0:
            score = score + memory.load_first(bias + 4 * i, max(np.int64(0), min(high - i, np.int64(LANES))))
        memory.store_float32(scores + 4 * i, between(score, i, low, high))


@inline
def _finish_row(scratch: int, r: int, width: int, out: int) -> None:
    sums = panel(scratch, Panel.SUMS) + r * panel(scratch, Panel.SUM_BYTES)
    inverse = np.float32(1.0) / reduce_add(memory.load_float32(panel(scratch, Panel.TOTALS) + 4 * LANES * r))
    for i in range(0, width, LANES):
        memory.store_first(out + 4 * i, memory.load_float32(sums + 4 * i) * inverse, min(width - i, LANES))


@inline
def _pages_seen(arguments: AttentionArguments, scratch: int, first: int) -> Any:
    """Return the number of the chunk's pages, from the first, that a group of rows is multiplied by (0 if unseen)."""
    group, rows = arguments.group, panel(scratch, Panel.ROWS)
    position, begin = panel(scratch, Panel.POSITION), panel(scratch, Panel.BEGIN)
    last = min(first + arguments.rows_at_once, rows)
    lowest, highest = position + first // group, position + (last - 1) // group
    end = end_visible(arguments, highest, panel(scratch, Panel.LENGTH))
    if first >= rows or begin >= end or begin + CHUNK_TOKENS <= first_visible(arguments, lowest):
        return np.int64(0)
    return min((end - 1 - begin) // PAGE_TOKENS + 1, np.int64(CHUNK_PAGES))


@inline
def _write_values(arguments: AttentionArguments, scratch: int, page: int, last: int) -> None:
    """Write the chunk's pages of values [page, last), whose values are the keys."""
    for index in range(page, last):
        entry, target = panel(scratch, Panel.PAGES) + 8 * index, panel(scratch, Panel.VALUE_PAGES)
        target += arguments.value_page * index
        call_operator(arguments.keys_to_values, arguments, memory.read_int64(entry), target, 0, 0)
        memory.write_int64(entry + 8 * CHUNK_PAGES, target)


@inline
def _check(context: int, sequence: int, row: int, count: int) -> Any:
    """Return 0 if the tokens are consecutive and inside their sequence, else ErrorCode.POSITION."""
    position, last = position_of(context, row), position_of(context, row + count - 1)
    if position < 0 or last != position + count - 1 or last >= context_length(context, sequence):
        return ErrorCode.POSITION.value
    return 0


@once
def load_chunk_op(kind: str) -> NativeOp:
    """Return `load_chunk`(arguments, scratch, low, high, -), which fills KEYS, VALUES and USABLE with a chunk.

    The block sees tokens [low, high). Values that are not finite are left out of VALUES, because 0 * infinity would
    turn the results of rows that do not see these tokens into NaN.
    """
    products: Any = amx_products if uses_tiles(kind) else vector_products
    load_keys, load_values, value_vector = (
        products.load_keys_of(kind),
        products.load_values_of(kind),
        value_vector_of(kind),
    )

    def load_chunk(arguments: AttentionArguments, scratch: int, low: int, high: int, unused: int) -> int:
        for page in range(low // PAGE_TOKENS, (high - 1) // PAGE_TOKENS + 1):
            load_keys(arguments, scratch, page)
        usable, width = panel(scratch, Panel.USABLE), arguments.v_head_size
        for token in range(CHUNK_TOKENS):
            memory.write_int8(usable + token, np.int8(low <= token < high))
        left_out, is_finite = 0, False
        while not is_finite:
            is_finite = reduce_add(load_values(arguments, scratch)) == 0
            if not is_finite:
                left_out = 1
                for token in range(low, high):
                    probe = splat_float32(0.0)
                    for i in range(0, width, LANES):
                        probe = probe + value_vector(width, value_page(scratch, token), token % PAGE_TOKENS, i) * 0.0
                    memory.write_int8(usable + token, np.int8(reduce_add(probe) == 0))
        set_panel(scratch, Panel.LEFT_OUT, left_out)
        return 0

    return native_op(AttentionArguments, name=f"load_chunk_{_kind(kind)}")(load_chunk)


@once
def weigh_rows_op(kind: str) -> NativeOp:
    """Return `weigh`(arguments, scratch, row, end, pages), which turns the scores of rows [row, end) into weights.

    The rows belong to one group. Their scores for the chunk's first `pages` pages become weights, which are added to
    the rows' running softmax.
    """
    tiles = uses_tiles(kind)
    products: Any = amx_products if tiles else vector_products
    store_weights, weight_of, value_vector = products.store_weights, products.weight_of, value_vector_of(kind)
    weigh_score = rough_exp2_of_negative if tiles else exp2_of_negative

    @inline
    def weigh(scratch: int, scores: int, r: int, pages: int) -> None:
        largest = splat_float32(NO_MAXIMUM)
        for i in range(0, pages * PAGE_TOKENS, 2 * LANES):
            pair = maximum(memory.load_float32(scores + 4 * i), memory.load_float32(scores + 4 * i + 4 * LANES))
            largest = maximum(largest, pair)
        top_at, total_at = panel(scratch, Panel.MAXIMA) + 4 * r, panel(scratch, Panel.TOTALS) + 4 * LANES * r
        top, total = memory.read_float32(top_at), memory.load_float32(total_at)
        if any_above(largest, top):
            new = reduce_max(largest)
            shrink = exp2_of_negative(splat_float32(top - new))
            total = total * shrink
            sums, stride = panel(scratch, Panel.SUMS), panel(scratch, Panel.SUM_BYTES)
            for i in range(r * stride, (r + 1) * stride, 4 * LANES):
                memory.store_float32(sums + i, memory.load_float32(sums + i) * shrink)
            top = new
            memory.write_float32(top_at, top)
        for page in range(pages):
            address = scores + 4 * PAGE_TOKENS * page
            first = weigh_score(memory.load_float32(address) - top)
            second = weigh_score(memory.load_float32(address + 4 * LANES) - top)
            total = total + (first + second)
            store_weights(scores, page, first, second)
        memory.store_float32(total_at, total)

    @inline
    def add_left_out(arguments: AttentionArguments, scratch: int, scores: int, r: int, low: int, high: int) -> None:
        """Add the values that were left out of VALUES, for a row that sees tokens [low, high) of the chunk."""
        width, sums = arguments.v_head_size, panel(scratch, Panel.SUMS) + r * panel(scratch, Panel.SUM_BYTES)
        first: Any = max(low, np.int64(0))
        last: Any = min(high, np.int64(CHUNK_TOKENS))
        for token in range(first, last):
            if memory.read_uint8(panel(scratch, Panel.USABLE) + token) == 0:
                share = weight_of(scores, token)
                for i in range(0, width, LANES):
                    value = value_vector(width, value_page(scratch, token), token % PAGE_TOKENS, i)
                    memory.store_float32(sums + 4 * i, multiply_add(value, share, memory.load_float32(sums + 4 * i)))

    def weigh_rows(arguments: AttentionArguments, scratch: int, row: int, end: int, pages: int) -> int:
        group, cap, begin = arguments.group, arguments.score_cap, panel(scratch, Panel.BEGIN)
        position, left_out = panel(scratch, Panel.POSITION), panel(scratch, Panel.LEFT_OUT) != 0
        lowest, highest = position + row // group, position + (end - 1) // group
        length, tokens = panel(scratch, Panel.LENGTH), arguments.bias_tokens
        is_cut = begin + pages * PAGE_TOKENS > end_visible(arguments, lowest, length)
        is_cut = is_cut or begin < first_visible(arguments, highest)
        scores, head = scores_of(arguments, scratch, row), panel(scratch, Panel.HEAD)
        for r in range(row, end):
            at = position + r // group
            low, high = first_visible(arguments, at) - begin, end_visible(arguments, at, length) - begin
            if is_cut or cap > 0 or tokens > 0:
                bias = np.int64(0)
                if tokens > 0:
                    bias = arguments.bias + 4 * ((head + r % group) * (2 * tokens - 1) + begin - at + tokens - 1)
                _cap_and_mask(scores, pages, cap, bias, low, high)
            weigh(scratch, scores, r, pages)
            if left_out:
                add_left_out(arguments, scratch, scores, r, low, high)
            scores += SCORE_BYTES
        return 0

    return native_op(AttentionArguments, name=f"weigh_rows_{_kind(kind)}")(weigh_rows)


def _kind(kind: str) -> str:
    return f"{kind}_in_tiles" if uses_tiles(kind) else kind


@inline
def _attend_chunk(arguments: AttentionArguments, scratch: int) -> None:
    """Process a block with a chunk, one group of rows at a time. A group's scores stay in the first-level cache."""
    at_once, rows = arguments.rows_at_once, panel(scratch, Panel.ROWS)
    before_chunk = np.int64(0)
    if arguments.causal != 0:
        before_chunk = max(before_chunk, panel(scratch, Panel.BEGIN) - panel(scratch, Panel.POSITION)) * arguments.group
    elif arguments.window > 0:
        seen = panel(scratch, Panel.BEGIN) - arguments.window + 1 - panel(scratch, Panel.POSITION)
        before_chunk = max(before_chunk, seen) * arguments.group
    first = before_chunk // at_once * at_once
    pages = _pages_seen(arguments, scratch, first)
    while pages > 0:
        call_operator(arguments.multiply_group, arguments, scratch, first, 0, pages)
        call_operator(arguments.weigh, arguments, scratch, first, min(first + at_once, rows), pages)
        call_operator(arguments.add_group, arguments, scratch, first, pages, 0)
        first += at_once
        pages = _pages_seen(arguments, scratch, first)


def prefill_op(kind: str) -> NativeOp:
    """Return the operator for a kind of pages. An item is an entry of ROW_BLOCKS (a block of tokens) and a KV head."""
    return _attend_blocks(uses_tiles(kind))


@once
def _attend_blocks(tiles: bool) -> NativeOp:
    products: Any = amx_products if tiles else vector_products
    load_queries, clear_queries = products.load_queries, products.clear_queries

    @inline
    def attend(
        arguments: AttentionArguments, context: int, sequence: int, row: int, count: int, head: int, scratch: int
    ) -> Any:
        group, ready = arguments.group, panel(scratch, Panel.READY)
        query_bytes = 4 * group * arguments.head_size
        for token in range(count):
            ahead = row_at(arguments.query, row + token + _TOKENS_AHEAD) + head * query_bytes
            for i in range(0, query_bytes, 4 * LANES):
                memory.prefetch(ahead + i)
            status = call_operator(arguments.make_ready, arguments, context, row + token, head, ready)
            if status != 0:
                return status
            load_queries(arguments, scratch, token * group)
            for h in range(group):
                _start_row(arguments, scratch, token * group + h, head * group + h)
        clear_queries(arguments, scratch, count * group)
        position = position_of(context, row)
        set_panel(scratch, Panel.ROWS, count * group)
        length = context_length(context, sequence)
        if arguments.bias != 0 and length > arguments.bias_tokens:
            return ErrorCode.BIAS_POSITION.value
        set_panel(scratch, Panel.POSITION, position)
        set_panel(scratch, Panel.LENGTH, length)
        set_panel(scratch, Panel.HEAD, head * group)
        seen, end = first_visible(arguments, position), end_visible(arguments, position + count - 1, length)
        for begin in range(seen // CHUNK_TOKENS * CHUNK_TOKENS, end, CHUNK_TOKENS):
            low, high = max(seen - begin, np.int64(0)), min(end - begin, np.int64(CHUNK_TOKENS))
            page, last = low // PAGE_TOKENS, (high - 1) // PAGE_TOKENS + 1
            keys, first_page = panel(scratch, Panel.PAGES) + 8 * page, begin // PAGE_TOKENS
            status = list_pages(
                arguments, context, sequence, first_page + page, first_page + last, head, keys, keys + 8 * CHUNK_PAGES
            )
            if status != 0:
                return status
            if arguments.keys_to_values != 0:
                _write_values(arguments, scratch, page, last)
            set_panel(scratch, Panel.BEGIN, begin)
            call_operator(arguments.load_chunk, arguments, scratch, low, high, 0)
            _attend_chunk(arguments, scratch)
        width = arguments.v_head_size
        for r in range(count * group):
            out = row_at(arguments.out, row + r // group)
            out += 4 * (head * group + r % group) * width
            _finish_row(scratch, r, width, out)
            if arguments.hadamard != 0:
                hadamard_transform(out, width)
        return 0

    def attend_blocks(arguments: AttentionArguments, context: int, begin: int, end: int, scratch: int) -> int:
        kv_heads, status = arguments.kv_heads, 0
        open_panels(arguments.panels, scratch)
        if tiles:
            configure_tiles(panel(scratch, Panel.CONFIG))
        for item in range(begin, end):
            entry = memory.read_int64(context + 8 * StepField.ROW_BLOCKS) + 4 * BLOCK_FIELDS * (item // kv_heads)
            sequence, row = np.int64(memory.read_int32(entry)), np.int64(memory.read_int32(entry + 4))
            count = np.int64(memory.read_int32(entry + 8))
            if status == 0:
                status = _check(context, sequence, row, count)
            if status == 0:
                status = attend(arguments, context, sequence, row, count, item % kv_heads, scratch)
        if tiles:
            release_tiles()
        return status

    return native_op(AttentionArguments, name=f"attend_blocks_{'tiles' if tiles else 'vectors'}")(attend_blocks)

"""Products of a block of queries in float32.

Keys are converted to float32 pages and values to float32 rows, and weights overwrite scores. This is one of two
implementations of the functions that `prefill` describes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...cache_layout import PAGE_TOKENS
from ..jit import memory
from ..jit.dsl import inline
from ..jit.native import native_op
from ..jit.variants import once
from ..jit.vector import LANES, splat_float32
from ..program.driver import call_operator
from .arguments import AttentionArguments
from .heads import head_stride
from .pages import key_vector_of, value_vector_of
from .panels import CHUNK_TOKENS, SCORE_BYTES, Panel, panel, scores_of, value_page


@inline
def load_queries(arguments: AttentionArguments, scratch: int, row: int) -> None:
    stride = head_stride(arguments.head_size)
    source = panel(scratch, Panel.READY)
    target = panel(scratch, Panel.QUERIES) + row * stride
    for i in range(0, arguments.group * stride, 4 * LANES):
        memory.store_float32(target + i, memory.load_float32(source + i))


@inline
def clear_queries(arguments: AttentionArguments, scratch: int, first: int) -> None:
    rows, stride = arguments.rows_at_once, panel(scratch, Panel.QUERY_BYTES)
    queries = panel(scratch, Panel.QUERIES)
    for i in range(first * stride, (first + rows - 1) // rows * rows * stride, 4 * LANES):
        memory.store_float32(queries + i, splat_float32(0.0))


@once
def load_keys_of(kind: str) -> Callable[..., None]:
    key_vector = key_vector_of(kind)

    @inline
    def load_keys(arguments: AttentionArguments, scratch: int, page: int) -> None:
        size = arguments.head_size
        source, target = memory.read_int64(panel(scratch, Panel.PAGES) + 8 * page), panel(scratch, Panel.KEYS)
        target += 4 * page * PAGE_TOKENS * size
        for column in range(size):
            for part in range(PAGE_TOKENS // LANES):
                address = target + 4 * (column * PAGE_TOKENS + part * LANES)
                memory.store_float32(address, key_vector(size, source, column, part))

    return load_keys


@once
def load_values_of(kind: str) -> Callable[..., Any]:
    value_vector = value_vector_of(kind)

    @inline
    def load_values(arguments: AttentionArguments, scratch: int) -> Any:
        width, stride = arguments.v_head_size, panel(scratch, Panel.SUM_BYTES)
        usable, values = panel(scratch, Panel.USABLE), panel(scratch, Panel.VALUES)
        probe = splat_float32(0.0)
        for token in range(CHUNK_TOKENS):
            target = values + token * stride
            for i in range(0, stride, 4 * LANES):
                memory.store_float32(target + i, splat_float32(0.0))
            if memory.read_uint8(usable + token) != 0:
                page = value_page(scratch, token)
                for i in range(0, width, LANES):
                    value = value_vector(width, page, token % PAGE_TOKENS, i)
                    memory.store_float32(target + 4 * i, value)
                    probe = probe + value * 0.0
        return probe

    return load_values


@native_op(AttentionArguments)
def multiply_vector_group(arguments: AttentionArguments, scratch: int, row: int, begin: int, end: int) -> int:
    """Implement `multiply_group` of `prefill`."""
    queries = panel(scratch, Panel.QUERIES) + row * panel(scratch, Panel.QUERY_BYTES)
    page_bytes = 4 * PAGE_TOKENS * arguments.head_size
    for page in range(begin, end):
        keys = panel(scratch, Panel.KEYS) + page * page_bytes
        scores = scores_of(arguments, scratch, row) + 4 * PAGE_TOKENS * page
        call_operator(arguments.multiply_keys, keys, keys, queries, scores, SCORE_BYTES)
    return 0


@inline
def store_weights(scores: int, page: int, first: Any, second: Any) -> None:
    memory.store_float32(scores + 4 * PAGE_TOKENS * page, first)
    memory.store_float32(scores + 4 * PAGE_TOKENS * page + 4 * LANES, second)


@inline
def weight_of(scores: int, token: int) -> Any:
    return memory.read_float32(scores + 4 * token)


@native_op(AttentionArguments)
def add_vector_group(arguments: AttentionArguments, scratch: int, row: int, pages: int, unused: int) -> int:
    """Implement `add_group` of `prefill`."""
    values, weights = panel(scratch, Panel.VALUES), scores_of(arguments, scratch, row)
    sums = panel(scratch, Panel.SUMS) + row * panel(scratch, Panel.SUM_BYTES)
    call_operator(arguments.add_values, values, values, PAGE_TOKENS * pages, weights, sums)
    return 0

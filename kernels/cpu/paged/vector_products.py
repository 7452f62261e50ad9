"""Products of a block of queries in float32: keys become pages of float32, values rows of float32, weights stay scores.

One of the two ways of `many`; see there for what each function does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from ...formats import PAGE_TOKENS
from ..jit import native_op
from ..lazy import inline
from ..memory import (
    load_first,
    load_first_half,
    load_float32,
    load_half,
    read_float32,
    read_int64,
    read_uint8,
    store_float32,
    word,
)
from ..tape.driver import call_operator
from ..vector import LANES, splat_float32
from .arguments import ADD_VALUES, GROUP, HEAD_SIZE, MULTIPLY_KEYS, ROWS_AT_ONCE, V_HEAD_SIZE
from .heads import head_stride
from .panels import (
    CHUNK_PAGES,
    CHUNK_TOKENS,
    KEYS,
    PAGES,
    QUERIES,
    QUERY_BYTES,
    READY,
    SCORE_BYTES,
    SUM_BYTES,
    SUMS,
    USABLE,
    VALUES,
    panel,
    scores_of,
)


@inline
def load_queries(arguments: int, scratch: int, row: int) -> None:
    stride = head_stride(word(arguments, HEAD_SIZE))
    source = panel(scratch, READY)
    target = panel(scratch, QUERIES) + row * stride
    for i in range(0, word(arguments, GROUP) * stride, 4 * LANES):
        store_float32(target + i, load_float32(source + i))


@inline
def clear_queries(arguments: int, scratch: int, first: int) -> None:
    rows, stride = word(arguments, ROWS_AT_ONCE), panel(scratch, QUERY_BYTES)
    queries = panel(scratch, QUERIES)
    for i in range(first * stride, (first + rows - 1) // rows * rows * stride, 4 * LANES):
        store_float32(queries + i, splat_float32(0.0))


@cache
def load_keys_of(half: bool) -> Callable[..., None]:
    load, item_bytes = (load_half, 2) if half else (load_float32, 4)

    @inline
    def load_keys(arguments: int, scratch: int, page: int) -> None:
        count = PAGE_TOKENS * word(arguments, HEAD_SIZE)
        source, target = read_int64(panel(scratch, PAGES) + 8 * page), panel(scratch, KEYS) + 4 * page * count
        for i in range(0, count, LANES):
            store_float32(target + 4 * i, load(source + item_bytes * i))

    return load_keys


@cache
def load_values_of(half: bool) -> Callable[..., Any]:
    load, item_bytes = (load_first_half, 2) if half else (load_first, 4)

    @inline
    def load_values(arguments: int, scratch: int) -> Any:
        width, stride = word(arguments, V_HEAD_SIZE), panel(scratch, SUM_BYTES)
        pages, usable, values = panel(scratch, PAGES), panel(scratch, USABLE), panel(scratch, VALUES)
        probe = splat_float32(0.0)
        for token in range(CHUNK_TOKENS):
            target = values + token * stride
            for i in range(0, stride, 4 * LANES):
                store_float32(target + i, splat_float32(0.0))
            if read_uint8(usable + token) != 0:
                page = read_int64(pages + 8 * (CHUNK_PAGES + token // PAGE_TOKENS))
                source = page + token % PAGE_TOKENS * width * item_bytes
                for i in range(0, width, LANES):
                    value = load(source + item_bytes * i, min(width - i, LANES))
                    store_float32(target + 4 * i, value)
                    probe = probe + value * 0.0
        return probe

    return load_values


@native_op
def multiply_vector_group(arguments: int, scratch: int, row: int, begin: int, end: int) -> int:
    """MULTIPLY_GROUP."""
    queries = panel(scratch, QUERIES) + row * panel(scratch, QUERY_BYTES)
    page_bytes = 4 * PAGE_TOKENS * word(arguments, HEAD_SIZE)
    for page in range(begin, end):
        keys = panel(scratch, KEYS) + page * page_bytes
        scores = scores_of(arguments, scratch, row) + 4 * PAGE_TOKENS * page
        call_operator(word(arguments, MULTIPLY_KEYS), keys, keys, queries, scores, SCORE_BYTES)
    return 0


@inline
def store_weights(scores: int, page: int, first: Any, second: Any) -> None:
    store_float32(scores + 4 * PAGE_TOKENS * page, first)
    store_float32(scores + 4 * PAGE_TOKENS * page + 4 * LANES, second)


@inline
def weight_of(scores: int, token: int) -> Any:
    return read_float32(scores + 4 * token)


@native_op
def add_vector_group(arguments: int, scratch: int, row: int, pages: int, unused: int) -> int:
    """ADD_GROUP."""
    values, weights = panel(scratch, VALUES), scores_of(arguments, scratch, row)
    sums = panel(scratch, SUMS) + row * panel(scratch, SUM_BYTES)
    call_operator(word(arguments, ADD_VALUES), values, values, PAGE_TOKENS * pages, weights, sums)
    return 0

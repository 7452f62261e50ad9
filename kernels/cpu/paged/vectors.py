"""Products of a block of queries in float32 vectors."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...formats import PAGE_TOKENS
from ..functions import inline
from ..memory import (
    load_first,
    load_first_half,
    load_float32,
    load_half,
    read_float32,
    read_int64,
    read_uint8,
    store_float32,
)
from ..vector import LANES, splat_float32
from .panels import CHUNK_PAGES, CHUNK_TOKENS, SCORE_STRIDE, Panels, Products
from .products import add_page_values, multiply_page_keys, padded, rows_at_once


def vector_products(panels: Panels, head_size: int, v_head_size: int, half: bool) -> Products:
    """Keys stay as pages of float32, values become rows of float32."""
    rows, item_bytes = rows_at_once(), 2 if half else 4
    load, load_some = (load_half, load_first_half) if half else (load_float32, load_first)
    multiply_page = multiply_page_keys(rows, head_size, panels.query_stride // 4, False, False)
    add_values = add_page_values(rows, panels.v_head_size, False, False)
    page_bytes = 4 * PAGE_TOKENS * head_size
    queries_at, keys_at, values_at = panels.queries, panels.keys, panels.values
    scores_at, sums_at, pages_at = panels.scores, panels.sums, panels.pages
    usable_at, ready_at = panels.usable, panels.ready
    query_stride, sum_stride = panels.query_stride, panels.sum_stride

    @inline
    def load_query(scratch: int, row: int) -> None:
        for i in range(0, 4 * padded_head, 4 * LANES):
            store_float32(scratch + queries_at + row * query_stride + i, load_float32(scratch + ready_at + i))

    @inline
    def clear_queries(scratch: int, first: int) -> None:
        for i in range(first * query_stride, (first + rows - 1) // rows * rows * query_stride, 4 * LANES):
            store_float32(scratch + queries_at + i, splat_float32(0.0))

    @inline
    def load_keys(scratch: int, page: int) -> None:
        source, target = read_int64(scratch + pages_at + 8 * page), scratch + keys_at + page * page_bytes
        for i in range(0, PAGE_TOKENS * head_size, LANES):
            store_float32(target + 4 * i, load(source + item_bytes * i))

    @inline
    def load_values(scratch: int) -> Any:
        probe = splat_float32(0.0)
        for token in range(CHUNK_TOKENS):
            target = scratch + values_at + token * sum_stride
            page = read_int64(scratch + pages_at + 8 * (CHUNK_PAGES + token // PAGE_TOKENS))
            source = page + token % PAGE_TOKENS * v_head_size * item_bytes
            usable = read_uint8(scratch + usable_at + token) != 0
            for i in range(0, v_head_size, LANES):
                value = splat_float32(0.0)
                if usable:
                    value = load_some(source + item_bytes * i, min(v_head_size - i, LANES))
                store_float32(target + 4 * i, value)
                probe = probe + value * 0.0
            for i in range(padded_values, sum_stride // 4, LANES):
                store_float32(target + 4 * i, splat_float32(0.0))
        return probe

    @inline
    def multiply_keys(scratch: int, row: int, pages: int) -> None:
        queries = scratch + queries_at + row * query_stride
        for page in range(pages):
            keys = scratch + keys_at + page * page_bytes
            multiply_page(keys, keys, queries, scratch + scores_at + 4 * PAGE_TOKENS * page, SCORE_STRIDE)

    @inline
    def store_weights(scratch: int, row: int, page: int, first: Any, second: Any) -> None:
        place = scratch + scores_at + row % rows * SCORE_STRIDE + 4 * PAGE_TOKENS * page
        store_float32(place, first)
        store_float32(place + 4 * LANES, second)

    @inline
    def weight(scratch: int, row: int, token: int, maximum: float) -> Any:
        return read_float32(scratch + scores_at + row % rows * SCORE_STRIDE + 4 * token)

    @inline
    def multiply_values(scratch: int, row: int, pages: int) -> None:
        values, sums = scratch + values_at, scratch + sums_at + row * sum_stride
        first, last = np.int64(0), np.int64(PAGE_TOKENS * pages)
        add_values(values, values, first, last, scratch + scores_at, SCORE_STRIDE, sums)

    padded_head, padded_values = padded(head_size), padded(v_head_size)
    return Products(
        rows, load_query, clear_queries, load_keys, load_values, multiply_keys, store_weights, weight, multiply_values
    )

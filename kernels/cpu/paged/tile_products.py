"""Products of a block of queries in tiles of bfloat16, with float32 sums (AMX).

Queries (with the scale) and weights are rounded to bfloat16, keys and values go from float16 to bfloat16: relative
errors of about 3e-3 in a result.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types

from ...formats import PAGE_TOKENS
from ..functions import exp2_of_negative, inline
from ..memory import load_first_half, load_float32, load_half, read_float32, read_int64, read_uint8, store_float32
from ..tiles import (
    TILE_BYTES,
    TILE_ROW_BYTES,
    TILE_ROWS,
    emit_load,
    emit_product,
    emit_store,
    emit_zero,
    store_bfloat_pairs,
    store_bfloats,
)
from ..vector import LANES, intrinsic, reduce_max, splat_float32
from .panels import CHUNK_PAGES, CHUNK_TOKENS, SCORE_STRIDE, Panels, Products
from .products import loop

_ROWS = 2 * TILE_ROWS  # rows of a product of two by two tiles
_INT64 = ir.IntType(64)
_TILE_COLUMNS = TILE_ROW_BYTES // 2  # bfloat16 numbers in a row of a tile


def _multiply_of(accumulate: bool) -> Any:
    """An intrinsic (a, a_step, b, b_step, steps, c, stride): 32 x 32 numbers of c (+)= a b.

    Tiles of a row of `a` (a column of b) follow each other, the second row (column) lies a_step (b_step) bytes after the
    first.
    """

    def multiply(typing_context: Any, a: Any, a_step: Any, b: Any, b_step: Any, steps: Any, c: Any, stride: Any) -> Any:
        def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            a, a_step, b, b_step, steps, c, stride = args
            integer, line = _INT64, _INT64(TILE_ROW_BYTES)
            below = builder.add(c, builder.mul(stride, integer(TILE_ROWS)))
            places = [c, builder.add(c, line), below, builder.add(below, line)]
            for tile, place in enumerate(places):
                if accumulate:
                    emit_load(builder, tile, place, stride)
                else:
                    emit_zero(builder, tile)
            with loop(builder, integer(0), builder.mul(steps, integer(TILE_BYTES)), TILE_BYTES, []) as (offset, _):
                first_a, first_b = builder.add(a, offset), builder.add(b, offset)
                emit_load(builder, 6, first_b, line)
                emit_load(builder, 4, first_a, line)
                emit_product(builder, 0, 4, 6)
                emit_load(builder, 7, builder.add(first_b, b_step), line)
                emit_product(builder, 1, 4, 7)
                emit_load(builder, 5, builder.add(first_a, a_step), line)
                emit_product(builder, 2, 5, 6)
                emit_product(builder, 3, 5, 7)
            for tile, place in enumerate(places):
                emit_store(builder, tile, place, stride)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), lower

    return intrinsic(multiply)


_multiply, _multiply_and_add = _multiply_of(False), _multiply_of(True)


def tile_products(panels: Panels, head_size: int, v_head_size: int) -> Products:
    """Queries and weights are tiles [row][step], keys and values tiles [column][step], all of TILE_BYTES."""
    steps, head_pairs = panels.head_size // _TILE_COLUMNS, panels.head_size // 2
    columns = panels.v_head_size // LANES
    queries_at, keys_at, values_at = panels.queries, panels.keys, panels.values
    scores_at, weights_at, sums_at = panels.scores, panels.weights, panels.sums
    pages_at, usable_at, ready_at = panels.pages, panels.usable, panels.ready
    sum_stride, page_line = panels.sum_stride, 2 * PAGE_TOKENS
    query_bytes = steps * TILE_BYTES  # of a row of tiles
    weight_bytes = CHUNK_PAGES * TILE_BYTES

    @inline
    def load_query(scratch: int, row: int) -> None:
        target = scratch + queries_at + row // TILE_ROWS * query_bytes + row % TILE_ROWS * TILE_ROW_BYTES
        for step in range(steps):
            source = scratch + ready_at + 4 * _TILE_COLUMNS * step
            store_bfloats(target + step * TILE_BYTES, load_float32(source), load_float32(source + 4 * LANES))

    @inline
    def clear_queries(scratch: int, first: int) -> None:
        for row in range(first, (first + _ROWS - 1) // _ROWS * _ROWS):
            target = scratch + queries_at + row // TILE_ROWS * query_bytes + row % TILE_ROWS * TILE_ROW_BYTES
            for step in range(steps):
                store_float32(target + step * TILE_BYTES, splat_float32(0.0))

    @inline
    def load_keys(scratch: int, page: int) -> None:
        source = read_int64(scratch + pages_at + 8 * page)
        target = scratch + keys_at + 2 * page * query_bytes
        for pair in range(head_pairs):
            place = target + pair // TILE_ROWS * TILE_BYTES + pair % TILE_ROWS * TILE_ROW_BYTES
            for part in range(2):
                even, odd = splat_float32(0.0), splat_float32(0.0)
                if 2 * pair < head_size:
                    even = load_half(source + 2 * pair * page_line + 2 * LANES * part)
                if 2 * pair + 1 < head_size:
                    odd = load_half(source + (2 * pair + 1) * page_line + 2 * LANES * part)
                store_bfloat_pairs(place + part * query_bytes, even, odd)

    @inline
    def value_address(scratch: int, token: int) -> Any:
        """Of a token's values, or 0 if they are not usable."""
        page = read_int64(scratch + pages_at + 8 * (CHUNK_PAGES + token // PAGE_TOKENS))
        usable = read_uint8(scratch + usable_at + token) != 0
        return page + 2 * v_head_size * (token % PAGE_TOKENS) if usable else 0

    @inline
    def load_value(address: int, column: int) -> Any:
        value = splat_float32(0.0)
        if address != 0:
            value = load_first_half(address + 2 * LANES * column, min(v_head_size - column * LANES, LANES))
        return value

    @inline
    def load_values(scratch: int) -> Any:
        probe = splat_float32(0.0)
        for token in range(0, CHUNK_TOKENS, 2):
            target = scratch + values_at + token // PAGE_TOKENS * TILE_BYTES
            target += token % PAGE_TOKENS // 2 * TILE_ROW_BYTES
            first, second = value_address(scratch, token), value_address(scratch, token + 1)
            for column in range(columns):
                even, odd = load_value(first, column), load_value(second, column)
                store_bfloat_pairs(target + column * weight_bytes, even, odd)
                probe = probe + (even * 0.0 + odd * 0.0)
        return probe

    @inline
    def multiply_keys(scratch: int, row: int, pages: int) -> None:
        queries = scratch + queries_at + row // TILE_ROWS * query_bytes
        for page in range(pages):
            keys = scratch + keys_at + 2 * page * query_bytes
            scores = scratch + scores_at + 4 * PAGE_TOKENS * page
            _multiply(queries, query_bytes, keys, query_bytes, steps, scores, SCORE_STRIDE)

    @inline
    def store_weights(scratch: int, row: int, page: int, first: Any, second: Any) -> None:
        place = scratch + weights_at + row % _ROWS // TILE_ROWS * weight_bytes + row % TILE_ROWS * TILE_ROW_BYTES
        store_bfloats(place + page * TILE_BYTES, first, second)

    @inline
    def weight(scratch: int, row: int, token: int, maximum: float) -> Any:
        score = read_float32(scratch + scores_at + row % _ROWS * SCORE_STRIDE + 4 * token)
        return reduce_max(exp2_of_negative(splat_float32(score - maximum)))

    @inline
    def multiply_values(scratch: int, row: int, pages: int) -> None:
        for column in range(0, columns, 2):
            values = scratch + values_at + column * weight_bytes
            sums = scratch + sums_at + row * sum_stride + 4 * LANES * column
            _multiply_and_add(scratch + weights_at, weight_bytes, values, weight_bytes, pages, sums, sum_stride)

    return Products(
        _ROWS, load_query, clear_queries, load_keys, load_values, multiply_keys, store_weights, weight, multiply_values
    )

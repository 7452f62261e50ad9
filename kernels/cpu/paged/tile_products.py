"""Products of a block of queries in tiles of bfloat16, with float32 sums (AMX).

Queries (with the scale) and weights are rounded to bfloat16, keys and values go from float16 to bfloat16: relative
errors of about 3e-3 in a result. One of the two ways of `many`; see there for what each function does.

Queries are tiles [row][step], keys and values tiles [column][step]. The weights of a row take the place of its scores:
tiles of weights are 64 bytes of 16 rows that are SCORE_BYTES apart.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir

from ...formats import PAGE_TOKENS
from ..jit import native_op
from ..lazy import inline, intrinsic, types
from ..memory import load_first_half, load_float32, load_half, read_int64, read_uint8, store_float32, word
from ..tiles import (
    TILE_BYTES,
    TILE_ROW_BYTES,
    TILE_ROWS,
    emit_load,
    emit_product,
    emit_store,
    emit_zero,
    read_bfloat,
    store_bfloat_pairs,
    store_bfloats,
)
from ..vector import LANES, splat_float32
from .arguments import GROUP, HEAD_SIZE, V_HEAD_SIZE
from .heads import head_stride
from .panels import (
    CHUNK_PAGES,
    CHUNK_TOKENS,
    KEYS,
    PAGES,
    QUERIES,
    READY,
    SCORE_BYTES,
    STEPS,
    SUM_BYTES,
    SUMS,
    USABLE,
    VALUES,
    panel,
    scores_of,
)
from .products import loop

# Few enough that their scores and sums stay in the first-level cache, beside a chunk of keys and values.
TILE_PRODUCT_ROWS = TILE_ROWS
_TILE_COLUMNS = TILE_ROW_BYTES // 2  # bfloat16 numbers in a row of a tile
_VALUE_COLUMN_BYTES = CHUNK_PAGES * TILE_BYTES
_INT64 = ir.IntType(64)


_ROWS, _COLUMNS = 4, (5, 6, 7, 5)  # tile registers; sums take the first ones


def _multiply_of(columns: int, line: int, step: int, accumulate: bool) -> Any:
    """An intrinsic (a, b, b_next, steps, c, stride): 16 rows of c, `columns` tiles side by side, (+)= a b.

    Rows of a tile of `a` are `line` bytes apart, tiles that follow each other in its row of tiles `step` bytes, columns
    of tiles of `b` b_next bytes.
    """

    def multiply(typing_context: Any, a: Any, b: Any, b_next: Any, steps: Any, c: Any, stride: Any) -> Any:
        def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            a, b, b_next, steps, c, stride = args
            places = [builder.add(c, _INT64(column * TILE_ROW_BYTES)) for column in range(columns)]
            for tile, place in enumerate(places):
                if accumulate:
                    emit_load(builder, tile, place, stride)
                else:
                    emit_zero(builder, tile)
            with loop(builder, _INT64(0), steps, 1, []) as (index, _):
                emit_load(builder, _ROWS, builder.add(a, builder.mul(index, _INT64(step))), _INT64(line))
                place_b = builder.add(b, builder.mul(index, _INT64(TILE_BYTES)))
                for tile in range(columns):
                    emit_load(builder, _COLUMNS[tile], place_b, _INT64(TILE_ROW_BYTES))
                    emit_product(builder, tile, _ROWS, _COLUMNS[tile])
                    place_b = builder.add(place_b, b_next)
            for tile, place in enumerate(places):
                emit_store(builder, tile, place, stride)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), lower

    return intrinsic(multiply)


_multiply_two, _multiply_four = (_multiply_of(columns, TILE_ROW_BYTES, TILE_BYTES, False) for columns in (2, 4))
_add_two, _add_four = (_multiply_of(columns, SCORE_BYTES, TILE_ROW_BYTES, True) for columns in (2, 4))


@inline
def _query_address(scratch: int, row: int) -> Any:
    tiles = row // TILE_ROWS * (panel(scratch, STEPS) * TILE_BYTES)
    return panel(scratch, QUERIES) + tiles + row % TILE_ROWS * TILE_ROW_BYTES


@inline
def load_queries(arguments: int, scratch: int, row: int) -> None:
    steps, stride = panel(scratch, STEPS), head_stride(word(arguments, HEAD_SIZE))
    for head in range(word(arguments, GROUP)):
        source, target = panel(scratch, READY) + head * stride, _query_address(scratch, row + head)
        for step in range(steps):
            place = source + 4 * _TILE_COLUMNS * step
            store_bfloats(target + step * TILE_BYTES, load_float32(place), load_float32(place + 4 * LANES))


@inline
def clear_queries(arguments: int, scratch: int, first: int) -> None:
    for row in range(first, (first + TILE_PRODUCT_ROWS - 1) // TILE_PRODUCT_ROWS * TILE_PRODUCT_ROWS):
        target = _query_address(scratch, row)
        for step in range(panel(scratch, STEPS)):
            store_float32(target + step * TILE_BYTES, splat_float32(0.0))


@inline
def load_keys(arguments: int, scratch: int, page: int) -> None:
    size, column = word(arguments, HEAD_SIZE), panel(scratch, STEPS) * TILE_BYTES
    line = 2 * PAGE_TOKENS
    source = read_int64(panel(scratch, PAGES) + 8 * page)
    target = panel(scratch, KEYS) + 2 * page * column
    for pair in range(size // 2):
        place = target + pair // TILE_ROWS * TILE_BYTES + pair % TILE_ROWS * TILE_ROW_BYTES
        first, second = source + 2 * pair * line, source + (2 * pair + 1) * line
        store_bfloat_pairs(place, load_half(first), load_half(second))
        store_bfloat_pairs(place + column, load_half(first + 2 * LANES), load_half(second + 2 * LANES))
    for pair in range(size // 2, panel(scratch, STEPS) * TILE_ROWS):
        place = target + pair // TILE_ROWS * TILE_BYTES + pair % TILE_ROWS * TILE_ROW_BYTES
        for part in range(2):
            value = splat_float32(0.0)
            if 2 * pair < size:
                value = load_half(source + 2 * pair * line + 2 * LANES * part)
            store_bfloat_pairs(place + part * column, value, splat_float32(0.0))


@inline
def _value_address(arguments: int, scratch: int, token: int) -> Any:
    """Of a token's values, or 0 if they are not usable."""
    address = np.int64(0)
    if read_uint8(panel(scratch, USABLE) + token) != 0:
        page = read_int64(panel(scratch, PAGES) + 8 * (CHUNK_PAGES + token // PAGE_TOKENS))
        address = page + 2 * word(arguments, V_HEAD_SIZE) * (token % PAGE_TOKENS)
    return address


@inline
def _load_value(address: int, i: int, width: int) -> Any:
    value = splat_float32(0.0)
    if address != 0:
        if i + LANES <= width:
            value = load_half(address + 2 * i)
        elif i < width:
            value = load_first_half(address + 2 * i, width - i)
    return value


@inline
def load_values(arguments: int, scratch: int) -> Any:
    width, values = word(arguments, V_HEAD_SIZE), panel(scratch, VALUES)
    padded = panel(scratch, SUM_BYTES) // 4
    probe = splat_float32(0.0)
    for token in range(0, CHUNK_TOKENS, 2):
        target = values + token // PAGE_TOKENS * TILE_BYTES + token % PAGE_TOKENS // 2 * TILE_ROW_BYTES
        first = _value_address(arguments, scratch, token)
        second = _value_address(arguments, scratch, token + 1)
        for i in range(0, padded, LANES):
            even, odd = _load_value(first, i, width), _load_value(second, i, width)
            store_bfloat_pairs(target + i // LANES * _VALUE_COLUMN_BYTES, even, odd)
            probe = probe + (even * 0.0 + odd * 0.0)
    return probe


@native_op
def multiply_tile_group(arguments: int, scratch: int, row: int, begin: int, end: int) -> int:
    """MULTIPLY_GROUP."""
    steps, queries = panel(scratch, STEPS), _query_address(scratch, row)
    column = steps * TILE_BYTES
    for page in range(begin, end, 2):
        keys = panel(scratch, KEYS) + 2 * page * column
        scores = scores_of(arguments, scratch, row) + 4 * PAGE_TOKENS * page
        if page + 1 < end:
            _multiply_four(queries, keys, column, steps, scores, SCORE_BYTES)
        else:
            _multiply_two(queries, keys, column, steps, scores, SCORE_BYTES)
    return 0


@inline
def store_weights(scores: int, page: int, first: Any, second: Any) -> None:
    store_bfloats(scores + page * TILE_ROW_BYTES, first, second)


@inline
def weight_of(scores: int, token: int) -> Any:
    return read_bfloat(scores + 2 * token)


@native_op
def add_tile_group(arguments: int, scratch: int, row: int, pages: int, unused: int) -> int:
    """ADD_GROUP."""
    weights, values, stride = scores_of(arguments, scratch, row), panel(scratch, VALUES), panel(scratch, SUM_BYTES)
    sums = panel(scratch, SUMS) + row * stride
    columns = stride // TILE_ROW_BYTES
    for column in range(0, columns, 4):
        place, target = values + column * _VALUE_COLUMN_BYTES, sums + column * TILE_ROW_BYTES
        if column + 2 < columns:
            _add_four(weights, place, _VALUE_COLUMN_BYTES, pages, target, stride)
        else:
            _add_two(weights, place, _VALUE_COLUMN_BYTES, pages, target, stride)
    return 0

"""Products of a block of queries in tiles of bfloat16, with float32 sums (AMX).

Scaled queries and weights are rounded to bfloat16, and keys and values are converted from their pages to bfloat16. The
relative errors of a result are about 3e-3. This is one of two implementations of the functions that `prefill`
describes.

Queries are stored as tiles [row][step], and keys and values as tiles [column][step]. The weights of a row overwrite its
scores, so a tile of weights consists of 64 bytes from each of 16 rows that are SCORE_BYTES apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ...cache_layout import PAGE_TOKENS
from ..jit import amx
from ..jit.dsl import inline, intrinsic
from ..jit.emit import INT64, Emitter
from ..jit.memory import load_float32, read_bfloat16, read_int64, read_uint8, store_float32
from ..jit.native import native_op
from ..jit.variants import once
from ..jit.vector import LANES, splat_float32
from .arguments import AttentionArguments
from .heads import head_stride
from .pages import key_vector_of, value_vector_of
from .panels import CHUNK_PAGES, CHUNK_TOKENS, SCORE_BYTES, Panel, panel, scores_of, value_page

# Few enough rows that their scores and sums fit in the first-level cache together with a chunk of keys and values.
TILE_PRODUCT_ROWS = amx.TILE_ROWS
_TILE_COLUMNS = amx.TILE_ROW_BYTES // 2  # bfloat16 numbers in a row of a tile
_VALUE_COLUMN_BYTES = CHUNK_PAGES * amx.TILE_BYTES


_ROWS, _COLUMNS = 4, (5, 6, 7, 5)  # tile registers; the sums use registers 0 to 3


def _multiply_of(columns: int, line: int, step: int, accumulate: bool) -> Any:
    """Return an intrinsic (a, b, b_next, steps, c, stride) that computes c = a b, or c += a b if `accumulate`.

    c has 16 rows and `columns` tiles side by side. The rows of a tile of `a` are `line` bytes apart, and consecutive
    tiles are `step` bytes apart. The columns of tiles of `b` are `b_next` bytes apart.
    """

    @intrinsic(None, *["int64"] * 6)
    def multiply(e: Emitter, a: Any, b: Any, b_next: Any, steps: Any, c: Any, stride: Any) -> None:
        addresses = [e.at(c, column * amx.TILE_ROW_BYTES) for column in range(columns)]
        for tile, address in enumerate(addresses):
            if accumulate:
                amx.load_tile(e, tile, address, stride)
            else:
                amx.clear_tile(e, tile)
        with e.loop(steps) as (index, _):
            amx.load_tile(e, _ROWS, e.at(a, e.builder.mul(index, INT64(step))), line)
            address_b = e.at(b, e.builder.mul(index, INT64(amx.TILE_BYTES)))
            for tile in range(columns):
                amx.load_tile(e, _COLUMNS[tile], address_b)
                amx.add_bfloat_product(e, tile, _ROWS, _COLUMNS[tile])
                address_b = e.at(address_b, b_next)
        for tile, address in enumerate(addresses):
            amx.store_tile(e, tile, address, stride)

    return multiply


_multiply_two, _multiply_four = (_multiply_of(columns, amx.TILE_ROW_BYTES, amx.TILE_BYTES, False) for columns in (2, 4))
_add_two, _add_four = (_multiply_of(columns, SCORE_BYTES, amx.TILE_ROW_BYTES, True) for columns in (2, 4))


@inline
def _query_address(scratch: int, row: int) -> Any:
    line = row // amx.TILE_ROWS * (panel(scratch, Panel.STEPS) * amx.TILE_BYTES)
    return panel(scratch, Panel.QUERIES) + line + row % amx.TILE_ROWS * amx.TILE_ROW_BYTES


@inline
def load_queries(arguments: AttentionArguments, scratch: int, row: int) -> None:
    steps, stride = panel(scratch, Panel.STEPS), head_stride(arguments.head_size)
    for head in range(arguments.group):
        source, target = panel(scratch, Panel.READY) + head * stride, _query_address(scratch, row + head)
        for step in range(steps):
            address = source + 4 * _TILE_COLUMNS * step
            amx.store_bfloats(target + step * amx.TILE_BYTES, load_float32(address), load_float32(address + 4 * LANES))


@inline
def clear_queries(arguments: AttentionArguments, scratch: int, first: int) -> None:
    for row in range(first, (first + TILE_PRODUCT_ROWS - 1) // TILE_PRODUCT_ROWS * TILE_PRODUCT_ROWS):
        target = _query_address(scratch, row)
        for step in range(panel(scratch, Panel.STEPS)):
            store_float32(target + step * amx.TILE_BYTES, splat_float32(0.0))


@once
def load_keys_of(kind: str) -> Callable[..., None]:
    key_vector = key_vector_of(kind)

    @inline
    def load_keys(arguments: AttentionArguments, scratch: int, page: int) -> None:
        size, column = arguments.head_size, panel(scratch, Panel.STEPS) * amx.TILE_BYTES
        source = read_int64(panel(scratch, Panel.PAGES) + 8 * page)
        target = panel(scratch, Panel.KEYS) + 2 * page * column
        for pair in range(panel(scratch, Panel.STEPS) * amx.TILE_ROWS):
            address = target + pair // amx.TILE_ROWS * amx.TILE_BYTES + pair % amx.TILE_ROWS * amx.TILE_ROW_BYTES
            for part in range(2):
                first, second = splat_float32(0.0), splat_float32(0.0)
                if 2 * pair < size:
                    first = key_vector(size, source, 2 * pair, part)
                if 2 * pair + 1 < size:
                    second = key_vector(size, source, 2 * pair + 1, part)
                amx.store_bfloat_pairs(address + part * column, first, second)

    return load_keys


@inline
def _usable_page(scratch: int, token: int) -> Any:
    """Return the page of a token's value, or 0 if the value is not usable."""
    page = np.int64(0)
    if read_uint8(panel(scratch, Panel.USABLE) + token) != 0:
        page = value_page(scratch, token)
    return page


@once
def load_values_of(kind: str) -> Callable[..., Any]:
    value_vector = value_vector_of(kind)

    @inline
    def load_value(width: int, page: int, token: int, i: int) -> Any:
        """Load columns of a token's value: zeros after the last column, or everywhere if `page` is 0."""
        value = splat_float32(0.0)
        if page != 0 and i < width:
            value = value_vector(width, page, token % PAGE_TOKENS, i)
        return value

    @inline
    def load_values(arguments: AttentionArguments, scratch: int) -> Any:
        width, values, padded = (
            arguments.v_head_size,
            panel(scratch, Panel.VALUES),
            panel(scratch, Panel.SUM_BYTES) // 4,
        )
        probe = splat_float32(0.0)
        for token in range(0, CHUNK_TOKENS, 2):
            target = values + token // PAGE_TOKENS * amx.TILE_BYTES + token % PAGE_TOKENS // 2 * amx.TILE_ROW_BYTES
            first, second = _usable_page(scratch, token), _usable_page(scratch, token + 1)
            for i in range(0, padded, LANES):
                even, odd = load_value(width, first, token, i), load_value(width, second, token + 1, i)
                amx.store_bfloat_pairs(target + i // LANES * _VALUE_COLUMN_BYTES, even, odd)
                probe = probe + (even * 0.0 + odd * 0.0)
        return probe

    return load_values


@native_op(AttentionArguments)
def multiply_tile_group(arguments: AttentionArguments, scratch: int, row: int, begin: int, end: int) -> int:
    """Implement `multiply_group` of `prefill`."""
    steps, queries = panel(scratch, Panel.STEPS), _query_address(scratch, row)
    column = steps * amx.TILE_BYTES
    for page in range(begin, end, 2):
        keys = panel(scratch, Panel.KEYS) + 2 * page * column
        scores = scores_of(arguments, scratch, row) + 4 * PAGE_TOKENS * page
        if page + 1 < end:
            _multiply_four(queries, keys, column, steps, scores, SCORE_BYTES)
        else:
            _multiply_two(queries, keys, column, steps, scores, SCORE_BYTES)
    return 0


@inline
def store_weights(scores: int, page: int, first: Any, second: Any) -> None:
    amx.store_bfloats(scores + page * amx.TILE_ROW_BYTES, first, second)


@inline
def weight_of(scores: int, token: int) -> Any:
    return read_bfloat16(scores + 2 * token)


@native_op(AttentionArguments)
def add_tile_group(arguments: AttentionArguments, scratch: int, row: int, pages: int, unused: int) -> int:
    """Implement `add_group` of `prefill`."""
    values, stride = panel(scratch, Panel.VALUES), panel(scratch, Panel.SUM_BYTES)
    weights, sums = scores_of(arguments, scratch, row), panel(scratch, Panel.SUMS) + row * stride
    columns = stride // amx.TILE_ROW_BYTES
    for column in range(0, columns, 4):
        address, target = values + column * _VALUE_COLUMN_BYTES, sums + column * amx.TILE_ROW_BYTES
        if column + 2 < columns:
            _add_four(weights, address, _VALUE_COLUMN_BYTES, pages, target, stride)
        else:
            _add_two(weights, address, _VALUE_COLUMN_BYTES, pages, target, stride)
    return 0

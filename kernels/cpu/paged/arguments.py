"""The arguments that all operators of a layer share, and how they read them and the step."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...formats import PAGE_TOKENS
from ..lazy import inline
from ..memory import read_int32, read_int64, word, write_int64
from ..tape.context import ErrorCode, Word

(
    QUERY, QUERY_STRIDE, KEY, KEY_STRIDE, VALUE, VALUE_STRIDE, OUT, OUT_STRIDE,
    KEY_PAGES, KEY_BLOCK, VALUE_PAGES, VALUE_BLOCK, NUM_BLOCKS, KV_HEADS, GROUP, HEAD_SIZE, V_HEAD_SIZE, ITEM_BYTES,
    QUERY_FACTOR, SCORE_CAP, WINDOW, SINKS,
    COS, SIN, POSITIONS, LONG_COS, LONG_SIN, LONG_POSITIONS, HALF, INTERLEAVED,
    Q_NORM, K_NORM, EPSILON,
    MAKE_READY, MULTIPLY_KEYS, ADD_VALUES, ROWS_AT_ONCE, WEIGH, PANELS, LOAD_CHUNK, MULTIPLY_GROUP, ADD_GROUP,
) = range(42)  # fmt: skip
# KEY_BLOCK and VALUE_BLOCK are the bytes from a block to the next. QUERY_FACTOR, SCORE_CAP and SINKS are such that
# scores are in powers of two: softmax takes 2 ** score. From MAKE_READY on there are operators that others call by
# their address, so that each is small, and compiled once whoever calls it: MAKE_READY is `heads.make_heads_ready`;
# MULTIPLY_KEYS and ADD_VALUES are `products` of ROWS_AT_ONCE query rows; the others are what `few` and `many` say.
# PANELS is a table of `panels`.

NO_MAXIMUM = np.float32(-3.0e38)  # finite, so that the difference of two of them is zero and not NaN


@inline
def position_of(context: int, row: int) -> Any:
    """Index of a row's token in its sequence."""
    return read_int64(read_int64(context + 8 * Word.POSITIONS) + 8 * row)


@inline
def sequence_of(context: int, row: int) -> Any:
    """The sequence that a row belongs to."""
    return np.int64(read_int32(read_int64(context + 8 * Word.SEQUENCE_OF_ROW) + 4 * row))


@inline
def context_length(context: int, sequence: int) -> Any:
    """Tokens of a sequence in the cache, this step's included."""
    return np.int64(read_int32(read_int64(context + 8 * Word.CONTEXT_LENGTHS) + 4 * sequence))


@inline
def first_visible(arguments: int, position: int) -> Any:
    """The first key that a row at this position sees."""
    window = word(arguments, WINDOW)
    return max(np.int64(0), position - window + 1) if window > 0 else np.int64(0)


@inline
def list_pages(
    arguments: int, context: int, sequence: int, first: int, last: int, head: int, keys: int, values: int
) -> Any:
    """Write down the addresses of pages [first, last) of a head, of keys and of values each at their place.

    Returns 0, or ErrorCode.PAGE.
    """
    width = read_int64(context + 8 * Word.TABLE_WIDTH)
    if last > width:
        return ErrorCode.PAGE.value
    table = read_int64(context + 8 * Word.BLOCK_TABLES) + 4 * sequence * width
    key_bytes = PAGE_TOKENS * word(arguments, HEAD_SIZE) * word(arguments, ITEM_BYTES)
    value_bytes = PAGE_TOKENS * word(arguments, V_HEAD_SIZE) * word(arguments, ITEM_BYTES)
    first_key = word(arguments, KEY_PAGES) + head * key_bytes
    first_value = word(arguments, VALUE_PAGES) + head * value_bytes
    for index in range(first, last):
        block = np.int64(read_int32(table + 4 * index))
        if block < 0 or block >= word(arguments, NUM_BLOCKS):
            return ErrorCode.PAGE.value
        place = 8 * (index - first)
        write_int64(keys + place, first_key + block * word(arguments, KEY_BLOCK))
        write_int64(values + place, first_value + block * word(arguments, VALUE_BLOCK))
    return 0

"""Memory of prefill attention: a block of queries, and a chunk of keys and values.

A thread's scratch starts with a table of int64 entries: the addresses of the panels in the scratch, and a few sizes.
Operators read the entries by the names below, so they are compiled once for all sizes.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...cache_layout import PAGE_TOKENS
from ..jit.amx import TILE_CONFIG, TILE_ROWS
from ..jit.dsl import inline
from ..jit.memory import read_int64, write_int64
from ..jit.vector import LANES
from .arguments import AttentionArguments
from .heads import head_bytes

CHUNK_TOKENS = 128
CHUNK_PAGES = CHUNK_TOKENS // PAGE_TOKENS
BLOCK_TOKENS = 128  # tokens of a sequence that share the conversion of keys and values
SCORE_BYTES = 4 * CHUNK_TOKENS  # bytes of a row's scores
MOST_ROWS = 2 * TILE_ROWS  # maximum number of rows that are multiplied at a time


class Panel(IntEnum):
    """Entries of the table."""

    PAGES = 0  # addresses of the chunk's key pages, then of its value pages
    USABLE = 1  # one byte per token of the chunk: 1 if the block sees the token and its values are finite
    READY = 2  # prepared query heads of a token
    QUERIES = 3
    KEYS = 4
    VALUES = 5
    SCORES = 6  # scores of a group of rows, later replaced by weights
    SUMS = 7  # weighted values of each row so far
    MAXIMA = 8  # maximum score of each row so far
    TOTALS = 9  # sum of each row's weights so far: a vector with a partial sum per lane
    VALUE_PAGES = 10  # pages of values, if keys are the values
    CONFIG = 11  # configuration for configure_tiles
    QUERY_BYTES = 12  # bytes of a row of queries, or of a row of tiles of queries
    SUM_BYTES = 13  # bytes of a row of SUMS
    STEPS = 14  # number of tiles of a head
    ROWS = 15  # number of rows of the current block
    POSITION = 16  # position of the block's first row
    BEGIN = 17  # position of the chunk's first token
    LEFT_OUT = 18  # not 0 if some tokens that the block sees are not USABLE
    LENGTH = 19  # number of tokens of the block's sequence
    HEAD = 20  # first query head of the block


# Entries before CONFIG are addresses in the scratch. Entries before ROWS are the same for all blocks.
_ADDRESSES, _ENTRIES = Panel.CONFIG, Panel.ROWS
_HEADER_BYTES = 192
# Heads are padded to whole pairs of tiles.
_PADDING = 2 * LANES


class Panels:
    """The panels for a layer's shape.

    Args:
        value_page_bytes: see `latent.value_page_bytes`.

    Attributes:
        table: the entries, with addresses relative to the scratch.
        bytes: size of the scratch.
        v_head_size: padded size of a value.
    """

    def __init__(self, group: int, head_size: int, v_head_size: int, value_page_bytes: int = 0) -> None:
        # The last group of rows may be incomplete, but memory for a whole group is reserved.
        rows = _padded(BLOCK_TOKENS * group + MOST_ROWS)
        head, values = _padded(head_size), _padded(v_head_size)
        self.v_head_size = values
        steps = head // _PADDING
        query_bytes = max(head_bytes(head_size), 4 * head)
        self._end = _HEADER_BYTES
        entries = {
            Panel.PAGES: self._add(16 * CHUNK_PAGES),
            Panel.USABLE: self._add(CHUNK_TOKENS),
            Panel.READY: self._add((group + 1) * head_bytes(head_size)) + head_bytes(head_size),
            Panel.QUERIES: self._add(rows * query_bytes),
            Panel.KEYS: self._add(4 * CHUNK_TOKENS * head),
            Panel.VALUES: self._add(4 * CHUNK_TOKENS * values),
            Panel.SCORES: self._add(MOST_ROWS * SCORE_BYTES),
            Panel.SUMS: self._add(4 * rows * values),
            Panel.MAXIMA: self._add(4 * rows),
            Panel.TOTALS: self._add(4 * LANES * rows),
            Panel.VALUE_PAGES: self._add(CHUNK_PAGES * value_page_bytes),
            Panel.CONFIG: TILE_CONFIG.ctypes.data,
            Panel.QUERY_BYTES: head_bytes(head_size),
            Panel.SUM_BYTES: 4 * values,
            Panel.STEPS: steps,
        }
        self.table: NDArray[np.int64] = np.array([entries[Panel(index)] for index in range(_ENTRIES)], np.int64)
        self.bytes = self._end

    def _add(self, size: int) -> int:
        start, self._end = self._end, self._end + -(-size // 64) * 64
        return start


def _padded(size: int) -> int:
    return -(-size // _PADDING) * _PADDING


@inline
def open_panels(table: int, scratch: int) -> None:
    """Write the table at the start of the scratch."""
    for index in range(_ENTRIES):
        value = read_int64(table + 8 * index)
        write_int64(scratch + 8 * index, value + scratch if index < _ADDRESSES else value)


@inline
def panel(scratch: int, name: int) -> Any:
    """Return an entry of the table."""
    return read_int64(scratch + 8 * name)


@inline
def set_panel(scratch: int, name: int, value: int) -> None:
    """Set an entry of the table."""
    write_int64(scratch + 8 * name, value)


@inline
def value_page(scratch: int, token: int) -> Any:
    """Return the page that holds the value of a token in the chunk."""
    return read_int64(panel(scratch, Panel.PAGES) + 8 * (CHUNK_PAGES + token // PAGE_TOKENS))


@inline
def scores_of(arguments: AttentionArguments, scratch: int, row: int) -> Any:
    """Return the address of the scores (later the weights) of a row of the current group."""
    at_once = arguments.rows_at_once
    return panel(scratch, Panel.SCORES) + row % at_once * SCORE_BYTES

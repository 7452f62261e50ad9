"""Where attention of the prefill rows keeps a block of queries and a chunk of keys and values while it works on them.

A thread's scratch begins with a table of int64: addresses of the panels in it, and a few sizes. Operators read them by
the names below, so they are compiled once for all sizes.
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
BLOCK_TOKENS = 128  # of a sequence, that share the conversion of keys and values
SCORE_BYTES = 4 * CHUNK_TOKENS  # of a row
MOST_ROWS = 2 * TILE_ROWS  # that are multiplied at once


class Panel(IntEnum):
    """Entries of the table."""

    PAGES = 0  # addresses of the chunk's pages: of keys, then of values
    USABLE = 1  # a byte per token of the chunk: the block sees it, and its values are finite
    READY = 2  # query heads of a token
    QUERIES = 3
    KEYS = 4
    VALUES = 5
    SCORES = 6  # of a group of rows, which become its weights
    SUMS = 7  # weighted values of each row so far
    MAXIMA = 8  # of each row so far
    TOTALS = 9  # of each row's weights so far: a vector, whose lanes have a sum each
    CONFIG = 10  # for configure_tiles
    QUERY_BYTES = 11  # of a row of queries, or of a row of tiles of them
    SUM_BYTES = 12  # of a row of SUMS
    STEPS = 13  # tiles that a head takes
    ROWS = 14  # of the block that is worked on
    POSITION = 15  # of its first row
    BEGIN = 16  # position of the chunk's first token
    LEFT_OUT = 17  # not 0: some of the seen tokens are not USABLE


# The entries before CONFIG are addresses in the scratch, those before ROWS are the same for all blocks.
_ADDRESSES, _ENTRIES = Panel.CONFIG, Panel.ROWS
_HEADER_BYTES = 192
# Heads are padded to whole pairs of tiles.
_PADDING = 2 * LANES


class Panels:
    """Panels for a layer's shape.

    Attributes:
        table: the entries, addresses counted from the scratch.
        bytes: size of the scratch.
        v_head_size: padded.
    """

    def __init__(self, group: int, head_size: int, v_head_size: int) -> None:
        # The last group of rows need not be whole.
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
    """Write the table at the beginning of the scratch."""
    for index in range(_ENTRIES):
        value = read_int64(table + 8 * index)
        write_int64(scratch + 8 * index, value + scratch if index < _ADDRESSES else value)


@inline
def panel(scratch: int, name: int) -> Any:
    """An entry of the table."""
    return read_int64(scratch + 8 * name)


@inline
def set_panel(scratch: int, name: int, value: int) -> None:
    """Change an entry of the table."""
    write_int64(scratch + 8 * name, value)


@inline
def value_page(scratch: int, token: int) -> Any:
    """The page that holds the value of a token of the chunk."""
    return read_int64(panel(scratch, Panel.PAGES) + 8 * (CHUNK_PAGES + token // PAGE_TOKENS))


@inline
def scores_of(arguments: AttentionArguments, scratch: int, row: int) -> Any:
    """Scores, which become weights, of a row of the group that is worked on."""
    at_once = arguments.rows_at_once
    return panel(scratch, Panel.SCORES) + row % at_once * SCORE_BYTES

"""Where attention of the MANY rows keeps a block of queries and a chunk of keys and values while it works on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...formats import PAGE_TOKENS
from ..vector import LANES
from .heads import head_floats

CHUNK_TOKENS = 128
CHUNK_PAGES = CHUNK_TOKENS // PAGE_TOKENS
BLOCK_TOKENS = 64  # of a sequence, that share the conversion of keys and values
# Rows and columns of panels are padded to whole pairs of tiles.
_PADDING = 2 * LANES
SCORE_STRIDE = 4 * CHUNK_TOKENS


def _pad(size: int) -> int:
    return -(-size // _PADDING) * _PADDING


class Panels:
    """Offsets in a thread's scratch, in bytes, for a layer's shape.

    Attributes:
        rows: query rows of a block, padded; row = token * group + query head of the group.
        head_size, v_head_size: padded.
    """

    def __init__(self, group: int, head_size: int, v_head_size: int) -> None:
        self.rows = _pad(BLOCK_TOKENS * group)
        self.head_size, self.v_head_size = _pad(head_size), _pad(v_head_size)
        self.query_stride = 4 * max(head_floats(head_size), self.head_size)
        self.sum_stride = 4 * self.v_head_size
        self._end = 0
        self.pages = self._add(16 * CHUNK_PAGES)
        self.usable = self._add(CHUNK_TOKENS)  # a byte per token: it is seen by the block, and its values are finite
        self.work = self._add(self.query_stride)
        self.ready = self._add(self.query_stride)
        self.queries = self._add(self.rows * self.query_stride)
        self.keys = self._add(CHUNK_TOKENS * self.head_size * 4)
        self.values = self._add(CHUNK_TOKENS * self.v_head_size * 4)
        self.scores = self._add(_PADDING * SCORE_STRIDE)
        self.weights = self._add(_PADDING * SCORE_STRIDE)
        self.sums = self._add(self.rows * self.sum_stride)
        self.maxima = self._add(self.rows * 4)
        self.totals = self._add(self.rows * 4 * LANES)

    def _add(self, size: int) -> int:
        start, self._end = self._end, self._end + -(-size // 64) * 64
        return start

    @property
    def bytes(self) -> int:
        return self._end


@dataclass(frozen=True)
class Products:
    """How the products of a block are computed; all take the address of the scratch first.

    Attributes:
        rows: query rows that are multiplied at once.
        load_query: (scratch, row): the head that lies ready becomes a row of the queries.
        clear_queries: (scratch, first): rows from `first` on, to a multiple of `rows`, become zero.
        load_keys: (scratch, page): a page of keys becomes a part of the panel.
        load_values: (scratch): the usable values of the pages become the panel, zeros elsewhere; returns a vector that
            is zero if all of them are finite.
        multiply_keys: (scratch, row, pages): scores of `rows` rows from `row` on.
        store_weights: (scratch, row, page, first, second): a row's weights for the tokens of a page.
        weight: (scratch, row, token, maximum): such a weight again.
        multiply_values: (scratch, row, pages): weighted values of `rows` rows are added to their sums.
    """

    rows: int
    load_query: Callable[..., Any]
    clear_queries: Callable[..., Any]
    load_keys: Callable[..., Any]
    load_values: Callable[..., Any]
    multiply_keys: Callable[..., Any]
    store_weights: Callable[..., Any]
    weight: Callable[..., Any]
    multiply_values: Callable[..., Any]

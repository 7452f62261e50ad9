"""The step as operators see it: a table of int64 words, at one address for the life of a team's work.

Counts first: a tape's rows say on which of them the number of their items depends. Then addresses of arrays.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Word(IntEnum):
    """Index of a word of the context.

    A step's tokens are ordered: first the FEW rows, of sequences that have few tokens in this step (decoding, short
    chunks), then the MANY rows, of sequences with long chunks. Operators may treat the two differently; which a
    sequence's rows are depends on nothing but the sequence.
    """

    ONE = 0  # always 1
    TOKENS = 1  # T, rows of this step
    FEW = 2  # rows [0, FEW)
    MANY = 3  # rows [FEW, T)
    WANTED = 4  # R, rows whose logits are wanted
    SEQUENCES = 5  # S
    FEW_SEQUENCES = 6  # sequences [0, FEW_SEQUENCES) own the FEW rows
    FEW_SPLITS = 7  # pieces of context that attention over the FEW rows is cut into, all rows together
    CANCEL = 8  # not 0: operators need no longer do their work
    MANY_BLOCKS = 9  # blocks of neighbouring tokens that the MANY rows are cut into
    TOKEN_IDS = 16  # int64 [T]
    POSITIONS = 17  # int64 [T]
    QUERY_START = 18  # int32 [S + 1]
    CONTEXT_LENGTHS = 19  # int32 [S]
    BLOCK_TABLES = 20  # int32 [S, TABLE_WIDTH]
    TABLE_WIDTH = 21
    SLOTS = 22  # int64 [T]
    WANTED_ROWS = 23  # int64 [R]
    ROPE_TABLE = 24  # int32 [S]
    SEQUENCE_OF_ROW = 25  # int32 [T]
    SPLITS = 26  # int32 [FEW_SPLITS, 2]: row, number of the piece in its context
    PARTIALS = 27  # memory for the results of the pieces
    ROW_BLOCKS = 28  # int32 [MANY_BLOCKS, 3]: sequence, first row, number of rows


CONTEXT_WORDS = 64


class ErrorCode(IntEnum):
    """What an operator returns instead of working on something that would lead it outside its memory."""

    INDEX_OUTSIDE_TABLE = 1  # a token, a position or a wanted row is negative, or beyond the last row of its table
    SLOT = 2  # a slot outside the cache
    POSITION = 3  # a position outside its sequence, or rows of a sequence that do not follow each other
    PAGE = 4  # a block table too short for its sequence, or an entry outside the cache
    ROTARY_POSITION = 5  # a position outside the rotary tables


@dataclass
class ContextTable:
    """The table, and the arrays that its addresses point into."""

    words: NDArray[np.int64] = field(default_factory=lambda: np.zeros(CONTEXT_WORDS, np.int64))
    _held: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.words[Word.ONE] = 1

    @property
    def address(self) -> int:
        return int(self.words.ctypes.data)

    def count(self, word: Word, value: int) -> None:
        """Set a count."""
        self.words[word] = value

    def array(self, word: Word, array: NDArray[Any]) -> None:
        """Set an address; the array is held until the word is set again."""
        if not array.flags.c_contiguous:
            raise ValueError(f"{word.name} is not C-contiguous: shape {array.shape}, strides {array.strides}")
        self._held[word] = array
        self.words[word] = array.__array_interface__["data"][0]

"""The step as operators see it: a table of int64 words, at one address for the life of an executor.

Counts first: calls say on which of them the number of their items depends. Then addresses of arrays.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...interrupts import InterruptsDeferred


class Word(IntEnum):
    """Index of a word of the context.

    A step's tokens, of S sequences, are ordered: first the FEW rows, of sequences that have few tokens in this step
    (decoding, short chunks), then the MANY rows, of sequences with long chunks. Operators may treat the two
    differently; which a sequence's rows are depends on nothing but the sequence.
    """

    ONE = 0  # always 1
    TOKENS = 1  # T, rows of this step
    FEW = 2  # rows [0, FEW)
    MANY = 3  # rows [FEW, T)
    WANTED = 4  # R, rows whose logits are wanted
    FEW_SPLITS = 7  # pieces of context that attention over the FEW rows is cut into, all rows together
    CANCEL = 8  # not 0: operators need no longer do their work
    MANY_BLOCKS = 9  # blocks of neighbouring tokens that the MANY rows are cut into
    EXPERTS = 10  # experts that any token of the layer at hand is sent to; an operator of the step counts them
    TOKEN_IDS = 16  # int64 [T]
    POSITIONS = 17  # int64 [T]
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


class ContextTable:
    """The table, and the memory that its addresses point into.

    Attributes:
        words: int64 [CONTEXT_WORDS]. address: where they lie.
    """

    def __init__(self) -> None:
        self.words: NDArray[np.int64] = np.zeros(CONTEXT_WORDS, np.int64)
        self.address: int = self.words.__array_interface__["data"][0]
        self._view = self.words.data  # writes a word in a fifth of the time that an array takes
        self._view[Word.ONE] = 1
        self._memory: dict[Word, NDArray[Any]] = {}

    def count(self, word: Word, value: int) -> None:
        """Set a count."""
        self._view[word] = value

    def room(self, word: Word, count: int, dtype: Any) -> NDArray[Any]:
        """Memory for so many numbers at least, at the address in a word. It stays there until more are asked for."""
        memory = self._memory.get(word)
        if memory is None or len(memory) < count or memory.dtype != dtype:
            with InterruptsDeferred():  # machine code must never see an address without its memory
                memory = self._memory[word] = np.empty(2 * count + 1, dtype)
                self._view[word] = memory.__array_interface__["data"][0]
        return memory

    def array(self, word: Word, values: NDArray[Any]) -> None:
        """Copy numbers to the address in a word."""
        self.room(word, values.size, values.dtype)[: values.size] = values.reshape(-1)

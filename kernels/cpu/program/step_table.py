"""The step as operators see it: a table of int64 fields, at one address for the life of an executor.

Counts first: calls say on which of them the number of their items depends. Then addresses of arrays.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.common.interrupts import InterruptsDeferred


class StepField(IntEnum):
    """Index of a field of the step's table.

    A step's tokens, of S sequences, are ordered: first the decode rows (of decoding and short prompts), then the
    prefill rows (of long prompts). Each have numerics of their own; which a row is depends on its sequence alone.
    """

    ONE = 0  # always 1
    TOKENS = 1  # T, rows of this step
    DECODE_ROWS = 2  # rows [0, DECODE_ROWS)
    PREFILL_ROWS = 3  # rows [DECODE_ROWS, T)
    LOGITS_ROWS = 4  # R, rows whose logits are wanted
    KV_SPLITS = 7  # splits of the context that attention of the decode rows works on, all rows together
    CANCEL = 8  # not 0: operators need no longer do their work
    PREFILL_BLOCKS = 9  # blocks of neighbouring tokens that the prefill rows are cut into
    SEQUENCES = 5  # S
    EXPERTS = 10  # experts that any token of the layer at hand is sent to; an operator of the step counts them
    LORA_BLOCKS = 11  # blocks of ranks that adapters of the step have, all of them together; 0 = no row has any
    TOKEN_IDS = 16  # int64 [T]
    POSITIONS = 17  # int64 [T]
    CONTEXT_LENGTHS = 19  # int32 [S]
    BLOCK_TABLES = 20  # int32 [cache groups, S, TABLE_WIDTH]
    TABLE_WIDTH = 21
    SLOT_MAPPING = 22  # int64 [cache groups, T]
    LOGITS_INDICES = 23  # int64 [R]
    ROPE_TABLE = 24  # int32 [S]
    SEQUENCE_OF_ROW = 25  # int32 [T]
    ROW_SPLITS = 26  # int32 [KV_SPLITS, 2]: row, number of the split in its context
    PARTIALS = 27  # memory for the results of the splits
    ROW_BLOCKS = 28  # int32 [PREFILL_BLOCKS, 3]: sequence, first row, number of rows
    # Adapters of the rows; see `linear.lora`.
    ADAPTERS_OF_SEQUENCE = 29  # int32 [S + 1]: where those of a sequence begin in the next
    ROW_ADAPTERS = 30  # int64 [E, 2]: address of an adapter's table, where its part begins in a row of HIDDEN, in bytes
    SHRINK_BLOCKS = 31  # int64 [LORA_BLOCKS, 4]: address of a table, first rank, begin and end in SHRINK_ROWS
    SHRINK_ROWS = 32  # int32 [.., 3]: row, where its part begins in a row of HIDDEN, bits of the weight (float32)
    HIDDEN = 33  # float32 [targets, T, HIDDEN_STRIDE / 4]
    HIDDEN_STRIDE = 34
    HIDDEN_TARGET = 35  # bytes from a target to the next
    # States of recurrent layers.
    SEQUENCE_STARTS = 36  # int32 [S + 1]: rows of a sequence
    STATE_READS = 37  # int32 [S]: the slot to begin from; -1 = zeros
    STATE_WRITES = 38  # int32 [T]: the slot for the state behind a row; -1 = none


CONTEXT_FIELDS = 64


class ErrorCode(IntEnum):
    """What an operator returns instead of working on something that would lead it outside its memory."""

    INDEX_OUTSIDE_TABLE = 1  # a token, a position or a logits index is negative, or beyond the last row of its table
    SLOT = 2  # a slot outside the cache
    POSITION = 3  # a position outside its sequence, or rows of a sequence that do not follow each other
    PAGE = 4  # a block table too short for its sequence, or an entry outside the cache
    ROTARY_POSITION = 5  # a position outside the rotary tables


class ContextTable:
    """The table, and the memory that its addresses point into.

    Attributes:
        values: int64 [CONTEXT_FIELDS]. address: where they lie.
    """

    def __init__(self) -> None:
        self.values: NDArray[np.int64] = np.zeros(CONTEXT_FIELDS, np.int64)
        self.address: int = self.values.__array_interface__["data"][0]
        self._view = self.values.data  # writes a field in a fifth of the time that an array takes
        self._view[StepField.ONE] = 1
        self._memory: dict[StepField, NDArray[Any]] = {}

    @property
    def is_cancelled(self) -> bool:
        """Whether operators need no longer do their work."""
        return self._view[StepField.CANCEL] != 0

    def count(self, field: StepField, value: int) -> None:
        """Set a count."""
        self._view[field] = value

    def room(self, field: StepField, count: int, dtype: Any) -> NDArray[Any]:
        """Memory for so many numbers at least, at the address in a field. It stays there until more are asked for."""
        memory = self._memory.get(field)
        if memory is None or len(memory) < count or memory.dtype != dtype:
            with InterruptsDeferred():  # machine code must never see an address without its memory
                memory = self._memory[field] = np.empty(2 * count + 1, dtype)
                self._view[field] = memory.__array_interface__["data"][0]
        return memory

    def array(self, field: StepField, values: NDArray[Any]) -> None:
        """Copy numbers to the address in a field."""
        self.room(field, values.size, values.dtype)[: values.size] = values.reshape(-1)

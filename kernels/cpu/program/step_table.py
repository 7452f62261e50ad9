"""The step as operators see it: a table of int64 fields at an address that is fixed for the lifetime of an executor.

The first fields are counts, on which the numbers of items in calls depend. The other fields are addresses of arrays.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.common.interrupts import InterruptsDeferred


class StepField(IntEnum):
    """Index of a field of the step's table.

    The tokens of a step belong to S sequences and are ordered: first the decode rows (of decoding and short prompts),
    then the prefill rows (of long prompts). The two kinds of rows have separate numerics. The kind of a row depends
    only on its sequence.
    """

    ONE = 0  # always 1
    TOKENS = 1  # T, rows of this step
    DECODE_ROWS = 2  # rows [0, DECODE_ROWS)
    PREFILL_ROWS = 3  # rows [DECODE_ROWS, T)
    LOGITS_ROWS = 4  # R, rows whose logits are requested
    KV_SPLITS = 7  # splits of the contexts of all decode rows, which attention works on
    CANCEL = 8  # not 0 if operators can skip their work
    PREFILL_BLOCKS = 9  # blocks of consecutive tokens that the prefill rows are divided into
    SEQUENCES = 5  # S
    EXPERTS = 10  # experts that tokens of the current layer are routed to; counted by an operator
    LORA_BLOCKS = 11  # blocks of ranks of all adapters of the step; 0 = no row has an adapter
    TOKEN_IDS = 16  # int64 [T]
    POSITIONS = 17  # int64 [T]
    TOKEN_TYPES = 18  # int64 [T]; only if the program reads it
    CONTEXT_LENGTHS = 19  # int32 [S]
    BLOCK_TABLES = 20  # int32 [cache groups, S, TABLE_WIDTH]
    TABLE_WIDTH = 21
    SLOT_MAPPING = 22  # int64 [cache groups, T]
    LOGITS_INDICES = 23  # int64 [R]
    ROPE_TABLE = 24  # int32 [S]
    SEQUENCE_OF_ROW = 25  # int32 [T]
    ROW_SPLITS = 26  # int32 [KV_SPLITS, 2]: row, index of the split in the row's context
    PARTIALS = 27  # memory for the results of the splits
    ROW_BLOCKS = 28  # int32 [PREFILL_BLOCKS, 3]: sequence, first row, number of rows
    # Adapters of the rows; see `linear.lora`.
    ADAPTERS_OF_SEQUENCE = 29  # int32 [S + 1]: first entry of each sequence in ROW_ADAPTERS, and the end
    ROW_ADAPTERS = 30  # int64 [E, 2]: address of an adapter's table, byte offset of its part in a row of HIDDEN
    SHRINK_BLOCKS = 31  # int64 [LORA_BLOCKS, 4]: address of a table, first rank, begin and end in SHRINK_ROWS
    SHRINK_ROWS = 32  # int32 [.., 3]: row, byte offset of the part in a row of HIDDEN, bits of the weight (float32)
    HIDDEN = 33  # float32 [targets, T, HIDDEN_STRIDE / 4]
    HIDDEN_STRIDE = 34
    HIDDEN_TARGET = 35  # bytes between consecutive targets
    # States of recurrent layers.
    SEQUENCE_STARTS = 36  # int32 [S + 1]: first row of each sequence, and the end
    STATE_READS = 37  # int32 [S]: the slot to start from; -1 = zeros
    STATE_WRITES = 38  # int32 [T]: the slot for the state after a row; -1 = none


CONTEXT_FIELDS = 64


class ErrorCode(IntEnum):
    """Code that an operator returns if its inputs would cause it to access memory outside its arrays."""

    INDEX_OUTSIDE_TABLE = 1  # a token, position or logits index is negative, or after the last row of its table
    SLOT = 2  # a slot outside the cache
    POSITION = 3  # a position outside its sequence, or rows of a sequence whose positions are not consecutive
    PAGE = 4  # a block table too short for its sequence, or an entry outside the cache
    ROTARY_POSITION = 5  # a position outside the rotary tables
    BIAS_POSITION = 6  # a position outside the attention bias


class ContextTable:
    """The table, and the memory that its addresses point to.

    Attributes:
        values: int64 [CONTEXT_FIELDS].
        address: address of `values`.
    """

    def __init__(self) -> None:
        self.values: NDArray[np.int64] = np.zeros(CONTEXT_FIELDS, np.int64)
        self.address: int = self.values.__array_interface__["data"][0]
        self._view = self.values.data  # writing a field to this view takes a fifth of the time of the array
        self._view[StepField.ONE] = 1
        self._memory: dict[StepField, NDArray[Any]] = {}

    @property
    def is_cancelled(self) -> bool:
        """True if operators can skip their work."""
        return self._view[StepField.CANCEL] != 0

    def count(self, field: StepField, value: int) -> None:
        """Set a count."""
        self._view[field] = value

    def room(self, field: StepField, count: int, dtype: Any) -> NDArray[Any]:
        """Return memory for at least `count` numbers at the address in a field, valid until more numbers are needed."""
        memory = self._memory.get(field)
        if memory is None or len(memory) < count or memory.dtype != dtype:
            with InterruptsDeferred():  # machine code must never see an address whose memory is freed
                memory = self._memory[field] = np.empty(2 * count + 1, dtype)
                self._view[field] = memory.__array_interface__["data"][0]
        return memory

    def array(self, field: StepField, values: NDArray[Any]) -> None:
        """Copy numbers to the memory at the address in a field."""
        self.room(field, values.size, values.dtype)[: values.size] = values.reshape(-1)

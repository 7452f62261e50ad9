"""What the sampling kernel takes: arrays with one entry per row, and memory to work in."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from ..checks import check
from . import codes
from .passes import BLOCK
from .row import NUM_FLAGS, NUM_STATES


@dataclass(frozen=True)
class SamplingBatch:
    """What is to be done with A rows.

    Attributes:
        steps: int64 [A, MAX_STEPS]; settings: float64 [A, NUM_SETTINGS]; spans: int64 [A, NUM_SPANS]; see `codes`.
        counters: uint64 [A, 3]: seed, row inside the request, position. Random numbers depend on nothing else.
        replaced: float32 [R, V], logits that stand in for the given ones.
        edit_ids, edit_values: int32 and float32 [E]: added to the logits before everything else; -inf masks.
        tokens: int32 [L], the histories (or as much of them as counts), end to end.
    """

    steps: NDArray[np.int64]
    settings: NDArray[np.float64]
    counters: NDArray[np.uint64]
    spans: NDArray[np.int64]
    replaced: NDArray[np.float32]
    edit_ids: NDArray[np.int32]
    edit_values: NDArray[np.float32]
    tokens: NDArray[np.int32]

    @property
    def num_rows(self) -> int:
        """Rows to sample."""
        return len(self.steps)

    def check(self, num_logits: int, vocab_size: int) -> None:
        """Every index is inside its array: machine code does not look.

        Raises:
            ValueError: one is not, or an array has another type or shape.
        """
        rows, edits = self.num_rows, len(self.edit_ids)
        check("steps", self.steps, (rows, codes.MAX_STEPS), np.dtype(np.int64))
        check("settings", self.settings, (rows, codes.NUM_SETTINGS), np.dtype(np.float64))
        check("counters", self.counters, (rows, 3), np.dtype(np.uint64))
        check("spans", self.spans, (rows, codes.NUM_SPANS), np.dtype(np.int64))
        check("replaced", self.replaced, (None, vocab_size))
        check("edit_ids", self.edit_ids, (edits,), np.dtype(np.int32))
        check("edit_values", self.edit_values, (edits,))
        check("tokens", self.tokens, (None,), np.dtype(np.int32))
        for name, ids in (("edit_ids", self.edit_ids), ("tokens", self.tokens)):
            if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
                raise ValueError(f"{name} reach from {ids.min()} to {ids.max()}, expected 0 to {vocab_size - 1}")
        for name, column, low, high in (
            ("source", codes.SOURCE, -len(self.replaced), num_logits - 1),
            ("first edit", codes.FIRST_EDIT, 0, edits),
            ("end of the edits", codes.END_EDIT, 0, edits),
            ("first token", codes.FIRST_TOKEN, 0, len(self.tokens)),
            ("end of the tokens", codes.END_TOKEN, 0, len(self.tokens)),
        ):
            values = self.spans[:, column]
            if rows and not low <= int(values.min()) <= int(values.max()) <= high:
                raise ValueError(f"{name} of a row is {values.min()} to {values.max()}, expected {low} to {high}")


# Numba types of Workspace.arrays.
SLOT_ARRAYS = "float32[:,::1], float32[:,:,::1], float64[:,:,::1], int32[:,:,::1], float64[:,::1], int64[:,::1]"


@dataclass(frozen=True)
class Workspace:
    """Memory for a number of slots; each slot works on one row after another. Pages are touched only when needed.

    Arrays are [slots, ...]; see `row.Row`.
    """

    own: NDArray[np.float32]
    blocks: NDArray[np.float32]
    numbers: NDArray[np.float64]
    ids: NDArray[np.int32]
    state: NDArray[np.float64]
    flags: NDArray[np.int64]

    @classmethod
    def allocate(cls, slots: int, vocab_size: int) -> Workspace:
        """Memory for rows of vocab_size logits."""
        return cls(
            own=np.empty((slots, vocab_size), np.float32),
            blocks=np.empty((slots, 2, -(-vocab_size // BLOCK)), np.float32),
            numbers=np.empty((slots, 3, vocab_size), np.float64),
            ids=np.zeros((slots, 3, vocab_size), np.int32),
            state=np.empty((slots, NUM_STATES), np.float64),
            flags=np.empty((slots, NUM_FLAGS), np.int64),
        )

    @property
    def slots(self) -> int:
        """Rows that can be worked on at a time."""
        return len(self.own)

    @property
    def vocab_size(self) -> int:
        """Logits per row."""
        return int(self.own.shape[1])

    @property
    def arrays(self) -> tuple[NDArray[np.generic], ...]:
        """All arrays in order."""
        return tuple(getattr(self, field.name) for field in fields(self))

"""What one step tells its kernels: which tokens, where they stand, which blocks they see, which rows are wanted.

A step works on a flat batch of T tokens that belong to S sequences; decode rows and prefill chunks mix freely.
Everything that differs between decode, prefill and mixed batches is in here, so a plan never asks which it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from .cpu.team import Team


@dataclass(frozen=True)
class StepContext:
    """Metadata of one step over a flat batch.

    Attributes:
        positions: int64 [T], index of each token inside its sequence.
        query_start: int32 [S + 1], sequence s owns rows query_start[s]:query_start[s + 1].
        context_lengths: int32 [S], tokens visible to the last row of each sequence, this step's included.
        block_tables: int32 [S, max_blocks], block ids of each sequence, in order.
        slots: int64 [T], where each token's key and value go: block * block_size + offset.
        few_sequences: so many sequences come first whose rows are FEW; those of the others are MANY.
        wanted_rows: int64 [R], rows whose logits are wanted.
        rope_table: int32 [S], which RoPE table a sequence uses (0 short, 1 long).
        layers: per attention layer its paged keys and values.
        team: the threads that share the work; None runs on the calling thread.
        table: the same step as tapes read it; None where no tape is walked.
    """

    positions: NDArray[np.int64]
    query_start: NDArray[np.int32]
    context_lengths: NDArray[np.int32]
    block_tables: NDArray[np.int32]
    slots: NDArray[np.int64]
    few_sequences: int
    wanted_rows: NDArray[np.int64]
    rope_table: NDArray[np.int32]
    layers: Sequence[Any]
    team: Team | None = None
    table: Any = None

"""What a decoder is to the rest of the engine: sequences with state, and logits for their pending tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Logits = NDArray[np.float32]


class DecoderSequence(Protocol):
    """One growing token sequence and its cached state.

    `tokens` may be appended to freely; `num_computed` of them are in the cache.
    """

    tokens: list[int]

    @property
    def num_computed(self) -> int: ...

    def rewind(self, length: int) -> None:
        """Forget all tokens from `length` on. The last one kept becomes pending: its logits may be asked for."""

    def close(self) -> None:
        """Give the cached state back."""


class Decoder(Protocol):
    """Computes logits. Safe to use from several threads, each with its own sequences."""

    vocab_size: int

    def open(self) -> Any:
        """A new empty DecoderSequence."""

    def compute(
        self, sequences: Sequence[Any], *, all_rows: bool = False, token_budget: int | None = None
    ) -> list[Logits]:
        """Compute the pending tokens of every sequence.

        Args:
            sequences: each with at least one pending token.
            all_rows: whether the logits of every pending token are wanted, or only those of the last one.
            token_budget: most tokens in one step; None = the decoder's own choice.

        Returns:
            Per sequence float32 [rows, vocab_size]: rows = 1, or the number of pending tokens with all_rows.

        Raises:
            CacheCapacityError: no room; the sequences are as they were.
        """

    def close(self) -> None:
        """Give all memory back."""

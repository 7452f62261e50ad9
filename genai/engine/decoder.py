"""What a decoder is to the rest of the engine: sequences with state, and logits for their pending tokens."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from genai.kernels.cpu.team import Team

Logits = NDArray[np.float32]


class DecoderSequence(Protocol):
    """One growing token sequence and its cached state.

    `num_computed` of its `tokens` are in the cache.
    """

    tokens: list[int]

    def append(self, tokens: Sequence[int], *, together: int = 0) -> None:
        """Add tokens. Many that come together may be computed by other kernels than a few, which round differently.

        Args:
            together: of how many these are a part, where they are appended in pieces.
        """

    @property
    def num_computed(self) -> int: ...

    def rewind(self, length: int) -> None:
        """Forget all tokens from `length` on. The last one kept becomes pending: its logits may be asked for."""

    def drop_cache(self) -> None:
        """Give the cached state back and keep the tokens: all of them are pending again."""

    def close(self) -> None:
        """Give the cached state back."""


class Decoder(Protocol):
    """Computes logits. Safe to use from several threads, each with its own sequences."""

    vocab_size: int
    team: Team

    def open(self) -> Any:
        """A new empty DecoderSequence."""

    def fork(self, sequence: Any) -> Any:
        """A sequence with the same tokens that shares what is cached; each may go its own way."""

    def step(
        self, sequences: Sequence[Any], *, all_rows: Collection[int] = (), token_budget: int | None = None
    ) -> list[Logits | None]:
        """Compute pending tokens of the sequences: one step, which may leave long prompts unfinished.

        Args:
            sequences: those without pending tokens take no part.
            all_rows: indices of sequences of which the logits of every token are wanted.
            token_budget: most tokens in the step; None = the decoder's own choice.

        Returns:
            Per sequence float32 [rows, vocab_size], or None. rows = 1, the logits after its last token, once all its
            tokens are computed; with all_rows, a row per token of this step.

        Raises:
            CacheCapacityError: no room; the sequences are as they were.
            StepInterrupted: see interrupt.
        """

    def interrupt(self, sequences: Collection[Any]) -> None:
        """Give up the step in progress if it computes these sequences alone; it raises StepInterrupted soon.

        Called from another thread than the step's. Without effect where a step cannot be given up.
        """

    def reuse(self, sequence: Any) -> int:
        """Fill a sequence of which nothing is computed with the cached beginning of its tokens.

        Returns:
            How many tokens were found; always less than there are.
        """

    def publish(self, sequence: Any) -> None:
        """Let later sequences reuse what this one has computed."""

    def close(self) -> None:
        """Give all memory back."""


def compute(
    decoder: Decoder, sequences: Sequence[Any], *, all_rows: bool = False, token_budget: int | None = None
) -> list[Logits]:
    """Compute all pending tokens of every sequence.

    Args:
        sequences: each with at least one pending token.
        all_rows: whether the logits of every pending token are wanted, or only those of the last one.
        token_budget: most tokens in one step; None = the decoder's own choice.

    Returns:
        Per sequence float32 [rows, vocab_size]: rows = 1, or the number of pending tokens with all_rows.

    Raises:
        CacheCapacityError: no room. Steps that were done count; the tokens of the others are still pending.
    """
    results: list[list[Logits]] = [[] for _ in sequences]
    wanted = range(len(sequences)) if all_rows else ()
    while any(sequence.num_computed < len(sequence.tokens) for sequence in sequences):
        for rows, logits in zip(
            results, decoder.step(sequences, all_rows=wanted, token_budget=token_budget), strict=True
        ):
            if logits is not None:
                rows.append(logits)
    return [rows[0] if len(rows) == 1 else np.concatenate(rows) for rows in results]


def stacked(rows: Sequence[Logits]) -> Logits:
    """Rows [vocab_size] as float32 [rows, vocab_size]: where a step gave them one after the other, its own memory."""
    first, owner = rows[0], rows[0].base
    begin = first.ctypes.data
    if isinstance(owner, np.ndarray) and owner.flags.c_contiguous:
        places = [begin + index * first.nbytes for index in range(len(rows))]
        if all(row.base is owner and row.ctypes.data == place for row, place in zip(rows, places, strict=True)):
            return np.ndarray((len(rows), first.size), first.dtype, owner, begin - owner.ctypes.data)
    return np.stack(rows)

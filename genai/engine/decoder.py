"""A decoder as the engine sees it: it opens sequences and computes logits for their pending tokens."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence

import numpy as np

from genai.kernels.device import Executor, TokenChoice
from genai.kvcache.pool import BlockPool

from ..errors import ConfigError, UnsupportedModelError
from .adapter_mix import AdapterMix
from .scheduler import StepPlan, plan_step
from .sequence import ContextShift, DecoderSequence, Logits
from .stored import StoredArray, StoredTokens


class Decoder(ABC):
    """Computes logits. Safe to use from several threads, each with its own sequences.

    Attributes:
        output_names: outputs that give a row per token: the logits, then others, such as hidden states.
        pool: the blocks that its sequences share, of `block_size` tokens; None = each has memory of its own.
        num_groups: how many blocks a short sequence takes: one for each cache group.
        token_budget: in a step of so many tokens it is fastest. most_tokens: more cannot be in one.
        has_numerics: whether tokens differ in how they round, see DecoderSequence.numerics.
        verifies: whether sequences may have proposals: tokens then have the same bits in a step with others of their
            sequence as one by one.
        runs_ahead: whether `step_ahead` may start anything.
    """

    has_numerics = False
    runs_ahead = False

    pool: BlockPool | None = None
    block_size = num_groups = 1
    token_budget = most_tokens = sys.maxsize
    verifies = False
    vocab_size: int
    executor: Executor
    output_names: tuple[str, ...]

    @property
    def pools(self) -> Sequence[BlockPool]:
        """All that its sequences take blocks from, by the numbers that `GroupDemand.pool` names."""
        return [] if self.pool is None else [self.pool]

    @abstractmethod
    def open(self) -> DecoderSequence:
        """A new empty sequence."""

    @abstractmethod
    def step(
        self, sequences: Sequence[DecoderSequence], step: StepPlan, *, all_rows: Collection[int] = (), output: str = ""
    ) -> list[Logits | None]:
        """Compute pending tokens of some of the sequences.

        Args:
            step: see plan_step.
            all_rows: indices of sequences of which the logits of every token are wanted.
            output: one of `output_names` whose rows are wanted in place of the logits.

        Returns:
            Per sequence float32 [rows, vocab_size], or None. Once all its tokens are computed, the logits after its
            last token and after each proposal that was computed; with all_rows, a row per token of this step.

        Raises:
            CacheCapacityError: no room; the sequences are as they were.
            StepInterrupted: see interrupt.
        """

    def step_ahead(self, sequences: Sequence[DecoderSequence], choice: TokenChoice, rows: Sequence[int]) -> bool:
        """Start to compute the token that each sequence is about to be given, while it is still being chosen.

        What a step of a GPU takes from the host are numbers that are known before the token is: its position, its slot,
        that there will be one. The token itself goes from the sampler's outcomes to the step's tokens inside the
        device. So the host reads tokens one step behind: while it does, and makes text of them, the device computes.
        Each sequence notes what was started (`DecoderSequence.ahead`). If the token turns out to be another sequence's
        end, or is taken back, or anything but that one token is appended, that is dropped like proposals are: a slot
        behind the end was written to, in the device's order before all that may be written there later.

        Args:
            sequences: each computed to its end, without proposals.
            choice: what chooses their tokens; rows: the row of each in it.

        Returns:
            False: nothing was started, and the sequences are as they were. Whatever stands in the way (no room in the
            cache, a device that failed, a closed model) comes up again, and is dealt with, where the step is made as
            usual.
        """
        return False

    def interrupt(self, sequences: Collection[DecoderSequence]) -> None:  # noqa: B027 - what cannot be given up is ended
        """Give up the step in progress if it computes these sequences alone; it raises StepInterrupted soon.

        Called from another thread than the step's. Without effect where a step cannot be given up.
        """

    def check_shift(self, shift: ContextShift) -> None:
        """Raise unless sequences may have this `shift`.

        Raises:
            UnsupportedModelError: keys of this model cannot move. OptionError: too few tokens would be left.
        """
        raise UnsupportedModelError(
            "the context cannot be shifted with this model",
            "its graph runs sequence by sequence, as it was exported, with a cache of its own",
            "leave ctx_shift out, or export a graph that can be flattened (info.reason says what is in the way)",
        )

    def restore(
        self,
        stored: StoredTokens,
        read: Callable[[memoryview], None],
        adapters: AdapterMix | None = None,
        *,
        earlier: bool = False,
    ) -> DecoderSequence:
        """A sequence with the tokens of another one, and its state.

        Args:
            stored: its tokens, and how many of them have their state in arrays.
            read: fills memory with the bytes of the arrays, one after the other.
            adapters: what its tokens went through, and will.
            earlier: whether the arrays are those of `earlier_arrays_for`, instead of `arrays_for`.

        What was read is not published: nobody but this sequence and its forks goes on from it.

        Raises:
            CacheCapacityError: no room. What `read` raises; nothing is kept then.
        """
        raise NotImplementedError

    def arrays_for(self, num_stored: int) -> list[StoredArray]:
        """The arrays that hold the state of so many tokens; their sizes are settled by the model alone."""
        raise NotImplementedError

    def earlier_arrays_for(self, num_stored: int) -> list[StoredArray]:
        """The arrays in which earlier versions saved the same state."""
        return self.arrays_for(num_stored)

    def close(self) -> None:  # noqa: B027 - where nothing is kept outside the sequences
        """Give all memory back."""


def check_width(logits: Logits, vocab_size: int) -> None:
    """Check what a graph gave.

    Raises:
        ConfigError: its last axis is not the vocabulary.
    """
    width = logits.shape[-1] if logits.ndim else 0
    if width != vocab_size:
        raise ConfigError(
            f"the model gives {width} logits, genai_config.json says vocab_size {vocab_size}",
            "both must agree",
            f"set model.vocab_size to {width}",
        )


def compute(
    decoder: Decoder,
    sequences: Sequence[DecoderSequence],
    *,
    all_rows: bool = False,
    token_budget: int | None = None,
    output: str = "",
) -> list[Logits]:
    """Compute all pending tokens of every sequence.

    Args:
        sequences: each with at least one pending token.
        all_rows: whether the logits of every pending token are wanted, or only those of the last one.
        token_budget: most tokens in one step; None = the decoder's own choice.
        output: one of the decoder's outputs in place of the logits.

    Returns:
        Per sequence float32 [rows, vocab_size]: rows = 1, or the number of pending tokens with all_rows.

    Raises:
        CacheCapacityError: no room. Steps that were done count; the tokens of the others are still pending.
    """
    results: list[list[Logits]] = [[] for _ in sequences]
    wanted = range(len(sequences)) if all_rows else ()
    budget = min(token_budget or decoder.token_budget, decoder.most_tokens)
    while step := plan_step([sequence.pending() for sequence in sequences], budget):
        for rows, logits in zip(results, decoder.step(sequences, step, all_rows=wanted, output=output), strict=True):
            if logits is not None:
                rows.append(logits)
    return [rows[0] if len(rows) == 1 else np.concatenate(rows) for rows in results]

"""The interface of a decoder, which opens sequences and computes logits for their pending tokens."""

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
    """A model that computes logits. Several threads may use a decoder, each with separate sequences.

    Attributes:
        output_names: the outputs with one row per token: the logits first, then others, such as hidden states.
        pool: the pool of blocks, of `block_size` tokens each, that the decoder's sequences share; None = each sequence
            has separate memory.
        num_groups: number of blocks that a short sequence uses: one per cache group.
        token_budget: number of tokens at which a step is most efficient.
        most_tokens: maximum number of tokens in a step.
        has_numerics: True if tokens can be rounded differently; see DecoderSequence.numerics.
        verifies: True if sequences may have draft tokens. The result for a token must then be bit-identical whether it
            is computed alone or in a step with other tokens of its sequence.
        runs_ahead: True if `step_ahead` may start a step.
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
        """The pools from which the decoder's sequences allocate blocks, indexed by `GroupDemand.pool`."""
        return [] if self.pool is None else [self.pool]

    @abstractmethod
    def open(self) -> DecoderSequence:
        """Open a new empty sequence."""

    @abstractmethod
    def step(
        self, sequences: Sequence[DecoderSequence], step: StepPlan, *, all_rows: Collection[int] = (), output: str = ""
    ) -> list[Logits | None]:
        """Compute pending tokens of some of the sequences.

        Args:
            sequences: the sequences.
            step: the plan of the step, from plan_step.
            all_rows: indices of sequences for which to return the logits of every token.
            output: one of `output_names` to return instead of the logits.

        Returns:
            For each sequence, float32 [rows, vocab_size] or None. If the step completes the sequence, the rows are the
            logits after its last token and after each computed draft token. With all_rows, the logits have one row per
            token of this step.

        Raises:
            CacheCapacityError: the cache is full; the sequences are unchanged.
            StepInterrupted: see interrupt.
        """

    def step_ahead(self, sequences: Sequence[DecoderSequence], choice: TokenChoice, rows: Sequence[int]) -> bool:
        """Start computing each sequence's next token while that token is still being chosen.

        A GPU step needs from the host only numbers that are known before the token is: its position and its slot. The
        token itself is copied on the device, from the sampler's results to the step's inputs. The host therefore reads
        tokens one step late, and the device computes while the host reads and detokenises them. Each sequence records
        the started step (`DecoderSequence.ahead`). If the token turns out to end the sequence, is taken back, or
        another token is appended, the step is dropped like draft tokens. This is safe because the step only wrote to a
        slot after the end of the sequence, before anything else is written to that slot.

        Args:
            sequences: sequences without pending or draft tokens.
            choice: the choice of their tokens, in progress.
            rows: the row of each sequence in `choice`.

        Returns:
            False if no step was started and the sequences are unchanged. The cause (a full cache, a failed device, a
            closed model) recurs in the next normal step and is handled there.
        """
        return False

    def interrupt(self, sequences: Collection[DecoderSequence]) -> None:  # noqa: B027 - optional
        """Cancel the current step if it computes only these sequences; the step then soon raises StepInterrupted.

        Call this method from a thread other than the one that runs the step. It has no effect if the decoder cannot
        cancel steps.
        """

    def check_shift(self, shift: ContextShift) -> None:
        """Raise an error if sequences of this decoder cannot use this context shift.

        Raises:
            UnsupportedModelError: keys of this model cannot be moved.
            OptionError: too few tokens would remain.
        """
        raise UnsupportedModelError(
            "context shift is not supported for this model",
            "the model's graph cannot be flattened, so each sequence has a separate cache",
            "remove ctx_shift, or export a graph that can be flattened (see info.reason)",
        )

    def restore(
        self,
        stored: StoredTokens,
        read: Callable[[memoryview], None],
        adapters: AdapterMix | None = None,
        *,
        earlier: bool = False,
    ) -> DecoderSequence:
        """Open a sequence with saved tokens and their state.

        The state is not published: only this sequence and its forks use it.

        Args:
            stored: the tokens, and the number of tokens whose state is in the arrays.
            read: fills memory with the bytes of the arrays, in order.
            adapters: the adapters of the saved tokens and of all later ones.
            earlier: True if the arrays are those of `earlier_arrays_for` instead of `arrays_for`.

        Raises:
            CacheCapacityError: the cache is full.
            Exception: any error raised by `read`; the sequence is closed.
        """
        raise NotImplementedError

    def arrays_for(self, num_stored: int) -> list[StoredArray]:
        """Return the arrays for the state of `num_stored` tokens; their sizes depend only on the model."""
        raise NotImplementedError

    def earlier_arrays_for(self, num_stored: int) -> list[StoredArray]:
        """Return the arrays in which earlier versions saved the state of `num_stored` tokens."""
        return self.arrays_for(num_stored)

    def close(self) -> None:  # noqa: B027 - optional: some decoders store nothing outside sequences
        """Release all memory."""


def check_width(logits: Logits, vocab_size: int) -> None:
    """Check the width of a graph's logits.

    Raises:
        ConfigError: the last axis does not have the size of the vocabulary.
    """
    width = logits.shape[-1] if logits.ndim else 0
    if width != vocab_size:
        raise ConfigError(
            f"the model has {width} logits, but vocab_size in genai_config.json is {vocab_size}",
            "the two numbers must be equal",
            f"set model.vocab_size in genai_config.json to {width}",
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
        decoder: the decoder of the sequences.
        sequences: each with at least one pending token.
        all_rows: True to return the logits after every pending token, False to return only those after the last one.
        token_budget: maximum number of tokens in a step; None = the decoder's default.
        output: one of the decoder's outputs to return instead of the logits.

    Returns:
        For each sequence, float32 [rows, vocab_size]: rows = 1, or the number of pending tokens with all_rows.

    Raises:
        CacheCapacityError: the cache is full. Completed steps remain; the other tokens are still pending.
    """
    results: list[list[Logits]] = [[] for _ in sequences]
    wanted = range(len(sequences)) if all_rows else ()
    budget = min(token_budget or decoder.token_budget, decoder.most_tokens)
    while step := plan_step([sequence.pending() for sequence in sequences], budget):
        for rows, logits in zip(results, decoder.step(sequences, step, all_rows=wanted, output=output), strict=True):
            if logits is not None:
                rows.append(logits)
    return [rows[0] if len(rows) == 1 else np.concatenate(rows) for rows in results]

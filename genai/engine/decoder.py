"""What a decoder is to the rest of the engine: sequences with state, and logits for their pending tokens."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from genai.kernels.device import Executor, TokenChoice
from genai.kvcache.pool import BlockPool

from ..errors import ConfigError, InputError, UnsupportedModelError
from .adapter_mix import AdapterMix
from .scheduler import Pending, StepPlan, plan_step
from .stored import StoredArray, StoredTokens

# float32 [rows, vocab_size]: NumPy's, or in a device's memory, from where np.asarray brings them to the host. There
# they can be cut into rows, stacked and concatenated; `logits[rows, tokens]` are single numbers on the host.
Logits = NDArray[np.float32]
T = TypeVar("T")


@dataclass(frozen=True)
class ContextShift:
    """What becomes of a sequence that has more tokens than the context holds: it forgets half of them, but the first.

    Attributes:
        keep: so many of the first tokens stay, up to whole blocks. size: most tokens that are cached.
    """

    keep: int
    size: int


class AdapterHistory(Generic[T]):
    """What tokens went through that were computed before it changed for those behind them: computed again, they go
    through the same.
    """

    def __init__(self) -> None:
        # Each entry speaks of the tokens before an index, from the one that the entry before it names on.
        self._entries: list[tuple[int, T]] = []

    def __bool__(self) -> bool:
        return bool(self._entries)

    def copy(self) -> AdapterHistory[T]:
        """The same, for a sequence that goes its own way."""
        other: AdapterHistory[T] = AdapterHistory()
        other._entries = [*self._entries]
        return other

    def note(self, num_computed: int, what: T) -> None:
        """What so many tokens went through that are computed already, but for those that went through something else
        before; what is not computed goes through what comes now.
        """
        if num_computed == 0:
            self._entries.clear()
        elif num_computed > (self._entries[-1][0] if self._entries else 0):
            self._entries.append((num_computed, what))

    def of(self, index: int, now: T) -> T:
        """What a token goes through; `now` is that of tokens that nothing is noted of."""
        if not self._entries:
            return now
        return next((what for end, what in self._entries if index < end), now)

    def end_of(self, first: int, end: int) -> int:
        """The end of the tokens from `first` on, and before `end`, that go through the same."""
        if not self._entries:
            return end
        return min([end, *(changed for changed, _ in self._entries if changed > first)])

    def cut(self, length: int) -> None:
        """Forget tokens from `length` on."""
        starts = [0, *(end for end, _ in self._entries)]
        self._entries = [
            (min(end, length), what)
            for start, (end, what) in zip(starts, self._entries, strict=False)
            if start < length
        ]


@dataclass
class StepAhead:
    """The token behind a sequence's last one, which a device computes before anybody knows which it is.

    Attributes:
        index: of the token. logits: of the step; row: which of them are behind it.
    """

    index: int
    logits: Logits
    row: int


class DecoderSequence:
    """One growing token sequence and its cached state.

    `num_computed` of its `tokens`, and of the proposals behind them, are in the cache.

    Attributes:
        adapters: what its tokens go through from now on (see Decoder.adapt); those that are computed stay as they are.
        proposed: tokens that may come after `tokens`. They are computed with them; append keeps what was computed of
            them where it is given the same.
        shift: what becomes of it when the context is full; None = it has no more tokens than that.
        forgotten: so many of its tokens, behind the first ones that are kept, are no more seen by those that follow.
        earlier: what computed tokens went through, where it changed behind them.
        ahead: what `Decoder.step_ahead` has started, until its logits are taken. The token that it computes counts in
            `num_computed`, and is the one that is appended next. Whatever else becomes of the sequence takes it back,
            and leaves it as if nothing had been started.
    """

    num_computed: int
    ahead: StepAhead | None = None
    shift: ContextShift | None = None
    forgotten = 0

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.adapters: AdapterMix | None = None
        self.proposed: list[int] = []
        self.adapter_history: AdapterHistory[Any] = AdapterHistory()

    def append(self, tokens: Sequence[int], *, together: int = 0) -> None:
        """Add tokens. Many that come together may be computed by other kernels than a few, which round differently.

        Args:
            together: of how many these are a part, where they are appended in pieces.
        """
        if self.ahead is not None and self.ahead.index == len(self.tokens) and len(tokens) == 1:
            pass  # it is being computed
        elif self.proposed and [*tokens] == self.proposed[:1]:
            del self.proposed[0]
        else:
            self.take_back()
        self.tokens.extend(tokens)

    @property
    def numerics(self) -> bytes:
        """Per token 1 where it has prefill numerics, else 0; empty where there is no difference."""
        return b""

    def propose(self, tokens: Sequence[int]) -> None:
        """Set tokens that may come next, in place of those proposed before; see Decoder.verifies."""
        self.take_back()
        self.proposed.extend(tokens)

    def take_back(self) -> None:
        """Forget the proposals, and what was computed of them; and what was started ahead."""
        if self.ahead is not None:
            self.drop_cache(self.ahead.index)
        if self.proposed:
            self.proposed.clear()
            self.drop_cache(len(self.tokens))

    def take_ahead(self) -> Logits | None:
        """The logits behind the token that was computed ahead and appended meanwhile. None if it was not appended, as
        after an interrupt: those that it was to be chosen from are gone, too, so that the last token is pending again.
        """
        ahead, self.ahead = self.ahead, None
        if ahead is None or ahead.index + 1 != len(self.tokens):
            self.drop_cache(max(len(self.tokens) - 1, 0))
            return None
        return ahead.logits[ahead.row : ahead.row + 1]

    @property
    def is_full(self) -> bool:
        """Whether it has to forget tokens before more are computed."""
        return self.shift is not None and len(self.tokens) - self.forgotten > self.shift.size

    def pending(self) -> Pending:
        """The next tokens that are not computed yet and go together."""
        first = self.num_computed
        return Pending(self.adapter_history.end_of(first, len(self.tokens)) - first, False)

    def blocks(self) -> tuple[int, int, int | None]:
        """How many blocks of the cache it can go on with, how many of them nobody else holds, and the most that it
        holds at a time; None = as many as its tokens need."""
        return 0, 0, None

    def rewind(self, length: int) -> None:
        """Forget all tokens from `length` on. The last one kept becomes pending: its logits may be asked for."""
        self.take_back()
        del self.tokens[length:]
        self.adapter_history.cut(length)
        self.drop_cache(max(length - 1, 0))

    def drop_cache(self, length: int = 0) -> None:
        """Give the cached state from `length` on back and keep the tokens, which are pending again."""
        raise NotImplementedError

    def close(self) -> None:
        """Give the cached state back."""
        self.drop_cache()


class Decoder(ABC):
    """Computes logits. Safe to use from several threads, each with its own sequences.

    Attributes:
        output_names: outputs that give a row per token: the logits, then others, such as hidden states.
        pool: the blocks that its sequences share, of `block_size` tokens; None = each has memory of its own.
        token_budget: in a step of so many tokens it is fastest. most_tokens: more cannot be in one.
        has_numerics: whether tokens differ in how they round, see DecoderSequence.numerics.
        verifies: whether sequences may have proposals: tokens then have the same bits in a step with others of their
            sequence as one by one.
        runs_ahead: whether `step_ahead` may start anything.
    """

    has_numerics = False
    runs_ahead = False

    pool: BlockPool | None = None
    block_size = 1
    token_budget = most_tokens = sys.maxsize
    verifies = False
    vocab_size: int
    executor: Executor
    output_names: tuple[str, ...]

    def give(self, sequence: Any, name: str, value: NDArray[Any]) -> None:
        """Set an input of the graph that is not tokens or state, for one sequence.

        Raises:
            InputError: the graph has no such input.
        """
        raise InputError(
            f"there is no input {name!r} to give", "the graph takes tokens and its own state", "leave the call out"
        )

    def adapt(self, sequence: Any, adapters: AdapterMix | None) -> None:
        """Let the tokens of a sequence that are computed from now on go through adapters; None = through none.

        Raises:
            InputError: this decoder has no places for them.
        """
        if adapters is not None:
            raise InputError(
                "adapters cannot be used with this model",
                "its graph runs sequence by sequence, as it was exported, without places for them",
                "export the model so that it can be flattened (info.reason says what is in the way)",
            )

    @abstractmethod
    def open(self) -> Any:
        """A new empty DecoderSequence."""

    @abstractmethod
    def fork(self, sequence: Any) -> Any:
        """A sequence with the same tokens that shares what is cached; each may go its own way."""

    @abstractmethod
    def step(
        self, sequences: Sequence[Any], step: StepPlan, *, all_rows: Collection[int] = (), output: str = ""
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

    def step_ahead(self, sequences: Sequence[Any], choice: TokenChoice, rows: Sequence[int]) -> bool:
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

    def interrupt(self, sequences: Collection[Any]) -> None:  # noqa: B027 - what cannot be given up is ended
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

    def forget(self, sequence: Any) -> None:
        """Let a sequence that is full forget half of what lies behind the tokens that its `shift` keeps.

        What is behind these moves to earlier positions: its keys are rotated anew, and nothing is computed again.
        """
        raise NotImplementedError

    def reuse(self, sequence: Any) -> int:
        """Fill a sequence of which nothing is computed with the cached beginning of its tokens.

        Returns:
            How many tokens were found; always less than there are.
        """
        return 0

    def publish(self, sequence: Any) -> None:  # noqa: B027 - where nothing is shared
        """Let later sequences reuse what this one has computed."""

    def stored_arrays(self, sequence: Any) -> list[tuple[StoredArray, Iterator[NDArray[np.uint8]]]]:
        """What of a sequence's cached state must be kept to go on with it elsewhere: arrays, and their bytes in pieces.

        Tokens whose state is not part of it are computed again, which gives the same bits.

        Raises:
            StateError: parts of it were computed through other adapters than it has now, so that nothing could be
                computed again.
        """
        raise NotImplementedError

    def restore(
        self, stored: StoredTokens, read: Callable[[memoryview], None], adapters: AdapterMix | None = None
    ) -> Any:
        """A sequence with the tokens of another one, and its state.

        Args:
            stored: its tokens, where `arrays` is what `arrays_for` says.
            read: fills memory with the bytes of the arrays, one after the other.
            adapters: what its tokens went through, and will.

        What was read is not published: nobody but this sequence and its forks goes on from it.

        Raises:
            CacheCapacityError: no room. What `read` raises; nothing is kept then.
        """
        raise NotImplementedError

    def arrays_for(self, num_stored: int) -> list[StoredArray]:
        """The arrays that hold the state of so many tokens; their sizes are settled by the model alone."""
        raise NotImplementedError

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
    sequences: Sequence[Any],
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


def stacked(rows: Sequence[Logits]) -> Logits:
    """Rows [vocab_size] as float32 [rows, vocab_size]: where a step gave them one after the other, its own memory."""
    first = rows[0]
    if len(rows) == 1:
        return first[None]
    owner = getattr(first, "base", None)
    if isinstance(owner, np.ndarray) and owner.flags.c_contiguous and all(row.base is owner for row in rows):
        begin, *others = [row.__array_interface__["data"][0] for row in rows]
        if others == [begin + index * first.nbytes for index in range(1, len(rows))]:
            return np.ndarray((len(rows), first.size), first.dtype, owner, begin - owner.ctypes.data)
    return np.stack(rows)

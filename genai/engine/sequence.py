"""A sequence as the engine sees it: tokens, how much of them is computed, what may come next."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from .adapter_mix import AdapterMix
from .scheduler import GroupDemand, Pending
from .stored import StoredArray

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


class DecoderSequence(ABC):
    """One growing token sequence and its cached state.

    `num_computed` of its `tokens`, and of the proposals behind them, are in the cache.

    Attributes:
        adapters: what its tokens go through from now on (see Decoder.adapt); those that are computed stay as they are.
        proposed: tokens that may come after `tokens`. They are computed with them; append keeps what was computed of
            them where it is given the same.
        shift: what becomes of it when the context is full; None = it has no more tokens than that.
        forgotten: so many of its tokens, behind the first ones that are kept, are no more seen by those that follow.
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
            self.truncate(self.ahead.index)
        if self.proposed:
            self.proposed.clear()
            self.truncate(len(self.tokens))

    def take_ahead(self) -> Logits | None:
        """The logits behind the token that was computed ahead and appended meanwhile. None if it was not appended, as
        after an interrupt: those that it was to be chosen from are gone, too, so that the last token is pending again.
        """
        ahead, self.ahead = self.ahead, None
        if ahead is None or ahead.index + 1 != len(self.tokens):
            self.truncate(max(len(self.tokens) - 1, 0))
            return None
        return ahead.logits[ahead.row : ahead.row + 1]

    @property
    def is_full(self) -> bool:
        """Whether it has to forget tokens before more are computed."""
        return self.shift is not None and len(self.tokens) - self.forgotten > self.shift.size

    @abstractmethod
    def pending(self) -> Pending:
        """The next tokens that are not computed yet and go together."""

    def demand(self) -> tuple[GroupDemand, ...]:
        """What it holds of the cache, and may ask of it, per cache group."""
        return ()

    def rewind(self, length: int) -> None:
        """Forget all tokens from `length` on. The last one kept becomes pending: its logits may be asked for."""
        self.take_back()
        del self.tokens[length:]
        self.truncate(max(length - 1, 0))

    @abstractmethod
    def truncate(self, length: int = 0) -> int:
        """Give the cached state from `length` on back and keep the tokens, which are pending again.

        Returns:
            How many tokens are still computed: fewer than `length` where the state of some layers reaches back no
            further, as windows do. The tokens from there on are computed again, which gives the same bits.
        """

    def close(self) -> None:
        """Give the cached state back."""
        self.truncate()

    @abstractmethod
    def fork(self) -> Self:
        """A sequence with the same tokens that shares what is cached; each may go its own way."""

    def adapt(self, adapters: AdapterMix | None) -> None:
        """Let tokens that are computed from now on go through adapters; None = through none.

        Raises:
            InputError: the decoder has no LoRA targets.
        """
        if adapters is not None:
            raise InputError(
                "adapters cannot be used with this model",
                "its graph runs sequence by sequence, as it was exported, without places for them",
                "export the model so that it can be flattened (info.reason says what is in the way)",
            )

    def give(self, name: str, value: NDArray[np.generic]) -> None:
        """Set an input of the graph that is not tokens or state, for this sequence.

        Raises:
            InputError: the graph has no such input.
        """
        raise InputError(
            f"there is no input {name!r} to give", "the graph takes tokens and its own state", "leave the call out"
        )

    def reuse(self) -> int:
        """Fill the sequence, of which nothing is computed, with the cached beginning of its tokens.

        Returns:
            How many tokens were found; always less than there are.
        """
        return 0

    def publish(self) -> None:  # noqa: B027 - where nothing is shared
        """Let later sequences reuse what this one has computed."""

    def share(self) -> None:
        """Publish also keys and values that came from outside, such as from a file."""
        self.publish()

    def forget(self) -> None:
        """Forget half of the tokens behind those that `shift` keeps; the sequence is full.

        What is behind the forgotten tokens moves to earlier positions: its keys are rotated anew, and nothing is
        computed again.
        """
        raise NotImplementedError

    def mark_boundary(self, length: int) -> None:  # noqa: B027 - where others can go on from any token
        """Others may have the same first tokens, up to about here: what they need to go on from there is kept."""

    def mark_messages(self, ends: Collection[int]) -> None:  # noqa: B027 - where others can go on from any token
        """As `mark_boundary`, behind the first of these tokens, and behind the last two: in a chat they end the system
        message, and what comes before the last turn.
        """

    def num_stored(self) -> int:
        """How many tokens have their state in `stored_arrays`."""
        return self.num_computed

    @abstractmethod
    def stored_arrays(self) -> list[tuple[StoredArray, Iterator[NDArray[np.uint8]]]]:
        """What of the cached state must be kept to go on with it elsewhere: arrays, and their bytes in pieces.

        Tokens whose state is not part of it are computed again, which gives the same bits.

        Raises:
            StateError: parts of it were computed through other adapters than it has now, so that nothing could be
                computed again.
        """

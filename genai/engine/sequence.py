"""The interface of a sequence: its tokens, the part of them that is computed, and the proposed tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from .adapter_mix import AdapterMix
from .scheduler import GroupDemand, Pending
from .stored import StoredArray

if TYPE_CHECKING:  # avoids an import cycle
    from .hidden_rows import HiddenRows

# float32 [rows, vocab_size]: a NumPy array, or an array in a device's memory that np.asarray copies to the host. A
# device array can be sliced by rows, stacked and concatenated; `logits[rows, tokens]` copies single values to the host.
Logits = NDArray[np.float32]
T = TypeVar("T")


@dataclass(frozen=True)
class ContextShift:
    """Context shift: a sequence longer than the context drops half of its tokens, but never the first ones.

    Attributes:
        keep: number of leading tokens to keep, rounded up to whole blocks.
        size: maximum number of cached tokens.
    """

    keep: int
    size: int


class AdapterHistory(Generic[T]):
    """The adapters (or other inputs) with which earlier tokens were computed, stored for recomputing the tokens."""

    def __init__(self) -> None:
        # Each entry applies to the tokens before its index, starting at the index of the preceding entry.
        self._entries: list[tuple[int, T]] = []

    def __bool__(self) -> bool:
        return bool(self._entries)

    def copy(self) -> AdapterHistory[T]:
        """Return a copy for a fork of the sequence."""
        other: AdapterHistory[T] = AdapterHistory()
        other._entries = [*self._entries]
        return other

    def note(self, num_computed: int, what: T) -> None:
        """Record the value that the first `num_computed` tokens were computed with; tokens with an entry keep theirs.

        Tokens that are not computed yet use the new value.
        """
        if num_computed == 0:
            self._entries.clear()
        elif num_computed > (self._entries[-1][0] if self._entries else 0):
            self._entries.append((num_computed, what))

    def of(self, index: int, now: T) -> T:
        """Return the value for a token; `now` applies to tokens without an entry."""
        if not self._entries:
            return now
        return next((what for end, what in self._entries if index < end), now)

    def end_of(self, first: int, end: int) -> int:
        """Return the end of the run of tokens in [first, end) that have the same value as `first`."""
        if not self._entries:
            return end
        return min([end, *(changed for changed, _ in self._entries if changed > first)])

    def cut(self, length: int) -> None:
        """Drop the entries of tokens from index `length`."""
        starts = [0, *(end for end, _ in self._entries)]
        self._entries = [
            (min(end, length), what)
            for start, (end, what) in zip(starts, self._entries, strict=False)
            if start < length
        ]


@dataclass
class StepAhead:
    """A token that follows a sequence's last token, and that a device computes before the host has read it.

    Attributes:
        index: index of the token in the sequence.
        logits: logits of the step that computes the token.
        row: row of the logits after the token.
    """

    index: int
    logits: Logits
    row: int


class DecoderSequence(ABC):
    """A growing token sequence and its cached state.

    The first `num_computed` of `tokens`, followed by `proposed`, are in the cache.

    Attributes:
        adapters: the adapters for tokens computed from now on (see `adapt`); computed tokens are unchanged.
        proposed: draft tokens that may follow `tokens`. They are computed together; `append` keeps the computed state
            of the draft tokens that it receives.
        shift: the context shift to apply when the context is full; None = the context limits the length.
        forgotten: number of tokens after the first kept tokens that later tokens no longer attend to.
        cache_salt: part of the keys of the prefix cache; only sequences with the same salt share blocks.
        ahead: the step that `Decoder.step_ahead` started, until its logits are taken. The step's token is counted in
            `num_computed`, and must be the next token to be appended. Any other change of the sequence undoes the step,
            as if it had not been started.
        hidden: collects the hidden states of computed tokens for an MTP head; None = they are not collected.
    """

    num_computed: int
    ahead: StepAhead | None = None
    shift: ContextShift | None = None
    forgotten = 0
    cache_salt = b""
    hidden: HiddenRows | None = None

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.adapters: AdapterMix | None = None
        self.proposed: list[int] = []

    def append(self, tokens: Sequence[int], *, together: int = 0) -> None:
        """Append tokens. A large number appended together may be computed by other kernels, which round differently.

        Args:
            tokens: token ids.
            together: total number of tokens if they are appended in several parts.
        """
        if self.ahead is not None and self.ahead.index == len(self.tokens) and len(tokens) == 1:
            pass  # the token is already being computed
        elif self.proposed and [*tokens] == self.proposed[:1]:
            del self.proposed[0]
        else:
            self.take_back()
        self.tokens.extend(tokens)

    @property
    def numerics(self) -> bytes:
        """One byte per token: 1 for prefill numerics, else 0. Empty if the decoder does not distinguish them."""
        return b""

    def propose(self, tokens: Sequence[int]) -> None:
        """Set draft tokens that may come next, replacing earlier draft tokens; see Decoder.verifies."""
        self.take_back()
        self.proposed.extend(tokens)

    def take_back(self) -> None:
        """Drop the draft tokens and their computed state, and undo a step that was started ahead."""
        if self.ahead is not None:
            self.truncate(self.ahead.index)
        if self.proposed:
            self.proposed.clear()
            self.truncate(len(self.tokens))

    def take_ahead(self) -> Logits | None:
        """Return the logits after the token that was computed ahead and has been appended in the meantime.

        Returns:
            None if the token was not appended, for example because of an interrupt. The logits to choose it from have
            been overwritten by then, so the last token becomes pending again.
        """
        ahead, self.ahead = self.ahead, None
        if ahead is None or ahead.index + 1 != len(self.tokens):
            self.truncate(max(len(self.tokens) - 1, 0))
            return None
        return ahead.logits[ahead.row : ahead.row + 1]

    @property
    def is_full(self) -> bool:
        """True if tokens must be dropped before more can be computed."""
        return self.shift is not None and len(self.tokens) - self.forgotten > self.shift.size

    @abstractmethod
    def pending(self) -> Pending:
        """Return the next run of pending tokens that can be computed together."""

    def demand(self) -> tuple[GroupDemand, ...]:
        """Return the cache blocks that the sequence holds and may need, per cache group."""
        return ()

    def rewind(self, length: int) -> None:
        """Drop all tokens from index `length`.

        The last remaining token becomes pending, so that its logits can be computed.
        """
        self.take_back()
        del self.tokens[length:]
        self.truncate(max(length - 1, 0))

    @abstractmethod
    def truncate(self, length: int = 0) -> int:
        """Drop the cached state from index `length` but keep the tokens, which become pending again.

        Returns:
            The number of tokens still computed. It is less than `length` if some layers, such as windows, have no older
            state. The tokens after that number are computed again, with bit-identical results.
        """

    def close(self) -> None:
        """Drop the cached state."""
        self.truncate()

    @abstractmethod
    def fork(self) -> Self:
        """Return an independent sequence with the same tokens that shares the cached state."""

    def adapt(self, adapters: AdapterMix | None) -> None:
        """Set the adapters for the tokens that are computed from now on; None = no adapters.

        Raises:
            InputError: the decoder has no LoRA targets.
        """
        if adapters is not None:
            raise InputError(
                "adapters cannot be used with this model",
                "the model's graph cannot be flattened, so the model has no LoRA targets",
                "export the model so that its graph can be flattened (see info.reason)",
            )

    def give(self, name: str, value: NDArray[np.generic]) -> None:
        """Set a graph input that is neither tokens nor state for this sequence.

        Raises:
            InputError: the graph has no such input.
        """
        raise InputError(
            f"the graph has no input {name!r} to set",
            "the engine sets all inputs of this graph",
            "remove the call",
        )

    def reuse(self) -> int:
        """Fill the sequence, which has no computed tokens, with the longest cached prefix of its tokens.

        Returns:
            The number of tokens found; always less than the number of tokens in the sequence.
        """
        return 0

    def publish(self) -> None:  # noqa: B027 - optional: some decoders share nothing
        """Let later sequences reuse the computed state of this sequence."""

    def share(self) -> None:
        """Also publish keys and values that were loaded, for example from a file."""
        self.publish()

    def forget(self) -> None:
        """Drop half of the tokens after those that `shift` keeps; the sequence must be full.

        The tokens after the dropped ones move to earlier positions. Their keys are rotated, and nothing is recomputed.
        """
        raise NotImplementedError

    def mark_boundary(self, length: int) -> None:  # noqa: B027 - optional: some decoders can continue from any token
        """Mark a length at which other sequences may diverge; the state needed to continue from it is stored."""

    def settle(self) -> None:  # noqa: B027 - optional: some decoders share nothing
        """Fix the numerics of all tokens, so that `reuse` finds only blocks with the same numerics.

        Blocks with later tokens are not published.
        """

    def leave_first(self) -> None:  # noqa: B027 - optional: some decoders share nothing
        """Let the cached state of this sequence be evicted before that of other sequences, until it is reused."""

    def mark_messages(self, ends: Collection[int]) -> None:  # noqa: B027 - optional, as mark_boundary
        """Mark boundaries after the first and the last two occurrences of the tokens in `ends`.

        In a chat, these boundaries end the system message and the messages before the last turn.
        """

    def num_stored(self) -> int:
        """Return the number of tokens whose state is in `stored_arrays`."""
        return self.num_computed

    @abstractmethod
    def stored_arrays(self) -> list[tuple[StoredArray, Iterator[NDArray[np.uint8]]]]:
        """Return the arrays needed to continue the sequence elsewhere, with their bytes in pieces.

        Tokens without state in the arrays are computed again, with bit-identical results.

        Raises:
            StateError: some tokens were computed with adapters other than the current ones, so they could not be
                computed again.
        """

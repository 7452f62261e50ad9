"""A sequence of the main decoder: its tokens, and the block tables that hold their keys and values."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

from genai.kernels.device import DeviceFailed
from genai.kvcache.pool import CacheFull
from genai.kvcache.sequence_cache import SequenceCache
from genai.kvcache.storage import STATES_PER_SEQUENCE
from genai.kvcache.table import BlockCopy

from ..errors import CacheCapacityError, DeviceError, GenaiError, StateError
from .adapter_mix import AdapterMix
from .scheduler import GroupDemand, Pending
from .sequence import AdapterHistory, DecoderSequence
from .stored import StoredArray, StoredTokens

if TYPE_CHECKING:  # avoids an import cycle
    from .paged import PagedDecoder

# Tokens appended together in at least this number have prefill numerics.
MIN_PREFILL_TOKENS = 32
_ONE_TOKEN = Pending(1, False), Pending(1, True)


class PagedSequence(DecoderSequence):
    """A sequence's tokens, and the block tables that hold their keys and values.

    Long prompts have prefill numerics. Single tokens and short prompts have decode numerics, which round differently.
    A token's numerics are fixed when the token is appended. If the token is found in the prefix cache, the cached block
    determines its numerics (a reply can be part of the next prompt). The results for a token are therefore
    bit-identical whether it is computed in chunks, with other sequences, or again after its cache was dropped.
    """

    def __init__(self, decoder: PagedDecoder, cache: SequenceCache) -> None:
        super().__init__()
        self.decoder, self.cache = decoder, cache
        self._rope_threshold = decoder.rope_threshold
        self.adapter_history: AdapterHistory[AdapterMix | None] = AdapterHistory()
        self._prefill = bytearray()  # per token
        # The number of tokens that have been computed and keep their numerics. Cached blocks with different numerics do
        # not match these tokens.
        self._settled = 0
        # True if keys and values were loaded from outside. They are not published to other sequences with the same
        # tokens.
        self.is_private = False
        # The number of leading tokens to keep when tokens are dropped.
        self._kept = 0
        decoder.pool.release_after(self, cache.release)

    def fork(self) -> Self:
        if self.ahead is not None:
            self.take_back()
        other = type(self)(self.decoder, self.cache.fork())
        other.tokens, other._prefill, other._settled = [*self.tokens], self._prefill[:], len(self.tokens)
        other.adapters, other.adapter_history = self.adapters, self.adapter_history.copy()
        other.is_private, other.cache_salt = self.is_private, self.cache_salt
        other._kept, other.forgotten = self._kept, self.forgotten
        other.hidden = None if self.hidden is None else self.hidden.copy()
        return other

    # --- the position of a token in the cache ------------------------------------------------------------------------

    def _cache_index(self, index: int) -> int:
        """Return a token's index in the cache; for a dropped token, the index of the next retained token."""
        return index if index <= self._kept else max(self._kept, index - self.forgotten)

    def _index(self, cache_index: int) -> int:
        """Return the index of the token at an index in the cache."""
        return cache_index if cache_index < self._kept else cache_index + self.forgotten

    def computed_end(self) -> int:
        """The index after the last cached token."""
        if not self.forgotten:
            return self.cache.length
        return self._index(self.cache.length - 1) + 1 if self.cache.length else 0

    def note_forgotten(self, kept: int, count: int) -> None:
        """Record that `count` tokens after the first `kept` ones were removed from the cache."""
        self._kept, self.forgotten = kept, self.forgotten + count

    def append(self, tokens: Sequence[int], *, together: int = 0) -> None:
        before = self.rope_table
        super().append(tokens, together=together)
        if len(tokens) > 1:
            self.mark_boundary(len(self.tokens) - 1)
        self._prefill.extend([max(together, len(tokens)) >= MIN_PREFILL_TOKENS] * len(tokens))
        if self.rope_table != before:
            self.truncate()

    @property
    def rope_table(self) -> int:
        """The index of the RoPE table. Keys are stored rotated, so crossing the threshold recomputes the sequence."""
        return int(self._rope_threshold is not None and len(self.tokens) > self._rope_threshold)

    def adapt(self, adapters: AdapterMix | None) -> None:
        before, origin = self.adapters, self._origin
        self.adapters = adapters
        if self._origin != origin or self.num_computed == 0:
            self.adapter_history.note(self.num_computed, before)

    @property
    def was_switched(self) -> bool:
        """True if the adapters changed after tokens were computed; those tokens are unchanged."""
        return bool(self.adapter_history)

    def adapters_of(self, index: int) -> AdapterMix | None:
        """Return the adapters of a token: those that it was first computed with, or else the current ones."""
        return self.adapter_history.of(index, self.adapters)

    def resume(self, stored: StoredTokens) -> None:
        """Set tokens that were computed earlier but are not cached yet; their numerics are fixed."""
        self.tokens, self._prefill = list(stored.tokens), bytearray(stored.numerics)
        self._settled, self.is_private = len(self.tokens), True

    @property
    def numerics(self) -> bytes:
        """One byte per token: 1 for prefill numerics, else 0."""
        return bytes(self._prefill)

    @property
    def _origin(self) -> tuple[int, bytes]:
        """Everything that keys and values depend on except tokens and numerics."""
        adapters = b"" if self.adapters is None else self.adapters.key
        return self.rope_table, adapters + (b"salt" + sha256(self.cache_salt).digest() if self.cache_salt else b"")

    def pending(self) -> Pending:
        first, total = self.num_computed, len(self.tokens)
        if first >= total:
            return Pending(0, False)
        prefill = self._prefill[first]
        if first + 1 == total and not self.proposed:
            return _ONE_TOKEN[prefill]
        end = self._prefill.find(1 - prefill, first)
        if end < 0:
            end = total if prefill else total + len(self.proposed)
        if self.forgotten and first < self._kept:
            end = min(end, self._kept)
        return Pending(self.adapter_history.end_of(first, end) - first, bool(prefill))

    def propose(self, tokens: Sequence[int]) -> None:
        """Propose draft tokens, but only up to a change of RoPE tables, which recomputes the sequence."""
        super().propose(tokens)
        if self._rope_threshold is not None and not self.rope_table:
            del self.proposed[self._rope_threshold - len(self.tokens) :]

    def reuse(self) -> int:
        if self.forgotten:
            return 0
        with device_errors("loading blocks of the prefix cache"):
            return self.cache.reuse(self.tokens, self._origin, self._prefill, self._settled)

    def settle(self) -> None:
        # A key has one block. If blocks of a reply were published, no block with the numerics of a prompt could be
        # published under the same key, and later requests would find neither.
        self._settled = self.cache.publish_limit = len(self.tokens)

    def leave_first(self) -> None:
        self.cache.is_brief = True

    def settle_cache(self) -> None:
        """Return blocks that no later token attends to; publish the blocks at boundaries, and snapshots of states."""
        if self.cache.length > self._cache_index(len(self.tokens)):
            return  # some draft tokens may still be rejected
        position = self.cache.length
        if self.cache.has_snapshots:
            self._publish()
        if self.cache.has_left(position):
            if self._is_public:
                self.cache.publish_leaving(position, self.tokens, self._origin, self._prefill)
            self.cache.leave_behind(position)

    @property
    def certain_length(self) -> int:
        """The index in the cache at which draft tokens start."""
        return self._cache_index(len(self.tokens))

    def mark_boundary(self, length: int) -> None:
        if self.cache.has_boundaries:
            length -= length % self.decoder.block_size
            self.cache.boundaries.add(length)

    def mark_messages(self, ends: Collection[int]) -> None:
        if self.cache.has_boundaries:
            found = [index + 1 for index, token in enumerate(self.tokens) if token in ends]
            for length in {*found[:1], *found[-2:]}:
                self.mark_boundary(length)

    def share(self) -> None:
        self.is_private = False
        self.publish()

    @property
    def _is_public(self) -> bool:
        return not (self.is_private or self.forgotten or self.was_switched)

    def publish(self) -> None:
        self._publish(at_end=True)

    def _publish(self, at_end: bool = False) -> None:
        if self._is_public:
            self.cache.publish(self.tokens, self._origin, self._prefill, at_end)

    @property
    def num_computed(self) -> int:  # type: ignore[override]
        return self._index(self.cache.length) if self.forgotten else self.cache.length

    def demand(self) -> tuple[GroupDemand, ...]:
        tables, size, states = self.cache.tables, self.decoder.block_size, self.cache.states
        reading = min(len(self.tokens) - self.num_computed, self.decoder.token_budget)
        demands = tuple(
            GroupDemand(
                table.usable_blocks - table.num_gone,
                table.own_blocks,
                group.most_blocks(sys.maxsize, reading, size) if group.is_bounded else None,
            )
            for group, table in zip(self.cache.page_groups, tables, strict=True)
        )
        if states is None:
            return demands
        most = STATES_PER_SEQUENCE
        return (*demands, GroupDemand(min(len(states.slots), most), states.own_slots, most, pool=1, fixed=True))

    @property
    def can_go_ahead(self) -> bool:
        """True if the next token only needs to be computed, whichever token it is."""
        length, threshold = len(self.tokens), self._rope_threshold
        is_full = self.shift is not None and length + 1 - self.forgotten > self.shift.size
        is_ready = self.num_computed == length and self.ahead is None and not self.proposed
        return is_ready and not is_full and length != threshold  # at the threshold the other RoPE table applies

    def rewind(self, length: int) -> None:
        before = self.rope_table
        if self.forgotten and length <= self._kept + self.forgotten:
            self.truncate(min(length, self._kept))
            self._kept = self.forgotten = 0
        super().rewind(length)
        self.adapter_history.cut(length)
        del self._prefill[length:]
        self._settled = min(self._settled, length)
        if self.rope_table != before:
            self.truncate()

    def truncate(self, length: int = 0) -> int:
        self.proposed.clear()
        if self.ahead is not None:
            length, self.ahead = min(length, self.ahead.index), None
        self._settled = max(self._settled, min(self.num_computed, len(self.tokens)))
        self.cache.truncate(min(self.cache.length, self._cache_index(length)))
        self.is_private = self.is_private and self.cache.length > 0
        return self.num_computed

    def forget(self) -> None:
        shift, cache, decoder, size = self.shift, self.cache, self.decoder, self.decoder.block_size
        if shift is None:
            raise StateError(
                "the sequence cannot drop tokens",
                "the sequence has no context shift",
                "set `shift` before the context is full",
            )
        move_keys = decoder.key_rotator()
        self.take_back()
        first = (self._kept if self.forgotten else -(-shift.keep // size) * size) // size
        # If the tokens are no longer cached, the sequence is recomputed without the dropped tokens.
        held = cache.length >= (first + 1) * size
        count = max(1, ((cache.length if held else shift.size) // size - first) // 2)
        held = held and cache.can_forget(first, count)
        copies: list[BlockCopy] = []
        if held:
            try:
                copies = cache.forget(first, count)
            except CacheFull:
                held = False
        if not held:
            self.truncate(first * size)
        else:
            try:
                decoder.executor.copy_blocks(decoder.storage.blocks, copies)
                move_keys([table.blocks[max(first, table.num_gone) :] for table in cache.tables], count * size)
            except MemoryError:  # some keys may have been moved already
                self.truncate(first * size)
            except BaseException as error:
                self.truncate()
                if isinstance(error, DeviceFailed):
                    raise device_error(error, "moving keys") from error
                raise
            finally:
                decoder.pool.release(source for source, _ in copies)
        self.note_forgotten(first * size, count * size)

    def stored_arrays(self) -> list[tuple[StoredArray, Iterator[NDArray[np.uint8]]]]:
        """Return whole blocks only: the rest of a partial block may contain data from another sequence."""
        if self.forgotten:
            raise StateError(
                "this sequence dropped tokens when its context was full",
                "the remaining keys and values do not match the tokens of the sequence",
                "save the state before the context is full, or generate without ctx_shift",
            )
        if self.was_switched:
            raise StateError(
                "the adapters of this sequence were changed after tokens were computed",
                "a loaded state computes the tokens of the last block again, with a single set of adapters",
                "choose the adapters before the first token, or rewind to 0 after the change",
            )
        decoder, states = self.decoder, self.cache.states
        decoder.check_open()
        num_stored = self.num_stored()
        pieces = [decoder.stored_blocks(self.cache, num_stored, group) for group in range(len(decoder.page_groups))]
        if states is not None:
            slots = [states.slots[num_stored]] if num_stored else []
            pieces.append(map(decoder.stored_state, slots))
        return list(zip(decoder.arrays_for(num_stored), pieces, strict=True))

    def num_stored(self) -> int:
        size, states = self.decoder.block_size, self.cache.states
        if states is None:
            lengths = [self.num_computed // size * size]
        else:
            lengths = [length for length in states.slots if length % size == 0 and length <= self.num_computed]
        # A window may no longer have the blocks that the next token attends to.
        return max((length for length in lengths if self.cache.has_all(length)), default=0)


def device_error(error: MemoryError | DeviceFailed, work: str) -> GenaiError:
    """Convert a device's error to an error that contains a fix."""
    if isinstance(error, DeviceFailed):
        fix = "load the model again; genai doctor lists the devices"
        return DeviceError(f"the device failed while {work}", str(error), fix)
    return CacheCapacityError(
        f"the device has no memory left for {work}",
        str(error) or "an allocation failed",
        "compute fewer sequences at a time, or load the model with a smaller context_size or cache_bytes",
    )


@contextmanager
def device_errors(work: str) -> Iterator[None]:
    """Convert device errors that occur in `work` to errors that contain a fix."""
    try:
        yield
    except (MemoryError, DeviceFailed) as error:
        raise device_error(error, work) from error

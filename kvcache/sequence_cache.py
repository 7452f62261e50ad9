"""The cache of a sequence: one table per cache group, all of the same length.

A sequence reuses blocks that already contain a prefix of its tokens, if another sequence published them. The idea is
vLLM's automatic prefix caching; the pool handles eviction. A group with full attention needs every block of the prefix,
a window only the blocks that the next token attends to, and recurrent layers the state after the prefix. The longest
prefix that all groups can serve is used.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence

from genai.common.interrupts import uninterrupted

from .groups import CacheGroup, GroupKind
from .pool import BlockError, BlockPool, CacheFull
from .states import StateTable
from .table import GONE, BlockCopy, BlockTable

Origin = int | tuple[int | bytes, ...]
"""A key that identifies everything that keys and values depend on, except tokens and numerics. Example: adapters."""

ONE_GROUP = (CacheGroup((0,)),)
_LEAST_SPACING, _PER_OCTAVE = 128, 8


def snapshot_spacing(length: int) -> int:
    """Return the distance between regular snapshots of states near a prefix of `length` tokens.

    The distance doubles with the length: a sequence that diverges from another after n tokens computes fewer than
    max(128, n / 8) of these tokens again, and long prompts have few snapshots: 16 up to 2,048 tokens, then 8 for each
    doubling.
    """
    return max(_LEAST_SPACING, (1 << length.bit_length()) // (2 * _PER_OCTAVE))


def regular_snapshots(first: int, end: int) -> Iterator[int]:
    """Yield the lengths after `first` and before `end` at which states are published for other sequences."""
    length = first
    while True:
        spacing = snapshot_spacing(length)
        length = (length // spacing + 1) * spacing
        if length >= end:
            return
        yield length


class SequenceCache:
    """The block tables and the states of a sequence.

    One thread at a time may use it. Caches of different threads may share a pool and blocks.

    Args:
        pool: the pool that blocks are allocated from.
        block_size: tokens per block, at least 1.
        groups: see `storage.CacheLayout`; a group with states comes last.
        state_pool: the pool of slots for states; None if there are no recurrent layers.

    Attributes:
        tables: the tables of the groups with pages, by group number.
        states: the states of recurrent layers; None if there are none.
        boundaries: lengths, multiples of the block size, at which other sequences may continue. The blocks that the
            next token after a boundary attends to are published before they leave the window. The state at a boundary
            is stored, as it is at the lengths of `regular_snapshots`.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        groups: Sequence[CacheGroup] = ONE_GROUP,
        state_pool: BlockPool | None = None,
    ) -> None:
        self.pool, self.block_size, self.groups = pool, block_size, groups
        self.page_groups = [group for group in groups if group.kind is not GroupKind.STATE]
        self.tables = tuple(BlockTable(pool, block_size) for _ in self.page_groups)
        self.states = StateTable(state_pool, block_size) if state_pool is not None else None
        self._first = self.tables[0] if self.tables else self.states
        self.boundaries: set[int] = set()
        self._bounded = [
            (group, table) for group, table in zip(self.page_groups, self.tables, strict=True) if group.is_bounded
        ]
        # The known keys of the full blocks, and the origin that the keys were computed with; then, per group, the
        # number of published blocks.
        self._keys: list[bytes] = []
        self._origin: Origin = 0
        self._published = [0] * len(self.tables)
        # The number of leading tokens whose blocks and states may be published; None = all.
        self.publish_limit: int | None = None
        # True if published blocks and states are evicted before those of other sequences.
        self.is_brief = False

    @property
    def length(self) -> int:
        """The number of tokens in the tables."""
        return 0 if self._first is None else self._first._length  # private access: read several times per step

    @property
    def held_blocks(self) -> list[int]:
        """All blocks that the tables hold references to."""
        return [block for table in self.tables for block in table.held_blocks]

    # --- growing and shrinking ---------------------------------------------------------------------------------------

    def append(self, num_tokens: int) -> tuple[list[list[int]], list[BlockCopy]]:
        """Allocate slots for tokens at the end; for the tokens' states, see `append_states`.

        Returns:
            Per group with pages, the slots of the new tokens; and the block copies that the storage must perform first
            (see BlockTable.append).

        Raises:
            CacheFull: there are not enough free blocks; the tables are unchanged.
        """
        if len(self.tables) == 1:  # a shortcut for most models, because every step runs this
            own, copies = self.tables[0].append(num_tokens)
            return [own], copies
        before, slots, copies = self.length, [], []
        try:
            for table in self.tables:
                own, copied = table.append(num_tokens)
                slots.append(own)
                copies += copied
        except BaseException:
            self._undo_tables(before)
            raise
        return slots, copies

    def append_states(self, num_tokens: int, guessed_from: int) -> tuple[int, dict[int, int]]:
        """Allocate slots for states of the same tokens: after the last token, after each draft token, and snapshots.

        Args:
            num_tokens: number of tokens.
            guessed_from: the length up to which tokens are certain. The states after that length are stored, so that
                rejected draft tokens need no recomputation.

        Returns, raises: see StateTable.append.
        """
        assert self.states is not None
        first, end = self.states.length, self.states.length + num_tokens
        guesses = range(max(guessed_from, first + 1), end)
        return self.states.append(num_tokens, {*guesses, *regular_snapshots(first, end), *self.boundaries})

    @uninterrupted
    def allocate(self, num_tokens: int) -> None:
        """Fill this empty cache with new blocks for a prefix: all blocks that the next token attends to.

        Args:
            num_tokens: length of the prefix, a multiple of the block size.

        Raises:
            CacheFull: there are not enough free blocks; the cache is empty.
        """
        count = num_tokens // self.block_size
        try:
            if self.states is not None and num_tokens:
                (slot,) = self.states.pool.allocate(1)
                self.states.fill(num_tokens, slot)
            for group, table in zip(self.page_groups, self.tables, strict=True):
                first = group.first_visible(num_tokens) // self.block_size
                table.fill([GONE] * first + self.pool.allocate(count - first))
        except CacheFull:
            self.release()
            raise

    @uninterrupted
    def undo(self, length: int) -> None:
        """Undo all appends since the tables had this length, even an append that failed half-way."""
        self._undo_tables(length)
        if self.states is not None and self.states.length > length:
            self.states.truncate(length)
        self._cut(length)

    @uninterrupted
    def _undo_tables(self, length: int) -> None:
        for table in self.tables:
            if table.length > length:
                table.truncate(length)

    @uninterrupted
    def truncate(self, length: int) -> int:
        """Drop all tokens from index `length`.

        If a window no longer has the blocks that the next token needs, or there is no state for exactly this length,
        earlier tokens are also dropped.

        Returns:
            The number of remaining tokens; the tokens after them have to be computed again.

        Raises:
            ValueError: `length` is negative or greater than the tables' length.
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"length = {length}: the tables have {self.length} tokens")
        if self.states is not None:
            length = self.states.reachable(length)
        # The blocks that a window returned precede all of its blocks, so the window cannot serve any shorter prefix.
        if not self.has_all(length):
            length = 0
        for table in self.tables:
            table.truncate(length)
        if self.states is not None:
            self.states.truncate(length)
        self._cut(length)
        return length

    def release(self) -> None:
        """Return all blocks to the pool; the cache is empty afterwards and may be used again."""
        self.truncate(0)

    def _cut(self, length: int) -> None:
        """Drop the keys of blocks that are no longer full, and do not count these blocks as published."""
        full = length // self.block_size
        del self._keys[full:]
        self._published = [min(count, full) for count in self._published]

    def settle(self) -> None:
        """See BlockTable.settle."""
        for table in self.tables:
            table.settle()

    def fork(self) -> SequenceCache:
        """Return a cache with the same tokens that shares every block; the first write to a shared block copies it."""
        other = SequenceCache(
            self.pool, self.block_size, self.groups, None if self.states is None else self.states.pool
        )
        try:
            if self.states is not None and other.states is not None:
                other.states.share(self.states)
            for group, (mine, table) in enumerate(zip(other.tables, self.tables, strict=True)):
                mine.share(table)
                other._published[group] = self._published[group]
        except BaseException:
            other.release()
            raise
        other.publish_limit, other.is_brief = self.publish_limit, self.is_brief
        other._keys, other._origin, other.boundaries = [*self._keys], self._origin, {*self.boundaries}
        return other

    # --- windows -----------------------------------------------------------------------------------------------------

    def _leaving(self, position: int) -> list[tuple[BlockTable, int]]:
        """Return the tables with leading blocks that no token from `position` attends to, and the number of blocks.

        The blocks needed to continue one block earlier are retained, so that a few tokens can be undone.
        """
        leaving = []
        for group, table in self._bounded:
            num_blocks = group.first_visible(max(position - self.block_size, 0)) // self.block_size
            if num_blocks > table.num_gone:
                leaving.append((table, num_blocks))
        return leaving

    def has_all(self, length: int) -> bool:
        """Return True if each window still has the blocks that a token at this length attends to."""
        return all(table.num_gone * self.block_size <= group.first_visible(length) for group, table in self._bounded)

    def has_left(self, position: int) -> bool:
        """Return True if there are blocks that neither the token at `position` nor any later token attends to."""
        return bool(self._bounded and self._leaving(position))

    @property
    def has_boundaries(self) -> bool:
        """True if other sequences can only continue at certain lengths, because there are windows or states."""
        return self.states is not None or bool(self._bounded)

    def publish_leaving(self, position: int, tokens: Sequence[int], origin: Origin, numerics: bytearray) -> None:
        """Publish the blocks that are about to leave a window if a token at a boundary attends to them.

        Other blocks are not published, because they would fill the memory but are hardly ever reused.
        """
        self._find_keys(position // self.block_size, tokens, origin, numerics)
        for table, num_blocks in self._leaving(position):
            number = self.tables.index(table)
            for index in range(table.num_gone, self._within_limit(num_blocks)):
                if any(self._sees(number, length, index) for length in self.boundaries):
                    self._publish_block(number, index, numerics)

    def _within_limit(self, num_blocks: int) -> int:
        """Return the number of blocks, of `num_blocks`, that may be published."""
        return num_blocks if self.publish_limit is None else min(num_blocks, self.publish_limit // self.block_size)

    def _sees(self, group: int, length: int, index: int) -> bool:
        """Return True if a token at this length attends to the block at `index`."""
        first = self.page_groups[group].first_visible(length)
        return first // self.block_size <= index < length // self.block_size

    def leave_behind(self, position: int) -> None:
        """Return blocks that no token from `position` attends to. Published blocks can still be found afterwards."""
        for table, num_blocks in self._leaving(position):
            table.leave_behind(num_blocks)

    def can_forget(self, first: int, count: int) -> bool:
        """Return True if every group still has what the next token needs after these blocks are removed (`forget`)."""
        position = self.length - count * self.block_size
        if position < first * self.block_size or self.states is not None:  # a state includes the removed tokens
            return False
        for group, table in self._bounded:
            gone = table.num_gone - max(0, min(table.num_gone, first + count) - first)
            if gone * self.block_size > group.first_visible(position):
                return False
        return True

    @uninterrupted
    def forget(self, first: int, count: int) -> list[BlockCopy]:
        """Remove `count` full blocks from every table, starting at block `first`; see BlockTable.forget.

        Raises:
            CacheFull: there are not enough free blocks for the copies. The cache is unchanged or empty.
        """
        copies: list[BlockCopy] = []
        for table in self.tables:
            try:
                copies += table.forget(first, count)
            except CacheFull:
                self.pool.release(source for source, _ in copies)
                if table is not self.tables[0]:
                    for one in self.tables:
                        one.release()
                    self._cut(0)
                raise
        self._cut(0)
        return copies

    # --- the prefix cache --------------------------------------------------------------------------------------------

    @uninterrupted
    def reuse(self, tokens: Sequence[int], origin: Origin, numerics: bytearray, settled: int = 0) -> int:
        """Fill this empty cache with the published blocks of the longest known prefix.

        The last token is never taken from the cache. It must be computed, because its logits are needed.

        Args:
            tokens: the tokens of the sequence.
            origin: a key for what the keys and values depend on, except tokens and numerics. Example: adapters.
            numerics: one number per token that identifies how its computation rounds. The blocks found may have been
                computed with other numerics; the numbers for their tokens are written here.
            settled: number of leading tokens for which only blocks that agree with `numerics` are used.

        Returns:
            The number of tokens that the cache now holds: a multiple of the block size, less than len(tokens).

        Raises:
            BlockError: the cache is not empty.
        """
        if self.length:
            raise BlockError(f"the cache already has {self.length} tokens, but reuse needs an empty cache")
        self._keys, self._origin = [], origin
        held: list[dict[int, int]] = [{} for _ in self.tables]
        try:
            notes = self._find_prefix(tokens, numerics, settled, held)
            count = self._shorten(notes, held)
        except BaseException:
            for blocks in held:
                self.pool.release(blocks.values())
            raise
        for group, table, blocks in zip(self.page_groups, self.tables, held, strict=True):
            first = group.first_visible(count * self.block_size) // self.block_size
            wanted = range(min(first, count), count)
            # The last block is released first, so that the end of a published prefix is evicted before its start.
            self.pool.release(blocks[index] for index in sorted(blocks, reverse=True) if index not in wanted)
            table.fill([GONE] * wanted.start + [blocks[index] for index in wanted])
        numerics[: count * self.block_size] = b"".join(notes[:count])
        # A sequence that diverges here cannot continue at this length. Publish a boundary for the next such sequence.
        if len(notes) > count:
            self.boundaries.add(len(notes) * self.block_size)
        del self._keys[count:]
        self._published = [count] * len(self.tables)
        return self.length

    def _find_prefix(
        self, tokens: Sequence[int], numerics: bytearray, settled: int, held: list[dict[int, int]]
    ) -> list[bytes]:
        """Follow the prefix for as long as all groups with full attention have it, and take references to their blocks.

        Returns:
            The numerics of each block's tokens: those of the block found or, if no group determines them, those in
            `numerics`.
        """
        notes: list[bytes] = []
        size = self.block_size
        for index in range((len(tokens) - 1) // size):
            begin, end = index * size, (index + 1) * size
            key = self._next_key(tokens, notes[-1] if notes else b"")
            note = self._take_full(key, index, held)
            if note is None:
                break
            note = note or bytes(numerics[begin:end])
            fixed = max(min(settled, end) - begin, 0)
            if note[:fixed] != numerics[begin : begin + fixed]:
                break
            self._keys.append(key)
            notes.append(note)
        return notes

    def _take_full(self, key: bytes, index: int, held: list[dict[int, int]]) -> bytes | None:
        """Take a reference to the block of each group with full attention.

        Returns:
            The numerics of the block; empty if no group determines them; None if at least one group has no such block.
        """
        note = b""
        for number, group in enumerate(self.page_groups):
            if group.is_bounded:
                continue
            found = self.pool.take(_group_key(key, number))
            if found is None:
                return None
            held[number][index] = found[0]
            if note and found[1] != note:
                return None
            note = found[1]
        if len(self._bounded) == len(self.tables):  # without full-attention groups, use any published block's note
            known = [self.pool.note_of(_group_key(key, number)) for number in range(len(self.tables))]
            if self.states is not None:
                known.append(self.states.pool.note_of(_state_key(key)))
            note = next((one for one in known if one is not None), b"")
        return note

    def _shorten(self, notes: Sequence[bytes], held: list[dict[int, int]]) -> int:
        """Take the windows' blocks and the state for the longest possible part of the prefix.

        Returns:
            The maximum number of blocks at which each window has what the next token attends to, and a state is stored.
        """
        count = len(notes)
        while count:
            if self.states is not None and self.states.pool.note_of(_state_key(self._keys[count - 1])) is None:
                count -= 1
                continue
            missing = self._take_windows(count, notes, held)
            if missing is not None:
                count = missing
            elif self.states is None or self._take_state(count, notes[count - 1]):
                break
            else:
                count -= 1
        return count

    def _take_state(self, count: int, note: bytes) -> bool:
        """Take the state after `count` blocks; return False if there is no state with these numerics."""
        assert self.states is not None
        found = self.states.pool.take(_state_key(self._keys[count - 1]))
        if found is None:
            return False
        if found[1] != note:
            self.states.pool.release([found[0]])
            return False
        self.states.fill(count * self.block_size, found[0])
        return True

    def _take_windows(self, count: int, notes: Sequence[bytes], held: list[dict[int, int]]) -> int | None:
        """Take the blocks that a token after `count` blocks attends to; return the index of a missing block, if any."""
        for number, group in enumerate(self.page_groups):
            if not group.is_bounded:
                continue
            first = group.first_visible(count * self.block_size) // self.block_size
            for index in range(count - 1, first - 1, -1):
                if index in held[number]:
                    continue
                found = self.pool.take(_group_key(self._keys[index], number))
                if found is None:
                    return index
                held[number][index] = found[0]
                if found[1] != notes[index]:
                    self.pool.release([held[number].pop(index)])
                    return index
        return None

    def publish(self, tokens: Sequence[int], origin: Origin, numerics: bytearray, at_end: bool = False) -> None:
        """Make full blocks findable. Call this method only after the blocks' keys and values were written.

        Args:
            tokens: the sequence's tokens, at least as many as the tables hold.
            origin, numerics: see `reuse`.
            at_end: True to publish the state after the last full block, too.
        """
        if len(tokens) < self.length:
            raise ValueError(f"{len(tokens)} tokens were given for tables of {self.length} tokens")
        size, full = self.block_size, self._within_limit(self.length // self.block_size)
        self._find_keys(full, tokens, origin, numerics)
        for number, table in enumerate(self.tables):
            for index in range(max(self._published[number], table.num_gone), full):
                self._publish_block(number, index, numerics)
            self._published[number] = max(self._published[number], full)
        if self.states is not None:
            for length, slot in self.states.slots.items():
                is_last = at_end and length == full * size
                if (is_last or self._is_snapshot(length)) and 0 < length <= full * size:
                    index = length // size - 1
                    note = bytes(numerics[index * size : length])
                    self.states.pool.publish(slot, _state_key(self._keys[index]), note, is_brief=self.is_brief)

    def _find_keys(self, count: int, tokens: Sequence[int], origin: Origin, numerics: bytearray) -> None:
        """Compute the keys of the first `count` blocks."""
        if origin != self._origin:
            self._keys, self._origin, self._published = [], origin, [0] * len(self.tables)
        while len(self._keys) < count:
            end = len(self._keys) * self.block_size
            self._keys.append(self._next_key(tokens, bytes(numerics[max(end - self.block_size, 0) : end])))

    def _publish_block(self, group: int, index: int, numerics: bytearray) -> None:
        note = bytes(numerics[index * self.block_size : (index + 1) * self.block_size])
        block, key = self.tables[group].blocks[index], _group_key(self._keys[index], group)
        self.pool.publish(block, key, note, is_brief=self.is_brief)

    @property
    def has_snapshots(self) -> bool:
        """True if the cache has states to publish."""
        return self.states is not None and any(map(self._is_snapshot, self.states.slots))

    def _is_snapshot(self, length: int) -> bool:
        return length % snapshot_spacing(length) == 0 or length in self.boundaries

    def _next_key(self, tokens: Sequence[int], note: bytes) -> bytes:
        """Return the key of the block that follows the blocks with known keys.

        The key is a hash chain over the tokens and over everything that the keys and values depend on before the block.
        The block's own numerics are not included.

        SHA-256 ensures that no user can choose tokens whose key collides with another user's.

        Args:
            tokens: the sequence's tokens.
            note: the numerics of the preceding block.
        """
        size, begin = self.block_size, len(self._keys) * self.block_size
        before = self._keys[-1] + note if self._keys else repr(self._origin).encode()
        chain = hashlib.sha256(before).digest()
        return hashlib.sha256(chain + struct.pack(f"<{size}q", *tokens[begin : begin + size])).digest()


def _state_key(key: bytes) -> bytes:
    """Return the key of the state after a block."""
    return key + b"state"


def _group_key(key: bytes, group: int) -> bytes:
    """Return the key of a group's block."""
    return key + b"%d" % group if group else key

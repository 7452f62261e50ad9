"""The cache of one sequence: a table per cache group, all of the same length.

A sequence finds blocks that already hold a prefix of it, where another has published them. The idea is vLLM's automatic
prefix caching; eviction is the pool's. Of a group with full attention every block of the prefix is needed, of a window
only those that the next token sees, of recurrent layers the state behind it: the longest prefix that all groups can
serve is taken.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

from genai.common.interrupts import uninterrupted

from .groups import CacheGroup, GroupKind
from .pool import BlockError, BlockPool, CacheFull
from .states import StateTable
from .table import GONE, BlockCopy, BlockTable

Origin = int | tuple[int | bytes, ...]
"""What keys and values depend on besides tokens and numerics."""

ONE_GROUP = (CacheGroup((0,)),)
SNAPSHOT_TOKENS = 512
"""At every so many tokens the state of recurrent layers is kept for others to go on from."""


class SequenceCache:
    """The tables of one sequence.

    One thread at a time may use it; caches of different threads may share a pool and blocks.

    Args:
        pool: where blocks come from. block_size: tokens per block, at least 1.
        groups: see `storage.CacheLayout`; one with states comes last.
        state_pool: where slots of states come from; None where there are none.

    Attributes:
        tables: of the groups with pages, by their numbers. states: those of recurrent layers, if there are any.
        boundaries: lengths, multiples of the block size, at which others may go on: what a token there sees is
            published before it leaves its window, and the state there is kept (as it is at every SNAPSHOT_TOKENS).
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
        self.states = StateTable(state_pool) if state_pool is not None else None
        self._first = self.tables[0] if self.tables else self.states
        self.boundaries: set[int] = set()
        self._bounded = [
            (group, table) for group, table in zip(self.page_groups, self.tables, strict=True) if group.is_bounded
        ]
        # Keys of the full blocks, as far as they are known, and what they were made with; per group, how many of its
        # blocks are published.
        self._keys: list[bytes] = []
        self._origin: Origin = 0
        self._published = [0] * len(self.tables)

    @property
    def length(self) -> int:
        """Tokens in the tables."""
        return 0 if self._first is None else self._first._length  # asked for several times in every step

    @property
    def held_blocks(self) -> list[int]:
        """Every block that a table holds a reference to."""
        return [block for table in self.tables for block in table.held_blocks]

    # --- growing and shrinking ---------------------------------------------------------------------------------------

    def append(self, num_tokens: int) -> tuple[list[list[int]], list[BlockCopy]]:
        """Make room for tokens at the end; for their states see `append_states`.

        Returns:
            Per group with pages the slots of the new tokens, and the block copies that the storage must perform first;
            see BlockTable.append.

        Raises:
            CacheFull: not enough free blocks; the tables are as they were.
        """
        if len(self.tables) == 1:  # as most models have it, and every step pays for it
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
        """Make room for the states of the same tokens: behind the last one, behind each guess, and for snapshots.

        Args:
            guessed_from: so many tokens are certain; the states from there on are kept, so that guesses that turn out
                to be wrong cost nothing.

        Returns, raises: see StateTable.append.
        """
        assert self.states is not None
        first, end = self.states.length, self.states.length + num_tokens
        guesses = range(max(guessed_from, first + 1), end)
        regular = range((first // SNAPSHOT_TOKENS + 1) * SNAPSHOT_TOKENS, end, SNAPSHOT_TOKENS)
        return self.states.append(num_tokens, {*guesses, *regular, *self.boundaries})

    @uninterrupted
    def allocate(self, num_tokens: int) -> None:
        """Fill this empty cache with blocks of its own for so many tokens, a multiple of the block size: all of those
        that a token behind them sees.

        Raises:
            CacheFull: not enough free blocks; the cache is empty.
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
        """Take back what was appended since the tables had this length, also where that failed half-way."""
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
        """Forget all tokens from `length` on; and some before it, where a window no longer has what comes before them,
        or no state is held of exactly so many tokens.

        Returns:
            How many tokens are left: the tokens from there on have to be computed again.

        Raises:
            ValueError: `length` is negative or greater than the tables' length.
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"length = {length}: the tables hold {self.length} tokens")
        if self.states is not None:
            length = self.states.reachable(length)
        # What a window gave back lies before all that it has: a token there cannot be computed from what is left.
        if not self.has_all(length):
            length = 0
        for table in self.tables:
            table.truncate(length)
        if self.states is not None:
            self.states.truncate(length)
        self._cut(length)
        return length

    def release(self) -> None:
        """Give all blocks back; the cache is empty afterwards and may be used again."""
        self.truncate(0)

    def _cut(self, length: int) -> None:
        """Forget what is known of blocks that are no longer full."""
        full = length // self.block_size
        del self._keys[full:]
        self._published = [min(count, full) for count in self._published]

    def settle(self) -> None:
        """See BlockTable.settle."""
        for table in self.tables:
            table.settle()

    def fork(self) -> SequenceCache:
        """A cache with the same tokens that shares every block; whoever writes first into a shared block copies it."""
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
        other._keys, other._origin, other.boundaries = [*self._keys], self._origin, {*self.boundaries}
        return other

    # --- windows -----------------------------------------------------------------------------------------------------

    def _leaving(self, position: int) -> list[tuple[BlockTable, int]]:
        """Tables with blocks that no token from a position on sees, and how many such blocks there are at their
        beginning. What the tokens of a block before that see stays, so that a few tokens can be taken back.
        """
        leaving = []
        for group, table in self._bounded:
            num_blocks = group.first_visible(max(position - self.block_size, 0)) // self.block_size
            if num_blocks > table.num_gone:
                leaving.append((table, num_blocks))
        return leaving

    def has_all(self, length: int) -> bool:
        """Whether each window still has what a token at this length sees."""
        return all(table.num_gone * self.block_size <= group.first_visible(length) for group, table in self._bounded)

    def has_left(self, position: int) -> bool:
        """Whether there are blocks that no token from a position on sees."""
        return bool(self._bounded and self._leaving(position))

    @property
    def has_boundaries(self) -> bool:
        """Whether others cannot go on from everywhere."""
        return self.states is not None or bool(self._bounded)

    def publish_leaving(self, position: int, tokens: Sequence[int], origin: Origin, numerics: bytearray) -> None:
        """Publish those of the blocks that are about to leave which a token at a boundary sees. Others would fill the
        memory with what is hardly ever found again.
        """
        self._find_keys(position // self.block_size, tokens, origin, numerics)
        for table, num_blocks in self._leaving(position):
            number = self.tables.index(table)
            for index in range(table.num_gone, num_blocks):
                if any(self._sees(number, length, index) for length in self.boundaries):
                    self._publish_block(number, index, numerics)

    def _sees(self, group: int, length: int, index: int) -> bool:
        """Whether a token at this length sees a block."""
        first = self.page_groups[group].first_visible(length)
        return first // self.block_size <= index < length // self.block_size

    def leave_behind(self, position: int) -> None:
        """Give blocks back that no token from a position on sees; published before, they may still be found."""
        for table, num_blocks in self._leaving(position):
            table.leave_behind(num_blocks)

    def can_forget(self, first: int, count: int) -> bool:
        """Whether every group still has what the next token needs once these blocks are taken out (see `forget`)."""
        position = self.length - count * self.block_size
        if position < first * self.block_size or self.states is not None:  # a state has seen what is forgotten
            return False
        for group, table in self._bounded:
            gone = table.num_gone - max(0, min(table.num_gone, first + count) - first)
            if gone * self.block_size > group.first_visible(position):
                return False
        return True

    @uninterrupted
    def forget(self, first: int, count: int) -> list[BlockCopy]:
        """Take `count` full blocks out of every table, from block `first` on; see BlockTable.forget.

        Raises:
            CacheFull: not enough free blocks for the copies. The cache is as it was, or empty.
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

        The last token is never taken from the cache: it has to be computed to get logits.

        Args:
            origin: what the keys and values depend on besides tokens and numerics, such as adapters.
            numerics: per token, a number for how it rounds. What is found need not round as it would have been: the
                found tokens' numbers are written here.
            settled: for so many tokens only blocks that agree with `numerics` are taken.

        Returns:
            How many tokens the cache now holds: a multiple of the block size, less than len(tokens).

        Raises:
            BlockError: the cache is not empty.
        """
        if self.length:
            raise BlockError(f"reuse: the cache already holds {self.length} tokens")
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
            # Last block first: of a published prefix, the end is the first to be evicted.
            self.pool.release(blocks[index] for index in sorted(blocks, reverse=True) if index not in wanted)
            table.fill([GONE] * wanted.start + [blocks[index] for index in wanted])
        numerics[: count * self.block_size] = b"".join(notes[:count])
        # What went another way found nothing to go on from here; the next one will.
        if len(notes) > count:
            self.boundaries.add(len(notes) * self.block_size)
        del self._keys[count:]
        self._published = [count] * len(self.tables)
        return self.length

    def _find_prefix(
        self, tokens: Sequence[int], numerics: bytearray, settled: int, held: list[dict[int, int]]
    ) -> list[bytes]:
        """Walk along the prefix as far as all groups with full attention have it, and take their blocks.

        Returns:
            Per block how its tokens round: as the blocks that were found, or, where there is none, as `numerics`.
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
        """Take a block of each group with full attention.

        Returns:
            How it rounds; empty where no group says so, None where one of them does not have it.
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
        if len(self._bounded) == len(self.tables):  # nothing says so for certain, but what is there may
            known = [self.pool.note_of(_group_key(key, number)) for number in range(len(self.tables))]
            if self.states is not None:
                known.append(self.states.pool.note_of(_state_key(key)))
            note = next((one for one in known if one is not None), b"")
        return note

    def _shorten(self, notes: Sequence[bytes], held: list[dict[int, int]]) -> int:
        """The most blocks of a prefix behind which there is a state, and for which each window has what the next token
        sees; those blocks, and the state, are taken.
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
        """Whether the state behind so many blocks could be taken."""
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
        """Take the blocks that a token behind so many blocks sees; the number of one that is not there, if any."""
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

    def publish(self, tokens: Sequence[int], origin: Origin, numerics: bytearray) -> None:
        """Make full blocks findable; call it only once their keys and values have been written.

        Args:
            tokens: the tokens in the tables, at least as many as they hold.
            origin, numerics: what computed them, and how, see `reuse`.
        """
        if len(tokens) < self.length:
            raise ValueError(f"{len(tokens)} tokens given for a table of {self.length}")
        size, full = self.block_size, self.length // self.block_size
        self._find_keys(full, tokens, origin, numerics)
        for number, table in enumerate(self.tables):
            for index in range(max(self._published[number], table.num_gone), full):
                self._publish_block(number, index, numerics)
            self._published[number] = full
        if self.states is not None:
            for length, slot in self.states.slots.items():
                if self._is_snapshot(length):
                    index = length // size - 1
                    note = bytes(numerics[index * size : length])
                    self.states.pool.publish(slot, _state_key(self._keys[index]), note)

    def _find_keys(self, count: int, tokens: Sequence[int], origin: Origin, numerics: bytearray) -> None:
        """Know the keys of so many blocks."""
        if origin != self._origin:
            self._keys, self._origin, self._published = [], origin, [0] * len(self.tables)
        while len(self._keys) < count:
            end = len(self._keys) * self.block_size
            self._keys.append(self._next_key(tokens, bytes(numerics[max(end - self.block_size, 0) : end])))

    def _publish_block(self, group: int, index: int, numerics: bytearray) -> None:
        note = bytes(numerics[index * self.block_size : (index + 1) * self.block_size])
        self.pool.publish(self.tables[group].blocks[index], _group_key(self._keys[index], group), note)

    @property
    def has_snapshots(self) -> bool:
        """Whether it holds states that are to be published."""
        return self.states is not None and any(map(self._is_snapshot, self.states.slots))

    def _is_snapshot(self, length: int) -> bool:
        return length % SNAPSHOT_TOKENS == 0 or length in self.boundaries

    def _next_key(self, tokens: Sequence[int], note: bytes) -> bytes:
        """The key of the block behind those whose keys are known: a chain of hashes over the tokens, over all that
        their keys and values depend on before the block, but not over the block's own numerics.

        SHA-256, so that nobody can choose tokens whose key collides with another user's.

        Args:
            note: the numerics of the block before it.
        """
        size, begin = self.block_size, len(self._keys) * self.block_size
        before = self._keys[-1] + note if self._keys else repr(self._origin).encode()
        chain = hashlib.sha256(before).digest()
        return hashlib.sha256(chain + struct.pack(f"<{size}q", *tokens[begin : begin + size])).digest()


def _state_key(key: bytes) -> bytes:
    """The key of the state behind a block."""
    return key + b"state"


def _group_key(key: bytes, group: int) -> bytes:
    """The key of a group's block."""
    return key + b"%d" % group if group else key

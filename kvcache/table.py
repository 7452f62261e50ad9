"""Block tables map a sequence's tokens to blocks. They grow on demand and share blocks copy-on-write."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

from genai.common.interrupts import uninterrupted

from .pool import BlockError, BlockPool, CacheFull

GONE = -1
"""The entry in `BlockTable.blocks` for a block that was returned to the pool."""

# Every change to a table's list of blocks gets a new number, which is unique across all tables.
_VERSIONS = count()

BlockCopy = tuple[int, int]
"""(source block, destination block): the storage must copy the content before anything else is written."""


class _ReportedCopy(NamedTuple):
    """A copy requested from the storage. Its source stays referenced and readable until the table's next call."""

    source: int
    block_index: int
    length_before: int


class BlockTable:
    """The blocks of a sequence: token i is in blocks[i // block_size] at offset i % block_size.

    One thread at a time may use a table. Tables used by different threads may share a pool and blocks.

    Args:
        pool: the pool that blocks are allocated from.
        block_size: tokens per block, at least 1.
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        if block_size < 1:
            raise ValueError(f"block_size = {block_size}: a block must hold at least one token")
        self.pool = pool
        self.block_size = block_size
        self._blocks: list[int] = []
        self._length = self._num_gone = 0
        self._reported_copy: _ReportedCopy | None = None
        self._version = next(_VERSIONS)

    @property
    def length(self) -> int:
        """The number of tokens in the table."""
        return self._length

    @property
    def blocks(self) -> Sequence[int]:
        """The block ids in token order; the first `num_gone` are GONE. A live view: read it, do not store it."""
        return self._blocks

    @property
    def version(self) -> int:
        """A number that changes whenever `blocks` changes, unique across all tables; a key for data derived from it."""
        return self._version

    @property
    def num_gone(self) -> int:
        """The number of leading blocks that were returned to the pool; see `leave_behind`."""
        return self._num_gone

    @property
    def held_blocks(self) -> Sequence[int]:
        """All blocks that this table references: `blocks`, and the source of a copy that was just reported."""
        held = self._blocks[self._num_gone :]
        return held if self._reported_copy is None else [*held, self._reported_copy.source]

    @property
    def usable_blocks(self) -> int:
        """The number of blocks that the table can grow in: a shared and partial last block does not count."""
        partial = self._length % self.block_size != 0
        return len(self._blocks) - (partial and not self.pool.is_writable(self._blocks[-1]))

    @property
    def own_blocks(self) -> int:
        """The number of blocks that only this table holds."""
        return sum(self.pool.references(block) == 1 for block in self._blocks[self._num_gone :])

    def append(self, num_tokens: int) -> tuple[list[int], list[BlockCopy]]:
        """Allocate slots for tokens at the end.

        Args:
            num_tokens: number of tokens, at least 0.

        Returns:
            The slots of the new tokens (block * block_size + offset), and the block copies (at most one) that the
            storage must perform before the slots are written and before the next call to this table.

        Raises:
            CacheFull: there are not enough free blocks; the table is unchanged.
        """
        if num_tokens < 0:
            raise ValueError(f"num_tokens = {num_tokens} is negative; use truncate() to remove tokens")
        copies: list[BlockCopy] = []
        if self._has_room(num_tokens):
            self._length += num_tokens  # a single assignment, so an interrupt cannot leave it half done
            if num_tokens == 1:
                return [self._blocks[-1] * self.block_size + (self._length - 1) % self.block_size], copies
        else:
            copies = self._grow(num_tokens)
        return self._slots(self._length - num_tokens), copies

    def _has_room(self, num_tokens: int) -> bool:
        """Return True if the tokens fit into the last block and that block is writable."""
        used = self._length % self.block_size
        room = self._reported_copy is None and 0 < used <= self.block_size - num_tokens
        return room and self.pool.is_writable(self._blocks[-1])

    @uninterrupted
    def _grow(self, num_tokens: int) -> list[BlockCopy]:
        self._settle_copy(self._length)
        used = self._length % self.block_size
        must_copy = num_tokens > 0 and used > 0 and not self.pool.is_writable(self._blocks[-1])
        num_blocks = -(-(self._length + num_tokens) // self.block_size)
        fresh = self.pool.allocate(num_blocks - len(self._blocks) + must_copy)
        copies: list[BlockCopy] = []
        if must_copy:
            source, destination = self._blocks[-1], fresh.pop(0)
            self._reported_copy = _ReportedCopy(source, len(self._blocks) - 1, self._length)
            self._blocks[-1] = destination
            copies.append((source, destination))
        self._blocks += fresh
        self._length += num_tokens
        self._version = next(_VERSIONS)
        return copies

    def _slots(self, start: int) -> list[int]:
        """Return the slots of the tokens from index `start` to the end."""
        slots: list[int] = []
        for index in range(start // self.block_size, len(self._blocks)):
            first = max(start - index * self.block_size, 0)
            last = min(self._length - index * self.block_size, self.block_size)
            base = self._blocks[index] * self.block_size
            slots.extend(range(base + first, base + last))
        return slots

    @uninterrupted
    def truncate(self, length: int) -> None:
        """Drop all tokens from index `length`, and return blocks that become unused to the pool.

        Directly after an append, this undoes the append completely, whether or not the copy was performed.

        Raises:
            ValueError: `length` is negative or greater than the table's length.
        """
        if not 0 <= length <= self._length:
            raise ValueError(f"length = {length}: the table has {self._length} tokens")
        self._settle_copy(length)
        keep = -(-length // self.block_size)
        # The last block is released first, so that the end of a published prefix is evicted before its start.
        self.pool.release(reversed(self._blocks[max(keep, self._num_gone) :]))
        del self._blocks[keep:]
        self._length, self._num_gone = length, min(keep, self._num_gone)
        self._version = next(_VERSIONS)

    @uninterrupted
    def leave_behind(self, num_blocks: int) -> None:
        """Return up to `num_blocks` full leading blocks, which are no longer read, to the pool; the length stays."""
        end = min(num_blocks, self._length // self.block_size)
        if end > self._num_gone:
            self._settle_copy(self._length)  # the copied block may be among the returned blocks
            self.pool.release(reversed(self._blocks[self._num_gone : end]))
            self._blocks[self._num_gone : end] = [GONE] * (end - self._num_gone)
            self._num_gone = end
            self._version = next(_VERSIONS)

    @uninterrupted
    def forget(self, first: int, count: int) -> list[BlockCopy]:
        """Remove `count` full blocks, starting at block `first`; the tokens after them move to earlier positions.

        After the call, the later blocks are no longer shared, so their content may be changed.

        Returns:
            The copies that the storage must perform immediately; the caller then releases their sources in the pool.

        Raises:
            CacheFull: there are not enough free blocks for the copies; the table is unchanged.
            ValueError: these are not full blocks of the table.
        """
        last = first + count
        if first < 0 or count < 1 or last > self._length // self.block_size:
            raise ValueError(f"blocks {first} to {last - 1} are not full: the table has only {self._length} tokens")
        self._settle_copy(self._length)
        behind = self._blocks[last:]
        shared = [block for block in behind if block != GONE and not self.pool.is_writable(block)]
        try:
            own = dict(zip(shared, self.pool.allocate(len(shared)), strict=True))
        except CacheFull:  # unpublish blocks that have a single holder: these blocks need no copy
            shared = [block for block in shared if not self.pool.withdraw(block)]
            own = dict(zip(shared, self.pool.allocate(len(shared)), strict=True))
        self.pool.release(reversed(self._blocks[max(first, self._num_gone) : last]))
        self._blocks[first:] = [own.get(block, block) for block in behind]
        self._length -= count * self.block_size
        self._num_gone -= max(0, min(self._num_gone, last) - first)
        self._version = next(_VERSIONS)
        return [*own.items()]

    def release(self) -> None:
        """Return all blocks to the pool; the table is empty afterwards and may be used again."""
        self.truncate(0)

    def fork(self) -> BlockTable:
        """Return a table with the same tokens that shares every block; the first write to a shared block copies it."""
        other = BlockTable(self.pool, self.block_size)
        other.share(self)
        return other

    @uninterrupted
    def share(self, other: BlockTable) -> None:
        """Share the blocks and tokens of another table; this table must be empty."""
        other._settle_copy(other._length)
        self.pool.share(other._blocks[other._num_gone :])
        self._blocks = list(other._blocks)
        self._length, self._num_gone = other._length, other._num_gone
        self._version = next(_VERSIONS)

    @uninterrupted
    def fill(self, blocks: Sequence[int]) -> None:
        """Fill this empty table with full blocks, leading GONE entries included. Takes over the caller's references.

        Raises:
            BlockError: the table is not empty.
        """
        if self._blocks:
            raise BlockError(f"the table already has {self._length} tokens")
        self._blocks = list(blocks)
        self._length, self._num_gone = len(blocks) * self.block_size, sum(block == GONE for block in blocks)
        self._version = next(_VERSIONS)

    @uninterrupted
    def settle(self) -> None:
        """Release the source of the copy that the last append reported; the copy must have been performed.

        Without this call, the source stays referenced until the next call, so that undoing the append shares the block
        again.
        """
        self._settle_copy(self._length)

    def _settle_copy(self, length: int) -> None:
        """Release the source of a reported copy, or its destination if the append is undone."""
        copy, self._reported_copy = self._reported_copy, None
        if copy is None:
            return
        if length <= copy.length_before:
            self._blocks[copy.block_index], unused = copy.source, self._blocks[copy.block_index]
            self._version = next(_VERSIONS)
        else:
            unused = copy.source
        self.pool.release([unused])

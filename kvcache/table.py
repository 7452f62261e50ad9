"""Block tables: which blocks hold a sequence's tokens, grown on demand and shared copy-on-write."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

from genai.common.interrupts import uninterrupted

from .pool import BlockError, BlockPool, CacheFull

GONE = -1
"""In the place of a block that was given back."""

# Every list of blocks that a table ever has gets a number of its own.
_VERSIONS = count()

BlockCopy = tuple[int, int]
"""(source block, destination block): contents that the storage must copy before anything is written."""


class _ReportedCopy(NamedTuple):
    """A copy the storage was asked for; its source stays referenced until the table's next call, to be read."""

    source: int
    block_index: int
    length_before: int


class BlockTable:
    """The blocks of one sequence: token i lies in blocks[i // block_size] at offset i % block_size.

    One thread at a time may use a table; tables of different threads may share a pool and blocks.

    Args:
        pool: where blocks come from.
        block_size: tokens per block, at least 1.
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        if block_size < 1:
            raise ValueError(f"block_size = {block_size}: a block holds at least one token")
        self.pool = pool
        self.block_size = block_size
        self._blocks: list[int] = []
        self._length = self._num_gone = 0
        self._reported_copy: _ReportedCopy | None = None
        self._version = next(_VERSIONS)

    @property
    def length(self) -> int:
        """Tokens in the table."""
        return self._length

    @property
    def blocks(self) -> Sequence[int]:
        """Block ids in token order, GONE for the first `num_gone`. A live view: read it, do not keep it."""
        return self._blocks

    @property
    def version(self) -> int:
        """Another number whenever `blocks` has changed; no other table ever has the same. What is made of the blocks
        can be kept as long as it stays.
        """
        return self._version

    @property
    def num_gone(self) -> int:
        """So many blocks at the beginning were given back, see `leave_behind`."""
        return self._num_gone

    @property
    def held_blocks(self) -> Sequence[int]:
        """Every block this table holds a reference to: `blocks`, and the source of a copy just reported."""
        held = self._blocks[self._num_gone :]
        return held if self._reported_copy is None else [*held, self._reported_copy.source]

    @property
    def usable_blocks(self) -> int:
        """Blocks with which the table can grow: a last one that is shared and not full will be copied."""
        partial = self._length % self.block_size != 0
        return len(self._blocks) - (partial and not self.pool.is_writable(self._blocks[-1]))

    @property
    def own_blocks(self) -> int:
        """Blocks that nobody else holds."""
        return sum(self.pool.references(block) == 1 for block in self._blocks[self._num_gone :])

    def append(self, num_tokens: int) -> tuple[list[int], list[BlockCopy]]:
        """Make room for tokens at the end.

        Args:
            num_tokens: how many, at least 0.

        Returns:
            The slots of the new tokens (block * block_size + offset), and the block copies (at most one) that the
            storage must perform before the slots are written and before the next call to this table.

        Raises:
            CacheFull: not enough free blocks; the table is as it was.
        """
        if num_tokens < 0:
            raise ValueError(f"num_tokens = {num_tokens}: cannot append fewer than no tokens; truncate() removes them")
        copies: list[BlockCopy] = []
        if self._has_room(num_tokens):
            self._length += num_tokens  # nothing that an interrupt could leave half done
            if num_tokens == 1:
                return [self._blocks[-1] * self.block_size + (self._length - 1) % self.block_size], copies
        else:
            copies = self._grow(num_tokens)
        return self._slots(self._length - num_tokens), copies

    def _has_room(self, num_tokens: int) -> bool:
        """Whether the last block, which nobody else may read, takes them."""
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
        """Slots of the tokens from `start` to the end."""
        slots: list[int] = []
        for index in range(start // self.block_size, len(self._blocks)):
            first = max(start - index * self.block_size, 0)
            last = min(self._length - index * self.block_size, self.block_size)
            base = self._blocks[index] * self.block_size
            slots.extend(range(base + first, base + last))
        return slots

    @uninterrupted
    def truncate(self, length: int) -> None:
        """Forget all tokens from `length` on, and give back the blocks that then hold nothing.

        Straight after an append it undoes that append completely, whether or not the copy was performed.

        Raises:
            ValueError: `length` is negative or greater than the table's length.
        """
        if not 0 <= length <= self._length:
            raise ValueError(f"length = {length}: the table holds {self._length} tokens")
        self._settle_copy(length)
        keep = -(-length // self.block_size)
        # Last block first: of a published prefix, the end is the first to be evicted.
        self.pool.release(reversed(self._blocks[max(keep, self._num_gone) :]))
        del self._blocks[keep:]
        self._length, self._num_gone = length, min(keep, self._num_gone)
        self._version = next(_VERSIONS)

    @uninterrupted
    def leave_behind(self, num_blocks: int) -> None:
        """Give the first full blocks back, up to so many: nobody reads them any more. The length stays as it is."""
        end = min(num_blocks, self._length // self.block_size)
        if end > self._num_gone:
            self._settle_copy(self._length)  # its block may be one of these
            self.pool.release(reversed(self._blocks[self._num_gone : end]))
            self._blocks[self._num_gone : end] = [GONE] * (end - self._num_gone)
            self._num_gone = end
            self._version = next(_VERSIONS)

    @uninterrupted
    def forget(self, first: int, count: int) -> list[BlockCopy]:
        """Take `count` full blocks out, from block `first` on: what lies behind them moves to earlier positions.

        Nobody else reads the blocks behind them afterwards, so that their content may be changed.

        Returns:
            Copies that the storage must perform at once; the caller then releases their sources in the pool.

        Raises:
            CacheFull: not enough free blocks for the copies; the table is as it was.
            ValueError: these are not full blocks of the table.
        """
        last = first + count
        if first < 0 or count < 1 or last > self._length // self.block_size:
            raise ValueError(f"blocks {first} to {last - 1} are not full: the table holds {self._length} tokens")
        self._settle_copy(self._length)
        behind = self._blocks[last:]
        shared = [block for block in behind if block != GONE and not self.pool.is_writable(block)]
        try:
            own = dict(zip(shared, self.pool.allocate(len(shared)), strict=True))
        except CacheFull:  # what nobody else holds is no longer found, and needs no copy
            shared = [block for block in shared if not self.pool.withdraw(block)]
            own = dict(zip(shared, self.pool.allocate(len(shared)), strict=True))
        self.pool.release(reversed(self._blocks[max(first, self._num_gone) : last]))
        self._blocks[first:] = [own.get(block, block) for block in behind]
        self._length -= count * self.block_size
        self._num_gone -= max(0, min(self._num_gone, last) - first)
        self._version = next(_VERSIONS)
        return [*own.items()]

    def release(self) -> None:
        """Give all blocks back; the table is empty afterwards and may be used again."""
        self.truncate(0)

    def fork(self) -> BlockTable:
        """A table with the same tokens that shares every block; whoever writes first into a shared block copies it."""
        other = BlockTable(self.pool, self.block_size)
        other.share(self)
        return other

    @uninterrupted
    def share(self, other: BlockTable) -> None:
        """Hold the tokens of another table, too, whose blocks are shared; this one is empty."""
        other._settle_copy(other._length)
        self.pool.share(other._blocks[other._num_gone :])
        self._blocks = list(other._blocks)
        self._length, self._num_gone = other._length, other._num_gone
        self._version = next(_VERSIONS)

    @uninterrupted
    def fill(self, blocks: Sequence[int]) -> None:
        """Take full blocks of which the caller has a reference each, GONE at the beginning; the table is empty.

        Raises:
            BlockError: it is not.
        """
        if self._blocks:
            raise BlockError(f"the table already holds {self._length} tokens")
        self._blocks = list(blocks)
        self._length, self._num_gone = len(blocks) * self.block_size, sum(block == GONE for block in blocks)
        self._version = next(_VERSIONS)

    @uninterrupted
    def settle(self) -> None:
        """Let go of the block that the last append reported to copy, which is copied by now.

        Otherwise that waits for the next call, so that an append which is undone shares the block again.
        """
        self._settle_copy(self._length)

    def _settle_copy(self, length: int) -> None:
        """Let go of a reported copy's source; or, if the append is undone, of its destination."""
        copy, self._reported_copy = self._reported_copy, None
        if copy is None:
            return
        if length <= copy.length_before:
            self._blocks[copy.block_index], unused = copy.source, self._blocks[copy.block_index]
            self._version = next(_VERSIONS)
        else:
            unused = copy.source
        self.pool.release([unused])

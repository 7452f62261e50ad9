"""A pool of reference-counted cache blocks."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from genai.common.forks import renew_locks
from genai.common.interrupts import uninterrupted


class CacheFull(RuntimeError):
    """The pool has fewer free blocks than the caller needs; nothing was allocated."""


class BlockError(ValueError):
    """A block was used in a way that its state does not allow, for example released twice."""


class Backing(Protocol):
    """A second store for published blocks, such as a disk; the pool searches it for blocks that are not in memory."""

    def load(self, key: bytes) -> tuple[bytes, Any] | None:
        """Return the note and the content stored under a key; None if the key has no entry."""

    def note_of(self, key: bytes) -> bytes | None:
        """Return the note stored under a key; None if there is no entry. The content may still prove to be damaged."""

    def fill(self, block: int, content: Any) -> None:
        """Copy content that `load` returned into a block that no other sequence reads."""

    def store(self, key: bytes, note: bytes, block: int) -> None:
        """Store the content of a block. The content does not change during this call."""

    def figures(self) -> dict[str, int]:
        """Return usage statistics by name."""

    def close(self) -> None:
        """Stop storing blocks."""


class BlockPool:
    """An allocator of block ids 0 to num_blocks - 1 that counts references to the blocks.

    A block is in exactly one of three states:
      referenced: at least one table holds it.
      idle: no table holds it, but its content is published under a key and can still be found. When no free block
        remains, the block that has been idle the longest is evicted. Brief blocks are evicted before all others.
      free: its content is unused.

    Every call is O(1) per block and atomic under one lock, so tables used by different threads may share a pool.

    Args:
        num_blocks: number of blocks, at least 1.

    Attributes:
        backing: a store for published blocks, which supplies blocks that are not in memory; None = memory only.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks = {num_blocks}: a pool needs at least one block")
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        # Low ids are allocated first and released blocks are reused first, which touches the fewest memory pages.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        # Brief blocks, until another sequence finds them; and those of them that are idle.
        self._brief: set[int] = set()
        self._idle_brief: OrderedDict[int, None] = OrderedDict()
        self._block_of_key: dict[bytes, int] = {}
        self._key_of_block: dict[int, bytes] = {}
        self._note_of_block: dict[int, bytes] = {}
        self._lock = threading.Lock()
        self.was_forked = False  # True if the process forked while another thread was changing the pool
        renew_locks(self, "_lock", flag="was_forked")
        self.backing: Backing | None = None
        self._owners: dict[weakref.ref[Any], Callable[[], None]] = {}
        self._dropped: SimpleQueue[weakref.ref[Any]] = SimpleQueue()

    def release_after(self, owner: object, release: Callable[[], None]) -> None:
        """Call `release` after `owner` was garbage-collected, before blocks are next allocated or counted.

        The garbage collector itself does not call `release`: it can run anywhere, even while this lock is held, and an
        interrupt raised in it is lost. Adding the owner to the queue is a single uninterruptible call.
        """
        self._owners[weakref.ref(owner, self._dropped.put)] = release

    @uninterrupted
    def _release_dropped(self) -> None:
        while not self._dropped.empty():
            with suppress(Empty):  # another thread took the last entry
                self._owners.pop(self._dropped.get_nowait())()

    @property
    def num_free(self) -> int:
        """The number of blocks that can be allocated now, including idle blocks."""
        self._release_dropped()
        return len(self._free) + len(self._idle) + len(self._idle_brief)

    def references(self, block: int) -> int:
        """Return the reference count of a block."""
        self._check_id(block)
        return self._references[block]

    def is_writable(self, block: int) -> bool:
        """Return True if the only holder of the block may write to it: it is neither shared nor published."""
        self._check_id(block)
        return self._references[block] == 1 and block not in self._key_of_block

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` blocks with one reference each, or raise an error and allocate none.

        Raises:
            CacheFull: fewer than `count` blocks are free.
        """
        if count < 0:
            raise ValueError(f"count = {count}: the number of blocks cannot be negative")
        self._release_dropped()
        with self._lock:
            if count > (free := len(self._free) + len(self._idle) + len(self._idle_brief)):
                raise CacheFull(f"{count} cache blocks are needed, but only {free} of {self.num_blocks} are free")
            blocks = [self._free.pop() if self._free else self._evict() for _ in range(count)]
            for block in blocks:
                self._references[block] = 1
            return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Add one reference to each block; if an error is raised, no block gets a reference.

        Raises:
            BlockError: at least one of the blocks has no references.
        """
        with self._lock:
            for block in blocks:
                self._check_held(block)
            for block in blocks:
                self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference to each block, in order; blocks that become idle are evicted in the same order.

        Raises:
            BlockError: at least one of the blocks has no references (it was released twice, or never allocated).
        """
        with self._lock:
            for block in blocks:
                self._check_held(block)
                self._references[block] -= 1
                if self._references[block] == 0:
                    if block in self._key_of_block:
                        (self._idle_brief if block in self._brief else self._idle)[block] = None
                    else:
                        self._free.append(block)

    def publish(self, block: int, key: bytes, note: bytes = b"", *, is_brief: bool = False) -> None:
        """Make a referenced block findable by a key that identifies its content. The block becomes read-only.

        If the key is already published, it stays with the older block. `find` returns the note with the block. A brief
        block is evicted before others, until it has been found.

        Raises:
            BlockError: the block has no references, or is published under another key.
        """
        with self._lock:
            self._check_held(block)
            known = self._key_of_block.get(block)
            if known is not None and known != key:
                raise BlockError(f"block {block} is already published under another key")
            is_new = key not in self._block_of_key
            if is_new:
                self._block_of_key[key] = block
                self._key_of_block[block], self._note_of_block[block] = key, note
                if is_brief:
                    self._brief.add(block)
        if is_new and self.backing is not None:
            self.backing.store(key, note, block)

    def withdraw(self, block: int) -> bool:
        """Unpublish a block so that its only holder may write to it; return False if it has several holders."""
        with self._lock:
            self._check_held(block)
            if self._references[block] > 1:
                return False
            if block in self._key_of_block:
                del self._block_of_key[self._key_of_block.pop(block)], self._note_of_block[block]
                self._brief.discard(block)
            return True

    def fetch(self, key: bytes) -> tuple[int, bytes] | None:
        """Load the block of a key from the backing into a new block and publish it. Returns the same as `find`."""
        if self.backing is None or (found := self.backing.load(key)) is None:
            return None
        note, content = found
        try:
            (block,) = self.allocate(1)
        except CacheFull:
            return None
        try:
            self.backing.fill(block, content)
        except BaseException:
            self.release([block])
            raise
        with self._lock:
            if key not in self._block_of_key:
                self._block_of_key[key] = block
                self._key_of_block[block], self._note_of_block[block] = key, note
        return block, note

    def take(self, key: bytes) -> tuple[int, bytes] | None:
        """Find a block in memory, or else fetch it from the backing."""
        return self.find(key) or self.fetch(key)

    def note_of(self, key: bytes) -> bytes | None:
        """Return the note published under a key without taking a reference; None if the key is unknown."""
        with self._lock:
            block = self._block_of_key.get(key)
            if block is not None:
                return self._note_of_block[block]
        return None if self.backing is None else self.backing.note_of(key)

    def find(self, key: bytes) -> tuple[int, bytes] | None:
        """Return the block published under a key and its note, and add a reference; None if the key is unknown."""
        with self._lock:
            block = self._block_of_key.get(key)
            if block is None:
                return None
            self._idle.pop(block, None)
            self._idle_brief.pop(block, None)
            self._brief.discard(block)
            self._references[block] += 1
            return block, self._note_of_block[block]

    def _evict(self) -> int:
        block, _ = (self._idle_brief or self._idle).popitem(last=False)
        self._brief.discard(block)
        del self._block_of_key[self._key_of_block.pop(block)], self._note_of_block[block]
        return block

    def _check_id(self, block: int) -> None:
        if not 0 <= block < self.num_blocks:
            raise BlockError(f"block {block} is not in the pool, which has the blocks 0 to {self.num_blocks - 1}")

    def _check_held(self, block: int) -> None:
        self._check_id(block)
        if self._references[block] == 0:
            raise BlockError(f"block {block} has no references: the block was released too often, or never allocated")

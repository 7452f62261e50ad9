"""Reference-counted cache blocks: who may use which block, and which are free."""

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
    """The pool has fewer free blocks than were asked for; nothing was allocated."""


class BlockError(ValueError):
    """A block was used in a way its state does not allow, such as released twice."""


class Backing(Protocol):
    """Where published blocks are kept besides memory, and found again."""

    def load(self, key: bytes) -> tuple[bytes, Any] | None:
        """The note and the content that have a key; None if there is none."""

    def note_of(self, key: bytes) -> bytes | None:
        """The note of what has a key, which may still turn out to be damaged; None if there is none."""

    def fill(self, block: int, content: Any) -> None:
        """Put content that `load` gave into a block that nobody else reads."""

    def store(self, key: bytes, note: bytes, block: int) -> None:
        """Keep the content of a block, which does not change as long as this call takes."""

    def figures(self) -> dict[str, int]:
        """What it has done."""

    def close(self) -> None:
        """Nothing more is kept."""


class BlockPool:
    """Hands out block ids 0 .. num_blocks - 1 and counts their references.

    A block is in exactly one of three states:
      referenced: at least one table holds it.
      idle: no table holds it, but its content is published under a key and can still be found; the longest-idle
        block is evicted when no free block is left.
      free: it holds nothing of use.

    Every call is O(1) per block and atomic under one lock, so tables of several threads may share a pool.

    Args:
        num_blocks: size of the pool, at least 1.

    Attributes:
        backing: keeps what is published, and finds what memory does not hold; None = memory is all.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks = {num_blocks}: a pool needs at least one block")
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        # Low ids first and the last one released again first: the fewest pages of memory are ever touched.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._block_of_key: dict[bytes, int] = {}
        self._key_of_block: dict[int, bytes] = {}
        self._note_of_block: dict[int, bytes] = {}
        self._lock = threading.Lock()
        self.was_forked = False  # while it was being changed
        renew_locks(self, "_lock", flag="was_forked")
        self.backing: Backing | None = None
        self._owners: dict[weakref.ref[Any], Callable[[], None]] = {}
        self._dropped: SimpleQueue[weakref.ref[Any]] = SimpleQueue()

    def release_after(self, owner: object, release: Callable[[], None]) -> None:
        """Once `owner` was dropped, call `release` before blocks are given out or counted.

        Not when it is dropped: that may be anywhere, also inside this lock, and what an interrupt raises there is lost.
        The queue takes note of it in one call that nothing comes between.
        """
        self._owners[weakref.ref(owner, self._dropped.put)] = release

    @uninterrupted
    def _release_dropped(self) -> None:
        while not self._dropped.empty():
            with suppress(Empty):  # another thread was faster
                self._owners.pop(self._dropped.get_nowait())()

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now, idle ones included."""
        self._release_dropped()
        return len(self._free) + len(self._idle)

    def references(self, block: int) -> int:
        """How many holders a block has."""
        self._check_id(block)
        return self._references[block]

    def is_writable(self, block: int) -> bool:
        """Whether the block's only holder may write into it: nobody else reads it, now or by its key."""
        self._check_id(block)
        return self._references[block] == 1 and block not in self._key_of_block

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each, or none at all.

        Raises:
            CacheFull: fewer than `count` blocks are free.
        """
        if count < 0:
            raise ValueError(f"count = {count}: cannot allocate fewer than no blocks")
        self._release_dropped()
        with self._lock:
            if count > (free := len(self._free) + len(self._idle)):
                raise CacheFull(f"{count} cache blocks needed, {free} of {self.num_blocks} are free")
            blocks = [self._free.pop() if self._free else self._evict() for _ in range(count)]
            for block in blocks:
                self._references[block] = 1
            return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Add one reference to each block, or to none.

        Raises:
            BlockError: nobody holds one of them.
        """
        with self._lock:
            for block in blocks:
                self._check_held(block)
            for block in blocks:
                self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference of each block, in order: of those that become idle, the first is evicted first.

        Raises:
            BlockError: nobody holds one of them (released twice, or never allocated).
        """
        with self._lock:
            for block in blocks:
                self._check_held(block)
                self._references[block] -= 1
                if self._references[block] == 0:
                    if block in self._key_of_block:
                        self._idle[block] = None
                    else:
                        self._free.append(block)

    def publish(self, block: int, key: bytes, note: bytes = b"") -> None:
        """Make a held block findable by a key that names its content; from then on nobody may write into it.

        If the key is already published, the older block keeps it. Who finds the block is given the note.

        Raises:
            BlockError: nobody holds the block, or it is published under another key.
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
        if is_new and self.backing is not None:
            self.backing.store(key, note, block)

    def withdraw(self, block: int) -> bool:
        """Let nobody find a published block any more, so that its only holder may write into it; whether it may."""
        with self._lock:
            self._check_held(block)
            if self._references[block] > 1:
                return False
            if block in self._key_of_block:
                del self._block_of_key[self._key_of_block.pop(block)], self._note_of_block[block]
            return True

    def fetch(self, key: bytes) -> tuple[int, bytes] | None:
        """As `find`, for what memory does not hold: the block is filled from the backing, and published."""
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
        """`find` in memory, else `fetch` from the backing."""
        return self.find(key) or self.fetch(key)

    def note_of(self, key: bytes) -> bytes | None:
        """The note of what is published under a key, of which nothing is taken; None if there is none."""
        with self._lock:
            block = self._block_of_key.get(key)
            if block is not None:
                return self._note_of_block[block]
        return None if self.backing is None else self.backing.note_of(key)

    def find(self, key: bytes) -> tuple[int, bytes] | None:
        """The block published under a key, with one more reference, and its note; None if there is none."""
        with self._lock:
            block = self._block_of_key.get(key)
            if block is None:
                return None
            self._idle.pop(block, None)
            self._references[block] += 1
            return block, self._note_of_block[block]

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        del self._block_of_key[self._key_of_block.pop(block)], self._note_of_block[block]
        return block

    def _check_id(self, block: int) -> None:
        if not 0 <= block < self.num_blocks:
            raise BlockError(f"block {block} is not in the pool: its blocks are 0 to {self.num_blocks - 1}")

    def _check_held(self, block: int) -> None:
        self._check_id(block)
        if self._references[block] == 0:
            raise BlockError(f"block {block} is not held by anyone: it was released too often, or never allocated")

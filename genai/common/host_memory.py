"""Host memory for large arrays: private, zeroed, aligned, and on huge pages if the system supports them.

Huge pages (2 MiB on x86) avoid most page table walks of a sequential read, which cost a third of the bandwidth on some
machines. The system uses huge pages only for private anonymous memory, and Python's mmap is shared by default.
"""

from __future__ import annotations

import contextlib
import mmap
import platform
import sys
import threading
from bisect import bisect
from collections import deque
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

HUGE_PAGE = 1 << 21
_LINE, _PAGE = 64, 4096
_MAPPING_BYTES = 1 << 26
# A separate mapping for a smaller array would waste too much memory on its partly used last page and on the system's
# bookkeeping.
_MAPPED_ALONE = 1 << 17
# Python defines MAP_NORESERVE since 3.13. For earlier versions, this is its value on common Linux machines.
_LINUX_MAP_NORESERVE = 0x4000
_COMMON_MACHINES = ("x86_64", "aarch64", "i686", "armv7l", "riscv64")


def huge_array(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """Return a zeroed array that starts on a huge page if it is large, else on a cache line.

    The memory is returned to the system when the array and its views are deleted.

    Raises:
        MemoryError: if the system has too little memory.
    """
    size = prod(shape) * np.dtype(dtype).itemsize
    mapping = None
    if size >= HUGE_PAGE and sys.platform.startswith("linux"):
        mapping = _mapped(size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, f"allocate {size} bytes of memory")
    array: NDArray[Any] = _aligned(size, mapping).view(dtype).reshape(shape)
    return array


def mapped_array(size: int) -> NDArray[np.uint8]:
    """Return an array of zeroed bytes in a separate mapping.

    When the array is deleted, the mapping is returned to the system.

    Huge pages are requested only where the array fills them completely, so that the array occupies no more memory than
    it uses. Small arrays, and all arrays outside Linux, are allocated by `huge_array`.

    Raises:
        MemoryError: if the system has too little memory.
    """
    if size < _MAPPED_ALONE or not sys.platform.startswith("linux"):
        return huge_array((size,), np.uint8)
    huge = size // HUGE_PAGE * HUGE_PAGE
    flags, purpose = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, f"allocate {size} bytes of memory"
    mapping = _mapping(size + (HUGE_PAGE if huge else 0), flags, purpose)
    array = _aligned(size, mapping) if huge else np.frombuffer(mapping, np.uint8)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_NOHUGEPAGE)
            if huge:
                first = array.ctypes.data - np.frombuffer(mapping, np.uint8).ctypes.data
                mapping.madvise(mmap.MADV_HUGEPAGE, first, huge)
    return array[:size]


class Arena:
    """Arrays that lie side by side in a few mappings, so that neighbours share the huge page at their boundary.

    A mapping is returned to the system when all of its arrays are deleted.
    """

    def __init__(self) -> None:
        self._left = np.empty(0, np.uint8)

    def array(self, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """Return a zeroed array that starts on a cache line, with all of its pages present."""
        size = prod(shape) * np.dtype(dtype).itemsize
        length = -(-size // _LINE) * _LINE
        if length > self._left.size:
            self._left = huge_array((max(length, _MAPPING_BYTES),), np.uint8)
        memory, self._left = self._left[:size], self._left[length:]
        # Only this thread touches the pages, because two threads that fault on one huge page at the same time wait for
        # milliseconds.
        memory[::_PAGE] = 0
        array: NDArray[Any] = memory.view(dtype).reshape(shape)
        return array


class RecycledMemory:
    """A mapping of which arrays take parts. A part is free again when its array and all of its views are deleted.

    The pages of free parts stay present. Memory of the C library is returned to the system and requested again in
    each run, and the page faults of a run with large images take up to a tenth of its time.
    """

    def __init__(self, nbytes: int) -> None:
        self._size = nbytes if sys.platform.startswith("linux") else 0
        self._memory: NDArray[np.uint8] | None = None
        self._free = [(0, self._size)]  # begins and ends, in order
        self._returned: deque[tuple[int, int]] = deque()  # deleted arrays, from any thread and at any time
        self._lock = threading.Lock()

    def array(self, nbytes: int) -> NDArray[np.uint8] | None:
        """Return bytes without initial values that start on a cache line; None if there is no room for them."""
        # A signal handler or a forked process may call this while the lock is held, and must not wait for it.
        if not self._lock.acquire(blocking=False):
            return None
        try:
            self._collect()
            length = -(-nbytes // _LINE) * _LINE
            place = next((place for place, (begin, end) in enumerate(self._free) if end - begin >= length), None)
            if place is None or not self._mapped():
                return None
            begin, end = self._free[place]
            self._free[place : place + 1] = [(begin + length, end)] if end - begin > length else []
        finally:
            self._lock.release()
        assert self._memory is not None
        address = self._memory.ctypes.data + begin
        return np.asarray(_Part(address, nbytes, self._memory, lambda: self._returned.append((begin, begin + length))))

    def _mapped(self) -> bool:
        """Return True if there is a mapping; it is created when it is first needed."""
        if self._memory is None:
            try:
                mapping = _mapping(self._size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, "map memory for images")
            except MemoryError:
                self._free = []
                return False
            self._memory = np.frombuffer(mapping, np.uint8)
        return True

    def _collect(self) -> None:
        """Add the parts of deleted arrays to the free parts, and join neighbours."""
        while self._returned:
            begin, end = self._returned.popleft()
            place = bisect(self._free, (begin, end))
            if place < len(self._free) and self._free[place][0] == end:
                end = self._free.pop(place)[1]
            if place and self._free[place - 1][1] == begin:
                place -= 1
                begin = self._free.pop(place)[0]
            self._free.insert(place, (begin, end))


class _Part:
    """The owner of an array's memory, which calls a function when the array and its views are deleted."""

    def __init__(self, address: int, nbytes: int, memory: NDArray[np.uint8], give_back: Callable[[], None]) -> None:
        self.__array_interface__ = {"data": (address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}
        self._memory, self._give_back = memory, give_back

    def __del__(self) -> None:
        self._give_back()


# Recycled arrays have at least this many bytes. The C library rarely returns the memory of smaller arrays to the
# system, and allocates it in less time.
LEAST_RECYCLED = 1 << 20
_RECYCLED = RecycledMemory(1 << 26)


def recycled(nbytes: int) -> NDArray[np.uint8] | None:
    """Return bytes of the process's recycled memory that start on a cache line; None if they are few or do not fit."""
    return _RECYCLED.array(nbytes) if nbytes >= LEAST_RECYCLED else None


def new_array(arena: Arena | None, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """Return a zeroed array from an arena, or a separate array if `arena` is None."""
    return (huge_array if arena is None else arena.array)(shape, dtype)


class ReservedMemory:
    """Zeroed bytes that never move and start on a cache line, reserved immediately and backed by memory on demand.

    Address space is reserved, and the system adds a page (if possible, a huge page) on the first write. Where such a
    reservation is not available (outside Linux), this is ordinary zeroed memory: most systems also back it on demand,
    and after close() it is freed when no array refers to it any more.

    Attributes:
        bytes: uint8 [nbytes].

    Raises:
        MemoryError: if the address space cannot be reserved.
    """

    def __init__(self, nbytes: int) -> None:
        flags, purpose = _reserve_flags(), f"reserve {nbytes} bytes of address space for the KV cache"
        self._map = None if flags is None or nbytes == 0 else _mapped(nbytes, flags, purpose)
        self.bytes = _aligned(nbytes, self._map)

    def close(self) -> None:
        """Free the memory. Reserved pages are freed even while arrays refer to them; the arrays then read zeros."""
        self.bytes = np.empty(0, np.uint8)
        mapping, self._map = self._map, None
        if mapping is None:
            return
        try:
            mapping.close()
        except BufferError:
            # The caller still holds an array, so free the pages now, and the addresses when the array is deleted.
            mapping.madvise(mmap.MADV_DONTNEED)


def _reserve_flags() -> int | None:
    if not sys.platform.startswith("linux"):
        return None
    known: Any = getattr(mmap, "MAP_NORESERVE", None)
    if known is None:
        known = _LINUX_MAP_NORESERVE if platform.machine() in _COMMON_MACHINES else 0
    return mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | int(known)


def _mapped(size: int, flags: int, purpose: str) -> mmap.mmap:
    """Map `size` bytes, plus the space to start on a huge page."""
    mapping = _mapping(size + HUGE_PAGE, flags, purpose)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without huge pages uses ordinary pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def _mapping(size: int, flags: int, purpose: str) -> mmap.mmap:
    try:
        return mmap.mmap(-1, size, flags=flags)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"cannot {purpose}: {error}") from error


def _aligned(size: int, mapping: mmap.mmap | None) -> NDArray[np.uint8]:
    """Return `size` zeroed bytes that start at a huge page of the mapping, or at a cache line of ordinary memory."""
    memory, step = (
        (np.zeros(size + _LINE, np.uint8), _LINE) if mapping is None else (np.frombuffer(mapping, np.uint8), HUGE_PAGE)
    )
    first = -memory.ctypes.data % step
    return memory[first : first + size]

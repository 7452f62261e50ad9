"""Memory of the host for large arrays: private, zeroed, aligned, on huge pages where the system has them.

A huge page (2 MiB on x86) spares most of the table walks of a sequential read: a third of the bandwidth on some
machines. The system gives them to private anonymous memory only, and Python's mmap is shared unless told otherwise.
"""

from __future__ import annotations

import contextlib
import mmap
import platform
import sys
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

HUGE_PAGE = 1 << 21
_LINE, _PAGE = 64, 4096
_MAPPING_BYTES = 1 << 26
# Below, a mapping's last page and what the system keeps of it would weigh too much.
_MAPPED_ALONE = 1 << 17
# Python knows MAP_NORESERVE from 3.13 on; before, its value on the common Linux machines.
_LINUX_MAP_NORESERVE = 0x4000
_COMMON_MACHINES = ("x86_64", "aarch64", "i686", "armv7l", "riscv64")


def huge_array(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """A zeroed array that begins on a huge page if it is large, else on a cache line.

    Its memory goes back to the system when the array and its views are gone.

    Raises:
        MemoryError: the system has no room.
    """
    size = prod(shape) * np.dtype(dtype).itemsize
    mapping = None
    if size >= HUGE_PAGE and sys.platform.startswith("linux"):
        mapping = _mapped(size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, f"get {size} bytes of memory")
    array: NDArray[Any] = _aligned(size, mapping).view(dtype).reshape(shape)
    return array


def mapped_array(size: int) -> NDArray[np.uint8]:
    """So many zeros in memory of their own: it goes back to the system with the array, and only its whole huge pages
    are such, so that no more is taken than is used. Where the system has none, as huge_array.

    Raises:
        MemoryError: the system has no room.
    """
    if size < _MAPPED_ALONE or not sys.platform.startswith("linux"):
        return huge_array((size,), np.uint8)
    huge = size // HUGE_PAGE * HUGE_PAGE
    flags, purpose = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, f"get {size} bytes of memory"
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
    """Arrays side by side in few mappings, so that neighbours share the huge page where one ends and the next begins.

    A mapping goes back to the system when all of its arrays are gone.
    """

    def __init__(self) -> None:
        self._left = np.empty(0, np.uint8)

    def array(self, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """A zeroed array that begins on a cache line, in memory that is there already."""
        size = prod(shape) * np.dtype(dtype).itemsize
        length = -(-size // _LINE) * _LINE
        if length > self._left.size:
            self._left = huge_array((max(length, _MAPPING_BYTES),), np.uint8)
        memory, self._left = self._left[:size], self._left[length:]
        # By this thread alone: two that meet a huge page for the first time at once wait for milliseconds.
        memory[::_PAGE] = 0
        array: NDArray[Any] = memory.view(dtype).reshape(shape)
        return array


def new_array(arena: Arena | None, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """A zeroed array from an arena, or on its own where there is none."""
    return (huge_array if arena is None else arena.array)(shape, dtype)


class ReservedMemory:
    """So many zeros that never move, from a cache line on: memory that is reserved at once, and filled on demand.

    Address space is reserved, and the system adds a page, a huge one if it can, when it is first written. Where such a
    reservation is not available (off Linux), it is ordinary zeroed memory: most systems fill it on demand as well, and
    close() frees it once no array of it is held.

    Attributes:
        bytes: uint8 [nbytes].

    Raises:
        MemoryError: the address space cannot be reserved.
    """

    def __init__(self, nbytes: int) -> None:
        flags, purpose = _reserve_flags(), f"reserve {nbytes} bytes of address space for the KV cache"
        self._map = None if flags is None or nbytes == 0 else _mapped(nbytes, flags, purpose)
        self.bytes = _aligned(nbytes, self._map)

    def close(self) -> None:
        """Give the memory back: reserved pages go even while arrays of them are held, which then read zeros."""
        self.bytes = np.empty(0, np.uint8)
        mapping, self._map = self._map, None
        if mapping is None:
            return
        try:
            mapping.close()
        except BufferError:
            # The caller still holds an array: return the pages now, the addresses when the array goes.
            mapping.madvise(mmap.MADV_DONTNEED)


def _reserve_flags() -> int | None:
    if not sys.platform.startswith("linux"):
        return None
    known: Any = getattr(mmap, "MAP_NORESERVE", None)
    if known is None:
        known = _LINUX_MAP_NORESERVE if platform.machine() in _COMMON_MACHINES else 0
    return mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | int(known)


def _mapped(size: int, flags: int, purpose: str) -> mmap.mmap:
    """So much memory, and room to begin on a huge page."""
    mapping = _mapping(size + HUGE_PAGE, flags, purpose)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without huge pages: ordinary ones serve as well
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def _mapping(size: int, flags: int, purpose: str) -> mmap.mmap:
    try:
        return mmap.mmap(-1, size, flags=flags)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"cannot {purpose}: {error}") from error


def _aligned(size: int, mapping: mmap.mmap | None) -> NDArray[np.uint8]:
    """So many zeros: of the mapping from a huge page on, or of ordinary memory from a cache line on."""
    memory, step = (
        (np.zeros(size + _LINE, np.uint8), _LINE) if mapping is None else (np.frombuffer(mapping, np.uint8), HUGE_PAGE)
    )
    first = -memory.ctypes.data % step
    return memory[first : first + size]

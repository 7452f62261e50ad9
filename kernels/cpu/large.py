"""Memory for large arrays: private, zeroed, aligned, on huge pages where the system has them.

A huge page (2 MiB on x86) spares most of the table walks of a sequential read: a third of the bandwidth on some
machines. The system gives them to private anonymous memory only, and Python's mmap is shared unless told otherwise.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

HUGE_PAGE = 1 << 21
_LINE, _PAGE = 64, 4096
_MAPPING_BYTES = 1 << 26


def huge_array(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """A zeroed array that begins on a huge page if it is large, else on a cache line.

    Its memory goes back to the system when the array and its views are gone.

    Raises:
        MemoryError: the system has no room.
    """
    size = prod(shape) * np.dtype(dtype).itemsize
    memory = _mapped(size) if size >= HUGE_PAGE and sys.platform.startswith("linux") else _aligned(size, _LINE)
    array: NDArray[Any] = memory[:size].view(dtype).reshape(shape)
    return array


class Arena:
    """Arrays side by side in few mappings, so that neighbours share the huge page where one ends and the next begins.

    A mapping goes back to the system when all of its arrays are gone.
    """

    def __init__(self) -> None:
        self._left = np.empty(0, np.uint8)

    def array(self, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """A zeroed array that begins on a cache line, in memory that is there already.

        Raises:
            MemoryError: the system has no room.
        """
        size = prod(shape) * np.dtype(dtype).itemsize
        taken = -(-size // _LINE) * _LINE
        if taken > self._left.size:
            self._left = huge_array((max(taken, _MAPPING_BYTES),), np.uint8)
        memory, self._left = self._left[:size], self._left[taken:]
        # By this thread alone: two that meet a huge page for the first time at once wait for milliseconds.
        memory[::_PAGE] = 0
        array: NDArray[Any] = memory.view(dtype).reshape(shape)
        return array


def new_array(arena: Arena | None, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """A zeroed array from an arena, or on its own where there is none."""
    return (huge_array if arena is None else arena.array)(shape, dtype)


def _mapped(size: int) -> NDArray[np.uint8]:
    try:
        mapping = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"cannot get {size} bytes of memory: {error}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without huge pages: ordinary ones serve as well
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return _from(np.frombuffer(mapping, np.uint8), HUGE_PAGE)


def _aligned(size: int, alignment: int) -> NDArray[np.uint8]:
    return _from(np.zeros(size + alignment, np.uint8), alignment)


def _from(memory: NDArray[np.uint8], alignment: int) -> NDArray[np.uint8]:
    return memory[-memory.ctypes.data % alignment :]

"""How fast this machine reads memory: the ceiling of decoding, which reads every weight once per token."""

from __future__ import annotations

import contextlib
import mmap
import statistics
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from genai.kernels.cpu.ceilings import ITEM, read_memory
from genai.kernels.cpu.team import Team
from genai.kernels.cpu.vector import LANES

_SMALLEST, _LARGEST = 256 * 2**20, 512 * 2**20
_CACHES = 4
_SHARE_OF_FREE = 8
_ITEM_BYTES = 4 * ITEM
# Items that are worth a thread: 1 MiB.
_GRAIN = 2**20 // _ITEM_BYTES
_HUGE_PAGE = 2**21


@dataclass(frozen=True)
class Bandwidth:
    """A measurement.

    Attributes:
        bytes_per_second: median over the passes.
        slowest, fastest: of the passes, bytes per second.
        buffer_bytes: what each pass read.
        threads: how many read it together.
    """

    bytes_per_second: float
    slowest: float
    fastest: float
    buffer_bytes: int
    threads: int

    def tokens_per_second(self, weight_bytes: float) -> float:
        """The most tokens per second that a model of so many bytes can decode, one sequence at a time."""
        return self.bytes_per_second / weight_bytes


def buffer_size(last_level_cache: int, free_bytes: int) -> int:
    """Four times the last-level cache within 256 to 512 MiB, and at most an eighth of the free memory."""
    return min(max(_SMALLEST, min(_CACHES * last_level_cache, _LARGEST)), max(free_bytes, 0) // _SHARE_OF_FREE)


def measure_bandwidth(buffer_bytes: int, *, threads: int | None = None, seconds: float = 0.3) -> Bandwidth:
    """Read a buffer again and again for `seconds`, with the threads that kernels use.

    The pages are huge where the system grants it, as those of packed weights are.

    Raises:
        ValueError: the buffer is smaller than 4 KiB.
    """
    items = buffer_bytes // _ITEM_BYTES
    if items < 1:
        raise ValueError(f"buffer_bytes is {buffer_bytes}, expected at least {_ITEM_BYTES}")
    team = Team(threads)
    buffer, total = _buffer(items * ITEM), np.zeros(LANES, np.int32)
    read_memory(buffer, total, 0, 1)  # compiled before the clock runs
    try:
        speeds: list[float] = []
        end = time.perf_counter() + seconds
        while not speeds or time.perf_counter() < end:
            begin = time.perf_counter()
            # Work in nanoseconds, at a byte each: more than there is, so that only the grain limits the parts.
            team.run(read_memory, (buffer, total), items, work=float(buffer.nbytes), grain=_GRAIN)
            speeds.append(buffer.nbytes / (time.perf_counter() - begin))
    finally:
        team.close()
    return Bandwidth(statistics.median(speeds), min(speeds), max(speeds), buffer.nbytes, team.threads)


def _buffer(count: int) -> NDArray[np.int32]:
    """int32 numbers on huge pages, written once: else the system serves all of them from a single page of zeros."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.ones(count, np.int32)
    # Shared anonymous memory, Python's default, gets no huge pages.
    mapping = mmap.mmap(-1, 4 * count + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(mapping, np.int32)
    first = -whole.ctypes.data % _HUGE_PAGE // 4
    buffer = whole[first : first + count]
    buffer[:] = 1
    return buffer

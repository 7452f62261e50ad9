"""How fast this machine reads memory: the ceiling of decoding, which reads every weight once per token."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.kernels.cpu.team import Team

_SMALLEST, _LARGEST = 256 * 2**20, 512 * 2**20
_CACHES = 4
_SHARE_OF_FREE = 8
# A part of this many bytes or more is worth a thread.
_GRAIN = 2**20 // 8


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

    A pass is a bitwise OR over 64-bit words, which NumPy computes without the GIL at the speed of memory.

    Raises:
        ValueError: the buffer is smaller than a word.
    """
    words = buffer_bytes // 8
    if words < 1:
        raise ValueError(f"buffer_bytes is {buffer_bytes}, expected at least 8")
    team = Team(threads)
    buffer = np.empty(words, np.uint64)
    try:
        # Pages must exist, or the system serves all of them from a single page of zeros.
        _share(team, _fill, buffer)
        speeds: list[float] = []
        end = time.perf_counter() + seconds
        while not speeds or time.perf_counter() < end:
            begin = time.perf_counter()
            _share(team, _read, buffer)
            speeds.append(buffer.nbytes / (time.perf_counter() - begin))
    finally:
        team.close()
    return Bandwidth(statistics.median(speeds), min(speeds), max(speeds), buffer.nbytes, team.threads)


def _share(team: Team, part: Any, buffer: NDArray[np.uint64]) -> None:
    # Work in nanoseconds, at a byte each: more than there is, so that only the grain limits the parts.
    team.run(part, (buffer,), len(buffer), work=float(buffer.nbytes), grain=_GRAIN)


def _fill(buffer: NDArray[np.uint64], begin: int, end: int) -> None:
    buffer[begin:end] = 1


def _read(buffer: NDArray[np.uint64], begin: int, end: int) -> None:
    np.bitwise_or.reduce(buffer[begin:end])

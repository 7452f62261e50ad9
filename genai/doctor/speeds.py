"""The ceilings of this machine: memory bandwidth, which limits decoding, and arithmetic, which limits prefill."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from genai.common.cores import default_threads, request_tiles
from genai.common.host_memory import huge_array
from genai.kernels.cpu import ceilings
from genai.kernels.cpu.jit.vector import LANES
from genai.kernels.cpu.program.calls import program_of
from genai.kernels.cpu.program.thread_pool import Threads

from .processor import Processor, read_processor

_SMALLEST, _LARGEST = 256 * 2**20, 512 * 2**20
_CACHES = 4
_SHARE_OF_FREE = 8
# Number of items that justify an extra thread: 1 MiB.
_GRAIN = 2**20 // ceilings.ITEM_BYTES
# The estimated duration of a run, which is large enough that all threads take part.
_SHARED_NANOSECONDS = 1e6


@dataclass(frozen=True)
class Bandwidth:
    """A bandwidth measurement.

    Attributes:
        bytes_per_second: median over the passes.
        slowest: bytes per second of the slowest pass.
        fastest: bytes per second of the fastest pass.
        buffer_bytes: bytes that each pass read.
        threads: number of threads that read the buffer.
    """

    bytes_per_second: float
    slowest: float
    fastest: float
    buffer_bytes: int
    threads: int

    def tokens_per_second(self, weight_bytes: float) -> float:
        """Return the maximum decode speed of one sequence, for a model whose weights have `weight_bytes` bytes."""
        return self.bytes_per_second / weight_bytes


def buffer_size(last_level_cache: int, free_bytes: int) -> int:
    """Return 4 times the last-level cache, limited to 256 to 512 MiB and to at most 1/8 of the free memory."""
    return min(max(_SMALLEST, min(_CACHES * last_level_cache, _LARGEST)), max(free_bytes, 0) // _SHARE_OF_FREE)


def measure_bandwidth(buffer_bytes: int, *, threads: int | None = None, seconds: float = 0.3) -> Bandwidth:
    """Read a buffer repeatedly for `seconds`, with the threads that kernels use.

    The buffer uses huge pages where the system grants them, as packed weights do.

    Raises:
        ValueError: the buffer is smaller than 4 KiB.
    """
    items = buffer_bytes // ceilings.ITEM_BYTES
    if items < 1:
        raise ValueError(f"buffer_bytes is {buffer_bytes}, expected at least {ceilings.ITEM_BYTES}")
    readers = Threads(threads)
    buffer = huge_array((items * ceilings.ITEM_BYTES,), np.uint8)
    buffer.fill(1)  # all pages that were never written to map to the same zero page
    program = program_of([[ceilings.read_call(buffer, items, _GRAIN)]])
    readers.run(program, nanoseconds=_SHARED_NANOSECONDS)  # compiles the program if necessary
    speeds: list[float] = []
    end = time.perf_counter() + seconds
    while not speeds or time.perf_counter() < end:
        begin = time.perf_counter()
        readers.run(program, nanoseconds=_SHARED_NANOSECONDS)
        speeds.append(buffer.nbytes / (time.perf_counter() - begin))
    return Bandwidth(statistics.median(speeds), min(speeds), max(speeds), buffer.nbytes, readers.count)


# The duration in seconds to which a thread's loop is calibrated.
_LOOP_SECONDS = 0.02
_FIRST_ROUNDS = 10_000

TimedLoop = Callable[[int], None]


def measure_products(
    *, threads: int | None = None, repeat: int = 5, processor: Processor | None = None, only: str | None = None
) -> dict[str, float]:
    """Measure operations per second on registers only; a multiplication and an addition count as two operations.

    Args:
        threads: number of threads that multiply simultaneously; None = the number that kernels use.
        repeat: number of runs; the result is the median of the runs.
        processor: processor whose instruction sets are measured; None = this machine's processor.
        only: one of the names below; None = all names that the machine supports.

    Returns:
        The operations per second by name: "fp32" and, if the machine has the instructions, "vnni int8", "amx bf16" and
        "amx int8".

    Raises:
        ValueError: threads or repeat is below 1.
    """
    threads = default_threads() if threads is None else threads
    for name, value in (("threads", threads), ("repeat", repeat)):
        if value < 1:
            raise ValueError(f"{name} is {value}, expected at least 1")
    speeds = {}
    for name, (loop, operations) in _loops(processor or read_processor()).items():
        if only not in (None, name):
            continue
        rounds = _calibrated(loop)
        seconds = [_together(loop, rounds, threads) for _ in range(repeat)]
        speeds[name] = threads * rounds * operations / statistics.median(seconds)
    return speeds


def _loops(processor: Processor) -> dict[str, tuple[TimedLoop, int]]:
    """Return for each arithmetic a loop over a number of rounds, and the number of operations in one round."""
    config, numbers = ceilings.TILE_CONFIG.ctypes.data, np.full(LANES, 1e-3, np.float32)
    loops: dict[str, tuple[TimedLoop, int]] = {
        "fp32": (lambda rounds: ceilings.multiply_float32(rounds, numbers.ctypes.data), ceilings.FLOAT32_OPERATIONS)
    }
    features = processor.features
    if "AVX512-VNNI" in features:
        loops["vnni int8"] = lambda rounds: ceilings.multiply_vnni(rounds, config), ceilings.VNNI_OPERATIONS
    if {"AMX-BF16", "AMX-INT8"} <= set(features) and request_tiles():
        loops["amx bf16"] = lambda rounds: ceilings.multiply_amx_bf16(rounds, config), ceilings.AMX_BF16_OPERATIONS
        loops["amx int8"] = lambda rounds: ceilings.multiply_amx_int8(rounds, config), ceilings.AMX_INT8_OPERATIONS
    return loops


def _calibrated(loop: TimedLoop) -> int:
    """Return the number of rounds that take about _LOOP_SECONDS."""
    loop(1)  # compiles the loop before the measurement
    begin = time.perf_counter()
    loop(_FIRST_ROUNDS)
    return max(1, int(_FIRST_ROUNDS * _LOOP_SECONDS / (time.perf_counter() - begin)))


def _together(loop: TimedLoop, rounds: int, threads: int) -> float:
    """Return the seconds from the first thread's start to the last thread's end; all threads start together."""
    start = threading.Barrier(threads)
    spans: list[tuple[float, float]] = []

    def work() -> None:
        start.wait()
        begin = time.perf_counter()
        loop(rounds)
        spans.append((begin, time.perf_counter()))

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return max(end for _, end in spans) - min(begin for begin, _ in spans)

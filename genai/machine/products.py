"""How many multiplications and additions per second this machine does at most: the ceiling of reading a prompt."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable

import numpy as np

from genai.kernels.cpu import ceilings
from genai.kernels.cpu.cores import default_threads
from genai.kernels.cpu.vector import LANES

from .processor import Processor, read_processor, request_amx_tiles

# A thread's loop: calibrated to take this long, and repeated.
_LOOP_SECONDS = 0.02
_FIRST_ROUNDS = 10_000

Loop = Callable[[int], None]


def measure_products(
    *,
    threads: int | None = None,
    repeat: int = 5,
    processor: Processor | None = None,
    only: str | None = None,
) -> dict[str, float]:
    """Operations per second (a multiplication and an addition are two) of registers alone, memory left out.

    Args:
        threads: how many threads multiply at once; None = as many as kernels use.
        repeat: the median of so many runs counts.
        processor: whose instructions are tried; None = this one.
        only: one kind of product, as named below; None = all that the machine has.

    Returns:
        "fp32", and where the machine has the instructions "vnni int8", "amx bf16" and "amx int8".

    Raises:
        ValueError: threads or repeat is below 1.
    """
    threads = default_threads() if threads is None else threads
    for name, value in (("threads", threads), ("repeat", repeat)):
        if value < 1:
            raise ValueError(f"{name} is {value}, expected at least 1")
    found = {}
    for name, (loop, operations) in _loops(processor or read_processor()).items():
        if only not in (None, name):
            continue
        rounds = _calibrated(loop)
        seconds = [_together(loop, rounds, threads) for _ in range(repeat)]
        found[name] = threads * rounds * operations / statistics.median(seconds)
    return found


def _loops(processor: Processor) -> dict[str, tuple[Loop, int]]:
    """Per kind of number: a loop of so many rounds, and the operations of one round."""
    config = ceilings.TILE_CONFIG.ctypes.data
    loops: dict[str, tuple[Loop, int]] = {
        "fp32": (
            lambda rounds: ceilings.multiply_float32(rounds, np.full(LANES, 1e-3, np.float32)),
            ceilings.FLOAT32_OPERATIONS,
        )
    }
    features = processor.features
    if "AVX512-VNNI" in features:
        loops["vnni int8"] = lambda rounds: ceilings.multiply_vnni(rounds, config), ceilings.VNNI_OPERATIONS
    if {"AMX-BF16", "AMX-INT8"} <= set(features) and request_amx_tiles():
        loops["amx bf16"] = lambda rounds: ceilings.multiply_amx_bf16(rounds, config), ceilings.AMX_BF16_OPERATIONS
        loops["amx int8"] = lambda rounds: ceilings.multiply_amx_int8(rounds, config), ceilings.AMX_INT8_OPERATIONS
    return loops


def _calibrated(loop: Loop) -> int:
    """Rounds that take about _LOOP_SECONDS."""
    loop(1)  # compiled before the clock runs
    begin = time.perf_counter()
    loop(_FIRST_ROUNDS)
    return max(1, int(_FIRST_ROUNDS * _LOOP_SECONDS / (time.perf_counter() - begin)))


def _together(loop: Loop, rounds: int, threads: int) -> float:
    """Seconds from the first thread's start to the last one's end; all begin at once."""
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

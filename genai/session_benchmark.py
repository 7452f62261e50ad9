"""What `genai bench session` measures: loading, runs and time per operator, beside onnxruntime if asked for."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .session.arrays import random_feed
from .session.inference_session import InferenceSession
from .session.options import SessionOptions
from .session.peer import Peer

# A measurement ends after this, however many runs it was asked for.
MAX_SECONDS = 20.0


def bench_session(
    model: Path, *, dims: Mapping[str, int], repeat: int = 10, threads: int = 0, compare: bool = False
) -> dict[str, Any]:
    """Figures of a model on made-up inputs: milliseconds of loading and of a run (median and least).

    Args:
        dims: extents of symbolic dimensions.
        repeat: runs after a first one that is not counted.
        threads: 0 = the physical cores.
        compare: measure onnxruntime in turn with us, run by run, and give the ratio of the medians.

    Raises:
        GenaiError: the model cannot be loaded or run.
    """
    options = SessionOptions()
    options.intra_op_num_threads = threads
    began = time.perf_counter()
    session = InferenceSession(model, options)
    result: dict[str, Any] = {"model": model.name, "load_ms": (time.perf_counter() - began) * 1e3}
    feed = random_feed(session.get_inputs(), dims)
    peer = Peer(str(model), threads) if compare else None
    runs: list[Callable[[], Any]] = [lambda: session.run(None, feed)]
    if peer is not None:
        runs.append(lambda: peer.run(feed))
    times = _alternating(runs, repeat)
    result |= {"median_ms": statistics.median(times[0]), "least_ms": min(times[0]), "runs": len(times[0])}
    if peer is not None:
        median = statistics.median(times[1])
        result |= {"onnxruntime_median_ms": median, "onnxruntime_least_ms": min(times[1])}
        result["times_onnxruntime"] = result["median_ms"] / median
    return result


def _alternating(runs: list[Callable[[], Any]], repeat: int) -> list[list[float]]:
    """Milliseconds per run of each, taken in turn so that disturbances hit both."""
    times: list[list[float]] = [[] for _ in runs]
    deadline = time.perf_counter() + MAX_SECONDS
    for run in runs:
        run()
    for _ in range(repeat):
        for run, taken in zip(runs, times, strict=True):
            began = time.perf_counter()
            run()
            taken.append((time.perf_counter() - began) * 1e3)
        if time.perf_counter() > deadline:
            break
    return times

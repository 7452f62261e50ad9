"""What `genai bench session` measures: loading, runs and time per operator, beside onnxruntime if asked for."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..session.arrays import Peer, check_dims, random_feed
from ..session.config import SessionConfig
from ..session.session import Session

# A measurement ends after this, however many runs it was asked for.
MAX_SECONDS = 30.0
CREATIONS = 5
PAUSE_SECONDS = 0.05


def bench_session(
    model: Path, *, dims: Mapping[str, int], repeat: int = 10, threads: int = 0, compare: bool = False
) -> dict[str, Any]:
    """Figures of a model on made-up inputs: milliseconds of making a session and of a run (medians and least).

    Args:
        dims: extents of symbolic dimensions.
        repeat: runs after a first one that is not counted.
        threads: 0 = the physical cores.
        compare: measure onnxruntime in turn with us, one by one, and give the ratios of the medians.

    Raises:
        GenaiError: the model cannot be loaded or run.
    """
    config = SessionConfig(threads=threads)
    session = Session(model, config)
    peer = Peer(str(model), threads) if compare else None
    makers: list[Callable[[], Any]] = [lambda: Session(model, config)]
    check_dims(session.inputs, dims)
    feed = random_feed(session.inputs, dims)
    runs: list[Callable[[], Any]] = [lambda: session.run(feed)]
    if peer is not None:
        makers.append(lambda: Peer(str(model), threads))
        runs.append(lambda: peer.run(feed))
    result: dict[str, Any] = {"model": model.name}
    result |= _figures("create", _alternating(makers, CREATIONS))
    result |= _figures("run", _alternating(runs, repeat))
    return result


def _figures(name: str, times: list[list[float]]) -> dict[str, Any]:
    """Ours, and where there are two onnxruntime's and the ratio of both."""
    ours, *theirs = times
    figures: dict[str, Any] = {f"{name}_ms": statistics.median(ours), f"{name}_least_ms": min(ours)}
    if theirs:
        median = statistics.median(theirs[0])
        figures |= {f"onnxruntime_{name}_ms": median, f"onnxruntime_{name}_least_ms": min(theirs[0])}
        figures[f"{name}_ratio"] = statistics.median(ours) / median
    return {**figures, f"{name}s": len(ours)}


def _alternating(runs: list[Callable[[], Any]], repeat: int) -> list[list[float]]:
    """Milliseconds per run of each, taken in turn so that disturbances hit both.

    Where there are two, each has a pause and a run that does not count before its own: onnxruntime's threads go on
    spinning for a while after a run, on the cores that the other side needs.
    """
    times: list[list[float]] = [[] for _ in runs]
    deadline = time.perf_counter() + MAX_SECONDS
    for run in runs:
        run()
    for _ in range(repeat):
        for run, milliseconds in zip(runs, times, strict=True):
            if len(runs) > 1:
                time.sleep(PAUSE_SECONDS)
                run()
            began = time.perf_counter()
            run()
            milliseconds.append((time.perf_counter() - began) * 1e3)
        if time.perf_counter() > deadline:
            break
    return times

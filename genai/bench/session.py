"""The measurements of `genai bench session`: session creation and runs, optionally compared with onnxruntime."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..session.arrays import Peer, peer_module, random_feed
from ..session.config import SessionConfig
from ..session.session import Session

# A measurement stops after this number of seconds, even if runs remain.
MAX_SECONDS = 30.0
CREATIONS = 5
PAUSE_SECONDS = 0.05


def bench_session(
    model: Path, *, dims: Mapping[str, int], repeat: int = 10, threads: int = 0, compare: bool = False
) -> dict[str, Any]:
    """Return the figures of a model with random inputs: milliseconds to create a session and to run it (median, min).

    Args:
        dims: values of symbolic dimensions.
        repeat: measured runs, after a warm-up run.
        threads: CPU threads; 0 = the physical cores.
        compare: True to also measure onnxruntime, alternating run by run, and to return the ratios of the medians.

    Raises:
        GenaiError: the model cannot be loaded or run.
    """
    config = SessionConfig(threads=threads)
    if compare:
        peer_module()  # before anything that takes long
    session = Session(model, config)
    peer = Peer(str(model), threads) if compare else None
    makers: list[Callable[[], Any]] = [lambda: Session(model, config)]
    feed = random_feed(session.inputs, session.head_sizes | {**dims}, tables=session.table_sizes)
    runs: list[Callable[[], Any]] = [lambda: session.run(feed)]
    if peer is not None:
        makers.append(lambda: Peer(str(model), threads))
        runs.append(lambda: peer.run(feed))
    result: dict[str, Any] = {"model": model.name}
    result |= _figures("create", _alternating(makers, CREATIONS))
    result |= _figures("run", _alternating(runs, repeat))
    return result


def _figures(name: str, times: list[list[float]]) -> dict[str, Any]:
    """Return our figures and, if onnxruntime was measured, onnxruntime's figures and the ratio of the medians."""
    ours, *theirs = times
    figures: dict[str, Any] = {f"{name}_ms": statistics.median(ours), f"{name}_least_ms": min(ours)}
    if theirs:
        median = statistics.median(theirs[0])
        figures |= {f"onnxruntime_{name}_ms": median, f"onnxruntime_{name}_least_ms": min(theirs[0])}
        figures[f"{name}_ratio"] = statistics.median(ours) / median
    return {**figures, f"{name}s": len(ours)}


def _alternating(runs: list[Callable[[], Any]], repeat: int) -> list[list[float]]:
    """Return the milliseconds of each run. The two sides alternate, so that disturbances affect both.

    With two sides, a pause and an unmeasured run precede each measured run, because after a run onnxruntime's threads
    spin for a while on the cores that the other side needs.
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

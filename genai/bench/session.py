"""The measurements of `genai bench session`: session creation and runs, optionally compared with onnxruntime."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..session.arrays import Peer, differences, peer_module, random_feed
from ..session.config import SessionConfig
from ..session.session import Session

# A measurement stops after this number of seconds, even if runs remain.
MAX_SECONDS = 30.0
CREATIONS = 5
PAUSE_SECONDS = 0.05
# Short runs are repeated for this number of milliseconds, because timers and the first run after a pause are not exact.
_LEAST_MS, _MOST_RUNS = 1.0, 100


def bench_session(
    model: Path,
    *,
    dims: Mapping[str, int],
    repeat: int = 10,
    threads: int = 0,
    compare: bool = False,
    cpu: bool = False,
    inputs: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the figures of a model: milliseconds to create a session and to run it (median, minimum, spread).

    The spread is the distance between the first and the third quartile. Runs of less than a millisecond are measured
    several at a time.

    Args:
        dims: values of symbolic dimensions.
        repeat: number of measurements, after a warm-up run.
        threads: CPU threads; 0 = the physical cores, or one thread with `cpu`.
        compare: True to also measure onnxruntime, alternating run by run, and to return the ratios of the medians and
            the largest difference of a result, relative to the largest value of that output.
        cpu: True to measure the CPU time of the process, with one thread, instead of the elapsed time. The ratios are
            then those of the minima.
        inputs: arrays by input name; None = random inputs.

    Raises:
        GenaiError: the model cannot be loaded or run.
    """
    threads = 1 if cpu else threads
    config = SessionConfig(threads=threads)
    if compare:
        peer_module()  # before anything that takes long
    session = Session(model, config)
    peer = Peer(str(model), threads) if compare else None
    makers: list[Callable[[], Any]] = [lambda: Session(model, config)]
    feed = inputs or random_feed(session.inputs, session.head_sizes | {**dims}, tables=session.table_sizes)
    runs: list[Callable[[], Any]] = [lambda: session.run(feed)]
    if peer is not None:
        makers.append(lambda: Peer(str(model), threads))
        runs.append(lambda: peer.run(feed))
    result: dict[str, Any] = {"model": model.name}
    result |= _figures("create", _alternating(makers, CREATIONS, cpu=cpu), of_minima=cpu)
    result |= _figures("run", _alternating([_longer(run) for run in runs], repeat, cpu=cpu), of_minima=cpu)
    if peer is not None:
        found = differences(session.run(feed), peer.run(feed))
        result["difference"] = max((relative for _, _, relative in found), default=0.0)
    return result


class _Several:
    """A run that is repeated several times, so that it takes at least a millisecond."""

    def __init__(self, run: Callable[[], Any], count: int) -> None:
        self.run, self.count = run, count

    def __call__(self) -> None:
        for _ in range(self.count):
            self.run()


def _longer(run: Callable[[], Any]) -> _Several:
    milliseconds = math.inf
    for _ in range(4):  # the first two runs compile kernels and record a faster form of the plan
        began = time.perf_counter()
        run()
        milliseconds = min(milliseconds, (time.perf_counter() - began) * 1e3)
    return _Several(run, min(_MOST_RUNS, max(1, math.ceil(_LEAST_MS / max(milliseconds, 1e-3)))))


def _figures(name: str, times: list[list[float]], *, of_minima: bool = False) -> dict[str, Any]:
    """Return our figures and, if onnxruntime was measured, onnxruntime's figures and the ratio."""
    ours, *theirs = times
    figures: dict[str, Any] = _summary(name, ours)
    if theirs:
        figures |= _summary(f"onnxruntime_{name}", theirs[0])
        of = min if of_minima else statistics.median
        figures[f"{name}_ratio"] = of(ours) / of(theirs[0])
    return {**figures, f"{name}s": len(ours)}


def _summary(name: str, times: list[float]) -> dict[str, float]:
    """Return the median, the minimum, and the distance between the first and the third quartile."""
    low, _, high = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else (0.0, 0.0, 0.0)
    return {f"{name}_ms": statistics.median(times), f"{name}_least_ms": min(times), f"{name}_spread_ms": high - low}


def _alternating(runs: Sequence[Callable[[], Any]], repeat: int, *, cpu: bool = False) -> list[list[float]]:
    """Return the milliseconds of each run. The two sides alternate, so that disturbances affect both.

    With two sides, a pause and an unmeasured run precede each measured run, because after a run onnxruntime's threads
    spin for a while on the cores that the other side needs. CPU time does not need the pause.
    """
    times: list[list[float]] = [[] for _ in runs]
    clock = time.process_time if cpu else time.perf_counter
    deadline = time.perf_counter() + MAX_SECONDS
    for run in runs:
        run()
    for _ in range(repeat):
        for run, milliseconds in zip(runs, times, strict=True):
            if len(runs) > 1 and not cpu:
                time.sleep(PAUSE_SECONDS)
                run()
            began = clock()
            run()
            milliseconds.append((clock() - began) * 1e3 / getattr(run, "count", 1))
        if time.perf_counter() > deadline:
            break
    return times

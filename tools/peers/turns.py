"""Measurements of several engines in turns, so that a slow moment of the machine affects all engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from genai.common.cores import default_threads

from .cases import Case, Job, Measured
from .engines.base import Engine
from .processes import run_measured

T = TypeVar("T")
TIMEOUT_SECONDS = 900


def in_turns(
    work: Path,
    case: Case,
    vocab_size: int,
    contenders: Sequence[T],
    repeat: int,
    of: Callable[[T], tuple[Engine, Path]],
) -> Iterator[tuple[T, Measured]]:
    """Yield the measurements of each contender, `repeat` times, each in a separate process.

    Args:
        work: folder of the engines.
        case: case to measure.
        vocab_size: exclusive upper limit of the random tokens.
        contenders: objects to measure.
        repeat: number of measured runs per contender.
        of: function that returns a contender's engine and model.
    """
    for turn in range(repeat + 1):  # the first turn, which loads files and compiles kernels, is not measured
        for one in contenders:
            engine, model = of(one)
            job = Job.of(case, str(model), vocab_size, default_threads())
            outcome = run_measured(engine.command(work, job), engine.environment(work), TIMEOUT_SECONDS)
            measured = engine.measured(job, outcome)
            if turn:
                yield one, measured

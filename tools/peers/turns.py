"""Engines on models of their own, in turns, so that a slow moment of the machine hits all of them."""

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
    """Each contender so many times, each time in a process of its own.

    Args:
        work: the folder of the engines. of: a contender's engine, and its model.
    """
    for turn in range(repeat + 1):  # the first one brings files into memory and compiles kernels, and does not count
        for one in contenders:
            engine, model = of(one)
            job = Job.of(case, str(model), vocab_size, default_threads())
            outcome = run_measured(engine.command(work, job), engine.environment(work), TIMEOUT_SECONDS)
            measured = engine.measured(job, outcome)
            if turn:
                yield one, measured

"""Walks a plan for a session: the runtime's loop, with a word to stop it and a record of what each step took."""

from __future__ import annotations

from collections.abc import Iterable
from time import perf_counter_ns
from typing import Any

import numpy as np

from ..errors import GenaiError
from ..runtime.plan import Plan
from ..runtime.run_context import RunContext, RunStopped
from .errors import EPFail, Fail, InvalidArgument
from .options import RunOptions
from .profiling import Profiler


def run_steps(
    plan: Plan, feeds: Iterable[tuple[int, Any]], options: RunOptions | None, profiler: Profiler | None
) -> tuple[Any, ...]:
    """Run a plan; returns its outputs in order.

    Raises:
        Fail: a step failed.
        EPFail: a provider failed.
        RunStopped: `options.terminate` was set.
        InvalidArgument: an index is out of range.
    """
    context = None if options is None else RunContext(lambda: options.terminate)
    slots = list(plan.initial)
    for slot, value in feeds:
        slots[slot] = value
    with np.errstate(all="ignore"):
        for step in plan.steps:
            if context is not None:
                context.check()
            inputs = [slots[i] for i in step.inputs]
            begin = 0 if profiler is None else perf_counter_ns()
            try:
                results = step.kernel(context, inputs)
            except (MemoryError, RunStopped, EPFail):
                raise
            except Exception as error:
                raise _failure(step.label, inputs, error) from error
            if profiler is not None:
                profiler.record(step.label, step.op_type, begin, perf_counter_ns())
            for slot, value in zip(step.outputs, results, strict=False):
                slots[slot] = value
            slots[-1] = None
            for slot in step.release:
                slots[slot] = None
    return tuple([slots[slot] for slot in plan.outputs])


def _failure(label: str, inputs: list[Any], error: Exception) -> GenaiError:
    shapes = ", ".join(f"{x.dtype}{list(x.shape)}" if isinstance(x, np.ndarray) else type(x).__name__ for x in inputs)
    kind = InvalidArgument if isinstance(error, IndexError) else Fail
    what = error.what if isinstance(error, GenaiError) else error
    return kind(
        f"{label} failed: {what!s:.500}",
        f"its inputs were {shapes or 'none'} ({type(error).__name__})",
        "check that the inputs fit the model; if they do, the model or this kernel is wrong",
    )

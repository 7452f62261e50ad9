"""The plainest driver: walk the plan's steps in Python, one kernel call after another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ..errors import GenaiError, GraphError
from .plan import Plan


def run(plan: Plan, feeds: Mapping[str, Any], context: Any = None) -> dict[str, Any]:
    """Run a plan.

    Args:
        plan: the compiled graph.
        feeds: an array per graph input.
        context: handed to every kernel (for decoders the StepContext).

    Returns:
        An array per graph output.

    Raises:
        GraphError: a kernel failed; the message names the node and the shapes it got.
    """
    results = run_slots(plan, ((plan.inputs[name], value) for name, value in feeds.items()), context)
    return dict(zip(plan.output_names, results, strict=True))


def run_slots(plan: Plan, feeds: Iterable[tuple[int, Any]], context: Any) -> tuple[Any, ...]:
    """Run with values given per slot; returns the outputs in order."""
    slots = list(plan.initial)
    for slot, value in feeds:
        slots[slot] = value
    with np.errstate(all="ignore"):
        for step in plan.steps:
            inputs = [slots[i] for i in step.inputs]
            try:
                results = step.kernel(context, inputs)
            except (GenaiError, MemoryError):
                raise
            except Exception as error:
                raise _failure(step.label, inputs, error) from error
            for slot, value in zip(step.outputs, results, strict=False):
                if slot >= 0:
                    slots[slot] = value
            for slot in step.release:
                slots[slot] = None
    return tuple([slots[slot] for slot in plan.outputs])


def _failure(label: str, inputs: list[Any], error: Exception) -> GraphError:
    shapes = ", ".join(f"{x.dtype}{list(x.shape)}" if isinstance(x, np.ndarray) else type(x).__name__ for x in inputs)
    return GraphError(
        f"{label} failed: {error}",
        f"its inputs were {shapes or 'none'} ({type(error).__name__})",
        "check that the inputs fit the model; if they do, the model or this kernel is wrong",
    )

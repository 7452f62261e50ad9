"""Plans, and the simplest way to run a plan: its kernels are called one after another in Python."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np

from genai.ops.registry import Kernel

from ..errors import GenaiError, GraphError, RunStopped
from ..onnx.external_data import MappedFile, check_unchanged

# The number of inputs that a message describes; it only counts the remaining inputs.
_SHOWN = 12


@dataclass(frozen=True)
class OpCall:
    """A kernel call: the slots of its inputs and outputs (-1 = absent), and the slots to release after the call.

    Attributes:
        names: names of the outputs in the graph ("" = absent).
        is_own: True if the kernel is this package's kernel for the operator.
        calls_blas: False if the kernel never calls BLAS.
    """

    label: str
    op_type: str
    kernel: Kernel
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    release: tuple[int, ...]
    names: tuple[str, ...]
    is_own: bool = False
    calls_blas: bool = True


@dataclass(frozen=True)
class Plan:
    """A sequence of operator calls on numbered slots.

    The last slot is always None, so index -1 reads as an absent input. Constants may be views of `files`. `calls_blas`
    is False if no kernel calls BLAS.
    """

    calls: tuple[OpCall, ...]
    initial: tuple[Any, ...]
    inputs: Mapping[str, int]
    output_names: tuple[str, ...]
    outputs: tuple[int, ...]
    files: Sequence[MappedFile] = ()
    calls_blas: bool = True


@dataclass(frozen=True)
class RunContext:
    """The context of a run, passed to every kernel. Subgraphs check it before each run; this ends endless loops.

    Attributes:
        is_stopped: function that returns True if the run must stop.
        record: function (call, begin, end) for each call in a subgraph, in nanoseconds of time.perf_counter_ns; None =
            record nothing.
    """

    is_stopped: Callable[[], bool]
    record: Callable[[OpCall, int, int], None] | None = None

    def check(self) -> None:
        """Raise RunStopped if the run must stop."""
        if self.is_stopped():
            raise RunStopped("the run was stopped", "the stop callback returned True", "start the run again")


def run(plan: Plan, feeds: Mapping[str, Any]) -> dict[str, Any]:
    """Run a plan.

    Args:
        plan: the compiled graph.
        feeds: array by input name.

    Returns:
        Array by output name.

    Raises:
        GraphError: a kernel failed; the message names the node and its input shapes.
        ExternalDataError: a file that contains constants was changed.
    """
    check_unchanged(plan.files)
    results = run_slots(plan, ((plan.inputs[name], value) for name, value in feeds.items()), None)
    return dict(zip(plan.output_names, results, strict=True))


Explain = Callable[[OpCall, Sequence[Any], Exception], Exception]
"""A function that returns the error to raise if a kernel fails on its inputs: the given error, or a better one."""


def explained(op: OpCall, inputs: Sequence[Any], error: Exception) -> Exception:
    """Return a GraphError that names the node and its input shapes, unless the error is already understandable."""
    if isinstance(error, GenaiError | MemoryError):
        return error
    return GraphError(f"{op.label} failed: {error}", *circumstances(inputs, error))


def call(
    op: OpCall, context: RunContext | None, inputs: Sequence[Any], explain: Explain = explained
) -> tuple[Any, ...]:
    """Return a kernel's results. Raises the error that `explain` returns if the kernel fails."""
    try:
        return op.kernel(context, inputs)
    except Exception as error:
        raise_explained(explain, op, inputs, error)


def raise_explained(explain: Explain, op: OpCall, inputs: Sequence[Any], error: Exception) -> NoReturn:
    """Raise the error that `explain` returns for a failed kernel."""
    found = explain(op, inputs, error)
    if found is error:
        raise error
    raise found from error


def recorded_call(op: OpCall, context: RunContext | None, inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Call a kernel as `call` does, and record the time if the context requests it."""
    if context is None or context.record is None:
        return call(op, context, inputs)
    begin = time.perf_counter_ns()
    results = call(op, context, inputs)
    context.record(op, begin, time.perf_counter_ns())
    return results


@np.errstate(all="ignore")
def run_slots(
    plan: Plan,
    feeds: Iterable[tuple[int, Any]],
    context: RunContext | None,
    call: Callable[[OpCall, RunContext | None, Sequence[Any]], tuple[Any, ...]] = call,
) -> tuple[Any, ...]:
    """Run with one value per slot; return the outputs in order. `call` converts a kernel's failure to an error."""
    slots = list(plan.initial)
    for slot, value in feeds:
        slots[slot] = value
    for op in plan.calls:
        results = call(op, context, [slots[i] for i in op.inputs])
        for slot, value in zip(op.outputs, results, strict=False):
            if slot >= 0:
                slots[slot] = value
        for slot in op.release:
            slots[slot] = None
    return tuple([slots[slot] for slot in plan.outputs])


@np.errstate(all="ignore")
def run_unobserved(plan: Plan, feeds: Iterable[tuple[int, Any]], explain: Explain = explained) -> tuple[Any, ...]:
    """Run as `run_slots` does without a context. A call takes less time, because only its kernel is called."""
    slots = list(plan.initial)
    for slot, value in feeds:
        slots[slot] = value
    for op in plan.calls:
        inputs = [slots[i] for i in op.inputs]
        try:
            results = op.kernel(None, inputs)
        except Exception as error:
            raise_explained(explain, op, inputs, error)
        for slot, value in zip(op.outputs, results):  # noqa: B905 - the keyword takes as long as the loop
            if slot >= 0:
                slots[slot] = value
        for slot in op.release:
            slots[slot] = None
    return tuple([slots[slot] for slot in plan.outputs])


def with_lifetimes(calls: Sequence[OpCall], kept: set[int]) -> tuple[OpCall, ...]:
    """Record, for each call, the slots that no later call reads, except the slots to keep."""
    alive = set(kept)
    result = []
    for op in reversed(calls):
        touched = set(op.inputs) | set(op.outputs)
        dying = tuple(sorted(touched - alive))
        alive |= touched
        result.append(replace(op, release=dying))
    return tuple(reversed(result))


def circumstances(inputs: Sequence[Any], error: Exception) -> tuple[str, str]:
    """Return the last two parts of an error: a reason why a kernel may have failed, and a fix."""
    kinds = [f"{x.dtype}{list(x.shape)}" if isinstance(x, np.ndarray) else type(x).__name__ for x in inputs[:_SHOWN]]
    shapes = ", ".join(kinds) + f" and {len(inputs) - _SHOWN} more" * (len(inputs) > _SHOWN)
    return (
        f"the node's inputs were {shapes or 'none'} ({type(error).__name__})",
        "check the types and shapes of the inputs; if they are correct, the model or this kernel has a bug",
    )

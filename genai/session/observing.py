"""Runs a session and shows each value as soon as it is computed, so that nothing has to be kept to be looked at."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from genai.kernels.cpu.arrays.blas import BLAS_THREADS

from ..compat.onnxruntime.inference_session import InferenceSession
from ..onnx.external_data import check_unchanged
from .loop import OpCall, RunContext, run_slots
from .running import run_call


def observed_run(session: InferenceSession, feed: Mapping[str, Any], observe: Callable[[str, Any], None]) -> None:
    """Run a model once; its results are not kept either.

    Args:
        session: made with ORT_DISABLE_ALL, or else what rewrites joined is not seen.
        observe: called with the name and the value of each input given and of each result of a node of the main
            graph, in the order that they come about.

    Raises:
        InvalidArgument, Fail: see `InferenceSession.run`.
    """
    plan, feeds = session._plan, session._feed_check(feed)

    def call(op: OpCall, context: RunContext | None, inputs: Sequence[Any]) -> tuple[Any, ...]:
        results = run_call(None, op, context, inputs)
        for name, value in zip(op.names, results, strict=False):
            if name:
                observe(name, value)
        return results

    names = {slot: name for name, slot in plan.inputs.items()}
    for slot, value in feeds:
        observe(names[slot], value)
    check_unchanged(plan.files)
    with BLAS_THREADS.single():
        run_slots(plan, feeds, None, call)

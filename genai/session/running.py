"""Calls of a session's plan: the errors of those that fail, and a record of what each took."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import ArgumentError, GenaiError, NodeError, ProviderError, RunStopped
from .execution_providers import PROVIDED
from .loop import OpCall, RunContext, circumstances


class Profiler:
    """What a run took, call by call: a table per operator, and a trace that Chrome's viewer and Perfetto read.

    Attributes:
        start_ns: when recording began (time.perf_counter_ns).
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._events: list[tuple[str, str, int, int, int]] = []
        self.start_ns = time.perf_counter_ns()

    def record(self, label: str, op_type: str, begin_ns: int, end_ns: int) -> None:
        """One call, or "session" for a whole run."""
        self._events.append((label, op_type, threading.get_ident(), begin_ns, end_ns))

    def totals(self) -> dict[str, tuple[int, int]]:
        """Per operator type: calls and nanoseconds, the longest first."""
        totals: dict[str, tuple[int, int]] = {}
        for _, op_type, _, begin, end in list(self._events):
            calls, spent = totals.get(op_type, (0, 0))
            totals[op_type] = calls + 1, spent + end - begin
        return dict(sorted(totals.items(), key=lambda item: -item[1][1]))

    def write(self) -> str:
        """Write the trace into the working directory; returns its path."""
        stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
        path = Path(f"{self._prefix}{stamp}_{os.getpid()}_{self.start_ns % 1_000_000}.json")
        events = [
            {
                "cat": "Node",
                "name": label,
                "ph": "X",
                "pid": os.getpid(),
                "tid": thread,
                "ts": (begin - self.start_ns) / 1000,
                "dur": (end - begin) / 1000,
                "args": {"op_name": op_type},
            }
            for label, op_type, thread, begin, end in list(self._events)
        ]
        path.write_text(json.dumps(events), encoding="utf-8")
        return str(path)


def run_call(
    profiler: Profiler | None, op: OpCall, context: RunContext | None, inputs: Sequence[Any]
) -> tuple[Any, ...]:
    """What a call's kernel returns.

    Raises:
        NodeError, ArgumentError: it failed, or an index was out of range; the message names the node.
        ProviderError, RunStopped: its provider failed; the run was stopped.
    """
    if context is not None:
        context.check()
    begin = 0 if profiler is None else time.perf_counter_ns()
    try:
        results = op.kernel(context, inputs)
    except (MemoryError, RunStopped, ProviderError):
        raise
    except Exception as error:
        if op.op_type == PROVIDED and isinstance(error, GenaiError):
            raise  # it names the node itself
        kind = ArgumentError if isinstance(error, IndexError) else NodeError
        what = error.what if isinstance(error, GenaiError) else error
        raise kind(f"{op.label} failed: {what!s:.500}", *circumstances(inputs, error)) from error
    if profiler is not None:
        profiler.record(op.label, op.op_type, begin, time.perf_counter_ns())
    return results

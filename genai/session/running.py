"""Functions that run the calls of a session's plan, report errors from failed calls, and profile the calls."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..common.atomic_files import write_whole
from ..devices import compile_seconds
from ..errors import ArgumentError, GenaiError, InputError, NodeError, ProviderError, RunStopped
from .execution_providers import PROVIDED
from .loop import OpCall, RunContext, call, circumstances


class Profiler:
    """A record of the time of each call: a table per operator, and a trace for Chrome's trace viewer and Perfetto.

    Attributes:
        start_ns: start of the recording (time.perf_counter_ns).
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._events: list[tuple[str, str, int, int, int, int]] = []
        self._phases: list[tuple[str, int, int, int]] = []
        self.start_ns = time.perf_counter_ns()

    def record(self, op: OpCall, begin_ns: int, end_ns: int, compile_ns: int = 0) -> None:
        """Record one call, which has waited `compile_ns` for kernels that are compiled once.

        The calls in the bodies of If, Loop and Scan are recorded in addition to their nodes.
        """
        self._events.append((op.label, op.op_type, threading.get_ident(), begin_ns, end_ns, compile_ns))

    def record_phase(self, name: str, begin_ns: int, end_ns: int) -> None:
        """Record a phase of the session, such as "model_run", which is only part of the trace."""
        self._phases.append((name, threading.get_ident(), begin_ns, end_ns))

    def totals(self) -> dict[str, tuple[int, int]]:
        """Return the number of calls and the nanoseconds for each operator type, longest first.

        The nanoseconds of If, Loop and Scan include those of the operators in their bodies. The time to compile kernels
        is not included.
        """
        totals: dict[str, tuple[int, int]] = {}
        for _, op_type, _, begin, end, compiling in list(self._events):
            calls, spent = totals.get(op_type, (0, 0))
            totals[op_type] = calls + 1, spent + max(0, end - begin - compiling)
        return dict(sorted(totals.items(), key=lambda item: -item[1][1]))

    def write(self) -> str:
        """Write the trace to the working directory and return its path. Raises InputError if that fails."""
        stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
        path = Path(f"{self._prefix}_{stamp}_{os.getpid()}_{self.start_ns % 1_000_000}.json")
        events = [self._event("Session", name, thread, begin, end) for name, thread, begin, end in list(self._phases)]
        events += [
            self._event("Node", label, thread, begin, end, op_name=op_type, **_compiling(compiling))
            for label, op_type, thread, begin, end, compiling in list(self._events)
        ]
        try:
            write_whole(path, json.dumps(events).encode())
        except OSError as error:
            fix = "free some space, or set another path in SessionOptions.profile_file_prefix"
            raise InputError(f"{path}: the profile cannot be written", str(error), fix) from error
        return str(path)

    def _event(
        self, category: str, name: str, thread: int, begin: int, end: int, **more: str | float
    ) -> dict[str, Any]:
        return {
            "cat": category,
            "name": name,
            "ph": "X",
            "pid": os.getpid(),
            "tid": thread,
            "ts": (begin - self.start_ns) / 1000,
            "dur": (end - begin) / 1000,
            "args": more,
        }


def _compiling(nanoseconds: int) -> dict[str, float]:
    return {"compile_us": nanoseconds / 1000} if nanoseconds else {}


def run_call(
    profiler: Profiler | None, op: OpCall, context: RunContext | None, inputs: Sequence[Any]
) -> tuple[Any, ...]:
    """Run a call's kernel and return its results.

    Raises:
        NodeError: the kernel failed; the message names the node.
        ArgumentError: an index was out of range; the message names the node.
        ProviderError: the node's provider failed.
        RunStopped: the run was stopped.
    """
    if context is not None:
        context.check()
    begin, compiled = (0, 0.0) if profiler is None else (time.perf_counter_ns(), compile_seconds())
    results = call(op, context, inputs, node_error)
    if profiler is not None:
        profiler.record(op, begin, time.perf_counter_ns(), round((compile_seconds() - compiled) * 1e9))
    return results


def node_error(op: OpCall, inputs: Sequence[Any], error: Exception) -> Exception:
    """Return the error of a session's run for a kernel that failed; see `run_call`."""
    if isinstance(error, MemoryError | RunStopped | ProviderError):
        return error
    if op.op_type == PROVIDED and isinstance(error, GenaiError):
        return error  # the error already names the node
    kind = ArgumentError if _is_of_index(error) else NodeError
    what = error.what if isinstance(error, GenaiError) else error
    return kind(f"{op.label} failed: {what!s:.500}", *circumstances(inputs, error))


def _is_of_index(error: BaseException | None) -> bool:
    """Return True if a kernel, or a kernel of a node's subgraph, raised IndexError."""
    return isinstance(error, IndexError) or (isinstance(error, GenaiError) and _is_of_index(error.__cause__))

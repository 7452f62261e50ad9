"""The threads that run programs: one pool per process, shared by all models and sessions.

The threads enter machine code once, sleep there between runs, and never take the GIL. They start when a run first needs
them, and never end. Any Python thread can start a run, and takes part in it as thread 0. Runs that share the pool take
turns, because concurrent runs would only wait for each other's cores. After a fork, the child process has a new pool.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from genai.common.cores import default_threads
from genai.common.forks import THREAD_NAMES
from genai.common.host_memory import huge_array
from genai.common.interrupts import InterruptsDeferred, Task, ThreadsRefused, start

from ...errors import StepCancelled, StepError
from ..jit.native import LIBRARY
from . import driver
from .calls import PREFILL, OnlyCall, Program
from .step_table import ContextTable, ErrorCode, StepField
from .waiting import SPINS, START_PATIENCE

if TYPE_CHECKING:  # recorded programs run on threads
    from .recording import Recorder

MAX_THREADS = 1024
# Minimum work in nanoseconds for which other threads are started.
_MIN_SHARED_WORK = 40_000.0
# Work in nanoseconds per thread: of the longest run that is joined with others, and of joined runs. Interrupts are
# handled after joined runs.
_MAX_JOINED_WORK, _MAX_JOINED_SUM = 2_000_000.0, 20_000_000.0
# A run that may take longer does not run on the main thread, because only the main thread handles interrupts.
_NANOSECONDS_BETWEEN_SIGNALS = 0.05e9


_REFUSALS: dict[int, str] = {
    ErrorCode.INDEX_OUTSIDE_TABLE: "index outside its table",
    ErrorCode.SLOT: "slot outside the cache",
    ErrorCode.POSITION: "position outside its sequence",
    ErrorCode.PAGE: "context longer than its block table, or block table entry outside the cache",
    ErrorCode.ROTARY_POSITION: "position outside the rotary tables",
    ErrorCode.BIAS_POSITION: "position outside the attention bias",
}


class _Workspace:
    """Data that the threads of a run share: a table, and scratch memory and a counter per call for each thread."""

    def __init__(self, max_threads: int, spins: int = SPINS) -> None:
        self.shared: NDArray[np.int64] = huge_array((driver.shared_entries(max_threads),), np.int64)
        cores = self.shared[driver.FIRST_THREAD :].reshape(-1, driver.THREAD_ENTRIES)[:, driver.CORE]
        cores[:] = -1  # not yet known
        self.shared[driver.SPIN_LIMIT], self.shared[driver.START_SPIN_LIMIT] = spins, START_PATIENCE * spins
        self._address = self.shared.ctypes.data
        self._running = False
        # Writing or reading an entry of a memoryview takes a fifth of the time of the array.
        self._view = self.shared.data
        self._scratch: NDArray[np.uint8] = np.empty(0, np.uint8)
        self._counters: NDArray[np.int64] = np.empty((0, driver.COUNTER_ENTRIES), np.int64)

    def run(self, program: Program, context: ContextTable, threads: int) -> int:
        """Run a program. Returns the code of the first error, or 0."""
        if self._running:
            raise ThreadsRefused("a signal handler tried to start a run while another run of this thread is active")
        try:
            self._running = True
            return self._run(program, context, threads)
        finally:
            self._running = False

    def _run(self, program: Program, context: ContextTable, threads: int) -> int:
        view, calls = self._view, len(program.table)
        if program.scratch * threads > self._scratch.size or calls * threads > len(self._counters):
            with InterruptsDeferred():  # machine code must never see an address whose memory is freed
                self._grow(program.scratch * threads, calls * threads)
        view[driver.CALLS], view[driver.CALL_COUNT] = program.address, calls
        view[driver.CONTEXT], view[driver.THREADS] = context.address, threads
        view[driver.SCRATCH_BYTES] = program.scratch
        driver.run_program(self._address)
        if view[driver.FORKED]:
            raise ThreadsRefused("this process was forked during a run, and the run's threads exist only in the parent")
        return int(view[driver.ERROR])

    def _grow(self, scratch: int, counters: int) -> None:
        if scratch > self._scratch.size:
            self._scratch = huge_array((scratch,), np.uint8)
            self._view[driver.SCRATCH] = self._scratch.ctypes.data
        if counters > len(self._counters):
            self._counters = huge_array((counters, driver.COUNTER_ENTRIES), np.int64)
            self._view[driver.COUNTERS] = self._counters.ctypes.data


class _Pool:
    """The process's threads.

    Args:
        spins: number of spins before a waiting thread sleeps; between runs, START_PATIENCE times this number.
    """

    def __init__(self, spins: int = SPINS) -> None:
        self.lock = threading.RLock()  # a signal handler may fork inside a run of the same thread
        self.workspace = _Workspace(MAX_THREADS, spins)
        self._started = 1

    def run(self, program: Program, context: ContextTable, threads: int) -> int:
        """Run a program with `threads` threads; see _Workspace.run."""
        if not driver.serve.ready:
            LIBRARY.prepare([driver.run_program, driver.serve])  # before the lock is held, because a fork waits for it
        with self.lock:
            while self._started < threads:
                with InterruptsDeferred():  # otherwise a thread that has started but is not counted would start again
                    number, shared = self._started, self.workspace.shared  # the only data that a thread refers to
                    name = f"{THREAD_NAMES}{number}"
                    start(threading.Thread(target=_serve, args=(shared, number), name=name, daemon=True))
                    self._started += 1
            return self.workspace.run(program, context, threads)


_POOL = _Pool()
_OWN = threading.local()
# The name of a thread's recorder among its own objects.
_RECORDER = "recorder of programs"


def _begin_fork() -> None:
    with InterruptsDeferred():
        _POOL.lock.acquire()  # a fork waits until the current run ends


def _end_fork_in_child() -> None:
    global _POOL, _OWN
    _POOL.workspace.shared[driver.FORKED] = 1  # ends a run that a signal handler interrupted to fork
    _POOL, _OWN = _Pool(), threading.local()  # the parent's threads do not exist here


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_begin_fork, after_in_parent=lambda: _POOL.lock.release(), after_in_child=_end_fork_in_child
    )


def _serve(shared: NDArray[np.int64], thread: int) -> None:
    driver.serve(shared.ctypes.data, thread)


def own_memory(name: str, size: int) -> NDArray[np.uint8]:
    """Return at least `size` bytes, which this thread's next call with the name reuses. Contents are not preserved."""
    buffers: dict[str, Any] = _OWN.__dict__
    recorder: Recorder | None = buffers.get(_RECORDER)
    if recorder is not None:
        return recorder.own_memory(name, size)
    found: NDArray[np.uint8] | None = buffers.get(name)
    if found is None or found.nbytes < size:
        found = buffers[name] = huge_array((max(size, 1),), np.uint8)
    return found


def recorder_of_thread() -> Recorder | None:
    """Return the recorder of the programs that this thread runs; see `recording`."""
    return _OWN.__dict__.get(_RECORDER)


def set_recorder(recorder: Recorder | None) -> None:
    """Set the recorder of the programs that this thread runs; None = no recorder."""
    _OWN.__dict__[_RECORDER] = recorder


def fixed_address(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array; a recorder keeps it, because recorded programs read it at the same address in every run."""
    recorder = recorder_of_thread()
    if recorder is not None:
        recorder.fixed.append(array)
    return array


def temporary(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array that only the running kernel uses, for a recorder."""
    recorder = recorder_of_thread()
    if recorder is not None:
        recorder.own.append(("", array))
    return array


def rows_context(tokens: int) -> ContextTable:
    """Return a step with only a number of rows. Each thread has one such step, which is valid until the next call."""
    context: ContextTable | None = getattr(_OWN, "context", None)
    if context is None:
        context = _OWN.context = ContextTable()
    context.count(StepField.TOKENS, tokens)
    context.count(StepField.CANCEL, 0)
    return context


class Threads:
    """A number of threads of the pool, including the caller's.

    Args:
        count: number of threads; None = the available physical cores.

    Raises:
        ValueError: count is below 1 or above MAX_THREADS.
    """

    def __init__(self, count: int | None = None) -> None:
        self.count = default_threads() if count is None else count
        if not 1 <= self.count <= MAX_THREADS:
            raise ValueError(f"threads is {count}, expected 1 to {MAX_THREADS}")

    def run(self, program: Program, context: ContextTable | None = None, *, nanoseconds: float) -> None:
        """Run every call of a program.

        Args:
            program: program without open bindings.
            context: the step, whose CANCEL field any thread may set during the run; None if nothing depends on a step.
            nanoseconds: approximate time on one thread. Short runs use only the calling thread, and long runs leave the
                main thread free for signals.

        Raises:
            ValueError: a binding of the program is open.
            StepError: an operator rejected its input.
            StepCancelled: the step was cancelled.
        """
        if program.open:
            raise ValueError(f"{program.open[0][1]!r} of the program has not been bound")
        if program.later and context is not None and context.values[PREFILL].any():
            program.complete()
        is_long = nanoseconds > _NANOSECONDS_BETWEEN_SIGNALS * self.count
        if context is None:
            context = ContextTable() if is_long else NO_STEP  # an interrupt cancels only this run
        if is_long and threading.current_thread() is threading.main_thread():
            error = self._run_interruptibly(program, context)
        else:
            error = self._run(program, context, nanoseconds)
        if context.is_cancelled:
            raise StepCancelled
        if error:
            raise refused(error)

    def can_join(self, nanoseconds: float, joined: float = 0.0) -> bool:
        """Return True if a run of this time is short enough to be joined with runs that take `joined` together."""
        return nanoseconds < _MAX_JOINED_WORK * self.count and joined + nanoseconds < _MAX_JOINED_SUM * self.count

    def shares(self, nanoseconds: float) -> bool:
        """Return True if other threads take part in a run of this time."""
        return self.count > 1 and nanoseconds >= _MIN_SHARED_WORK

    def is_direct(self, nanoseconds: float) -> bool:
        """Return True if a run of this time uses only the calling thread because no other thread may share it."""
        return nanoseconds < (_MIN_SHARED_WORK if self.count > 1 else _NANOSECONDS_BETWEEN_SIGNALS)

    def _run(self, program: Program, context: ContextTable, nanoseconds: float) -> int:
        # A program without calls has no final barrier at which the threads could meet.
        if len(program.table) and self.shares(nanoseconds):
            return _POOL.run(program, context, self.count)
        alone: _Workspace | None = getattr(_OWN, "workspace", None)
        if alone is None:
            alone = _OWN.workspace = _Workspace(1)
        return alone.run(program, context, 1)

    def _run_interruptibly(self, program: Program, context: ContextTable) -> int:
        """Run on another thread while this thread waits.

        An interrupt cancels the run. It is raised only after the run has ended, because the run uses the caller's
        memory.
        """
        with InterruptsDeferred(lambda: context.count(StepField.CANCEL, 1)):
            return Task(lambda: self._run(program, context, _MIN_SHARED_WORK), "genai-step").result()


def refused(code: int) -> StepError:
    """Return the error for the code that an operator returned."""
    return StepError(f"an operator rejected its input: {_REFUSALS.get(code, 'unknown reason')} (code {code})")


def run_only(call: OnlyCall, context: ContextTable, rows: int = 0) -> None:
    """Run a program's only call on the calling thread. Raises StepError if the operator rejects its input."""
    scratch = own_memory("scratch", call.scratch).ctypes.data if call.scratch else 0
    if code := call(context.address, rows, scratch):
        raise refused(code)


# The context of programs that do not depend on a step.
NO_STEP = ContextTable()

"""The threads that run programs: one pool per process, shared by all models and sessions.

Its threads enter machine code once, sleep there between runs, and never want the GIL. They start when a run first needs
them, and stay. A run is started from any Python thread, which takes part in it as thread 0. Runs that share the pool
take turns, because two at once would only wait for each other's cores. After a fork the child has a pool of its own.
"""

from __future__ import annotations

import os
import threading

import numpy as np
from numpy.typing import NDArray

from genai.common.cores import default_threads
from genai.common.forks import THREAD_NAMES
from genai.common.host_memory import huge_array
from genai.common.interrupts import InterruptsDeferred, Task, ThreadsRefused, start

from ...device import StepCancelled, StepError
from ..jit.native import LIBRARY
from . import driver
from .calls import PREFILL, Program
from .step_table import ContextTable, ErrorCode, StepField
from .waiting import SPINS, START_PATIENCE

MAX_THREADS = 1024
# Nanoseconds of work that are worth starting other threads for.
_MIN_SHARED_WORK = 40_000.0
# A run that may take longer than this is not done on the main thread, which alone can be interrupted.
_NANOSECONDS_BETWEEN_SIGNALS = 0.05e9


_REFUSALS: dict[int, str] = {
    ErrorCode.INDEX_OUTSIDE_TABLE: "index outside its table",
    ErrorCode.SLOT: "slot outside the cache",
    ErrorCode.POSITION: "position outside its sequence",
    ErrorCode.PAGE: "context longer than its block table, or block table entry outside the cache",
    ErrorCode.ROTARY_POSITION: "position outside the rotary tables",
}


class _Workspace:
    """What the threads of a run share: a table, and for each of them scratch memory and a counter per call."""

    def __init__(self, max_threads: int, spins: int = SPINS) -> None:
        self.shared: NDArray[np.int64] = huge_array((driver.shared_entries(max_threads),), np.int64)
        cores = self.shared[driver.FIRST_THREAD :].reshape(-1, driver.THREAD_ENTRIES)[:, driver.CORE]
        cores[:] = -1  # not yet known
        self.shared[driver.SPIN_LIMIT], self.shared[driver.START_SPIN_LIMIT] = spins, START_PATIENCE * spins
        self._address = self.shared.ctypes.data
        self._running = False
        # Python's own view: it writes and reads an entry in a fifth of the time that an array takes.
        self._view = self.shared.data
        self._scratch: NDArray[np.uint8] = np.empty(0, np.uint8)
        self._counters: NDArray[np.int64] = np.empty((0, driver.COUNTER_ENTRIES), np.int64)

    def run(self, program: Program, context: ContextTable, threads: int) -> int:
        """Run a program; returns the code of the first error, or 0."""
        if self._running:
            raise ThreadsRefused("a signal handler interrupted a run of this thread, and wants another")
        try:
            self._running = True
            return self._run(program, context, threads)
        finally:
            self._running = False

    def _run(self, program: Program, context: ContextTable, threads: int) -> int:
        view, calls = self._view, len(program.table)
        if program.scratch * threads > self._scratch.size or calls * threads > len(self._counters):
            with InterruptsDeferred():  # machine code must never see an address without its memory
                self._grow(program.scratch * threads, calls * threads)
        view[driver.CALLS], view[driver.CALL_COUNT] = program.address, calls
        view[driver.CONTEXT], view[driver.THREADS] = context.address, threads
        view[driver.SCRATCH_BYTES] = program.scratch
        driver.run_program(self._address)
        if view[driver.FORKED]:
            raise ThreadsRefused("this process was forked in the middle of the run, and its threads were not")
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
        spins: how often a waiting thread looks before it sleeps; between runs START_PATIENCE times as often.
    """

    def __init__(self, spins: int = SPINS) -> None:
        self.lock = threading.RLock()  # a signal handler may fork inside a run of the same thread
        self.workspace = _Workspace(MAX_THREADS, spins)
        self._started = 1

    def run(self, program: Program, context: ContextTable, threads: int) -> int:
        """As _Workspace.run, by so many threads."""
        if not driver.serve.ready:
            LIBRARY.prepare([driver.run_program, driver.serve])  # before the turn, which a fork waits for
        with self.lock:
            while self._started < threads:
                with InterruptsDeferred():  # a thread that was started and is not counted would be started again
                    number, shared = self._started, self.workspace.shared  # a thread knows nothing else
                    name = f"{THREAD_NAMES}{number}"
                    start(threading.Thread(target=_serve, args=(shared, number), name=name, daemon=True))
                    self._started += 1
            return self.workspace.run(program, context, threads)


_POOL = _Pool()
_OWN = threading.local()


def _begin_fork() -> None:
    with InterruptsDeferred():
        _POOL.lock.acquire()  # a fork waits for the run in progress


def _end_fork_in_child() -> None:
    global _POOL, _OWN
    _POOL.workspace.shared[driver.FORKED] = 1  # a run that a signal handler interrupted to fork ends
    _POOL, _OWN = _Pool(), threading.local()  # the parent's threads do not exist here


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_begin_fork, after_in_parent=lambda: _POOL.lock.release(), after_in_child=_end_fork_in_child
    )


def _serve(shared: NDArray[np.int64], thread: int) -> None:
    driver.serve(shared.ctypes.data, thread)


def own_memory(name: str, size: int) -> NDArray[np.uint8]:
    """At least so many bytes of the calling thread, kept for its next call; what is in them is lost by then."""
    buffers: dict[str, NDArray[np.uint8]] = _OWN.__dict__
    found = buffers.get(name)
    if found is None or found.nbytes < size:
        found = buffers[name] = huge_array((max(size, 1),), np.uint8)
    return found


def rows_context(tokens: int) -> ContextTable:
    """A step of nothing but so many rows; the calling thread has one, so it counts until the next call."""
    context: ContextTable | None = getattr(_OWN, "context", None)
    if context is None:
        context = _OWN.context = ContextTable()
    context.count(StepField.TOKENS, tokens)
    context.count(StepField.CANCEL, 0)
    return context


class Threads:
    """So many threads of the pool, the caller's included.

    Args:
        count: None = the physical cores available.

    Raises:
        ValueError: count is below 1, or above MAX_THREADS.
    """

    def __init__(self, count: int | None = None) -> None:
        self.count = default_threads() if count is None else count
        if not 1 <= self.count <= MAX_THREADS:
            raise ValueError(f"threads is {count}, expected 1 to {MAX_THREADS}")

    def run(self, program: Program, context: ContextTable | None = None, *, nanoseconds: float) -> None:
        """Run every call of a program.

        Args:
            context: the step; its CANCEL field may be set meanwhile, from any thread. None: nothing depends on a step.
            nanoseconds: what it takes on one thread, roughly: small runs stay on this one, and long ones leave the main
                thread free for signals.

        Raises:
            StepError: an operator refused its input.
            StepCancelled: the step was cancelled.
        """
        if program.open:
            raise ValueError(f"{program.open[0][2].name!r} of the program is not bound")
        if program.later and context is not None and context.values[PREFILL].any():
            program.complete()
        is_long = nanoseconds > _NANOSECONDS_BETWEEN_SIGNALS * self.count
        if context is None:
            context = ContextTable() if is_long else _NO_STEP  # an interrupt cancels this run alone
        if is_long and threading.current_thread() is threading.main_thread():
            error = self._run_interruptibly(program, context)
        else:
            error = self._run(program, context, nanoseconds)
        if context.is_cancelled:
            raise StepCancelled
        if error:
            raise StepError(
                f"an operator refused its input: {_REFUSALS.get(error, 'for a reason of its own')} (code {error})"
            )

    def _run(self, program: Program, context: ContextTable, nanoseconds: float) -> int:
        # Without calls there is no barrier at the end that tells who has been there.
        if self.count > 1 and len(program.table) and nanoseconds >= _MIN_SHARED_WORK:
            return _POOL.run(program, context, self.count)
        alone: _Workspace | None = getattr(_OWN, "workspace", None)
        if alone is None:
            alone = _OWN.workspace = _Workspace(1)
        return alone.run(program, context, 1)

    def _run_interruptibly(self, program: Program, context: ContextTable) -> int:
        """On a thread of its own, while this one waits. An interrupt cancels the run, and is raised at its end: the run
        uses the caller's memory."""
        with InterruptsDeferred(lambda: context.count(StepField.CANCEL, 1)):
            return Task(lambda: self._run(program, context, _MIN_SHARED_WORK), "genai-step").result()


# What programs read that depend on no step.
_NO_STEP = ContextTable()

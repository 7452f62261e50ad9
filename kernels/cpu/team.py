"""Threads that share the work of a kernel.

A kernel works on a range [begin, end) of rows, tiles or heads and computes each of them alone, so that the result is
the same however the range is cut. Kernels release the GIL, so plain Python threads run side by side.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from itertools import count as counter
from queue import SimpleQueue
from typing import Any

from .cores import default_threads

# Nanoseconds of work that are worth handing over to another thread, which costs some tens of microseconds.
MIN_WORK_PER_PART = 100_000
# More parts than threads, so that a core that something else slows down gets fewer of them.
_PARTS_PER_THREAD = 2
# A part that an interrupt cut off before it began is never reported as finished, so waiting for the rest has an end.
_ABANDON_SECONDS = 5.0


class _Job:
    """One call: parts are handed out by a counter (whose `next` is atomic under the GIL), to workers and the caller."""

    def __init__(self, kernel: Callable[..., None], arguments: Sequence[Any], count: int, parts: int) -> None:
        self._kernel = kernel
        self._arguments = arguments
        self._count = count
        self._parts = parts
        self._next = counter()
        self._finished = counter(1)
        self._done = threading.Lock()
        self._done.acquire()
        self._error: BaseException | None = None

    def help(self) -> None:
        """Run parts until none are left."""
        while (part := next(self._next)) < self._parts:
            try:
                if self._error is None:
                    begin, end = part * self._count // self._parts, (part + 1) * self._count // self._parts
                    self._kernel(*self._arguments, begin, end)
            except BaseException as error:
                self._error = error
            finally:
                if next(self._finished) == self._parts:
                    self._done.release()

    def wait(self) -> None:
        """Until every part is done."""
        self._done.acquire()

    def raise_error(self) -> None:
        """Raise what a part raised."""
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # the traceback holds this frame: a circle that would keep the arrays alive

    def abandon(self, error: BaseException) -> None:
        """After an interrupt: start no more parts, and let those in progress leave the arrays."""
        self._error = error
        self._done.acquire(timeout=_ABANDON_SECONDS)


def _work(jobs: SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job.help()
        del job  # its arrays must not live until the next one


def _stop(jobs: SimpleQueue[_Job | None], workers: int) -> None:
    for _ in range(workers):
        jobs.put(None)


class Team:
    """A fixed number of threads, the caller's included. Several threads may call at once.

    Workers start at the first use, are daemons, and end when the team is closed or collected. After a fork they are
    started anew.

    Args:
        threads: how many threads work on a call; None = the physical cores available.
        min_work_per_part: least work, in nanoseconds, that is handed to another thread.

    Raises:
        ValueError: threads is below 1.
    """

    def __init__(self, threads: int | None = None, *, min_work_per_part: float = MIN_WORK_PER_PART) -> None:
        self.threads = default_threads() if threads is None else threads
        if self.threads < 1:
            raise ValueError(f"threads is {threads}, expected at least 1")
        self._min_work = min_work_per_part
        self._lock = threading.Lock()
        self._process = -1
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._finalizer: weakref.finalize[..., Any] | None = None

    def run(
        self, kernel: Callable[..., None], arguments: Sequence[Any], count: int, *, work: float, grain: int = 1
    ) -> None:
        """Call kernel(*arguments, begin, end) until [0, count) is covered; returns when all of it is done.

        Args:
            kernel: a compiled kernel; what it raises in any thread is raised here.
            count: number of items to share out.
            work: rough cost of the whole call in nanoseconds on one thread; small calls stay on this thread.
            grain: least number of items in a part.
        """
        parts = min(self.threads * _PARTS_PER_THREAD, count // grain, int(work // self._min_work))
        if parts <= 1 or self.threads == 1:
            kernel(*arguments, 0, count)
            return
        job = _Job(kernel, arguments, count, parts)
        jobs = self._queue()
        for _ in range(min(self.threads, parts) - 1):
            jobs.put(job)
        try:
            job.help()
            job.wait()
        except BaseException as error:
            job.abandon(error)
            raise
        job.raise_error()

    def close(self) -> None:
        """End the workers; a later call starts new ones."""
        with self._lock:
            if self._finalizer is not None and self._process == os.getpid():
                self._finalizer()
            self._finalizer = None
            self._process = -1

    def _queue(self) -> SimpleQueue[_Job | None]:
        """The queue that the workers of this very process read."""
        if self._process == os.getpid():
            return self._jobs
        with self._lock:
            if self._process != os.getpid():
                self._start()
            return self._jobs

    def _start(self) -> None:
        jobs: SimpleQueue[_Job | None] = SimpleQueue()
        workers = self.threads - 1
        for index in range(workers):
            # Workers know the queue only, so that an unused team can be collected.
            threading.Thread(target=_work, args=(jobs,), name=f"genai-kernels-{index + 1}", daemon=True).start()
        if self._finalizer is not None:
            self._finalizer.detach()  # the parent process's workers do not exist here
        self._finalizer = weakref.finalize(self, _stop, jobs, workers)
        self._finalizer.atexit = False
        self._jobs, self._process = jobs, os.getpid()


def run(
    team: Team | None, kernel: Callable[..., None], arguments: Sequence[Any], count: int, *, work: float, grain: int = 1
) -> None:
    """Run a kernel over [0, count) on a team, or on this thread if there is none."""
    if team is None:
        kernel(*arguments, 0, count)
    else:
        team.run(kernel, arguments, count, work=work, grain=grain)

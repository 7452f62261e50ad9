"""The threads that walk tapes: they enter machine code once, sleep there between steps, and never want the GIL.

A step is started from any Python thread; its caller is walker 0. Steps of several models take turns, because two teams
at once would only wait for each other's cores. After a fork the child starts threads of its own.
"""

from __future__ import annotations

import os
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..cores import default_threads
from ..jit import LIBRARY
from ..large import huge_array
from . import driver
from .context import ContextTable, Word
from .program import Tape
from .waiting import SPINS, STEP_PATIENCE

# A step that may take longer than this is not run on the main thread, which alone can be interrupted.
_SECONDS_BETWEEN_SIGNALS = 0.05
_TURNS = threading.Lock()
if hasattr(os, "register_at_fork"):
    # A fork waits for the step in progress, so that the child finds the lock free.
    os.register_at_fork(before=_TURNS.acquire, after_in_parent=_TURNS.release, after_in_child=_TURNS.release)


class StepError(RuntimeError):
    """An operator refused its input; `code` says why."""

    def __init__(self, code: int) -> None:
        super().__init__(f"an operator refused its input (code {code})")
        self.code = code


class StepCancelled(Exception):
    """The step was cancelled: what it computed is incomplete."""


class Walkers:
    """A fixed number of threads, the caller's included.

    Threads start at the first step of more than one, are daemons, and end when the walkers are closed or collected.

    Args:
        threads: None = the physical cores available.
        spins: how often a waiting thread looks before it sleeps; between steps STEP_PATIENCE times as often.

    Raises:
        ValueError: threads is below 1.
    """

    def __init__(self, threads: int | None = None, *, spins: int = SPINS) -> None:
        self.threads = default_threads() if threads is None else threads
        if self.threads < 1:
            raise ValueError(f"threads is {threads}, expected at least 1")
        self._spins = spins
        self._process = -1
        self._words: NDArray[np.int64] = np.empty(0, np.int64)
        self._scratch, self._counters = _no_memory()
        self._finalizer: weakref.finalize[..., Any] | None = None

    def walk(
        self,
        tape: Tape,
        context: ContextTable,
        *,
        seconds: float = 0.0,
        profile: NDArray[np.int64] | None = None,
    ) -> None:
        """Run every call of a tape.

        Args:
            context: the step; its CANCEL word may be set meanwhile, from any thread.
            seconds: how long it may take, roughly: long steps leave the main thread free for signals.
            profile: int64 [calls], filled with the time stamp after each call; None = not wanted.

        Raises:
            StepError: an operator refused its input.
            StepCancelled: the step was cancelled.
        """
        if seconds > _SECONDS_BETWEEN_SIGNALS and threading.current_thread() is threading.main_thread():
            error = self._walk_interruptibly(tape, context, profile)
        else:
            error = self._walk(tape, context, profile)
        if context.words[Word.CANCEL]:
            raise StepCancelled
        if error:
            raise StepError(error)

    def _walk(self, tape: Tape, context: ContextTable, profile: NDArray[np.int64] | None) -> int:
        """Returns the code of the first error, or 0."""
        if self._process != os.getpid():
            # Before the turn, which a fork waits for. `stop` as well: it may be needed while the interpreter ends.
            LIBRARY.prepare([driver.run_step, driver.serve, driver.stop])
        with _TURNS:
            words = self._ready(tape)
            words[driver.ROWS], words[driver.ROW_COUNT] = tape.address, len(tape.rows)
            words[driver.CONTEXT] = context.address
            words[driver.PROFILE] = 0 if profile is None else profile.ctypes.data
            driver.run_step(words.ctypes.data, self.threads)
            return int(words[driver.ERROR])

    def _walk_interruptibly(self, tape: Tape, context: ContextTable, profile: NDArray[np.int64] | None) -> int:
        """On a thread of its own, while this one waits; an interrupt cancels the step and waits for its end."""
        with ThreadPoolExecutor(1, thread_name_prefix="genai-step") as pool:
            step = pool.submit(self._walk, tape, context, profile)
            try:
                return step.result()
            except KeyboardInterrupt:
                context.count(Word.CANCEL, 1)
                raise

    def _ready(self, tape: Tape) -> NDArray[np.int64]:
        """The words of this process's threads, and for each of them scratch memory and a counter per call."""
        if self._process != os.getpid():
            self._start()
        if tape.scratch * self.threads > self._scratch.size:
            self._scratch = huge_array((tape.scratch * self.threads,), np.uint8)
            self._words[driver.SCRATCH], self._words[driver.SCRATCH_BYTES] = self._scratch.ctypes.data, tape.scratch
        if len(tape.rows) * self.threads > len(self._counters):
            self._counters = huge_array((len(tape.rows) * self.threads, driver.COUNTER_WORDS), np.int64)
            self._words[driver.COUNTERS] = self._counters.ctypes.data
        return self._words

    def _start(self) -> None:
        if self._finalizer is not None:
            self._finalizer.detach()  # the parent process's threads do not exist here
        words = huge_array((driver.team_words(self.threads),), np.int64)
        words[driver.CORE :] = -1  # not yet known
        words[driver.SPIN_LIMIT] = self._spins
        words[driver.STEP_SPIN_LIMIT] = STEP_PATIENCE * self._spins
        for thread in range(1, self.threads):
            # Threads know the words only, so that unused walkers can be collected.
            arguments = (words, thread, self.threads)
            threading.Thread(target=_serve, args=arguments, name=f"genai-walker-{thread}", daemon=True).start()
        self._words, self._process = words, os.getpid()
        self._scratch, self._counters = _no_memory()
        self._finalizer = weakref.finalize(self, _stop, words)
        self._finalizer.atexit = False

    def close(self) -> None:
        """End the threads; a later step starts new ones."""
        with _TURNS:
            if self._finalizer is not None and self._process == os.getpid():
                self._finalizer()
            self._finalizer = None
            self._process = -1


def _no_memory() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Scratch memory and counters before the first step."""
    return np.empty(0, np.uint8), np.empty((0, driver.COUNTER_WORDS), np.int64)


def _serve(words: NDArray[np.int64], thread: int, threads: int) -> None:
    driver.serve(words.ctypes.data, thread, threads, 0)


def _stop(words: NDArray[np.int64]) -> None:
    driver.stop(words.ctypes.data)

"""Deferral of Ctrl-C in code that an exception would leave half done, and threads whose callers can be interrupted."""

from __future__ import annotations

import math
import os
import secrets
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Generic, ParamSpec, TypeVar

from .forks import renew_locks

P = ParamSpec("P")
T = TypeVar("T")


# True while the main thread is inside a block of InterruptsDeferred.
_deferring = False


class InterruptsDeferred:
    """A context manager that defers exceptions of the SIGINT handler to the end of its block.

    The handler itself runs immediately. Python runs the handler only in the main thread, so the block has no effect in
    other threads. A block inside another such block also has no effect: the outer block raises the exception.

    Args:
        on_interrupt: called when the handler has raised an exception, so that the work in the block can end early.
    """

    def __init__(self, on_interrupt: Callable[[], None] | None = None) -> None:
        self._on_interrupt = on_interrupt
        self._handler: Any = None
        self._raised: BaseException | None = None

    def __enter__(self) -> InterruptsDeferred:
        global _deferring
        if threading.current_thread() is threading.main_thread() and not _deferring:
            handler = signal.getsignal(signal.SIGINT)
            self._handler = handler if callable(handler) else None
        if self._handler is not None:
            try:
                signal.signal(signal.SIGINT, self._handle)  # the last call that an interrupt can end with an exception
            except ValueError:  # the main thread of a sub-interpreter, which receives no signals
                self._handler = None
            else:
                _deferring = True
        return self

    def _handle(self, number: int, frame: Any) -> None:
        try:
            self._handler(number, frame)
        except BaseException as error:
            self._raised = error
            if self._on_interrupt is not None:
                self._on_interrupt()

    def __exit__(self, *error: object) -> None:
        global _deferring
        if self._handler is not None:
            _deferring = False
            signal.signal(signal.SIGINT, self._handler)
        if self._raised is not None:
            raise self._raised


def uninterrupted(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function so that it always completes: an interrupt is raised only when the function returns."""

    @wraps(function)
    def whole(*arguments: P.args, **options: P.kwargs) -> T:
        with InterruptsDeferred():
            return function(*arguments, **options)

    return whole


@contextmanager
def temporary_folder(parent: Path, prefix: str, suffix: str = "", *, mode: int = 0o777) -> Iterator[Path]:
    """Create a folder with a unique name and, unless it was renamed, delete it at the end, even after an interrupt.

    The name is chosen before the folder is created. With tempfile, an interrupt could arrive after the folder was
    created but before its name was returned, and the folder would not be deleted.
    """
    folder = parent / f"{prefix}{secrets.token_hex(8)}{suffix}"
    try:
        folder.mkdir(mode)
        yield folder
        with InterruptsDeferred():
            shutil.rmtree(folder, ignore_errors=True)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


class ThreadsRefused(RuntimeError):
    """The system refuses to start a thread, or the thread of a task does not exist in this process."""


def start(thread: threading.Thread, stack_bytes: int = 0) -> None:
    """Start a thread. An interrupt is raised only when the thread is known to run.

    Args:
        thread: the thread.
        stack_bytes: size of the thread's stack in bytes, which uses memory only as far as the stack grows; 0 = the
            default. The setting is process-wide, so threads that other code starts at the same moment may also get it.

    Raises:
        ThreadsRefused: if the system refuses to start a thread.
    """
    with InterruptsDeferred():
        try:
            if not stack_bytes:
                thread.start()
                return
            with _stack_lock:
                before = threading.stack_size(stack_bytes)
                try:
                    thread.start()
                finally:
                    threading.stack_size(before)
        except RuntimeError as error:
            raise ThreadsRefused(f"{error} ({threading.active_count()} threads are running in this process)") from error


_stack_lock = threading.Lock()
renew_locks(sys.modules[__name__], "_stack_lock")


class Task(Generic[T]):
    """A call on a separate daemon thread; a caller that waits for it can be interrupted.

    The caller does not wait with a Condition or an Event, because an interrupt in the middle of their code leaves their
    lock held, or released twice. A signal that arrives just before a thread blocks is handled when the thread wakes, so
    no wait is longer than SECONDS.
    """

    SECONDS = 0.1

    def __init__(self, work: Callable[[], T], name: str, *, stack_bytes: int = 0) -> None:
        self._work = work
        self._process = os.getpid()
        self._bell: SimpleQueue[None] = SimpleQueue()
        self._result: list[T] = []
        self._error: BaseException | None = None
        self._clock: int | None = None
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        start(self.thread, stack_bytes)

    def _run(self) -> None:
        # The clock is read in the thread itself, because systems may reject the id of a thread that has ended. Not
        # every system provides this clock.
        if hasattr(time, "pthread_getcpuclockid"):
            self._clock = time.pthread_getcpuclockid(threading.get_ident())
        try:
            self._result.append(self._work())
        except BaseException as error:
            self._error = error
        self._bell.put(None)

    @property
    def is_over(self) -> bool:
        """True if there is a result or an error."""
        return bool(self._result) or self._error is not None

    def wait(self, seconds: float = math.inf) -> bool:
        """Wait until the call is over; return False if it takes longer than `seconds`."""
        deadline = time.monotonic() + seconds
        while not self.is_over and (left := deadline - time.monotonic()) > 0:
            if os.getpid() != self._process:
                raise ThreadsRefused("this process was forked while a thread ran a call, and a fork copies no threads")
            with suppress(Empty):
                self._bell.get(timeout=min(left, self.SECONDS))
        return self.is_over

    def wait_for_work(self, seconds: float, most: float) -> bool:
        """Wait until the call is over; return False if it computes for `seconds`, or takes `most` seconds by the clock.

        Time in which other processes use the processor does not count as computing. Where the system does not report a
        thread's CPU time, `seconds` are measured by the clock.
        """
        deadline = time.monotonic() + most
        while not self.wait(min(self.SECONDS, deadline - time.monotonic())):
            worked = self._worked()
            left = deadline - time.monotonic()
            if left <= 0 or (left <= most - seconds if worked is None else worked >= seconds):
                return self.is_over
        return True

    def _worked(self) -> float | None:
        """Return the thread's CPU time in seconds; None if the system does not report it, or no longer reports it."""
        try:
            return None if self._clock is None else time.clock_gettime(self._clock)
        except OSError:
            return None

    def result(self) -> T:
        """Wait for the call, then return its result or raise its error."""
        self.wait()
        if self._error is not None:
            raise self._error
        return self._result[0]

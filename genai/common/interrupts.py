"""Ctrl-C at moments in which an exception would leave something half done, and threads that one can wait for."""

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


# Whether the main thread is inside a block of InterruptsDeferred.
_deferring = False


class InterruptsDeferred:
    """`with InterruptsDeferred():` what the handler of SIGINT raises inside is raised at the end.

    The handler itself runs at once. Only the main thread runs it, so elsewhere nothing changes; nor does it where the
    block lies in another one, at whose end it is raised.

    Args:
        on_interrupt: called when the handler has raised, so that what goes on inside may end early.
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
            signal.signal(signal.SIGINT, self._handle)  # the last call in which something can be raised
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
    """A function that is done whole: an interrupt is raised when it returns."""

    @wraps(function)
    def whole(*arguments: P.args, **options: P.kwargs) -> T:
        with InterruptsDeferred():
            return function(*arguments, **options)

    return whole


@contextmanager
def temporary_folder(parent: Path, prefix: str, suffix: str = "", *, mode: int = 0o777) -> Iterator[Path]:
    """A new folder with a name of its own, gone at the end unless it was renamed, wherever an interrupt arrives.

    The name comes before the folder: tempfile's own, whose name an interrupt hid from us, would be left behind.
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
    """The system starts no more threads, or those of a run are not in this process."""


def start(thread: threading.Thread, stack_bytes: int = 0) -> None:
    """Start a thread, or raise ThreadsRefused: an interrupt is raised when it runs for certain.

    Args:
        stack_bytes: of its stack, which takes memory where it is used only; 0 = as ever. It is a setting of the whole
            process, so what others start in the same moment may get it, too.
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
            raise ThreadsRefused(f"{error}: {threading.active_count()} run in this process") from error


_stack_lock = threading.Lock()
renew_locks(sys.modules[__name__], "_stack_lock")


class Task(Generic[T]):
    """A call on a thread of its own, which does not keep the process from ending; who waits can be interrupted.

    Nothing waits on a Condition or an Event: an interrupt in the middle of it leaves their lock held, or released
    twice. A signal that arrives just before a thread blocks is seen when it wakes, so no wait is longer than SECONDS.
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
        # Asked for here: of a thread that has ended, the system may not be asked any more. Not every system has it.
        if hasattr(time, "pthread_getcpuclockid"):
            self._clock = time.pthread_getcpuclockid(threading.get_ident())
        try:
            self._result.append(self._work())
        except BaseException as error:
            self._error = error
        self._bell.put(None)

    @property
    def is_over(self) -> bool:
        """Whether there is a result, or an error."""
        return bool(self._result) or self._error is not None

    def wait(self, seconds: float = math.inf) -> bool:
        """Until it is over; False if it takes longer."""
        deadline = time.monotonic() + seconds
        while not self.is_over and (left := deadline - time.monotonic()) > 0:
            if os.getpid() != self._process:
                raise ThreadsRefused("this process was forked while a call ran on a thread, and its threads were not")
            with suppress(Empty):
                self._bell.get(timeout=min(left, self.SECONDS))
        return self.is_over

    def wait_for_work(self, seconds: float, most: float) -> bool:
        """Until it is over; False if it has computed for longer, or takes longer than `most` by the clock.

        A processor that others use does not count as computing; where the system does not tell, `seconds` are waited.
        """
        deadline = time.monotonic() + most
        while not self.wait(min(self.SECONDS, deadline - time.monotonic())):
            worked = self._worked()
            left = deadline - time.monotonic()
            if left <= 0 or (left <= most - seconds if worked is None else worked >= seconds):
                return self.is_over
        return True

    def _worked(self) -> float | None:
        """Seconds that its thread has computed; None where the system does not tell, or no longer."""
        try:
            return None if self._clock is None else time.clock_gettime(self._clock)
        except OSError:
            return None

    def result(self) -> T:
        """What the call returned, or raised."""
        self.wait()
        if self._error is not None:
            raise self._error
        return self._result[0]

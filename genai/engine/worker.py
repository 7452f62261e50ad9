"""A thread that drives an Engine, so that callers can wait in any way: blocking, interruptible or async."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeVar, cast

from genai.common.interrupts import InterruptsDeferred, Task, ThreadsRefused, start

from ..errors import StateError, no_threads
from .engine import Engine
from .request import EngineRequest

# A time limit is needed because the garbage collector may stop a worker on any thread, even on a thread that the worker
# waits for.
_FAREWELL_SECONDS = 5.0
T = TypeVar("T")


class Worker:
    """Runs an engine for as long as it has work. Requests from several threads share the engine's steps.

    The thread starts with the first request. It ends with a call to `close`, when the last reference to the worker is
    dropped, or when the interpreter exits.

    Args:
        make_engine: creates the engine; called once, in the first call to submit.
    """

    def __init__(self, make_engine: Callable[[], Engine]) -> None:
        self._make_engine = make_engine
        self._inbox = _Inbox()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        # Also runs at exit, because a thread inside a kernel must not outlive the memory that it reads.
        self._finalizer = weakref.finalize(self, _stop, self._inbox)

    def submit(self, requests: Sequence[EngineRequest]) -> None:
        """Queue requests. The `finish` method of each request is called when the request ends.

        Raises:
            StateError: the worker is closed, belongs to the parent process of a fork, or would have to wait for itself.
        """
        self.check_usable()
        with self._lock:
            if self._thread is None and not self._inbox.stopped:
                self._start()
        self._inbox.put(requests)

    def check_usable(self) -> None:
        """Raise an error if waiting for this worker would never end.

        Raises:
            StateError: see submit.
        """
        if self._inbox.is_foreign:
            raise StateError(
                f"this LLM was created in process {self._inbox.process}, but is used in process {os.getpid()}",
                "a fork does not copy the thread that generates tokens",
                "load the model in the child process, or use the start method 'spawn'",
            )
        if self._thread is threading.current_thread():
            raise StateError(
                "a logits processor called the LLM that runs it",
                "the call would wait for itself",
                "use another LLM of the same Model in the logits processor",
            )

    def _start(self) -> None:
        self._inbox.process = os.getpid()
        engine = self._inbox.engine = self._make_engine()
        thread = threading.Thread(target=_run, args=(engine, self._inbox), name="genai-worker", daemon=True)
        try:
            with InterruptsDeferred():  # otherwise an interrupt could hide a started thread, and a second would start
                start(thread)
                # Set only after the start, so that a concurrent close never joins a thread that has not started.
                self._thread = self._inbox.thread = thread
        except ThreadsRefused as error:
            raise no_threads(error) from error

    def ask(self, question: Callable[[], T]) -> T:
        """Call `question` on the engine's thread between two steps, because it accesses data that steps change.

        Returns:
            The result of `question`.

        Raises:
            StateError: see submit.
            Exception: any error raised by `question`.
        """
        self.check_usable()
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                return question()
        answer: SimpleQueue[tuple[bool, Any]] = SimpleQueue()

        def reply() -> None:
            try:
                answer.put((True, question()))
            except BaseException as error:
                answer.put((False, error))

        self._inbox.ask(reply)
        while True:
            with suppress(Empty):
                well, value = answer.get(timeout=Task.SECONDS)
                if not well:
                    raise value
                return cast(T, value)
            if not self._thread.is_alive():
                return question()

    @property
    def engine(self) -> Engine | None:
        """The engine; None until the first request is submitted."""
        return self._inbox.engine

    def wake(self) -> None:
        """Notify the engine of a change, such as a cancelled request."""
        self._inbox.bell.put(None)
        self._inbox.interrupt()

    def close(self) -> None:
        """Stop the thread; unfinished requests end as cancelled."""
        self._finalizer()
        with self._lock:  # once the lock is acquired, a thread that was being started is set
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()


class _Inbox:
    """The state shared by the callers and the thread.

    The thread sleeps on `bell`. A Condition would not work: an interrupt (Ctrl-C) in the middle of `notify` leaves a
    waiter that no longer exists, and the next notification goes to that waiter and is lost. Putting an item into a
    SimpleQueue is a single uninterruptible call, and an extra item only wakes the thread once more.
    """

    def __init__(self) -> None:
        # Reentrant, because the garbage collector may finalise the worker while its own thread holds the lock.
        self.lock = threading.RLock()
        self.bell: SimpleQueue[None] = SimpleQueue()
        self.requests: deque[EngineRequest] = deque()
        self.questions: deque[Callable[[], None]] = deque()
        self.stopped = False
        self.thread: threading.Thread | None = None
        self.engine: Engine | None = None
        self.process = os.getpid()

    @property
    def is_foreign(self) -> bool:
        """True in the child process of a fork. The missing thread may have held the lock, so never wait for it."""
        return self.thread is not None and self.process != os.getpid()

    def put(self, requests: Sequence[EngineRequest]) -> None:
        with self.lock:
            if self.stopped:
                raise StateError(
                    "the model is closed", "close() stopped the worker thread of the model", "load the model again"
                )
            self.requests.extend(requests)
        self.bell.put(None)

    def ask(self, question: Callable[[], None]) -> None:
        self.questions.append(question)
        self.bell.put(None)

    def interrupt(self) -> None:
        """Cancel a step if its results are no longer needed."""
        if self.engine is not None and not self.is_foreign:
            self.engine.interrupt(everything=self.stopped)

    def pass_on(self, engine: Engine) -> bool:
        """Pass new requests to the engine, waiting for requests if it has no work. Return False to stop."""
        while True:
            while self.questions:
                self.questions.popleft()()
            with self.lock:
                while self.requests:
                    engine.submit(self.requests.popleft())
                if self.stopped or engine.has_work:
                    return not self.stopped
            self.bell.get()


def _run(engine: Engine, inbox: _Inbox) -> None:
    # Requests are not assigned to variables here: a reference would keep the caller alive, and thus the worker.
    while inbox.pass_on(engine):
        try:
            engine.step()
        except BaseException as error:
            # A failed step leaves all sequences in an unknown state, so all requests finish with the error.
            engine.abandon(error)
    engine.abandon(None)


def _stop(inbox: _Inbox) -> None:
    if inbox.is_foreign:
        return
    with inbox.lock:
        inbox.stopped = True
    inbox.bell.put(None)
    inbox.interrupt()
    if inbox.thread is not None and inbox.thread is not threading.current_thread():
        inbox.thread.join(_FAREWELL_SECONDS)

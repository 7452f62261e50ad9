"""The thread that drives an Engine, so that callers of any kind can wait for it: blocking, interrupted, or async."""

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

# The garbage collector may end a worker on any thread, also on one that the worker itself waits for.
_FAREWELL_SECONDS = 5.0
T = TypeVar("T")


class Worker:
    """Runs an engine while it has work. Requests of several threads share its steps.

    The thread starts with the first request and ends with `close`, with the last reference to the worker, or with the
    interpreter.

    Args:
        make_engine: called once, in the first submit.
    """

    def __init__(self, make_engine: Callable[[], Engine]) -> None:
        self._make_engine = make_engine
        self._inbox = _Inbox()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        # Also run at exit: a thread inside a kernel must not outlive the memory that it reads.
        self._finalizer = weakref.finalize(self, _stop, self._inbox)

    def submit(self, requests: Sequence[EngineRequest]) -> None:
        """Queue requests; their `finish` is called when they are over.

        Raises:
            StateError: the worker is closed, belongs to the process that this one was forked from, or would have to
                wait for itself.
        """
        self.check_usable()
        with self._lock:
            if self._thread is None and not self._inbox.stopped:
                self._start()
        self._inbox.put(requests)

    def check_usable(self) -> None:
        """Raise if whoever waits for this worker would wait for ever.

        Raises:
            StateError: see submit.
        """
        if self._inbox.is_foreign:
            raise StateError(
                f"this LLM worked in process {self._inbox.process}, and this is process {os.getpid()}",
                "a fork does not copy the thread that generates",
                "load the model in the child process, or start it by spawning",
            )
        if self._thread is threading.current_thread():
            raise StateError(
                "a logits processor called the LLM that runs it",
                "it would wait for itself",
                "use another LLM of the same Model inside the processor",
            )

    def _start(self) -> None:
        self._inbox.process = os.getpid()
        engine = self._inbox.engine = self._make_engine()
        thread = threading.Thread(target=_run, args=(engine, self._inbox), name="genai-worker", daemon=True)
        try:
            with InterruptsDeferred():  # a thread that was started and is not known would be started again
                start(thread)
                # Known only now: whoever closes meanwhile must not join a thread that has not begun.
                self._thread = self._inbox.thread = thread
        except ThreadsRefused as error:
            raise no_threads(error) from error

    def ask(self, question: Callable[[], T]) -> T:
        """What `question` gives, called on the engine's thread between two steps: for what a step changes.

        Raises:
            StateError: see submit. What `question` raises.
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
        """The engine, once a request has come."""
        return self._inbox.engine

    def wake(self) -> None:
        """Something changed that the engine should see, such as a request being cancelled."""
        self._inbox.bell.put(None)
        self._inbox.interrupt()

    def close(self) -> None:
        """End the thread; requests that are not over are dropped as cancelled."""
        self._finalizer()
        with self._lock:  # a thread that is being started is known after this
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()


class _Inbox:
    """What the callers and the thread share.

    The thread sleeps on a bell. A Condition would not do: an interrupt (Ctrl-C) in the middle of its `notify` leaves a
    sleeper behind that is no longer there, and the next notification goes to that one and is lost. Putting into a
    SimpleQueue is one uninterruptible call, and a ring too many costs the thread a look.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()  # the garbage collector may end the worker while its own thread holds this
        self.bell: SimpleQueue[None] = SimpleQueue()
        self.requests: deque[EngineRequest] = deque()
        self.questions: deque[Callable[[], None]] = deque()
        self.stopped = False
        self.thread: threading.Thread | None = None
        self.engine: Engine | None = None
        self.process = os.getpid()

    @property
    def is_foreign(self) -> bool:
        """Whether the thread was left behind by a fork; it may have held the lock, so nobody may wait for that."""
        return self.thread is not None and self.process != os.getpid()

    def put(self, requests: Sequence[EngineRequest]) -> None:
        with self.lock:
            if self.stopped:
                raise StateError("the model is closed", "close() ended its worker", "load the model again")
            self.requests.extend(requests)
        self.bell.put(None)

    def ask(self, question: Callable[[], None]) -> None:
        self.questions.append(question)
        self.bell.put(None)

    def interrupt(self) -> None:
        """A step whose results nobody wants ends early."""
        if self.engine is not None and not self.is_foreign:
            self.engine.interrupt(everything=self.stopped)

    def pass_on(self, engine: Engine) -> bool:
        """Give new requests to the engine, and wait for some if it has none. False when it is time to stop."""
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
    # No request is named here: it would keep its caller, and with it the worker, from being collected.
    while inbox.pass_on(engine):
        try:
            engine.step()
        except BaseException as error:
            # A failing step leaves no sequence in a known state; the waiting callers must hear of it.
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

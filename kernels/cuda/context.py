"""The context of one GPU, which is current while a thread calls the GPU.

`cupy.cuda.Device` also makes a context current, but on exit it sets the device that was current before. In every thread
that has not used CUDA yet, this is device 0: setting it opens GPU 0, uses a few hundred megabytes of its memory, and
fails if GPU 0 is full or belongs to another process. In addition, calls to the driver API need a context, and a new
thread has none.
"""

from __future__ import annotations

import threading
import weakref
from contextlib import suppress
from typing import Any


class DeviceContext:
    """The primary context of a GPU. A thread may enter the context several times before it leaves.

    Args:
        cupy: the module.
        index: index of the GPU.
    """

    def __init__(self, cupy: Any, index: int) -> None:
        driver = cupy.cuda.driver
        self._current, self._make_current = driver.ctxGetCurrent, driver.ctxSetCurrent
        self._left = _Left()
        self._own = _opened(cupy, index)

    def __enter__(self) -> None:
        before = int(self._current())
        if before != self._own:
            self._make_current(self._own)
        self._left.contexts.append(before)

    def __exit__(self, *_: object) -> None:
        before = self._left.contexts.pop()
        if before != self._own:
            self._make_current(before)


class InContext:
    """A CuPy object that is destroyed while a context is current.

    Streams, events, graphs and modules call CUDA when they are destroyed, and the garbage collector may destroy them in
    any thread. Without a current context, the call opens GPU 0 or fails.

    Args:
        context: the context.
        value: the object; no other reference to it may exist.
    """

    def __init__(self, context: DeviceContext, value: Any) -> None:
        # If the object were an attribute, it could be collected together with this instance, and destroyed at any
        # moment.
        self._held = [value]
        weakref.finalize(self, _drop, context, self._held).atexit = False

    @property
    def value(self) -> Any:
        """The object."""
        return self._held[0]


class Entered:
    """A context manager that enters the object of an InContext."""

    def __init__(self, held: InContext) -> None:
        self._held = held

    def __enter__(self) -> None:
        self._held.value.__enter__()

    def __exit__(self, *error: object) -> None:
        self._held.value.__exit__(*error)


def _drop(context: DeviceContext, held: list[Any]) -> None:
    with suppress(Exception), context:  # no caller can handle the error
        held.clear()


def _opened(cupy: Any, index: int) -> int:
    """Return the context of a GPU. A separate thread opens it, because a thread's choice of a GPU is permanent."""
    found: list[int] = []
    failed: list[BaseException] = []

    def work() -> None:
        try:
            cupy.cuda.runtime.setDevice(index)
            found.append(int(cupy.cuda.driver.ctxGetCurrent()))
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work, name="genai-gpu")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return found[0]


class _Left(threading.local):
    """The contexts that were current in a thread each time it entered, the latest last."""

    def __init__(self) -> None:
        self.contexts: list[int] = []

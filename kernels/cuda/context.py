"""The context of one GPU, made current while a thread asks it for something.

`cupy.cuda.Device` does that, too, but leaves by setting the device that was current before, which is number 0 in every
thread that has asked for nothing yet: that opens GPU 0, takes some hundred megabytes of it, and fails where it is full
or belongs to another process. Besides, what asks the driver itself needs a context, which a new thread has not.
"""

from __future__ import annotations

import threading
import weakref
from contextlib import suppress
from typing import Any


class DeviceContext:
    """The primary context of a GPU. A thread may enter it again before it leaves.

    Args:
        cupy: the module. index: of the GPU.
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
    """An object of CuPy's that is destroyed in a context.

    Streams, events, graphs and modules ask CUDA when they are destroyed, which may be by the collector in any thread:
    with no context that opens GPU 0, or fails.

    Args:
        value: nobody else holds it.
    """

    def __init__(self, context: DeviceContext, value: Any) -> None:
        # Not an attribute: the collector would take it for garbage with this object, and end it at any moment.
        self._held = [value]
        weakref.finalize(self, _drop, context, self._held).atexit = False

    @property
    def value(self) -> Any:
        """The object."""
        return self._held[0]


class Entered:
    """What an InContext holds, to be entered and left."""

    def __init__(self, held: InContext) -> None:
        self._held = held

    def __enter__(self) -> None:
        self._held.value.__enter__()

    def __exit__(self, *error: object) -> None:
        self._held.value.__exit__(*error)


def _drop(context: DeviceContext, held: list[Any]) -> None:
    with suppress(Exception), context:  # there is nobody to tell
        held.clear()


def _opened(cupy: Any, index: int) -> int:
    """The context of a GPU. A thread of its own asks for it: which GPU is meant stays with a thread for good."""
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
    """What was current in a thread when it entered, the last time last."""

    def __init__(self) -> None:
        self.contexts: list[int] = []

"""The context of one GPU, made current while a thread asks it for something.

`cupy.cuda.Device` does that, too, but leaves by setting the device that was current before, which is number 0 in every
thread that has asked for nothing yet: that opens GPU 0, takes some hundred megabytes of it, and fails where it is full
or belongs to another process. Besides, what asks the driver itself needs a context, which a new thread has not.
"""

from __future__ import annotations

import threading
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
        before = self._current()
        cupy.cuda.runtime.setDevice(index)
        self._own = int(self._current())
        self._make_current(before)

    def __enter__(self) -> None:
        before = int(self._current())
        if before != self._own:
            self._make_current(self._own)
        self._left.contexts.append(before)

    def __exit__(self, *_: object) -> None:
        before = self._left.contexts.pop()
        if before != self._own:
            self._make_current(before)


class _Left(threading.local):
    """What was current in a thread when it entered, the last time last."""

    def __init__(self) -> None:
        self.contexts: list[int] = []

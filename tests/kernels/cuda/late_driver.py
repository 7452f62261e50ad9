"""An emulated GPU that does no work before a caller waits, so that reads and writes that come too early show."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.kernels.cuda.cupy_driver import _check_same
from genai.kernels.cuda.driver import Grid
from genai.kernels.cuda.sources import CudaKernel

from .device_array import DeviceArray, of_host
from .host_driver import HostDriver


@dataclass(eq=False)
class LateEvent:
    """See `genai.kernels.cuda.driver.Event`."""

    driver: LateDriver
    number: int = 0

    def record(self) -> None:
        self.number = self.driver.asked

    def wait(self) -> None:
        self.driver.drain(self.number)


@dataclass(eq=False)
class LateDriver(HostDriver):
    """See HostDriver. What memory of the host holds is read when its copy is made.

    Attributes:
        asked: how much was asked for; ahead: the most that was asked for and not done.
    """

    asked: int = 0
    ahead: int = 0
    _queue: deque[tuple[int, Callable[[], object]]] = field(default_factory=deque)
    _pinned: list[NDArray[np.uint8]] = field(default_factory=list)
    # Memory of a GPU that goes back is given to nobody before what was asked for is done; here it never is.
    _memory: list[DeviceArray] = field(default_factory=list)

    @property
    def pending(self) -> int:
        """How much was asked for and is not done."""
        return len(self._queue)

    def drain(self, number: int) -> None:
        """Do what was asked for, up to this."""
        with self._turn:
            while self._queue and self._queue[0][0] <= number:
                self._queue.popleft()[1]()

    def _later(self, work: Callable[[], object]) -> None:
        self._outside_of_a_capture()
        with self._turn:
            self.asked += 1
            self._queue.append((self.asked, work))
            self.ahead = max(self.ahead, len(self._queue))

    def zeros(self, nbytes: int) -> DeviceArray:
        self._memory.append(super().zeros(nbytes))
        return self._memory[-1]

    def host_memory(self, nbytes: int) -> NDArray[np.uint8]:
        self._pinned.append(super().host_memory(nbytes))
        return self._pinned[-1]

    def write(self, target: DeviceArray, array: NDArray[Any]) -> None:
        _check_same(target, of_host(array))
        own = array if any(np.shares_memory(array, memory) for memory in self._pinned) else array.copy()
        self._later(partial(super().write, target, own))

    def read(self, array: DeviceArray, target: NDArray[Any]) -> None:
        assert any(np.shares_memory(target, memory) for memory in self._pinned)
        self._later(partial(super().read, array, target))

    def download(self, array: DeviceArray) -> NDArray[Any]:
        self.synchronize()
        return super().download(array)

    def copy_row(self, rows: DeviceArray, source: int, destination: int) -> None:
        self._later(partial(super().copy_row, rows, source, destination))

    def copy(self, source: DeviceArray, target: DeviceArray) -> None:
        self._later(partial(super().copy, source, target))

    def event(self) -> Any:
        return LateEvent(self)

    def launch(self, function: Any, kernel: CudaKernel, grid: Grid, arguments: NDArray[np.void]) -> None:
        if self._captured is not None:
            super().launch(function, kernel, grid, arguments)
            return
        own, start = arguments.copy(), super().launch
        self._later(lambda: start(function, kernel, grid, own))

    def launch_graph(self, captured: Any) -> None:
        self.graphs_launched += 1
        start = super().launch
        self._later(lambda: [start(*launch) for launch in captured])

    def synchronize(self) -> None:
        self._outside_of_a_capture()
        self.drain(self.asked)

    def settle(self) -> None:
        self.synchronize()

    def lend(self, array: DeviceArray, stream: Any, options: Mapping[str, Any]) -> Any:
        self.synchronize()
        return super().lend(array, stream, options)

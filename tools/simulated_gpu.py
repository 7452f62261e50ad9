"""A simulated GPU that takes time but computes nothing, to measure the host's work and its overlap with the GPU.

Work is queued as on a stream. It ends a given time after the preceding work in the queue, and takes effect when the
host waits for it. As with a GPU, host memory that a copy reads must not change until the copy takes effect.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.kernels.cuda.driver import CudaError, Grid
from genai.kernels.cuda.sources import CudaKernel, structs
from genai.kernels.sampling import ROW

_TABLE, _OUTCOME = (structs("sampling.cu")[name] for name in ("SamplingTable", "SamplingOutcome"))


@dataclass(eq=False)
class SimulatedGpu:
    """A driver (see `genai.kernels.cuda.driver.Driver`) whose launches write only the results of sampling: arbitrary
    tokens that depend on a row's counter.

    Attributes:
        launch_us: duration of a launch outside graphs.
        graph_us: duration of a step's graph.
        choice_us: duration of the graph that selects tokens.
        copy_us: duration of a copy.
        vocab_size: exclusive end of the range of selected tokens.
        first_token: first token of the range.
        log: if set, the names of all operations in order: "step", "choice", "event" (waited for), and so on.
        fails: called with the name before every operation; tests raise errors from it.
    """

    launch_us: float = 0.0
    graph_us: float = 0.0
    choice_us: float = 0.0
    copy_us: float = 0.0
    vocab_size: int = 256
    first_token: int = 0
    name: str = "a simulated GPU"
    capability: int = 80
    multiprocessors: int = 132
    log: list[str] | None = None
    fails: Callable[[str], None] | None = None
    _queue: deque[tuple[int, float, Callable[[], object]]] = field(default_factory=deque)
    _asked: int = 0
    _end: float = 0.0
    _pinned: list[tuple[int, int]] = field(default_factory=list)
    _captured: list[Any] | None = None
    _turn: Any = field(default_factory=threading.RLock, repr=False)

    # --- the queue -----------------------------------------------------------------------------------------------

    def _ask(self, what: str, microseconds: float, effect: Callable[[], object]) -> int:
        """Queue a piece of work; return its number."""
        self._note(what)
        with self._turn:
            self._end = max(self._end, time.perf_counter()) + 1e-6 * microseconds
            self._asked += 1
            self._queue.append((self._asked, self._end, effect))
            return self._asked

    def _wait(self, number: int) -> None:
        """Wait until a piece of work is done."""
        with self._turn:
            while self._queue and self._queue[0][0] <= number:
                _, end, effect = self._queue.popleft()
                while time.perf_counter() < end:
                    pass
                effect()

    def _note(self, what: str) -> None:
        if self.fails is not None:
            self.fails(what)
        if self.log is not None:
            self.log.append(what)

    # --- memory --------------------------------------------------------------------------------------------------

    def free_bytes(self) -> int:
        return 1 << 34

    def zeros(self, nbytes: int) -> NDArray[np.uint8]:
        self._note("zeros")
        memory = np.zeros(nbytes + 256, np.uint8)
        first = -memory.ctypes.data % 256
        return memory[first : first + nbytes]

    def host_memory(self, nbytes: int) -> NDArray[np.uint8]:
        memory = np.zeros(nbytes, np.uint8)
        self._pinned.append((memory.ctypes.data, nbytes))
        return memory

    def upload(self, array: NDArray[Any]) -> NDArray[Any]:
        return np.array(array, order="C")

    def write(self, target: NDArray[Any], array: NDArray[Any]) -> None:
        address = array.ctypes.data
        if not any(first <= address < first + nbytes for first, nbytes in self._pinned):
            array = array.copy()
        self._ask("write", self.copy_us, lambda: target.__setitem__(..., array))

    def download(self, array: NDArray[Any]) -> NDArray[Any]:
        self._note("download")
        self.synchronize()
        return array.copy()

    def read(self, array: NDArray[Any], target: NDArray[Any]) -> None:
        self._ask("read", self.copy_us, lambda: target.__setitem__(..., array))

    def event(self) -> SimulatedEvent:
        return SimulatedEvent(self)

    def copy_row(self, rows: NDArray[Any], source: int, destination: int) -> None:
        self._ask("copy_row", self.copy_us, lambda: rows.__setitem__(destination, rows[source]))

    def copy(self, source: NDArray[Any], target: NDArray[Any]) -> None:
        self._ask("copy", self.copy_us, lambda: target.__setitem__(..., source))

    def address(self, array: NDArray[Any]) -> int:
        return array.ctypes.data

    def borrow(self, address: int, nbytes: int) -> NDArray[np.uint8]:
        return np.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), np.uint8)

    def adopt(self, value: Any) -> NDArray[Any]:
        return np.ascontiguousarray(np.from_dlpack(value))

    dlpack_device = (1, 0)

    def lend(self, array: NDArray[Any], stream: Any, options: Mapping[str, Any]) -> Any:
        return array.__dlpack__(stream=None, **options)

    # --- kernels -------------------------------------------------------------------------------------------------

    def load(self, kernels: Collection[CudaKernel]) -> Mapping[CudaKernel, Any]:
        return {kernel: kernel.name for kernel in kernels}

    def launch(self, function: Any, kernel: CudaKernel, grid: Grid, arguments: NDArray[np.void]) -> None:
        effect = self._effect(kernel, grid, arguments)
        if self._captured is not None:
            self._captured.append(effect)
        else:
            self._ask("launch", self.launch_us, effect)

    def _effect(self, kernel: CudaKernel, grid: Grid, arguments: NDArray[np.void]) -> Callable[[], object]:
        if kernel.arguments != "SamplingArguments" or not arguments["is_first"]:
            return _nothing
        table, count = int(arguments["table"]), grid[1]
        return lambda: self._choose(table, count)

    def _choose(self, table: int, count: int) -> None:
        header = _at(table, _TABLE, 1)[0]
        assert header["count"] == count, "the table of another call"
        rows, found = _at(table + int(header["rows"]), ROW, count), _at(int(header["outcomes"]), _OUTCOME, count)
        seeds, numbers, positions = rows["counter"].astype(np.int64).T
        made_up = (seeds % 1000 + 31 * numbers + 7 * positions) % (self.vocab_size - self.first_token)
        found["token"] = self.first_token + made_up
        found["status"], found["probability"] = 0, 1.0

    def capture(self, work: Callable[[], None]) -> Any:
        with self._turn:
            self._captured = captured = []
            try:
                work()
            finally:
                self._captured = None
        return [effect for effect in captured if effect is not _nothing]

    def launch_graph(self, captured: Any) -> None:
        what, microseconds = ("choice", self.choice_us) if captured else ("step", self.graph_us)
        self._ask(what, microseconds, lambda: [effect() for effect in captured])

    def synchronize(self) -> None:
        self._note("wait")
        self._wait(self._asked)

    settle = synchronize


@dataclass(eq=False)
class SimulatedEvent:
    """See `genai.kernels.cuda.driver.Event`."""

    gpu: SimulatedGpu
    number: int = 0

    def record(self) -> None:
        self.number = self.gpu._asked

    def wait(self) -> None:
        self.gpu._note("event")
        self.gpu._wait(self.number)


def _nothing() -> None:
    """Do nothing: the effect of every kernel except sampling."""


def _at(address: int, dtype: np.dtype[np.void], count: int) -> NDArray[np.void]:
    return np.frombuffer((ctypes.c_ubyte * (dtype.itemsize * count)).from_address(address), dtype)


__all__ = ["CudaError", "SimulatedGpu"]

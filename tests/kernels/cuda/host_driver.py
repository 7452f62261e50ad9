"""A GPU that is a host: kernels are built by a C++ compiler with `host_shim.h`, memory is `DeviceArray`."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import platform
import shutil
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.kernels.cuda.cupy_driver import _check_same
from genai.kernels.cuda.driver import MOST_IN_GRID, CudaError, Grid
from genai.kernels.cuda.sources import CudaKernel, modules

from .device_array import DeviceArray, of_host, within

SHIM = Path(__file__).with_name("host_shim.h")
_PARTS = [SHIM.with_name(name) for name in ("host_races.h", "host_races.cpp")]
COMPILER = shutil.which("g++")
FLAGS = ["-std=c++17", "-O2", "-fPIC", "-fno-strict-aliasing", "-ffp-contract=off", "-Wno-unknown-pragmas"]
FLAGS += ["-fvisibility=hidden"]  # of each library its own shim, reached without detours
FLAGS += ["-march=x86-64-v3"] if platform.machine() == "x86_64" else []
_FOLDER = Path(tempfile.gettempdir()) / "genai-cuda-on-host"
# Bytes before and behind every array: NaN as floats, and never written.
_GUARD = 256


# The most shared memory of a block by compute capability, and of the others.
_MOST_SHARED, _SHARED = {80: 163 << 10, 87: 163 << 10, 90: 227 << 10, 100: 227 << 10, 103: 227 << 10}, 99 << 10


class LaunchError(RuntimeError):
    """What a kernel did wrong."""


def build(source: str, flags: Collection[str] = ()) -> Path:
    """A library of the kernels of a text, built once per content.

    Raises:
        CudaError: it does not compile.
    """
    shim = _shim(*flags)
    library = shim / f"{_digest(source)}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=shim) as folder:
            code, made = Path(folder) / "kernels.cpp", Path(folder) / "kernels.so"
            compiled = code.with_suffix(".o")
            code.write_text(source)
            _compile([*FLAGS, *flags, "-include", shim / SHIM.name, "-c", code, "-o", compiled])
            _compile(["-shared", compiled, shim / "shim.o", "-o", made])
            made.replace(library)
    return library


@cache
def _shim(*flags: str) -> Path:
    """A folder with what every library has of the shim, compiled: its header, which takes longer to read than most
    kernels, and what runs them."""
    ready = _FOLDER / _digest(*(part.read_text() for part in (SHIM, *_PARTS)), *FLAGS, *flags)
    if not ready.exists():
        _FOLDER.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_FOLDER) as folder:
            made = Path(folder) / "made"
            made.mkdir()
            header, *_ = [shutil.copy(part, made) for part in (SHIM, *_PARTS)]
            _compile([*FLAGS, *flags, "-x", "c++-header", header, "-o", f"{header}.gch"])
            untraced = [flag for flag in flags if "tsan" not in flag and "sanitize" not in flag]
            _compile([*FLAGS, *untraced, "-DSHIM_ONCE", "-x", "c++", "-c", header, "-o", made / "shim.o"])
            with contextlib.suppress(OSError):  # another process was faster
                made.replace(ready)
    return ready


def _compile(arguments: Sequence[str | Path]) -> None:
    assert COMPILER is not None
    done = subprocess.run([COMPILER, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise CudaError(done.stderr[:4000])


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:24]


@dataclass(eq=False)
class HostEvent:
    """See `genai.kernels.cuda.driver.Event`: everything is done at once."""

    driver: HostDriver

    def record(self) -> None:
        self.driver._outside_of_a_capture()

    def wait(self) -> None:
        self.driver._outside_of_a_capture()


@dataclass(eq=False)
class HostDriver:
    """See `genai.kernels.cuda.driver.Driver`.

    Attributes:
        order: in which the threads of a block run: 0 forwards, 1 backwards, others shuffle them.
        flags: further ones of the compiler. capability: 90 has the kernels of Hopper.
        launched: names of the kernels that were started, in order. graphs_launched: how many graphs were.
        room: the most bytes that one array may have; None = any number. allocated: bytes that were ever asked for.
    """

    order: int = 0
    flags: tuple[str, ...] = ()
    name: str = "a host that emulates a GPU"
    capability: int = 80
    multiprocessors: int = 4
    launched: list[str] = field(default_factory=list)
    graphs_launched: int = 0
    room: int | None = None
    allocated: int = 0
    _captured: list[Any] | None = None
    _turn: Any = field(default_factory=threading.RLock, repr=False)
    _guarded: list[tuple[weakref.ref[Any], Any]] = field(default_factory=list)

    def zeros(self, nbytes: int) -> DeviceArray:
        self._outside_of_a_capture()
        self.allocated += nbytes
        if self.room is not None and nbytes > self.room:
            raise MemoryError(f"{nbytes} bytes are not there")
        memory = np.zeros(nbytes + 3 * _GUARD, np.uint8)
        first = _GUARD + -memory.ctypes.data % _GUARD
        inside = memory[first : first + nbytes]
        memory[:first] = memory[first + nbytes :] = 0xFF
        self._guarded.append((weakref.ref(memory), (first, first + nbytes)))
        return DeviceArray(inside)

    def host_memory(self, nbytes: int) -> NDArray[np.uint8]:
        return np.zeros(nbytes, np.uint8)

    def upload(self, array: NDArray[Any]) -> DeviceArray:
        array = np.ascontiguousarray(array)
        copy = self.zeros(array.nbytes).view(array.dtype).reshape(array.shape)
        copy.host[...] = array
        return copy

    def write(self, target: DeviceArray, array: NDArray[Any]) -> None:
        self._outside_of_a_capture()
        _check_same(target, of_host(array))
        within(target)[...] = array

    def download(self, array: DeviceArray) -> NDArray[Any]:
        self._outside_of_a_capture()
        return within(array).copy()

    def read(self, array: DeviceArray, target: NDArray[Any]) -> None:
        self._outside_of_a_capture()
        _check_same(array, of_host(target))
        target[...] = within(array)

    def event(self) -> HostEvent:
        return HostEvent(self)

    def copy_row(self, rows: DeviceArray, source: int, destination: int) -> None:
        self._outside_of_a_capture()
        within(rows)[destination] = within(rows)[source]

    def free_bytes(self) -> int:
        return 1 << 30

    def address(self, array: DeviceArray) -> int:
        return within(array).ctypes.data

    def load(self, kernels: Collection[CudaKernel]) -> Mapping[CudaKernel, Any]:
        functions = {}
        for source, ones in modules(kernels):
            path = build(self.text(source), self.flags)
            library = ctypes.CDLL(str(path))
            for kernel in ones:
                function = functions[kernel] = getattr(library, kernel.name)
                function.restype = ctypes.c_char_p
                function.library, function.path = library, path
        return functions

    def text(self, source: str) -> str:
        """What is built in place of a source: tests plant faults."""
        return source

    def launch(self, function: Any, kernel: CudaKernel, grid: Grid, arguments: NDArray[np.void]) -> None:
        with self._turn:
            if self._captured is not None:  # arguments are copied here, as CUDA does
                self._captured.append((function, kernel, grid, arguments.copy()))
                return
        self.launched.append(kernel.name)
        self._check_limits(kernel, grid)
        sizes, threads = (ctypes.c_uint * 3)(*grid), (ctypes.c_uint * 3)(kernel.threads, 1, 1)
        error = function(sizes, threads, kernel.shared, self.order, ctypes.c_void_p(arguments.ctypes.data))
        if error:
            raise LaunchError(f"{kernel.name}: {error.decode()}")
        self.check()

    def capture(self, work: Callable[[], None]) -> Any:
        with self._turn:  # other threads wait
            self._captured = captured = []
            try:
                work()
            finally:
                self._captured = None
        return captured

    def launch_graph(self, captured: Any) -> None:
        self.graphs_launched += 1
        for launch in captured:
            self.launch(*launch)

    def _check_limits(self, kernel: CudaKernel, grid: Grid) -> None:
        """What a GPU would refuse to start."""
        if grid[0] >= 1 << 31 or max(grid[1:]) > MOST_IN_GRID:
            raise LaunchError(f"{kernel.name}: a grid of {grid} blocks, more than a GPU's can have")
        if kernel.shared > (most := _MOST_SHARED.get(self.capability, _SHARED)):
            raise LaunchError(f"{kernel.name}: {kernel.shared} bytes of shared memory of a block; there are {most}")

    def check(self) -> None:
        """Raise LaunchError if something was written before or behind an array that is still held."""
        for reference, (first, end) in self._guarded:
            memory = reference()
            if memory is not None and not ((memory[:first] == 0xFF).all() and (memory[end:] == 0xFF).all()):
                raise LaunchError("memory was written out of bounds")

    def seconds(self, work: Callable[[], None]) -> float:
        begin = time.perf_counter()
        work()
        self.synchronize()
        return time.perf_counter() - begin

    def synchronize(self) -> None:
        self._outside_of_a_capture()

    def _outside_of_a_capture(self) -> None:
        """While launches are captured there is nothing but launches."""
        with self._turn:
            captures = self._captured is not None
        if captures:
            raise LaunchError("something else than a launch was asked for while launches are captured")

    settle = synchronize

    def borrow(self, address: int, nbytes: int) -> DeviceArray:
        return DeviceArray(np.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), np.uint8))

    def adopt(self, value: Any) -> DeviceArray:
        return DeviceArray(np.ascontiguousarray(np.from_dlpack(value)))

    def copy(self, source: DeviceArray, target: DeviceArray) -> None:
        assert source.shape == target.shape and source.dtype == target.dtype
        within(target)[...] = within(source)

    @property
    def dlpack_device(self) -> tuple[int, int]:
        return 1, 0

    def lend(self, array: DeviceArray, stream: Any, options: Mapping[str, Any]) -> Any:
        return within(array).__dlpack__(stream=None, **options)

"""A host that emulates a GPU and looks for races, and for memory that a GPU could not read: see host_races.cpp."""

from __future__ import annotations

import ctypes
import re
import subprocess
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.kernels.cuda.driver import Grid
from genai.kernels.cuda.sources import CudaKernel

from .device_array import DeviceArray, within
from .host_driver import HostDriver, HostEvent, LaunchError

_FLAGS = ("-DSHIM_RACES", "-g1", "-fsanitize=thread,alignment", "--param=tsan-distinguish-volatile=1")
_FLAGS += ("--param=tsan-instrument-func-entry-exit=0",)


@dataclass(eq=False)
class RaceDriver(HostDriver):
    """See HostDriver."""

    flags: tuple[str, ...] = _FLAGS
    # What the kernel before has written: pairs of addresses.
    _recent: NDArray[np.uintp] = field(default_factory=lambda: np.zeros((0, 2), np.uintp))

    # Memory that tests made themselves, by address.
    _others: dict[int, weakref.ref[Any]] = field(default_factory=dict)

    def launch(self, function: Any, kernel: CudaKernel, grid: Grid, arguments: NDArray[np.void]) -> None:
        with self._turn:
            captures = self._captured is not None
        if captures:
            super().launch(function, kernel, grid, arguments)
            return
        memory, guarded = self._arrays()
        function.library.shim_watch(*_given(memory), *_given(guarded), *_given(self._recent))
        try:
            super().launch(function, kernel, grid, arguments)
        except LaunchError as error:
            raise LaunchError(_with_lines(str(error), function.path)) from None
        written = ctypes.POINTER(ctypes.c_size_t)()
        function.library.shim_written.restype = ctypes.c_size_t
        count = function.library.shim_written(ctypes.byref(written))
        self._recent = np.array(written[: 2 * count], np.uintp).reshape(-1, 2)

    def address(self, array: DeviceArray) -> int:
        whole = within(array)
        while isinstance(whole.base, np.ndarray):
            whole = whole.base
        if not any(memory() is whole for memory, _ in self._guarded):
            self._others[whole.ctypes.data] = weakref.ref(whole)
        return super().address(array)

    def _outside_of_a_capture(self) -> None:
        """Copies wait for the kernels before, and kernels for copies."""
        super()._outside_of_a_capture()
        self._recent = self._recent[:0]

    def event(self) -> HostEvent:
        return _RaceEvent(self)

    def launch_graph(self, captured: Any) -> None:
        self._recent = self._recent[:0]  # a graph does, too
        super().launch_graph(captured)

    def _arrays(self) -> tuple[NDArray[np.uintp], NDArray[np.uintp]]:
        """Where arrays begin and end, in order; those of them that have guards."""
        found = []
        for reference, (first, end) in self._guarded:
            if (memory := reference()) is not None and end > first:
                found.append((memory.ctypes.data + first, memory.ctypes.data + end))
        others = [memory for reference in self._others.values() if (memory := reference()) is not None]
        more = [(memory.ctypes.data, memory.ctypes.data + memory.nbytes) for memory in others]
        whole, guarded = (np.array(sorted(ones), np.uintp).reshape(-1, 2) for ones in (found + more, found))
        return whole, guarded


@dataclass(eq=False)
class _RaceEvent(HostEvent):
    """Kernels do not wait for it."""

    def record(self) -> None:
        pass

    wait = record


def _given(intervals: NDArray[np.uintp]) -> tuple[ctypes.c_void_p, ctypes.c_size_t]:
    return ctypes.c_void_p(intervals.ctypes.data), ctypes.c_size_t(len(intervals))


def _with_lines(text: str, library: Path) -> str:
    """With lines of sources in place of addresses in the library."""

    def line(found: re.Match[str]) -> str:
        address = hex(int(found[1], 16) - 1)  # the call, not what comes behind it
        done = subprocess.run(["addr2line", "-ie", library, address], capture_output=True, text=True)
        return " < ".join(Path(place).name.split(" ")[0] for place in done.stdout.split()) or found[0]

    return re.sub(r"\+(0x[0-9a-f]+)", line, text)

"""Launches that may start before the preceding kernel ends (programmatic dependent launch; CUDA C++ Programming Guide).

CuPy has no call for this, so this module calls the driver's library directly. A kernel signals when the next kernel may
start, and waits for the preceding kernel before it reads that kernel's results; see KERNEL in portable.cuh. This saves
a microsecond or two for each of the few hundred kernels of a step, including in captured graphs.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .driver import CudaError, Grid

OLDEST_CAPABILITY = 90
_PROGRAMMATIC_STREAM_SERIALIZATION = 6


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: an id, and a union of 64 bytes."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(_Attribute)), ("count", ctypes.c_uint),
    )  # fmt: skip


class DependentLaunches:
    """Launches kernels in one stream, for one thread at a time.

    Args:
        library: the driver's library.
        stream: handle of the stream.
    """

    def __init__(self, library: Any, stream: int) -> None:
        self._launch, self._describe = library.cuLaunchKernelEx, library.cuGetErrorString
        self._attribute = _Attribute(id=_PROGRAMMATIC_STREAM_SERIALIZATION, value=1)
        self._config = _Config(stream=stream, attributes=ctypes.pointer(self._attribute), count=1)
        self._parameters = (ctypes.c_void_p * 1)()

    def launch(self, function: int, grid: Grid, threads: int, arguments: NDArray[np.void], shared: int = 0) -> None:
        """Launch a kernel, given as a handle of the driver, with its argument struct.

        Raises:
            CudaError: if the kernel cannot be launched.
        """
        config = self._config
        config.grid[:], config.block[:], config.shared = grid, (threads, 1, 1), shared
        self._parameters[0] = arguments.ctypes.data
        code = self._launch(ctypes.byref(config), ctypes.c_void_p(function), self._parameters, None)
        if code:
            text = ctypes.c_char_p()
            self._describe(code, ctypes.byref(text))
            raise CudaError(f"a kernel cannot be launched: {(text.value or b'unknown').decode()} ({code})")


def open_dependent_launches(capability: int, stream: int) -> DependentLaunches | None:
    """Return the launcher, or None if the GPU or its driver is too old."""
    if capability < OLDEST_CAPABILITY:
        return None
    try:
        library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        return DependentLaunches(library, stream)
    except (OSError, AttributeError):
        return None

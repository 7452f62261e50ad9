"""The interface between a GPU and the executor: memory, and kernels that run in order. CuPy and tests implement it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import DeviceFailed
from .sources import CudaKernel

Grid = tuple[int, int, int]
# Maximum second and third dimension of a grid.
MOST_IN_GRID = 65535
# DLPack's device type for GPUs.
DLPACK_CUDA = 2


class Event(Protocol):
    """A point in the order of a device's work."""

    def record(self) -> None:
        """Record the event after all work submitted so far."""

    def wait(self) -> None:
        """Wait until all work before the event is done; return immediately if the event was never recorded."""


class Driver(Protocol):
    """A device and its one stream, which runs work in order.

    Memory is an array of the driver's own type. The array supports NumPy's `shape`, `dtype`, `ndim`, `size`,
    `itemsize`, `nbytes`, `strides`, `flags.c_contiguous` and `len`. Indexing by numbers and slices, `view` as another
    type (of another size if there are no gaps) and `reshape` (if it needs no copy) return the same memory, without work
    on the device. No other operation is allowed: conversion to or from host arrays and computation would fail, or run
    in a different stream. Only the methods below move data.

    Every method may raise CudaError, including for earlier failures, because a GPU reports failures late.
    """

    @property
    def name(self) -> str:
        """The name of the device as shown to users."""

    @property
    def capability(self) -> int:
        """Ten times the compute capability."""

    @property
    def multiprocessors(self) -> int:
        """The number of multiprocessors."""

    def free_bytes(self) -> int:
        """Return the free memory in bytes."""

    def zeros(self, nbytes: int) -> Any:
        """Allocate zeroed memory, uint8 [nbytes], aligned to 256 bytes.

        Raises:
            MemoryError: if the device has too little memory.
        """

    def host_memory(self, nbytes: int) -> NDArray[np.uint8]:
        """Allocate zeroed, pinned host memory, which the device copies from directly, uint8 [nbytes].

        Raises:
            MemoryError: if the host has too little memory.
        """

    def upload(self, array: NDArray[Any]) -> Any:
        """Copy a host array into separate memory."""

    def write(self, target: Any, array: NDArray[Any]) -> None:
        """Copy a host array into memory of the same shape and type.

        An array in `host_memory` must stay unchanged until the device has read it. Other arrays have been read when the
        method returns.
        """

    def download(self, array: Any) -> NDArray[Any]:
        """Return a copy on the host, made after all work submitted earlier."""

    def read(self, array: Any, target: NDArray[Any]) -> None:
        """Copy memory into host memory (`host_memory`) of the same shape and type, without waiting.

        The copy is complete when the wait for an event that was recorded afterwards returns.
        """

    def event(self) -> Event:
        """Return an event that has not been recorded."""

    def copy_row(self, rows: Any, source: int, destination: int) -> None:
        """Copy a row of memory to another row of the same memory."""

    def address(self, array: Any) -> int:
        """Return the device address of memory."""

    def load(self, kernels: Collection[CudaKernel]) -> Mapping[CudaKernel, Any]:
        """Load kernels and compile them if necessary; return the functions that `launch` accepts, by kernel.

        Raises:
            CudaError: if a kernel does not compile; the message contains the compiler's output.
        """

    def launch(self, function: Any, kernel: CudaKernel, grid: Grid, arguments: NDArray[np.void]) -> None:
        """Launch a kernel with its argument struct, an array of one element."""

    def capture(self, work: Callable[[], None]) -> Any:
        """Capture the launches of `work`, with their current arguments, as one graph for `launch_graph`.

        No kernel runs during the capture, and `work` may only launch kernels.
        """

    def launch_graph(self, captured: Any) -> None:
        """Launch a captured graph."""

    def seconds(self, work: Callable[[], None]) -> float:
        """Return the time that the launches of `work` take, in seconds by the device's clock."""

    def synchronize(self) -> None:
        """Wait until all submitted work is done."""

    def settle(self) -> None:
        """Wait until all work on the device is done, in every stream of the process."""

    def borrow(self, address: int, nbytes: int) -> Any:
        """Return memory that another owner keeps allocated, as a uint8 array."""

    def copy(self, source: Any, target: Any) -> None:
        """Copy memory into other memory of the same shape and type."""

    def adopt(self, value: Any) -> Any:
        """Return another library's DLPack memory as a contiguous array, after its work; a copy if there are gaps."""

    @property
    def dlpack_device(self) -> tuple[int, int]:
        """The device's type and number in DLPack."""

    def lend(self, array: Any, stream: Any, options: Mapping[str, Any]) -> Any:
        """Return a DLPack capsule of an array for a consumer's stream, whose later work waits for this stream.

        Args:
            array: the array.
            stream: the consumer's stream.
            options: further options that the consumer passes to `__dlpack__`.
        """


class CudaError(DeviceFailed):
    """A kernel does not compile or cannot be launched, or the GPU failed."""


class NoDevice(RuntimeError):
    """No GPU can be used. The message gives the reason in one line."""

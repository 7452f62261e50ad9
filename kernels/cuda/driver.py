"""What a GPU is to the executor: memory, and kernels that are launched in order. CuPy is one; tests have another."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..device import DeviceFailed
from .sources import CudaKernel

Grid = tuple[int, int, int]
# The largest second and third size of one.
MOST_IN_GRID = 65535
# What DLPack calls GPUs.
DLPACK_CUDA = 2


class Event(Protocol):
    """A place in the order of what a device is asked for."""

    def record(self) -> None:
        """Behind everything that was asked for until now."""

    def wait(self) -> None:
        """Until everything before it is done; not at all if it was never recorded."""


class Driver(Protocol):
    """A device and its one stream: what is asked for happens in order.

    Memory is an array of the driver's own. It has NumPy's `shape`, `dtype`, `ndim`, `size`, `itemsize`, `nbytes`,
    `strides`, `flags.c_contiguous` and `len`. Numbers and slices as indices, `view` as another
    type (of another size where there are no gaps) and `reshape` (where that takes no copy) give the same memory, and
    ask nothing of the device. Nothing else may be asked of it: it becomes no array of the host's, takes none, and
    computes nothing; it would refuse, or do it in a stream that is not ours. What it holds is moved by the methods here
    alone.

    Whatever is asked for may raise CudaError, also for what went wrong earlier: a GPU tells of it late.
    """

    @property
    def name(self) -> str:
        """What people call the device."""

    @property
    def capability(self) -> int:
        """What its instructions are: ten times the compute capability."""

    @property
    def multiprocessors(self) -> int:
        """How many it has."""

    def free_bytes(self) -> int:
        """Memory that is free now."""

    def zeros(self, nbytes: int) -> Any:
        """Zeroed memory, uint8 [nbytes], from a multiple of 256 bytes on.

        Raises:
            MemoryError: there is not so much.
        """

    def host_memory(self, nbytes: int) -> NDArray[np.uint8]:
        """Zeroed memory of the host that the device copies from without help, uint8 [nbytes].

        Raises:
            MemoryError: there is not so much.
        """

    def upload(self, array: NDArray[Any]) -> Any:
        """A copy of a host's array in memory of its own."""

    def write(self, target: Any, array: NDArray[Any]) -> None:
        """Copy a host's array into memory of the same shape and type.

        One in `host_memory` must stay as it is until the device has read it; others have been read on return.
        """

    def download(self, array: Any) -> NDArray[Any]:
        """A copy on the host, after everything that was asked for before."""

    def read(self, array: Any, target: NDArray[Any]) -> None:
        """Copy memory into one of the host's (`host_memory`) of the same shape and type, without waiting: it holds it
        once an event was waited for that was recorded afterwards.
        """

    def event(self) -> Event:
        """One that was not recorded yet."""

    def copy_row(self, rows: Any, source: int, destination: int) -> None:
        """Copy a row of memory onto another one of it."""

    def address(self, array: Any) -> int:
        """Where memory begins."""

    def load(self, kernels: Collection[CudaKernel]) -> Mapping[CudaKernel, Any]:
        """Compile kernels, or find them compiled: what `launch` takes, by kernel.

        Raises:
            CudaError: one does not compile; the compiler's words are in the message.
        """

    def launch(self, function: Any, kernel: CudaKernel, grid: Grid, arguments: NDArray[np.void]) -> None:
        """Start a kernel with its struct, an array of one element."""

    def capture(self, work: Callable[[], None]) -> Any:
        """What `work` launches, with the arguments of now, as one thing that `launch_graph` starts.

        Nothing runs meanwhile, and `work` asks for nothing else than launches.
        """

    def launch_graph(self, captured: Any) -> None:
        """Start what was captured."""

    def seconds(self, work: Callable[[], None]) -> float:
        """How long the device takes for the launches that some work asks for, by its own clock."""

    def synchronize(self) -> None:
        """Wait until everything is done that was asked for."""

    def settle(self) -> None:
        """Wait until everything is done on the device that anybody has asked for, whatever their streams."""

    def borrow(self, address: int, nbytes: int) -> Any:
        """Memory of somebody else, uint8, who keeps it there."""

    def copy(self, source: Any, target: Any) -> None:
        """Copy memory onto other memory of the same shape and type."""

    def adopt(self, value: Any) -> Any:
        """A dense array over what another library offers through DLPack, after its work; a copy where it has gaps."""

    @property
    def dlpack_device(self) -> tuple[int, int]:
        """The kind and the number of the device, as DLPack has them."""

    def lend(self, array: Any, stream: Any, options: Mapping[str, Any]) -> Any:
        """A DLPack capsule over an array, for a consumer's stream, whose work begins after ours.

        Args:
            options: others that the consumer passes to `__dlpack__`.
        """


class CudaError(DeviceFailed):
    """A kernel that does not compile, or does not start, or a GPU that failed."""


class NoDevice(RuntimeError):
    """There is no GPU that could be used; the message says why in one line."""

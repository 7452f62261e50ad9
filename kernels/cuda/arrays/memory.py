"""Device memory of arrays: a pool that reuses released memory, and tensors that can outlive their run."""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..driver import Driver

_ALIGNED = 256
_STATUS = np.dtype(np.int32)


class DeviceFull(MemoryError):
    """The device has too little memory. The message gives the requested and the available size."""


def rounded(nbytes: int) -> int:
    """Round a size up to a size that a pool allocates: there are eight sizes from each power of two to the next."""
    step = max(_ALIGNED, 1 << max(nbytes.bit_length() - 4, 0))
    return max(-(-nbytes // step) * step, _ALIGNED)


def _zeros(driver: Driver, nbytes: int) -> Any:
    """Return zeroed memory. Raises DeviceFull if the device has too little."""
    try:
        return driver.zeros(nbytes)
    except MemoryError:
        raise DeviceFull(f"{nbytes} bytes requested, {driver.free_bytes()} free on {driver.name}") from None


class Pool:
    """The device memory of one session.

    All work runs in the device's single stream, so memory can be reused while kernels still read it.

    Args:
        driver: the GPU.
        limit: maximum bytes of the pool; 0 = all memory of the device.
    """

    def __init__(self, driver: Driver, limit: int = 0) -> None:
        self.driver, self._limit = driver, limit
        self._free: dict[int, list[Any]] = {}
        self._held, self.allocations = 0, 0
        self._lock = threading.Lock()
        # The garbage collector returns memory at any moment, in any thread, even in a thread that holds a lock that
        # other threads wait for. Therefore returning memory never waits: it only appends to this list.
        self._given: deque[Any] = deque()
        self._forgotten: deque[int] = deque()

    def take(self, nbytes: int) -> Any:
        """Return uninitialised memory, uint8, of at least `nbytes` bytes.

        Raises:
            DeviceFull: if the device has too little free memory, or the limit would be exceeded.
        """
        size = rounded(nbytes)
        with self._lock:
            while self._forgotten:
                self._held -= self._forgotten.popleft()
            while self._given:
                memory = self._given.popleft()
                self._free.setdefault(memory.nbytes, []).append(memory)
            if kept := self._free.get(size):
                return kept.pop()
            if self._limit and self._held + size > self._limit:
                self._drop()
                if self._held + size > self._limit:
                    raise DeviceFull(
                        f"{size} bytes requested, {self._limit - self._held} left of {self._limit} allowed"
                    )
            try:
                memory = self.driver.zeros(size)
            except MemoryError:
                self._drop()
                memory = _zeros(self.driver, size)
            self._held += size
            self.allocations += 1
            return memory

    def give(self, memory: Any) -> None:
        """Return memory to the pool, without waiting."""
        self._given.append(memory)

    def forget(self, memory: Any) -> None:
        """Stop counting memory that another owner keeps permanently."""
        self._forgotten.append(memory.nbytes)

    def _drop(self) -> None:
        self._held -= sum(memory.nbytes for kept in self._free.values() for memory in kept)
        self._free.clear()


class Region:
    """Memory that returns to its pool when the last tensor in it is deleted.

    Attributes:
        driver: the GPU.
        memory: the memory.
        check: function that is called with the int32 at the start of the memory and raises an error if the number
            reports one; None after the call.
    """

    def __init__(self, driver: Driver, memory: Any, pool: Pool | None = None) -> None:
        self.driver, self.memory = driver, memory
        self.check: Callable[[int], None] | None = None
        self._pool = pool
        self._back = None if pool is None else weakref.finalize(self, pool.give, memory)

    def verify(self) -> None:
        """Raise the error of the kernels that wrote the memory, if any; the host detects the error only by reading."""
        if self.check is not None:
            self._checked(self.driver.download(self.memory[: _STATUS.itemsize]))

    def copy(self, first: int, end: int) -> NDArray[Any]:
        """Copy bytes to the host, after checking that the kernels that wrote them succeeded."""
        start = first if self.check is None else 0
        raw = self.driver.download(self.memory[start:end])
        self._checked(raw)
        return raw[first - start :]

    def _checked(self, raw: NDArray[Any]) -> None:
        if self.check is not None:
            self.check(int(raw[: _STATUS.itemsize].view(_STATUS)[0]))
            self.check = None

    def lend(self) -> None:
        """Exclude the memory from reuse, because external code may hold the memory longer than this object exists."""
        if self._back is not None and self._back.detach() and self._pool is not None:
            self._pool.forget(self.memory)
        self._back = None


class DeviceTensor:
    """A contiguous array in device memory.

    Attributes:
        region: the memory that contains it.
        first: offset in the region, in bytes.
        shape: shape, as in NumPy.
        dtype: NumPy dtype.
    """

    def __init__(self, region: Region, first: int, shape: Sequence[int], dtype: np.dtype[Any]) -> None:
        self.region, self.first = region, first
        self.shape, self.dtype = tuple(shape), dtype

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The size of the elements in bytes."""
        return self.size * self.dtype.itemsize

    @property
    def address(self) -> int:
        """The device address."""
        return self.region.driver.address(self.region.memory) + self.first

    @property
    def bytes(self) -> Any:
        """The tensor's memory as a byte array of the driver."""
        return self.region.memory[self.first : self.first + self.nbytes]

    def view(self) -> Any:
        """Return the tensor as the driver's own array."""
        return self.bytes.view(self.dtype).reshape(self.shape)

    def numpy(self) -> NDArray[Any]:
        """Return a copy on the host."""
        return to_host([self])[0]

    def write(self, array: NDArray[Any]) -> None:
        """Copy a host array of the same shape and type into this tensor."""
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if raw.size:
            self.region.driver.write(self.bytes, raw)

    def copy_from(self, other: DeviceTensor) -> None:
        """Copy a tensor of the same size on the same device into this tensor."""
        if self.nbytes:
            self.region.driver.copy(other.bytes, self.bytes)

    def __dlpack__(self, *, stream: Any = None, **options: Any) -> Any:
        self.region.verify()
        self.region.lend()
        return self.region.driver.lend(self.view(), stream, options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.region.driver.dlpack_device


def upload(driver: Driver, array: NDArray[Any]) -> DeviceTensor:
    """Copy a host array into separate device memory.

    Raises:
        DeviceFull: if the device has too little memory.
    """
    made = empty(driver, array.shape, array.dtype)
    made.write(array)
    return made


def empty(driver: Driver, shape: Sequence[int], dtype: np.dtype[Any]) -> DeviceTensor:
    """Allocate separate memory for an array. Raises DeviceFull if the device has too little."""
    nbytes = math.prod(shape) * dtype.itemsize
    return DeviceTensor(Region(driver, _zeros(driver, max(nbytes, 1))), 0, shape, dtype)


def to_host(tensors: Sequence[DeviceTensor]) -> list[NDArray[Any]]:
    """Copy tensors to the host, with one transfer for all tensors that lie in the same memory."""
    spans: dict[int, tuple[Region, int, int]] = {}
    for one in tensors:
        region, first, end = spans.get(id(one.region), (one.region, one.first, one.first))
        spans[id(one.region)] = region, min(first, one.first), max(end, one.first + one.nbytes)
    copies = {
        key: (region.copy(first, end) if end > first else np.zeros(0, np.uint8), first)
        for key, (region, first, end) in spans.items()
    }
    found = []
    alone = {key for key in copies if sum(id(one.region) == key for one in tensors) == 1}
    for one in tensors:
        raw, first = copies[id(one.region)]
        part = raw[one.first - first : one.first - first + one.nbytes]
        values = part.view(one.dtype) if one.nbytes else np.zeros(0, one.dtype)
        shaped = values.reshape(one.shape)
        found.append(shaped if id(one.region) in alone else shaped.copy())
    return found

"""Device memory of arrays: a pool that keeps what was given back, and tensors that outlive the run that made them."""

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
    """There is not so much memory on the device; the message says how much was wanted and how much there is."""


def rounded(nbytes: int) -> int:
    """Bytes that a pool hands out where so many are wanted: eight sizes from each power of two to the next."""
    step = max(_ALIGNED, 1 << max(nbytes.bit_length() - 4, 0))
    return max(-(-nbytes // step) * step, _ALIGNED)


def _zeros(driver: Driver, nbytes: int) -> Any:
    """Zeroed memory. Raises DeviceFull: there is not so much."""
    try:
        return driver.zeros(nbytes)
    except MemoryError:
        raise DeviceFull(f"{nbytes} bytes wanted, {driver.free_bytes()} free on {driver.name}") from None


class Pool:
    """Memory of one session.

    Everything happens in the device's one stream, so memory may be given to another while kernels still read it.

    Args:
        limit: bytes that it may hold; 0 = what the device has.
    """

    def __init__(self, driver: Driver, limit: int = 0) -> None:
        self.driver, self._limit = driver, limit
        self._free: dict[int, list[Any]] = {}
        self._held, self.allocations = 0, 0
        self._lock = threading.Lock()
        # The collector gives memory back at any moment, in any thread, and what a thread holds others may wait for: so
        # this waits for nothing.
        self._given: deque[Any] = deque()
        self._forgotten: deque[int] = deque()

    def take(self, nbytes: int) -> Any:
        """Memory that holds anything, uint8, of at least so many bytes.

        Raises:
            DeviceFull: there is not so much.
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
                    raise DeviceFull(f"{size} bytes wanted, {self._limit - self._held} left of {self._limit} allowed")
            try:
                memory = self.driver.zeros(size)
            except MemoryError:
                self._drop()
                memory = _zeros(self.driver, size)
            self._held += size
            self.allocations += 1
            return memory

    def give(self, memory: Any) -> None:
        """Take memory back."""
        self._given.append(memory)

    def forget(self, memory: Any) -> None:
        """Somebody else keeps it for good."""
        self._forgotten.append(memory.nbytes)

    def _drop(self) -> None:
        self._held -= sum(memory.nbytes for kept in self._free.values() for memory in kept)
        self._free.clear()


class Region:
    """Memory that goes back to its pool when nobody holds a tensor in it any more.

    Attributes:
        check: takes the int32 with which the memory begins, and raises if what lies there is wrong; None once it has.
    """

    def __init__(self, driver: Driver, memory: Any, pool: Pool | None = None) -> None:
        self.driver, self.memory = driver, memory
        self.check: Callable[[int], None] | None = None
        self._pool = pool
        self._back = None if pool is None else weakref.finalize(self, pool.give, memory)

    def verify(self) -> None:
        """Raise if what lies there is wrong, which only the device knows until it is asked."""
        if self.check is not None:
            self._checked(self.driver.download(self.memory[: _STATUS.itemsize]))

    def copy(self, first: int, end: int) -> NDArray[Any]:
        """A copy of bytes on the host, after they were found right."""
        start = first if self.check is None else 0
        raw = self.driver.download(self.memory[start:end])
        self._checked(raw)
        return raw[first - start :]

    def _checked(self, raw: NDArray[Any]) -> None:
        if self.check is not None:
            self.check(int(raw[: _STATUS.itemsize].view(_STATUS)[0]))
            self.check = None

    def lend(self) -> None:
        """Someone outside may hold the memory longer than this object: it will not be used again."""
        if self._back is not None and self._back.detach() and self._pool is not None:
            self._pool.forget(self.memory)
        self._back = None


class DeviceTensor:
    """A dense array in device memory.

    Attributes:
        shape, dtype: as NumPy has them. region: what it lies in; first: byte at which it begins there.
    """

    def __init__(self, region: Region, first: int, shape: Sequence[int], dtype: np.dtype[Any]) -> None:
        self.region, self.first = region, first
        self.shape, self.dtype = tuple(shape), dtype

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.size * self.dtype.itemsize

    @property
    def address(self) -> int:
        """Where it begins."""
        return self.region.driver.address(self.region.memory) + self.first

    @property
    def bytes(self) -> Any:
        """Its bytes, as the device's array."""
        return self.region.memory[self.first : self.first + self.nbytes]

    def view(self) -> Any:
        """It as the device's own array."""
        return self.bytes.view(self.dtype).reshape(self.shape)

    def numpy(self) -> NDArray[Any]:
        """A copy on the host."""
        return to_host([self])[0]

    def write(self, array: NDArray[Any]) -> None:
        """Copy a host's array of the same shape and type into it."""
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if raw.size:
            self.region.driver.write(self.bytes, raw)

    def copy_from(self, other: DeviceTensor) -> None:
        """Copy a tensor of the same size and device into it."""
        if self.nbytes:
            self.region.driver.copy(other.bytes, self.bytes)

    def __dlpack__(self, *, stream: Any = None, **options: Any) -> Any:
        self.region.verify()
        self.region.lend()
        return self.region.driver.lend(self.view(), stream, options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.region.driver.dlpack_device


def upload(driver: Driver, array: NDArray[Any]) -> DeviceTensor:
    """A copy of a host's array in memory of its own.

    Raises:
        DeviceFull: there is not so much.
    """
    made = empty(driver, array.shape, array.dtype)
    made.write(array)
    return made


def empty(driver: Driver, shape: Sequence[int], dtype: np.dtype[Any]) -> DeviceTensor:
    """Memory of its own for an array. Raises DeviceFull: there is not so much."""
    nbytes = math.prod(shape) * dtype.itemsize
    return DeviceTensor(Region(driver, _zeros(driver, max(nbytes, 1))), 0, shape, dtype)


def to_host(tensors: Sequence[DeviceTensor]) -> list[NDArray[Any]]:
    """Copies on the host: one transfer for all that lie in the same memory, one behind the other."""
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

"""Logits, which stay in device memory until they are requested on the host.

Every step writes to the same memory. Rows that are still held when the next step starts are first copied elsewhere. So
rows may live for any length of time, and logits that are sampled immediately are never copied.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .driver import Driver
from .launches import Functions, bind
from .sources import CudaKernel

GATHER = CudaKernel("gather.cu", "gather_numbers", "GatherArguments", 128)


class LogitsMemory:
    """State that the blocks of an executor share.

    Attributes:
        driver: the GPU.
        lock: held while rows move, and from the reading of row addresses until the work that reads the rows has been
            started.
    """

    def __init__(self, driver: Driver) -> None:
        self.driver, self.lock = driver, threading.RLock()
        self._functions: Functions | None = None

    def numbers(self, addresses: NDArray[np.uint64]) -> NDArray[np.float32]:
        """Return a host array of the float32 numbers at device addresses, in the same shape as the addresses."""
        count, driver = addresses.size, self.driver
        if self._functions is None:
            self._functions = driver.load([GATHER])
        sources, out = driver.upload(addresses.reshape(-1)), driver.zeros(4 * count)
        given = {"addresses": driver.address(sources), "out": driver.address(out), "count": count}
        grid = (-(-count // GATHER.threads), 1, 1)
        driver.launch(self._functions[GATHER], GATHER, grid, bind(GATHER, **given))
        found: NDArray[np.float32] = driver.download(out.view(np.float32)[:count]).reshape(addresses.shape)
        return found


class LogitsBlock:
    """The rows of one step.

    Args:
        memory: the state of the executor.
        rows: the device's array, float32 [rows, width].
    """

    def __init__(self, memory: LogitsMemory, rows: Any) -> None:
        self.memory = memory
        self._put(rows)

    def _put(self, rows: Any) -> None:
        self._rows, self._address = rows, self.memory.driver.address(rows)
        self._stride = int(rows.strides[0])

    @property
    def width(self) -> int:
        """The number of logits per row."""
        return int(self._rows.shape[1])

    def __len__(self) -> int:
        return int(self._rows.shape[0])

    def address(self, row: int) -> int:
        """Return the address of a row."""
        return self._address + self._stride * row

    def addresses(self, rows: Sequence[int]) -> NDArray[np.uint64]:
        """Return the addresses of rows."""
        return np.array(rows, np.uint64) * np.uint64(self._stride) + np.uint64(self._address)

    def keep(self) -> None:
        """Move the rows to separate memory, because their current memory is about to be overwritten."""
        driver = self.memory.driver
        own = driver.zeros(4 * len(self) * self.width).view(np.float32).reshape(len(self), self.width)
        driver.copy(self._rows, own)
        self._put(own)

    def download(self, first: int, end: int) -> NDArray[np.float32]:
        """Copy some rows to the host."""
        with self.memory.lock:
            found: NDArray[np.float32] = self.memory.driver.download(self._rows[first:end])
        return found


@dataclass(eq=False, slots=True)  # not frozen, because frozen instances take longer to create
class DeviceLogits:
    """Logits in device memory, float32 [rows, V], or one row [V].

    The object supports the operations of NumPy arrays that are useful for logits: slices of rows; np.stack and
    np.concatenate, which copy nothing; and `logits[rows, tokens]`, which copies single numbers to the host. np.asarray
    copies all logits to the host.

    Attributes:
        blocks: the block of each row.
        numbers: the index of each row in its block.
        width: number of logits per row.
        ndim: number of axes.
    """

    blocks: tuple[LogitsBlock, ...]
    numbers: tuple[int, ...]
    width: int
    ndim: int = 2
    dtype = np.dtype(np.float32)

    @classmethod
    def of(cls, block: LogitsBlock) -> DeviceLogits:
        """Return all rows of a block."""
        return cls((block,) * len(block), tuple(range(len(block))), block.width)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape, as in NumPy."""
        return (len(self.numbers), self.width)[-self.ndim :]

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: Any) -> Any:
        if self.ndim == 1 and key is None:
            return DeviceLogits(self.blocks, self.numbers, self.width)
        if self.ndim == 2 and isinstance(key, slice):
            return DeviceLogits(self.blocks[key], self.numbers[key], self.width)
        if self.ndim == 2 and isinstance(key, int | np.integer):
            return DeviceLogits((self.blocks[key],), (self.numbers[key],), self.width, ndim=1)
        if self.ndim == 2 and isinstance(key, np.ndarray):
            rows = key.tolist()
            return DeviceLogits(tuple(self.blocks[i] for i in rows), tuple(self.numbers[i] for i in rows), self.width)
        if self.ndim == 2 and isinstance(key, tuple) and len(key) == 2:
            return self._single(*key)
        raise TypeError(f"logits in device memory of {self.ndim} axes cannot be indexed with {key!r}; use np.asarray")

    def reshape(self, *shape: int) -> DeviceLogits:
        """Return the object itself; no other shape is supported."""
        if shape != self.shape:
            raise ValueError(
                f"logits in device memory have shape {list(self.shape)}, which cannot be changed to {list(shape)}"
            )
        return self

    def copy(self) -> DeviceLogits:
        """Return the object itself, because it never changes."""
        return self

    @contextmanager
    def held_for(self, driver: Driver) -> Iterator[NDArray[np.uint64] | None]:
        """Yield the address of each row, valid inside the context.

        Yields None if any row belongs to another driver, because this driver's stream does not wait for the other's
        stream.
        """
        if self.blocks and self.blocks.count(first := self.blocks[0]) == len(self.blocks):
            if first.memory.driver is not driver:
                yield None
                return
            with first.memory.lock:
                yield first.addresses(self.numbers)
            return
        memories = {block.memory for block in self.blocks}
        if {memory.driver for memory in memories} - {driver} or len(memories) > 1:
            yield None
            return
        with memories.pop().lock if memories else nullcontext():
            found = [block.address(number) for block, number in zip(self.blocks, self.numbers, strict=True)]
            yield np.array(found, np.uint64)

    def _single(self, rows: Any, tokens: Any) -> NDArray[np.float32]:
        where, which = np.broadcast_arrays(rows, tokens)
        if not where.size:
            return np.empty(where.shape, np.float32)
        size, count = self.width, len(self)
        if not (0 <= which.min() <= which.max() < size and -count <= where.min() <= where.max() < count):
            raise IndexError(f"an index is out of range for logits of shape {list(self.shape)}")
        with self.held_for(self.blocks[0].memory.driver) as addresses:
            if addresses is None:
                whole: NDArray[np.float32] = np.asarray(self)
                found: NDArray[np.float32] = whole[where, which]
                return found
            return self.blocks[0].memory.numbers(addresses[where] + np.uint64(4) * which.astype(np.uint64))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        found, parts = 0, []
        while found < len(self.numbers):
            block, first, end = self.blocks[found], self.numbers[found], found + 1
            while end < len(self.numbers) and self.blocks[end] is block and self.numbers[end] == first + end - found:
                end += 1
            parts.append(block.download(first, first + end - found))
            found = end
        rows = np.concatenate(parts) if parts else np.empty((0, self.width), np.float32)
        result: NDArray[Any] = rows.reshape(self.shape).astype(dtype or np.float32, copy=False)
        return result

    def __array_function__(self, function: Any, types: Any, given: Any, named: Any) -> Any:
        if function not in (np.stack, np.concatenate) or named or len(given) != 1:
            return NotImplemented
        parts: Sequence[Any] = given[0]
        if not all(isinstance(part, DeviceLogits) for part in parts):
            return function([np.asarray(part) for part in parts])
        if {part.ndim for part in parts} != {1 if function is np.stack else 2}:
            return NotImplemented
        blocks = tuple(block for part in parts for block in part.blocks)
        return DeviceLogits(blocks, tuple(number for part in parts for number in part.numbers), self.width)

"""Where the values of a program lie in device memory, which is used again when nobody reads a value any more.

Everything happens in one stream, in order: what is written later cannot disturb what was started earlier.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..ir import Per, RowsType
from .driver import Driver

_FLOAT_BYTES = 4


@dataclass(frozen=True)
class DeviceRows:
    """A value: rows of `width` float32 numbers, `stride` numbers apart, the first at `address`.

    Attributes:
        memory: what they lie in, uint8; first: number of the first one there.
    """

    address: int
    stride: int
    width: int
    per: Per
    memory: Any
    first: int = 0

    def columns(self, first: int, width: int) -> DeviceRows:
        """A part of each row."""
        address = self.address + _FLOAT_BYTES * first
        return DeviceRows(address, self.stride, width, self.per, self.memory, self.first + first)

    def view(self, count: int) -> Any:
        """So many rows as an array of the device's, float32 [count, width]."""
        numbers = self.memory.view(np.float32)[: count * self.stride].reshape(count, self.stride)
        return numbers[:, self.first : self.first + self.width]


@dataclass(eq=False)
class _Buffer:
    memory: Any
    users: int = 0


@dataclass
class Values:
    """Memory of values, and of what is derived from them.

    Attributes:
        types: of all values. capacity: the largest number of rows, by what they are counted in.
        buffers: where every value was put; the memory of some has been given to others since.
    """

    driver: Driver
    types: Mapping[str, RowsType]
    capacity: Mapping[Per, int]
    buffers: dict[str, DeviceRows] = field(default_factory=dict)
    _found: dict[Hashable, tuple[Any, _Buffer]] = field(default_factory=dict)
    _free: list[_Buffer] = field(default_factory=list)
    _left: Counter[str] = field(default_factory=Counter)

    def expect(self, names: Iterable[str]) -> None:
        """These values will be read: one more time each."""
        self._left.update(names)

    def __getitem__(self, name: str) -> DeviceRows:
        rows: DeviceRows = self._found[name][0]
        return rows

    def make(self, name: str) -> DeviceRows:
        """Memory for a value."""
        type_ = self.types[name]
        rows, buffer = self._rows(type_.width, type_.per)
        self._bind(name, rows, buffer)
        return rows

    def temporary(self, width: int, per: Per) -> tuple[DeviceRows, Hashable]:
        """Memory for rows that live until `release` of their key."""
        rows, buffer = self._rows(width, per)
        key = object()
        self._bind(key, rows, buffer)
        return rows, key

    def alias(self, name: str, source: str, rows: DeviceRows) -> None:
        """A value that lies in another one's memory."""
        self._bind(name, rows, self._found[source][1])

    def derived(self, source: str, layout: Hashable, nbytes: int, fill: Callable[[Any], None]) -> Any:
        """Memory for what is computed from a value once, and lives as long as the value does.

        Args:
            fill: adds what computes it, given the memory.
        """
        key = (source, layout)
        if key not in self._found:
            buffer = self._buffer(nbytes)
            self._bind(key, buffer.memory, buffer)
            fill(buffer.memory)
        return self._found[key][0]

    def hold(self, memory: Any) -> Hashable:
        """Memory that is used stays so until `release` of the key that this returns."""
        found, buffer = next(one for one in self._found.values() if one[1].memory is memory)
        key = object()
        self._bind(key, found, buffer)
        return key

    def done(self, inputs: Iterable[str], outputs: Iterable[str]) -> None:
        """An op has been lowered: what nobody else reads gives its memory back."""
        inputs, outputs = list(inputs), list(outputs)
        self._left.subtract(inputs)
        for name in (*inputs, *outputs):
            if not self._left[name]:
                for key in [k for k in self._found if k == name or (isinstance(k, tuple) and k[0] == name)]:
                    self.release(key)

    def release(self, key: Hashable) -> None:
        """What is there is not needed any more."""
        _, buffer = self._found.pop(key)
        buffer.users -= 1
        if buffer.users == 0:
            self._free.append(buffer)

    def _rows(self, width: int, per: Per) -> tuple[DeviceRows, _Buffer]:
        buffer = self._buffer(_FLOAT_BYTES * width * self.capacity[per])
        return DeviceRows(self.driver.address(buffer.memory), width, width, per, buffer.memory), buffer

    def _bind(self, key: Hashable, found: Any, buffer: _Buffer) -> None:
        self._found[key] = found, buffer
        if isinstance(key, str):
            self.buffers[key] = found
        buffer.users += 1

    def _buffer(self, nbytes: int) -> _Buffer:
        fitting = [one for one in self._free if nbytes <= one.memory.nbytes <= 2 * nbytes + 4096]
        if not fitting:
            return _Buffer(self.driver.zeros(-(-nbytes // 256) * 256))
        best = min(fitting, key=lambda one: one.memory.nbytes)
        self._free.remove(best)
        return best


@dataclass(eq=False)
class DeviceBytes:
    """See `kernels.executor.DeviceMemory`."""

    bytes: Any

    def close(self) -> None:
        """Give it back once no array of it is held."""
        self.bytes = np.empty(0, np.uint8)


def as_float32(array: NDArray[Any]) -> NDArray[np.float32]:
    """A constant as contiguous float32."""
    return np.ascontiguousarray(array, np.float32)

"""Device memory of a program's values. The memory of a value is reused when no op reads the value any more.

All work runs in one stream, in order, so later writes cannot disturb earlier launches.
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
    """A value: rows of `width` float32 numbers, which are `stride` numbers apart and start at `address`.

    Attributes:
        address: device address of the first number.
        stride: distance from one row to the next, in numbers.
        width: number of values in a row.
        per: the unit in which rows are counted.
        memory: uint8 memory that contains the rows.
        first: column of the value's first number in the rows of `memory`.
    """

    address: int
    stride: int
    width: int
    per: Per
    memory: Any
    first: int = 0

    def columns(self, first: int, width: int) -> DeviceRows:
        """Return some columns of each row."""
        address = self.address + _FLOAT_BYTES * first
        return DeviceRows(address, self.stride, width, self.per, self.memory, self.first + first)

    def view(self, count: int) -> Any:
        """Return `count` rows as a device array, float32 [count, width]."""
        numbers = self.memory.view(np.float32)[: count * self.stride].reshape(count, self.stride)
        return numbers[:, self.first : self.first + self.width]


@dataclass(eq=False)
class _Buffer:
    memory: Any
    users: int = 0


@dataclass
class Values:
    """Memory of values, and of data that is derived from them.

    Attributes:
        driver: the GPU.
        types: types of all values.
        capacity: maximum number of rows, by the unit in which rows are counted.
        buffers: location of every value; the memory of some values has since been reused.
    """

    driver: Driver
    types: Mapping[str, RowsType]
    capacity: Mapping[Per, int]
    buffers: dict[str, DeviceRows] = field(default_factory=dict)
    _found: dict[Hashable, tuple[Any, _Buffer]] = field(default_factory=dict)
    _free: list[_Buffer] = field(default_factory=list)
    _left: Counter[str] = field(default_factory=Counter)

    def expect(self, names: Iterable[str]) -> None:
        """Record that each of these values will be read one more time."""
        self._left.update(names)

    def __getitem__(self, name: str) -> DeviceRows:
        rows: DeviceRows = self._found[name][0]
        return rows

    def make(self, name: str) -> DeviceRows:
        """Allocate memory for a value."""
        type_ = self.types[name]
        rows, buffer = self._rows(type_.width, type_.per)
        self._bind(name, rows, buffer)
        return rows

    def temporary(self, width: int, per: Per) -> tuple[DeviceRows, Hashable]:
        """Allocate memory for rows; return it with its key for `release`."""
        rows, buffer = self._rows(width, per)
        key = object()
        self._bind(key, rows, buffer)
        return rows, key

    def alias(self, name: str, source: str, rows: DeviceRows) -> None:
        """Place a value in the memory of another value."""
        self._bind(name, rows, self._found[source][1])

    def derived(self, source: str, layout: Hashable, nbytes: int, fill: Callable[[Any], None]) -> Any:
        """Return memory for data that is computed from a value only once and lives as long as the value.

        Args:
            source: name of the value.
            layout: key of the data.
            nbytes: size in bytes.
            fill: function that is called with new memory and adds the launches that compute the data.
        """
        key = (source, layout)
        if key not in self._found:
            buffer = self._buffer(nbytes)
            self._bind(key, buffer.memory, buffer)
            fill(buffer.memory)
        return self._found[key][0]

    def hold(self, memory: Any) -> Hashable:
        """Keep memory in use until `release` is called with the returned key."""
        found, buffer = next(one for one in self._found.values() if one[1].memory is memory)
        key = object()
        self._bind(key, found, buffer)
        return key

    def done(self, inputs: Iterable[str], outputs: Iterable[str]) -> None:
        """Record that an op was lowered, and release the memory of values that no other op reads."""
        inputs, outputs = list(inputs), list(outputs)
        self._left.subtract(inputs)
        for name in (*inputs, *outputs):
            if not self._left[name]:
                for key in [k for k in self._found if k == name or (isinstance(k, tuple) and k[0] == name)]:
                    self.release(key)

    def release(self, key: Hashable) -> None:
        """Record that the memory of a key is no longer needed."""
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
    """See `genai.kernels.device.DeviceMemory`."""

    bytes: Any

    def close(self) -> None:
        """Drop the memory. It is freed when no array refers to it any more."""
        self.bytes = np.empty(0, np.uint8)


def as_float32(array: NDArray[Any]) -> NDArray[np.float32]:
    """Return a constant as contiguous float32."""
    return np.ascontiguousarray(array, np.float32)

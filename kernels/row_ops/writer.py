"""Writing the tape of some row nodes: memory for their values, and where the threads must meet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..cpu.jit import LIBRARY
from ..cpu.large import huge_array
from ..cpu.tape.context import Word
from ..cpu.tape.program import Phases, Rows, Tape, TapeWriter
from .base import RowNode, RowType

T = TypeVar("T")
_LINE = 64


@dataclass(eq=False)
class _Buffer:
    """Memory, and when (in meetings so far) it was last written and read."""

    memory: NDArray[np.uint8]
    written: int = -1
    read: int = -1
    users: int = 0


@dataclass(frozen=True)
class Place:
    """Memory for something else than rows (such as quantised activations): its address, kept alive by `memory`."""

    memory: NDArray[np.uint8]
    key: Hashable

    @property
    def address(self) -> int:
        return int(self.memory.ctypes.data)


@dataclass
class Writer:
    """Collects the calls of nodes, in order.

    Memory of values that nobody reads any more is used again. Threads meet only where a call needs what another one
    since the last meeting has made, or would overwrite what it reads.

    Attributes:
        capacity: the largest number of rows, by what they are counted in.
        layers: per attention layer its pages.
        places: where every value was put.
    """

    capacity: Mapping[Word, int]
    layers: Sequence[Any] = ()
    places: dict[str, Rows] = field(default_factory=dict)
    _tape: TapeWriter = field(default_factory=TapeWriter)
    _values: dict[Hashable, tuple[Any, _Buffer]] = field(default_factory=dict)
    _free: list[_Buffer] = field(default_factory=list)
    _meetings: int = 0
    _left: Counter[str] = field(default_factory=Counter)

    def write(self, nodes: Sequence[RowNode], keep: Mapping[str, RowType], given: Mapping[str, RowType]) -> Tape:
        """The tape of some nodes.

        Args:
            keep: values that are wanted at the end; `given`: those that exist before, and are to be filled.
        """
        self._left = Counter(name for node in nodes for name in node.inputs)
        self._left.update(list(keep))
        for name, type_ in given.items():
            self.make(name, type_)
        for node in nodes:
            node.write(self)
            for name in node.inputs:
                self._forget(name)
            for name in node.outputs:
                if not self._left[name]:
                    self._drop(name)
        return self._tape.finish(LIBRARY.take_expected())

    def rows(self, name: str) -> Rows:
        """Where a value is."""
        rows: Rows = self._values[name][0]
        return rows

    def make(self, name: str, type_: RowType) -> Rows:
        """Memory for a value; its rows begin on a cache line."""
        stride = -(-4 * type_.width // _LINE) * _LINE
        buffer = self._buffer(stride * self.capacity[type_.counted])
        rows = Rows(buffer.memory.ctypes.data, stride, type_.width, type_.counted, buffer.memory)
        self._bind(name, rows, buffer)
        return rows

    def alias(self, name: str, source: str, rows: Rows | None = None) -> None:
        """A value that lies in another one's memory: all of it, or a part of each row."""
        there, buffer = self._values[source]
        self._bind(name, there if rows is None else rows, buffer)

    def memory(self, key: Hashable, source: str, size: int) -> Place:
        """Memory for something computed from a value; it lives as long as the value does."""
        buffer = self._buffer(size)
        place = Place(buffer.memory, key)
        self._bind((source, key), place, buffer)
        return place

    def derived(self, source: str, key: Hashable, make: Callable[[], T]) -> T:
        """Something computed from a value, once: `make` is called the first time, and keeps it in `memory`."""
        if (source, key) not in self._values:
            made = make()
            _, buffer = self._values[source, key]
            self._values[source, key] = made, buffer
        found: T = self._values[source, key][0]
        return found

    def run(self, phases: Phases, reads: Sequence[Hashable], writes: Sequence[Hashable]) -> None:
        """Add calls that read and write these values (names, or (name, key) of what is derived from one)."""
        sources, targets = self._buffers(reads), self._buffers(writes)
        now = self._meetings
        if any(b.written == now for b in sources) or any(now in (b.written, b.read) for b in targets):
            self._meet()
        for index, phase in enumerate(phases):
            if index:
                self._meet()
            for call in phase:
                self._tape.add(call)
        for buffer in sources:
            buffer.read = self._meetings
        for buffer in targets:
            buffer.written = self._meetings

    def _buffers(self, names: Sequence[Hashable]) -> list[_Buffer]:
        return [self._values[name][1] for name in names]

    def _meet(self) -> None:
        self._tape.meet()
        self._meetings += 1

    def _bind(self, name: Hashable, value: Any, buffer: _Buffer) -> None:
        self._values[name] = value, buffer
        if isinstance(name, str):
            self.places[name] = value
        buffer.users += 1

    def _buffer(self, size: int) -> _Buffer:
        """Free memory that fits, rather such as no call since the last meeting has used; else new memory."""
        fitting = [b for b in self._free if size <= b.memory.size <= 2 * size + 4096]
        if not fitting:
            return _Buffer(huge_array((size,), np.uint8))
        best = min(fitting, key=lambda b: (self._meetings in (b.read, b.written), b.memory.size))
        self._free.remove(best)
        return best

    def _forget(self, name: str) -> None:
        self._left[name] -= 1
        if self._left[name] == 0:
            self._drop(name)

    def _drop(self, name: str) -> None:
        """A value, and what is derived from it, is no longer needed."""
        for key in [k for k in self._values if k == name or (isinstance(k, tuple) and k[0] == name)]:
            _, buffer = self._values.pop(key)
            buffer.users -= 1
            if buffer.users == 0:
                self._free.append(buffer)

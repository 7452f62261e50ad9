"""Where the values of a program lie: memory is used again when nobody reads a value any more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from genai.common.host_memory import huge_array

from ...cache_layout import CacheLayer
from ...ir import Constants, Per, RowsType
from ..jit.arguments import Binding
from ..jit.native import LIBRARY
from .calls import Call, Phases, Program, Rows, program_of
from .packed_weights import PackedWeights
from .step_table import StepField

T = TypeVar("T")
_LINE = 64
# Which count of the context says how many rows a value has.
COUNTED = {Per.TOKEN: StepField.TOKENS, Per.LOGITS: StepField.LOGITS_ROWS}


@dataclass(eq=False)
class _Buffer:
    """Memory, and when (in phases so far) it was last written and read."""

    memory: NDArray[np.uint8]
    written: int = -1
    read: int = -1
    users: int = 0


@dataclass
class Lowering:
    """Collects the calls of ops, in order.

    Memory of values that nobody reads any more is used again. A barrier stands only where a call needs what another one
    since the last barrier has made, or would overwrite what it reads.

    Attributes:
        capacity: the largest number of rows, by what they are counted in.
        types: of all values. constants, weights: what ops name, and its packed format.
        layers: per cache layer its pages.
        buffers: where every value was put.
        bound: values for which every run gives the memory, in contiguous rows.
    """

    capacity: Mapping[StepField, int]
    types: Mapping[str, RowsType]
    constants: Constants
    weights: PackedWeights
    layers: Sequence[CacheLayer | None] = ()
    bound: Collection[str] = ()
    buffers: dict[str, Rows] = field(default_factory=dict)
    _phases: list[list[Call]] = field(default_factory=lambda: [[]])
    _values: dict[Hashable, tuple[Any, _Buffer]] = field(default_factory=dict)
    _free: list[_Buffer] = field(default_factory=list)
    _left: Counter[str] = field(default_factory=Counter)

    def expect(self, names: Iterable[str]) -> None:
        """These values will be read: one more time each."""
        self._left.update(names)

    def finish(self) -> Program:
        """The program; its operators are compiled."""
        return program_of(self._phases, LIBRARY.take_expected())

    def rows(self, name: str) -> Rows:
        """Where a value is."""
        rows: Rows = self._values[name][0]
        return rows

    def make(self, name: str) -> Rows:
        """Memory for a value; its rows begin on a cache line, but for those of bound values."""
        type_ = self.types[name]
        counted = COUNTED[type_.per]
        if name in self.bound:
            buffer = _Buffer(np.empty(0, np.uint8))
            rows = Rows(Binding(name), 4 * type_.width, type_.width, counted)
        else:
            stride = -(-4 * type_.width // _LINE) * _LINE
            buffer = self._buffer(stride * self.capacity[counted])
            rows = Rows(buffer.memory.ctypes.data, stride, type_.width, counted, buffer.memory)
        self._bind(name, rows, buffer)
        return rows

    def elsewhere(self, name: str) -> None:
        """A value that lies in memory of the step's: calls that make and read it wait for each other."""
        self._bind(name, None, _Buffer(np.empty(0, np.uint8)))

    def alias(self, name: str, source: str, rows: Rows) -> None:
        """A value that lies in another one's memory, such as a part of each row."""
        self._bind(name, rows, self._values[source][1])

    def memory(self, size: int) -> tuple[NDArray[np.uint8], Hashable]:
        """Memory for something else than rows, which lives until `release`, and its key among the values."""
        buffer, key = self._buffer(size), object()
        self._bind(key, buffer.memory, buffer)
        return buffer.memory, key

    def derived(
        self, source: str, format: Hashable, size: int, make: Callable[[NDArray[np.uint8]], tuple[T, Call]]
    ) -> tuple[T, Hashable]:
        """Something computed from a value once, and its key among the values. It lives as long as the value does.

        Args:
            make: from the memory for it, of `size` bytes, to what it is there, and the call that computes it.
        """
        key = (source, format)
        if key not in self._values:
            buffer = self._buffer(size)
            made, call = make(buffer.memory)
            self._bind(key, made, buffer)
            self.run([[call]], [source], [key])
        found: T = self._values[key][0]
        return found, key

    def run(self, phases: Phases, reads: Sequence[Hashable], writes: Sequence[Hashable]) -> None:
        """Add calls that read and write these values (names, or (name, key) of what is derived from one)."""
        sources, targets = self._buffers(reads), self._buffers(writes)
        now = len(self._phases)
        if any(b.written == now for b in sources) or any(now in (b.written, b.read) for b in targets):
            self._phases.append([])
        self._phases[-1] += phases[0]
        self._phases += map(list, phases[1:])
        now = len(self._phases)
        for buffer in sources:
            buffer.read = now
        for buffer in targets:
            buffer.written = now

    def _buffers(self, names: Sequence[Hashable]) -> list[_Buffer]:
        return [self._values[name][1] for name in names]

    def _bind(self, name: Hashable, value: Any, buffer: _Buffer) -> None:
        self._values[name] = value, buffer
        if isinstance(name, str):
            self.buffers[name] = value
        buffer.users += 1

    def _buffer(self, size: int) -> _Buffer:
        """Free memory that fits, rather such as no call since the last barrier has used; else new memory."""
        fitting = [b for b in self._free if size <= b.memory.size <= 2 * size + 4096]
        if not fitting:
            return _Buffer(huge_array((size,), np.uint8))
        best = min(fitting, key=lambda b: (len(self._phases) in (b.read, b.written), b.memory.size))
        self._free.remove(best)
        return best

    def done(self, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        """An op with these inputs and outputs has been lowered: what nobody else reads gives its memory back."""
        self._left.subtract(inputs)
        for name in (*inputs, *outputs):
            if not self._left[name]:
                for key in [k for k in self._values if k == name or (isinstance(k, tuple) and k[0] == name)]:
                    self.release(key)

    def release(self, key: Hashable) -> None:
        """What is in such memory is not needed after the calls so far."""
        _, buffer = self._values.pop(key)
        buffer.users -= 1
        if buffer.users == 0 and buffer.memory.size:
            self._free.append(buffer)

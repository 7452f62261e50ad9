"""Memory of a program's values. A buffer is reused when no remaining op reads its value."""

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
from ..jit.native import LIBRARY, Compiled
from .calls import Call, Phases, Program, Rows, needed_by, program_of
from .packed_weights import PackedWeights
from .step_table import StepField

T = TypeVar("T")
_LINE = 64
# The field of the context that holds the number of a value's rows.
COUNTED = {Per.TOKEN: StepField.TOKENS, Per.LOGITS: StepField.LOGITS_ROWS}


@dataclass(eq=False)
class _Buffer:
    """Memory, and the number of phases after which it was last written and read."""

    memory: NDArray[np.uint8]
    written: int = -1
    read: int = -1
    users: int = 0


@dataclass
class Lowering:
    """A collector of the calls of ops, in order.

    Memory is reused when no remaining op reads its value. A barrier is added only where a call depends on a call since
    the last barrier: it reads that call's result, or overwrites memory that the call reads or writes.

    Attributes:
        capacity: maximum number of rows, by the field of the context that counts them.
        types: types of all values.
        constants: arrays that ops refer to by name.
        weights: packed weights.
        layers: pages or states of each cache layer.
        bound: values that are bound to contiguous rows at each run.
        whole_sequences: see OpProgram.
        split: values that only matmuls of split weights read, and that need no rows.
        buffers: rows of every value.
    """

    capacity: Mapping[StepField, int]
    types: Mapping[str, RowsType]
    constants: Constants
    weights: PackedWeights
    layers: Sequence[CacheLayer | None] = ()
    bound: Collection[str] = ()
    whole_sequences: bool = False
    split: Collection[str] = ()
    buffers: dict[str, Rows] = field(default_factory=dict)
    _phases: list[list[Call]] = field(default_factory=lambda: [[]])
    _values: dict[Hashable, tuple[Any, _Buffer]] = field(default_factory=dict)
    _free: list[_Buffer] = field(default_factory=list)
    _left: Counter[str] = field(default_factory=Counter)

    def expect(self, names: Iterable[str]) -> None:
        """Announce one more read of each of these values."""
        self._left.update(names)

    def finish(self) -> Program:
        """Return the program, with its operators compiled."""
        return program_of(self._phases, LIBRARY.take_expected())

    def operators(self) -> tuple[set[Compiled], set[Compiled]]:
        """Return the operators that `finish` compiles, and those that it leaves for later; see `needed_by`."""
        return needed_by([call for phase in self._phases for call in phase])

    def rows(self, name: str) -> Rows:
        """Return the rows of a value."""
        rows: Rows = self._values[name][0]
        return rows

    def make(self, name: str) -> Rows:
        """Allocate memory for a value. Its rows start on a cache line, unless the value is bound."""
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
        """Declare a value that is stored in the step's memory, so that calls that write and read it are ordered."""
        self._bind(name, None, _Buffer(np.empty(0, np.uint8)))

    def alias(self, name: str, source: str, rows: Rows) -> None:
        """Declare a value in the memory of another value, such as a range of columns."""
        self._bind(name, rows, self._values[source][1])

    def memory(self, size: int) -> tuple[NDArray[np.uint8], Hashable]:
        """Allocate memory that holds no rows, until `release`. Returns the memory and its key among the values."""
        buffer, key = self._buffer(size), object()
        self._bind(key, buffer.memory, buffer)
        return buffer.memory, key

    def derived(
        self, source: str, format: Hashable, size: int, make: Callable[[NDArray[np.uint8]], tuple[T, Call]]
    ) -> tuple[T, Hashable]:
        """Compute something from a value once. Returns the result, which lives as long as the value, and its key.

        Args:
            source: name of the value.
            format: key that distinguishes results that are derived from the same value.
            size: bytes of memory that `make` needs.
            make: function that takes this memory, and returns the result and the call that computes it.
        """
        key = (source, format)
        if key not in self._values:
            buffer = self._buffer(size)
            made, call = make(buffer.memory)
            self._bind(key, made, buffer)
            self.run([[call]], [source], [key])
        found: T = self._values[key][0]
        return found, key

    def replaced(self, name: str, format: Hashable, size: int, make: Callable[[NDArray[np.uint8]], T]) -> T:
        """Allocate memory for a value that exists only as a result of `derived` with this format, and return it."""
        buffer, type_ = self._buffer(size), self.types[name]
        made = make(buffer.memory)
        self._bind((name, format), made, buffer)
        self._bind(name, Rows(None, 0, type_.width, COUNTED[type_.per]), buffer)
        return made

    def run(self, phases: Phases, reads: Sequence[Hashable], writes: Sequence[Hashable]) -> None:
        """Add calls that read and write these values: names, or keys (name, format) of derived results."""
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
        """Return free memory of a suitable size, preferably unused since the last barrier, or else new memory."""
        fitting = [b for b in self._free if size <= b.memory.size <= 2 * size + 4096]
        if not fitting:
            return _Buffer(huge_array((size,), np.uint8))
        best = min(fitting, key=lambda b: (len(self._phases) in (b.read, b.written), b.memory.size))
        self._free.remove(best)
        return best

    def done(self, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        """Finish an op with these inputs and outputs. Memory of values that no remaining op reads becomes free."""
        self._left.subtract(inputs)
        for name in (*inputs, *outputs):
            if not self._left[name]:
                for key in [k for k in self._values if k == name or (isinstance(k, tuple) and k[0] == name)]:
                    self.release(key)

    def release(self, key: Hashable) -> None:
        """Release the memory of a value that later calls do not use."""
        _, buffer = self._values.pop(key)
        buffer.users -= 1
        if buffer.users == 0 and buffer.memory.size:
            self._free.append(buffer)

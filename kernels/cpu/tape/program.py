"""Writing a tape: one row per operator call, with its arguments, its items, and where the threads meet."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..jit import LIBRARY, Compiled, NativeOp
from ..large import huge_array
from .context import Word

# A row of the tape, in words: what the driver reads, then the operator's arguments.
OPERATOR, MEET, COUNTED, FACTOR, DIVISOR, GRAIN = range(6)
FIRST_ARGUMENT = 8
ROW_WORDS = 56
MAX_ARGUMENTS = ROW_WORDS - FIRST_ARGUMENT
ROW_BYTES = ROW_WORDS * 8
_LINE = 64


@dataclass(frozen=True)
class Items:
    """How many items a call has: ceil(context[counted] * factor / divisor); threads take `grain` or more at once."""

    counted: Word = Word.ONE
    factor: int = 1
    divisor: int = 1
    grain: int = 1


@dataclass(frozen=True)
class Rows:
    """float32 rows in memory, one per unit of `counted` (TOKENS or WANTED): what operators read and write.

    Attributes:
        address: of the first row. stride: bytes from a row to the next; rows may be parts of wider ones.
        width: numbers in a row.
        held: keeps the memory alive.
    """

    address: int
    stride: int
    width: int
    counted: Word = Word.TOKENS
    held: Any = None

    def columns(self, first: int, width: int) -> Rows:
        """A part of every row."""
        return Rows(self.address + 4 * first, self.stride, width, self.counted, self.held)

    @staticmethod
    def of(array: NDArray[np.float32], counted: Word = Word.TOKENS) -> Rows:
        """The rows of a float32 matrix whose rows are contiguous each."""
        if array.ndim != 2 or array.dtype != np.float32 or array.strides[1] != 4:
            raise ValueError(f"rows are {array.dtype} {list(array.shape)} with strides {list(array.strides)}")
        return Rows(array.ctypes.data, array.strides[0], array.shape[1], counted, array)


@dataclass(frozen=True)
class Hole:
    """An argument that is known at the run only: the address of a buffer, plus an offset (see `replay`)."""

    name: str
    offset: int = 0


Argument = int | float | NativeOp | Hole

# Calls in phases: those of one phase do not depend on each other, every phase on the ones before it.
Phases = Sequence[Sequence["Call"]]


@dataclass(frozen=True)
class Call:
    """An operator, its arguments (integers, addresses, floats, operators that it calls, holes), its items.

    `held` keeps alive what the addresses point to; `scratch` is the memory in bytes that a thread needs for it.
    """

    op: NativeOp
    arguments: Sequence[Argument]
    items: Items = field(default_factory=Items)
    scratch: int = 0
    held: Sequence[Any] = ()
    label: str = ""


@dataclass(frozen=True)
class Tape:
    """Calls in order, ready to be walked.

    Attributes:
        rows: int64 [calls, ROW_WORDS].
        calls: what the rows were written from.
        scratch: bytes that each thread needs, whole cache lines.
    """

    rows: NDArray[np.int64]
    calls: tuple[Call, ...]
    scratch: int

    @property
    def address(self) -> int:
        return int(self.rows.ctypes.data)


class TapeWriter:
    """Collects calls. Calls between two `meet()`s must not depend on each other: threads run through them freely."""

    def __init__(self) -> None:
        self._calls: list[Call] = []
        self._meets: set[int] = set()

    def add(self, call: Call) -> None:
        """Append a call.

        Raises:
            ValueError: too many arguments.
        """
        if len(call.arguments) > MAX_ARGUMENTS:
            raise ValueError(f"{call.op.name} has {len(call.arguments)} arguments, a row holds {MAX_ARGUMENTS}")
        self._calls.append(call)

    def add_phases(self, phases: Phases) -> None:
        """Append phases; all threads meet after each."""
        for phase in phases:
            for call in phase:
                self.add(call)
            self.meet()

    def meet(self) -> None:
        """All threads wait here until every call so far is done."""
        if self._calls:
            # Nothing happens if they have just met.
            self._meets.add(len(self._calls) - 1)

    def ops(self) -> list[NativeOp]:
        """The operators used, to compile them ahead."""
        called = [op for call in self._calls for op in call.arguments if isinstance(op, NativeOp)]
        return list(dict.fromkeys([*(call.op for call in self._calls), *called]))

    def finish(self, also: Collection[Compiled] = ()) -> Tape:
        """The tape; prepares its operators, and other kernels with them."""
        self.meet()
        LIBRARY.prepare([*also, *self.ops()])
        rows = huge_array((len(self._calls), ROW_WORDS), np.int64)
        for index, (row, call) in enumerate(zip(rows, self._calls, strict=True)):
            items = call.items
            row[OPERATOR] = call.op.address
            row[MEET] = index in self._meets
            row[COUNTED], row[FACTOR], row[DIVISOR], row[GRAIN] = (
                items.counted,
                items.factor,
                items.divisor,
                items.grain,
            )
            row[FIRST_ARGUMENT : FIRST_ARGUMENT + len(call.arguments)] = [
                argument_word(value) for value in call.arguments
            ]
        scratch = max((call.scratch for call in self._calls), default=0)
        return Tape(rows, tuple(self._calls), -(-scratch // _LINE) * _LINE)


def argument_word(value: Argument) -> int:
    """An argument as the word that travels in a row: floats as the bits of float64, operators as their address.

    A hole is 0 until it is filled.
    """
    if isinstance(value, Hole):
        return 0
    if isinstance(value, NativeOp):
        return value.address
    return int(np.float64(value).view(np.int64)) if isinstance(value, float) else int(value)

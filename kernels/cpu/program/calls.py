"""Programs: operator calls in order, each with its arguments and items, and the barriers between them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from genai.common.host_memory import huge_array

from ..jit.arguments import MAX_ARGUMENTS, Address, Arguments, Binding, BoundVector, Held
from ..jit.dsl import inline
from ..jit.native import LIBRARY, Compiled, NativeOp
from .step_table import StepField

# Numbers in an item if a row can be split. The size is fixed, so that no result depends on the number of threads.
PIECE = 4096
# A call in a program's table: entries that the driver reads, then the operator's arguments. Grain 0 = only thread 0.
OPERATOR, BARRIER, COUNTED, FACTOR, DIVISOR, GRAIN = 0, 1, 2, 3, 4, 5
FIRST_ARGUMENT = 8
CALL_ENTRIES = FIRST_ARGUMENT + MAX_ARGUMENTS
CALL_BYTES = CALL_ENTRIES * 8
PREFILL = [StepField.PREFILL_ROWS, StepField.PREFILL_BLOCKS]
_LINE = 64


class Items(NamedTuple):
    """The number of items: ceil(context[counted] / divisor) * factor. A thread takes at least `grain` at a time."""

    counted: StepField = StepField.ONE
    factor: int = 1
    divisor: int = 1
    grain: int = 1


class Rows(Arguments, kw_only=False):
    """float32 rows in memory that operators read and write, one per unit of `counted` (TOKENS or LOGITS_ROWS).

    Attributes:
        address: address of the first row, or a binding for it.
        stride: bytes between consecutive rows; rows may be parts of wider rows.
        width: number of elements in a row.
        counted: field of the context that holds the number of rows.
        held: object that keeps the memory alive.
    """

    address: Address
    stride: int
    width: int
    counted: StepField = StepField.TOKENS
    held: Held = None

    def columns(self, first: int, width: int) -> Rows:
        """Return a range of columns of every row."""
        return Rows(self.address + 4 * first, self.stride, width, self.counted, self.held)

    @staticmethod
    def of(array: NDArray[np.float32], counted: StepField = StepField.TOKENS) -> Rows:
        """Return the rows of a float32 matrix. Each row must be contiguous."""
        if array.ndim != 2 or array.dtype != np.float32 or array.strides[1] != 4:
            raise ValueError(
                f"rows are {array.dtype} {list(array.shape)} with strides {list(array.strides)}, expected float32 rows "
                "that are contiguous"
            )
        return Rows(array.ctypes.data, array.strides[0], array.shape[1], counted, array)


def pieces_of(width: int) -> int:
    """Return the number of pieces that a row is split into."""
    return max(1, -(-width // PIECE))


def piece_items(rows: Rows) -> Items:
    """Return the pieces of rows as items. Each piece has the number row * pieces + piece."""
    return Items(rows.counted, factor=pieces_of(rows.width), grain=_grain(rows.width))


def group_items(rows: Rows, groups: int = 1) -> Items:
    """Return the groups of rows as items with the number row * groups + group. Each group is computed as a whole."""
    return Items(rows.counted, factor=groups, grain=_grain(rows.width // groups))


def _grain(numbers: int) -> int:
    """Return the minimum number of items that are worth a thread's time."""
    return max(1, PIECE // max(1, numbers))


def check_rows(name: str, rows: Rows, counted: StepField, width: int) -> None:
    """Raise ValueError unless there is one row of this width per unit of `counted`."""
    if rows.width != width or rows.counted != counted:
        raise ValueError(f"{name} is [{rows.counted.name}, {rows.width}], expected [{counted.name}, {width}]")


def check_vector(name: str, vector: NDArray[Any] | BoundVector, sizes: tuple[int, ...]) -> None:
    """Raise ValueError unless this is a contiguous float32 vector of one of these sizes."""
    if isinstance(vector, BoundVector):
        if vector.size not in sizes:
            raise ValueError(
                f"{name} has {vector.size} numbers, expected {' or '.join(map(str, dict.fromkeys(sizes)))}"
            )
    elif vector.dtype != np.float32 or vector.ndim != 1 or vector.size not in sizes or not vector.flags.c_contiguous:
        wanted = " or ".join(str([size]) for size in dict.fromkeys(sizes))
        raise ValueError(f"{name} is {vector.dtype} {list(vector.shape)}, expected contiguous float32 {wanted}")


# Rows that are absent.
NO_ROWS = Rows(None, 0, 0)


@inline
def row_at(rows: Any, row: int) -> Any:
    """Return the address of a row in an object with an address and a stride."""
    return rows.address + row * rows.stride


# Calls in phases. Calls of a phase do not depend on each other, but may depend on all earlier phases.
Phases = Sequence[Sequence["Call"]]


@dataclass(frozen=True)
class Call:
    """An operator, its arguments and its items.

    Attributes:
        scratch: bytes of memory that each thread needs for the call.
    """

    op: NativeOp
    arguments: Arguments
    items: Items = field(default_factory=Items)
    scratch: int = 0

    def __post_init__(self) -> None:
        if type(self.arguments) is not self.op.arguments:
            declared = getattr(self.op.arguments, "__name__", "no declared arguments")
            raise TypeError(f"{self.op.name} takes {declared}, not {type(self.arguments).__name__}")


class OnlyCall:
    """The only call of a program, as a function that runs on the calling thread. Short runs cost less this way.

    Attributes:
        scratch: bytes of memory that the call needs.
    """

    def __init__(self, call: Call, table: int) -> None:
        self.scratch = call.scratch
        self._run = _OPERATOR(call.op.address)
        self._arguments, self._factor = table + 8 * FIRST_ARGUMENT, call.items.factor
        self._divisor = 0 if call.items.counted is StepField.ONE else call.items.divisor

    def with_arguments(self, context: int, scratch: int) -> Callable[[], int]:
        """Return a function that runs the call, whose number of items is constant, and returns its status."""
        return partial(self._run, self._arguments, context, 0, self._factor, scratch)

    def __call__(self, context: int, rows: int, scratch: int) -> int:
        """Run the call with the address of a step of `rows` rows, and return its status."""
        units = -(-rows // self._divisor) if self._divisor else 1
        status: int = self._run(self._arguments, context, 0, units * self._factor, scratch)
        return status


# ctypes converts an integer to a pointer in a third of the time that it needs for c_int64.
_OPERATOR = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_void_p] * 5)
# The fields of a step with only a number of rows.
_ROW_COUNTS = (StepField.ONE, StepField.TOKENS)


@dataclass(eq=False)
class Program:
    """Calls in order, ready to run when all open entries are bound.

    Attributes:
        table: int64 [calls, CALL_ENTRIES].
        calls: the calls that the table was written from.
        scratch: bytes that each thread needs, in whole cache lines.
        open: index in the flat table, name and offset of the binding, for each entry that waits for a value.
        later: calls that only prefill rows need, and whose operators were not compiled when the table was written; see
            `complete`.
    """

    table: NDArray[np.int64]
    calls: tuple[Call, ...]
    scratch: int
    open: list[tuple[int, str, int]] = field(default_factory=list)
    later: list[int] = field(default_factory=list)

    @cached_property
    def address(self) -> int:
        """Address of the table."""
        return int(self.table.__array_interface__["data"][0])

    @cached_property
    def view(self) -> memoryview:
        """Flat view of the table. Writing to the view takes a fifth of the time of writing to the array."""
        return self.table.reshape(-1).data

    @cached_property
    def only_call(self) -> OnlyCall | None:
        """The program as a function; None if it has several calls, or if the number of items depends on the step."""
        if len(self.calls) != 1 or self.later or self.calls[0].items.counted not in _ROW_COUNTS:
            return None
        return OnlyCall(self.calls[0], self.address)

    def bound(self, addresses: Mapping[str, int], copy: Program | None = None) -> Program:
        """Return a copy with all open entries bound, reusing `copy` if given. Threads may run separate copies."""
        if copy is None:
            copy = Program(self.table.copy(), self.calls, self.scratch, later=[*self.later])
        view = copy.view
        for entry, name, offset in self.open:
            view[entry] = addresses[name] + offset
        return copy

    def complete(self) -> None:
        """Compile the calls in `later`, and write them into the table. A step with prefill rows requires this."""
        if self.later:
            LIBRARY.prepare(operators_of([self.calls[index] for index in self.later]))
            for index in self.later:
                self.write(index)
            self.later.clear()

    def write(self, index: int) -> None:
        """Write a call's operator and arguments into the table, except open entries."""
        row, call = self.table[index], self.calls[index]
        row[OPERATOR] = call.op.address
        for entry, value in enumerate(call.arguments.encoded(), FIRST_ARGUMENT):
            if isinstance(value, Binding):
                self.open.append((index * CALL_ENTRIES + entry, value.name, value.offset))
            else:
                row[entry] = value


def program_of(phases: Phases, also: Collection[Compiled] = ()) -> Program:
    """Return a program that runs these phases, with a barrier after each. Compiles its operators and those in `also`.

    Operators that only prefill rows need may be compiled later.
    """
    calls = tuple(call for phase in phases for call in phase)
    ends = set(accumulate(map(len, phases)))
    operators = [operators_of([call]) for call in calls]
    now, later = needed_by(calls)
    if also or later or not all(op.ready for op in now):
        LIBRARY.prepare([*also, *now], later=later)
    table = huge_array((len(calls), CALL_ENTRIES), np.int64)
    scratch = max((call.scratch for call in calls), default=0)
    program = Program(table, calls, -(-scratch // _LINE) * _LINE)
    for index, (row, call, ops) in enumerate(zip(table, calls, operators, strict=True)):
        row[BARRIER] = index + 1 in ends
        row[COUNTED : GRAIN + 1] = call.items
        if all(op.ready or op.load() for op in ops):
            program.write(index)
        else:
            program.later.append(index)
    return program


def needed_by(calls: Sequence[Call]) -> tuple[set[Compiled], set[Compiled]]:
    """Return the operators that calls need in every step, and those that only prefill rows need."""
    now = {op for call in calls if call.items.counted not in PREFILL for op in operators_of([call])}
    return now, set(operators_of(calls)) - now


def operators_of(calls: Sequence[Call]) -> list[Compiled]:
    """Return the operators of calls, including those that they call."""
    found = [op for call in calls for op in (call.op, *call.arguments.operators())]
    return [op for op in dict.fromkeys(found) if isinstance(op, Compiled)]

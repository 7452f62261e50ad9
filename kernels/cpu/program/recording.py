"""One program from the programs of several nodes, for small graphs, whose calls take longer than their work.

A `Recorder` records the programs that one thread runs, with the addresses that are bound. The recorded runs become one
program, in which the addresses of values are bound again for each run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.common.host_memory import huge_array

from .calls import COUNTED, DIVISOR, FACTOR, Items, OnlyCall, Program
from .driver import run_alone
from .step_table import StepField
from .thread_pool import NO_STEP, recorder_of_thread, refused, set_recorder

# The bytes of memory that a program should write before it is read.
POISON = 0xA5


@dataclass
class Recorder:
    """The programs that a thread has run since `recorded` was entered.

    Attributes:
        runs: the runs in order.
        own: memory that only one kernel uses: memory that replaced the thread's own memory, by name (memory that was
            too small is also listed), and temporary arrays.
        fixed: arrays whose addresses never change.
        is_short: True if every run used only the calling thread.
        is_complete: False if a kernel did not use the results of a run.
    """

    runs: list[RecordedRun] = field(default_factory=list)
    own: list[tuple[str, NDArray[Any]]] = field(default_factory=list)
    fixed: list[NDArray[Any]] = field(default_factory=list)
    is_short: bool = True
    is_complete: bool = True

    def own_memory(self, name: str, size: int) -> NDArray[np.uint8]:
        """Return memory with this name, as `thread_pool.own_memory` does."""
        for known, memory in self.own:
            if known == name and memory.nbytes >= size:
                return memory
        made = huge_array((max(size, 1),), np.uint8)
        self.own.append((name, made))
        return made

    def add(self, program: Program, addresses: Mapping[str, int], tokens: int, *, is_short: bool) -> None:
        """Record a run of a program with these addresses and a step of `tokens` rows."""
        self.is_short &= is_short and not program.later
        self.runs.append(RecordedRun(program, dict(addresses), tokens))


@dataclass(frozen=True)
class RecordedRun:
    """A run of a program: the address for each binding, and the number of rows of its step."""

    program: Program
    addresses: dict[str, int]
    tokens: int

    @property
    def can_join(self) -> bool:
        """True if the numbers of items are known without a step."""
        return all(call.items.counted in (StepField.ONE, StepField.TOKENS) for call in self.program.calls)

    def rows(self) -> NDArray[np.int64]:
        """Return a copy of the program's table with constant numbers of items."""
        table = self.program.table.copy()
        for row, call in zip(table, self.program.calls, strict=True):
            counted, factor, divisor, _ = call.items
            row[COUNTED], row[DIVISOR] = StepField.ONE, 1
            row[FACTOR] = factor * (1 if counted is StepField.ONE else -(-self.tokens // divisor))
        return table


@contextmanager
def recorded() -> Iterator[Recorder]:
    """Record the programs that the calling thread runs in a block. Blocks in a block record separately."""
    before, recorder = recorder_of_thread(), Recorder()
    set_recorder(recorder)
    try:
        yield recorder
    finally:
        set_recorder(before)


# A view of a program's table, the memory for inner values, the function that runs the program, and the objects that
# the function's addresses refer to.
_Copy = tuple[memoryview, NDArray[np.uint8], Callable[[], int], tuple[object, ...]]


class JoinedProgram:
    """A program that runs recorded runs one after another on the calling thread.

    Several threads may run the program at the same time, each with a copy that has separate memory for inner values.

    Args:
        runs: the runs, all of which can be joined.
        place: function of the number of a run and an address that was bound. It returns the index in `addresses` of
            `run` (-1 = the memory for inner values) and the byte offset, or None if the address never changes.
        inner_bytes: size of the memory for inner values.
    """

    def __init__(
        self, runs: Sequence[RecordedRun], place: Callable[[int, int], tuple[int, int] | None], inner_bytes: int
    ) -> None:
        tables = [run.rows() for run in runs]
        self._table = np.concatenate(tables)
        self._calls = tuple(call for run in runs for call in run.program.calls)
        self._scratch = max(run.program.scratch for run in runs)
        self._inner_bytes = inner_bytes
        self._outer: list[tuple[int, int, int]] = []  # entry in the table, index of the address, offset
        self._inner: list[tuple[int, int]] = []  # entry in the table, offset in the memory for inner values
        first = 0
        for number, (run, table) in enumerate(zip(runs, tables, strict=True)):
            for entry, name, offset in run.program.open:
                address = run.addresses[name]
                self._open(first + entry, place(number, address), address, offset)
            first += table.size
        self._copies: list[_Copy] = []

    def _open(self, entry: int, placed: tuple[int, int] | None, address: int, offset: int) -> None:
        if placed is None:
            self._table.reshape(-1)[entry] = address + offset
        elif placed[0] < 0:
            self._inner.append((entry, placed[1] + offset))
        else:
            self._outer.append((entry, placed[0], placed[1] + offset))

    def run(self, addresses: Sequence[int], *, poison: bool = False) -> None:
        """Run the program with these addresses.

        Args:
            addresses: the addresses that change.
            poison: True to overwrite the memory for inner values before.

        Raises:
            StepError: an operator rejects its input.
        """
        try:
            copy = self._copies.pop()
        except IndexError:
            copy = self._copy()
        view, memory, run, _ = copy
        if poison:
            memory.fill(POISON)
        for entry, index, offset in self._outer:
            view[entry] = addresses[index] + offset
        status = run()
        self._copies.append(copy)
        if status:
            raise refused(status)

    def _copy(self) -> _Copy:
        table, memory = huge_array(self._table.shape, np.int64), huge_array((max(self._inner_bytes, 1),), np.uint8)
        table[...] = self._table
        program, start = Program(table, self._calls, self._scratch), memory.ctypes.data
        for entry, offset in self._inner:
            program.view[entry] = start + offset
        scratch = huge_array((max(self._scratch, 1),), np.uint8)
        context, at = NO_STEP.address, scratch.ctypes.data
        if len(self._calls) == 1:
            only = OnlyCall(replace(self._calls[0], items=Items(factor=int(table[0, FACTOR]))), program.address)
            run = only.with_arguments(context, at)
        else:
            run = partial(run_alone.entry, program.address, len(self._calls), context, at)
        return program.view, memory, run, (program, scratch)

"""One program from the programs of several nodes, so that a run enters machine code once, not once for each node.

A `Recorder` records the programs that one thread runs, with the addresses that are bound. The recorded runs become one
program, in which the addresses of values are bound again for each run. If another thread took part in a recorded run,
all threads run the whole program, and wait for each other at its barriers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.common.host_memory import LEAST_RECYCLED, huge_array, recycled

from .bound_program import first_element
from .calls import BARRIER, COUNTED, DIVISOR, FACTOR, GRAIN, Items, OnlyCall, Program
from .driver import run_alone
from .step_table import StepField
from .thread_pool import NO_STEP, Threads, recorder_of_thread, refused, set_recorder

# The bytes of memory that a program should write before it is read.
POISON = 0xA5
# Threads share a recorded run that takes at least this time in nanoseconds. A barrier takes about half a microsecond.
_MIN_DIVIDED_WORK = 4_000.0


@dataclass
class Recorder:
    """The programs that a thread has run since `recorded` was entered.

    Attributes:
        runs: the runs in order.
        own: memory that only one kernel uses: memory that replaced the thread's own memory, by name (memory that was
            too small is also listed), and temporary arrays.
        fixed: arrays whose addresses never change.
        nanoseconds: approximate time of all runs on one thread.
        can_join: True if the runs are short enough to be joined.
        is_complete: False if a kernel did not use the results of a run.
    """

    runs: list[RecordedRun] = field(default_factory=list)
    own: list[tuple[str, NDArray[Any]]] = field(default_factory=list)
    fixed: list[NDArray[Any]] = field(default_factory=list)
    nanoseconds: float = 0.0
    can_join: bool = True
    is_complete: bool = True

    def own_memory(self, name: str, size: int) -> NDArray[np.uint8]:
        """Return memory with this name, as `thread_pool.own_memory` does."""
        for known, memory in self.own:
            if known == name and memory.nbytes >= size:
                return memory
        made = huge_array((max(size, 1),), np.uint8)
        self.own.append((name, made))
        return made

    def can_follow(self, nanoseconds: float) -> bool:
        """Return True if the runs can be joined with earlier runs that take this time."""
        return all(run.threads.can_join(0.0, nanoseconds + self.nanoseconds) for run in self.runs)

    def add(
        self, program: Program, addresses: Mapping[str, int], tokens: int, threads: Threads, nanoseconds: float
    ) -> None:
        """Record a run of a program with these addresses and a step of `tokens` rows.

        Args:
            threads: threads that share the run.
            nanoseconds: approximate time on one thread.
        """
        self.can_join &= threads.can_join(nanoseconds, self.nanoseconds) and not program.later
        self.nanoseconds += nanoseconds
        self.runs.append(RecordedRun(program, dict(addresses), tokens, threads, nanoseconds))


@dataclass(frozen=True)
class RecordedRun:
    """A run of a program: the address for each binding, and the arguments of `Recorder.add`."""

    program: Program
    addresses: dict[str, int]
    tokens: int
    threads: Threads
    nanoseconds: float

    @property
    def can_join(self) -> bool:
        """True if the numbers of items are known without a step."""
        return all(call.items.counted in (StepField.ONE, StepField.TOKENS) for call in self.program.calls)

    @property
    def is_divided(self) -> bool:
        """True if threads that are already running share the run."""
        return self.threads.count > 1 and self.nanoseconds >= _MIN_DIVIDED_WORK

    def rows(self) -> NDArray[np.int64]:
        """Return a copy of the program's table with constant numbers of items.

        If the run is not divided, thread 0 computes it without barriers.
        """
        table = self.program.table.copy()
        for row, call in zip(table, self.program.calls, strict=True):
            counted, factor, divisor, _ = call.items
            row[COUNTED], row[DIVISOR] = StepField.ONE, 1
            row[FACTOR] = factor * (1 if counted is StepField.ONE else -(-self.tokens // divisor))
            if not self.is_divided:
                row[GRAIN] = row[BARRIER] = 0
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


@dataclass
class _Copy:
    """A copy of a joined program.

    Attributes:
        program: the program.
        start: address of the memory for inner values that is bound.
        memory: this memory, if it remains between runs.
        run: function that runs the program on the calling thread, and returns a status.
        scratch: memory whose address `run` contains.
    """

    program: Program
    start: int
    memory: NDArray[np.uint8] | None
    run: Callable[[], int]
    scratch: NDArray[np.uint8]


class JoinedProgram:
    """A program that runs recorded runs one after another.

    Several threads may run the program at the same time, each with a copy that has separate memory for inner values.
    If there is much of this memory, it is only allocated during runs.

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
        shared = [run for run in runs if run.threads.shares(run.nanoseconds)]
        self._threads = max((run.threads for run in shared), key=lambda threads: threads.count, default=None)
        self._nanoseconds = sum(run.nanoseconds for run in runs)
        # All threads wait before and after calls that they share, and at the end.
        divided = np.concatenate([np.full(len(table), run.is_divided) for run, table in zip(runs, tables, strict=True)])
        self._table[:-1, BARRIER] |= divided[1:] & ~divided[:-1]
        self._table[-1, BARRIER] = 1
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
        view, memory = copy.program.view, copy.memory
        if memory is None:
            memory = recycled(self._inner_bytes)
            memory = huge_array((self._inner_bytes,), np.uint8) if memory is None else memory
            self._bind(copy, first_element(memory))
        if poison:
            memory.fill(POISON)
        for entry, index, offset in self._outer:
            view[entry] = addresses[index] + offset
        if self._threads is not None:
            self._threads.run(copy.program, nanoseconds=self._nanoseconds)
        elif status := copy.run():
            raise refused(status)
        self._copies.append(copy)

    def _bind(self, copy: _Copy, start: int) -> None:
        """Use the memory at this address for inner values."""
        if start != copy.start:
            copy.start, view = start, copy.program.view
            for entry, offset in self._inner:
                view[entry] = start + offset

    def _copy(self) -> _Copy:
        table = huge_array(self._table.shape, np.int64)
        table[...] = self._table
        program = Program(table, self._calls, self._scratch)
        scratch = huge_array((max(self._scratch, 1),), np.uint8)
        context, at = NO_STEP.address, scratch.ctypes.data
        if len(self._calls) == 1:
            only = OnlyCall(replace(self._calls[0], items=Items(factor=int(table[0, FACTOR]))), program.address)
            run = only.with_arguments(context, at)
        else:
            run = partial(run_alone.entry, program.address, len(self._calls), context, at)
        copy = _Copy(program, 0, None, run, scratch)
        if self._inner_bytes < LEAST_RECYCLED:
            copy.memory = huge_array((max(self._inner_bytes, 1),), np.uint8)
            self._bind(copy, first_element(copy.memory))
        return copy

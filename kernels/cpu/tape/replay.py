"""Calls written once and run many times, with other addresses each time: what a node does that runs by itself.

A `Replay` is a tape with holes. A `Crew` runs it: by walkers, or on the calling thread alone where there is little to
do. Several threads may run one replay at once, since each fills in a copy.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..cores import default_threads
from ..jit import kernel
from ..large import huge_array
from ..memory import read_int64
from .context import ContextTable, Word
from .driver import call_operator
from .program import COUNTED, DIVISOR, FACTOR, FIRST_ARGUMENT, OPERATOR, ROW_BYTES, Hole, Phases, Tape, TapeWriter
from .walkers import StepError, Walkers

# Nanoseconds of work that are worth waking the other walkers for.
_MIN_SHARED_WORK = 40_000.0
_ONE = 8 * Word.ONE.value


class Replay:
    """Phases of calls with holes among their arguments.

    Args:
        work: rough nanoseconds on one thread.
    """

    def __init__(self, phases: Phases, work: float) -> None:
        self.work = work
        writer = TapeWriter()
        writer.add_phases(phases)
        self._tape = writer.finish()
        self._holes = [
            (row, FIRST_ARGUMENT + index, value.name, value.offset)
            for row, call in enumerate(self._tape.calls)
            for index, value in enumerate(call.arguments)
            if isinstance(value, Hole)
        ]

    def tape(self, addresses: Mapping[str, int]) -> Tape:
        """A copy with its holes filled."""
        rows = self._tape.rows.copy()
        for row, column, name, offset in self._holes:
            rows[row, column] = addresses[name] + offset
        return Tape(rows, self._tape.calls, self._tape.scratch)


@kernel("void(int64, int64, int64, int64, int64[::1])")
def run_rows(rows: int, count: int, context: int, scratch: int, refusal: Any) -> None:
    """All calls of a tape, one after another on this thread; the first error code goes to refusal[0] and ends it."""
    for index in range(count):
        row = rows + index * ROW_BYTES
        counted = read_int64(context + 8 * read_int64(row + 8 * COUNTED))
        items = -(-(counted * read_int64(row + 8 * FACTOR)) // read_int64(row + 8 * DIVISOR))
        operator = read_int64(row + 8 * OPERATOR)
        status = call_operator(operator, row + 8 * FIRST_ARGUMENT, context, 0, items, scratch)
        if status != 0:
            refusal[0] = status
            break


class Crew:
    """The threads that run replays, the caller's included.

    Args:
        threads: None = the physical cores available.

    Raises:
        ValueError: threads is below 1.
    """

    def __init__(self, threads: int | None = None) -> None:
        self.threads = default_threads() if threads is None else threads
        if self.threads < 1:
            raise ValueError(f"threads is {threads}, expected at least 1")
        self._walkers = Walkers(self.threads)
        self._context = ContextTable()
        self._own = threading.local()

    def run(self, replay: Replay, addresses: Mapping[str, int]) -> None:
        """Fill in and run all of it.

        Raises:
            StepError: an operator refused its input.
        """
        tape = replay.tape(addresses)
        if self.threads > 1 and replay.work >= _MIN_SHARED_WORK:
            self._walkers.walk(tape, self._context)
            return
        scratch = self.buffer("scratch", tape.scratch)
        refusal = np.zeros(1, np.int64)
        run_rows(tape.address, len(tape.rows), self._context.address, scratch, refusal)
        if refusal[0]:
            raise StepError(int(refusal[0]))

    def buffer(self, name: str, size: int) -> int:
        """The address of `memory`."""
        return int(self.memory(name, size).ctypes.data)

    def memory(self, name: str, size: int) -> NDArray[np.uint8]:
        """At least so many bytes of the calling thread, kept for its next call; what is in them is lost by then."""
        buffers: dict[str, NDArray[np.uint8]] = self._own.__dict__
        found = buffers.get(name)
        if found is None or found.nbytes < size:
            found = buffers[name] = huge_array((max(size, 1),), np.uint8)
        return found

    def close(self) -> None:
        """End its threads; a later run starts new ones."""
        self._walkers.close()

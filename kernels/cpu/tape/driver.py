"""The machine code that walks a tape, and what the team's threads run.

Every thread has a share of a call's items, side by side, so that it reads one stretch of memory. It takes a part of
what is left of it at a time, and when nothing is left, of the others' (guided self-scheduling, Polychronopoulos and
Kuck 1987): all are done at about the same time, and a thread whose core is taken away costs a piece and not the step.
Threads meet where the tape says so. A cancelled or failed step is walked to its end without
doing the work, so that all threads stay in step.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from ..jit import kernel
from ..lazy import inline, intrinsic, types
from ..memory import read_int64, write_int64
from .context import Word
from .program import COUNTED, DIVISOR, FACTOR, FIRST_ARGUMENT, GRAIN, MEET, OPERATOR, ROW_BYTES
from .waiting import current, current_core, exchange, fetch_add, replace, wait_until, wake_waiting

# The team's words. Those that several threads write have a cache line of their own; CORE is followed by one per thread.
LINE_WORDS = 8
STARTED, ARRIVED, STEP_SLEEPERS, MEET_SLEEPERS, ERROR, STOP = (i * LINE_WORDS for i in range(6))
ROWS, ROW_COUNT, CONTEXT, COUNTERS, SCRATCH, SCRATCH_BYTES, EPOCH, PROFILE = range(6 * LINE_WORDS, 6 * LINE_WORDS + 8)
SPIN_LIMIT, STEP_SPIN_LIMIT = 7 * LINE_WORDS, 7 * LINE_WORDS + 1
CORE = 8 * LINE_WORDS
# The part of what is left that a thread takes.
_PART = 4
# A counter has a cache line of its own: [calls][threads].
COUNTER_WORDS = LINE_WORDS
_COUNTER_BYTES = 8 * COUNTER_WORDS


def team_words(threads: int) -> int:
    """How many words a team has."""
    return CORE + threads * LINE_WORDS


@intrinsic
def call_operator(
    typing_context: Any, op: Any, arguments: Any, context: Any, begin: Any, end: Any, scratch: Any
) -> Any:
    """Call an operator by its address."""

    def lower(context_: Any, builder: Any, sig: Any, args: Any) -> Any:
        integer = ir.IntType(64)
        function = ir.FunctionType(integer, [integer] * 5)
        return builder.call(builder.inttoptr(args[0], ir.PointerType(function)), args[1:])

    return types.int64(*[types.int64] * 6), lower


@intrinsic
def cycles(typing_context: Any) -> Any:
    """The processor's time stamp."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        function = builder.module.declare_intrinsic("llvm.readcyclecounter", (), ir.FunctionType(ir.IntType(64), []))
        return builder.call(function, [])

    return types.int64(), lower


@inline
def _word(address: int, index: int) -> Any:
    return read_int64(address + 8 * index)


@inline
def _work(row: int, counters: int, words: int, context: int, scratch: int, thread: int, threads: int) -> None:
    """Take pieces of a call's items until none are left: of this thread's share, then of the others'."""
    items = -(-(_word(context, _word(row, COUNTED)) * _word(row, FACTOR)) // _word(row, DIVISOR))
    grain = _word(row, GRAIN)
    share = -(-items // (threads * grain)) * grain
    part = grain * (1 if threads == 1 else _PART)
    for turn in range(threads if items > 0 else 0):
        owner = (thread + turn) % threads
        counter, size = counters + owner * _COUNTER_BYTES, min(share, items - owner * share)
        done = current(counter)
        while done < size:
            if _word(context, Word.CANCEL) != 0 or _word(words, ERROR) != 0:
                break
            piece = min(-(-(size - done) // part) * grain, size - done)
            found = replace(counter, done, done + piece)
            if found == done:
                begin = owner * share + done
                status = call_operator(
                    _word(row, OPERATOR), row + 8 * FIRST_ARGUMENT, context, begin, begin + piece, scratch
                )
                if status != 0:
                    exchange(words + 8 * ERROR, status)
                done = current(counter)
            else:
                done = found


@inline
def _own_core(words: int, thread: int) -> None:
    """Say where this thread runs. Rarely news, and the other threads keep the line in their caches until it is."""
    core = current_core()
    if core != _word(words, CORE + thread * LINE_WORDS):
        exchange(words + 8 * (CORE + thread * LINE_WORDS), core)


@inline
def _patience(words: int, thread: int, threads: int, limit: int) -> Any:
    """How often to look before sleeping: not once while another thread needs this core."""
    core = current(words + 8 * (CORE + thread * LINE_WORDS))
    for turn in range(1, threads if core >= 0 else 1):
        if current(words + 8 * (CORE + (thread + turn) % threads * LINE_WORDS)) == core:
            return 0
    return _word(words, limit)


@inline
def _meet(words: int, thread: int, threads: int, epoch: int) -> int:
    """Wait for the other threads. The count of arrivals is never reset: a thread may still be leaving the last wait."""
    epoch += 1
    target = epoch * threads
    arrived = words + 8 * ARRIVED
    _own_core(words, thread)
    if fetch_add(arrived, 1) + 1 >= target:
        wake_waiting(arrived, words + 8 * MEET_SLEEPERS)
    else:
        wait_until(arrived, words + 8 * MEET_SLEEPERS, target, _patience(words, thread, threads, SPIN_LIMIT))
    return epoch


@inline
def _walk(words: int, thread: int, threads: int) -> None:
    rows, context = _word(words, ROWS), _word(words, CONTEXT)
    counters, profile = _word(words, COUNTERS), _word(words, PROFILE)
    scratch = _word(words, SCRATCH) + thread * _word(words, SCRATCH_BYTES)
    epoch = _word(words, EPOCH)
    for index in range(_word(words, ROW_COUNT)):
        row = rows + index * ROW_BYTES
        _work(row, counters + index * threads * _COUNTER_BYTES, words, context, scratch, thread, threads)
        if _word(row, MEET) != 0 and threads > 1:
            epoch = _meet(words, thread, threads, epoch)
        if profile != 0 and thread == 0:
            write_int64(profile + 8 * index, cycles())


@kernel("void(int64, int64)")
def run_step(words: int, threads: int) -> None:
    """Start the step that the team's words describe, take part in it, and return when it is done."""
    counters = _word(words, COUNTERS)
    for index in range(_word(words, ROW_COUNT) * threads):
        write_int64(counters + index * _COUNTER_BYTES, 0)
    write_int64(words + 8 * ERROR, 0)
    write_int64(words + 8 * EPOCH, _word(words, ARRIVED) // threads)
    if threads > 1:
        fetch_add(words + 8 * STARTED, 1)
        wake_waiting(words + 8 * STARTED, words + 8 * STEP_SLEEPERS)
    _walk(words, 0, threads)


@kernel("void(int64, int64, int64, int64)")
def serve(words: int, thread: int, threads: int, started: int) -> None:
    """What the other threads run: every step from number `started` + 1 on, until the team stops."""
    while True:
        started += 1
        _own_core(words, thread)
        spins = _patience(words, thread, threads, STEP_SPIN_LIMIT)
        wait_until(words + 8 * STARTED, words + 8 * STEP_SLEEPERS, started, spins)
        if current(words + 8 * STOP) != 0:
            break
        _walk(words, thread, threads)


@kernel("void(int64)")
def stop(words: int) -> None:
    """Let the serving threads return."""
    exchange(words + 8 * STOP, 1)
    fetch_add(words + 8 * STARTED, 1)
    wake_waiting(words + 8 * STARTED, words + 8 * STEP_SLEEPERS)

"""The machine code that runs a program, and what the pool's threads run.

Every thread has a share of a call's items, side by side, so that it reads one stretch of memory. It takes a part of
what is left of it at a time, and when nothing is left, of the others' (guided self-scheduling, Polychronopoulos and
Kuck 1987): all are done at about the same time, and a thread whose core is taken away costs a piece and not the whole.
Threads wait for each other where the program has a barrier. A cancelled or failed run goes to its end without
doing the work, so that all threads stay in step.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from ..jit.dsl import inline, typed_intrinsic, types
from ..jit.emit import INT64, Emitter
from ..jit.memory import entry, read_int64, write_int64
from ..jit.native import kernel
from .calls import BARRIER, CALL_BYTES, COUNTED, DIVISOR, FACTOR, FIRST_ARGUMENT, GRAIN, OPERATOR
from .step_table import StepField
from .waiting import current, current_core, exchange, fetch_add, replace, wait_until, wake_waiting

# The table that threads of a run share, in cache lines of LINE_ENTRIES: what several write has one of its own.
# Behind it every thread has THREAD_LINES lines: how many runs it was started for, with the number of
# those that sleep until the next (0 or 1) on a line of its own, and the core that it runs on.
LINE_ENTRIES = 8
ARRIVED, BARRIER_SLEEPERS, ERROR, FORKED = 0, 8, 16, 17
CALLS, CALL_COUNT, CONTEXT, COUNTERS, SCRATCH, SCRATCH_BYTES, THREADS = 24, 25, 26, 27, 28, 29, 30
FIRST_BARRIER, SPIN_LIMIT, START_SPIN_LIMIT = 32, 33, 34
FIRST_THREAD = 40
STARTED, START_SLEEPERS, CORE = 0, 8, 16
THREAD_ENTRIES = 24
# The part of what is left that a thread takes.
_PART = 4
# A counter has a cache line of its own: [calls][threads].
COUNTER_ENTRIES = LINE_ENTRIES
_COUNTER_BYTES = 8 * COUNTER_ENTRIES


def shared_entries(threads: int) -> int:
    """How many entries so many threads share."""
    return FIRST_THREAD + threads * THREAD_ENTRIES


@typed_intrinsic
def call_operator(op: Any, arguments: Any, context: Any, begin: Any, end: Any, scratch: Any) -> Any:
    """Call an operator by its address; `arguments` is an address, or a view of arguments that it shares."""

    def emit(e: Emitter, address: Any, *given: Any) -> Any:
        type_ = ir.PointerType(ir.FunctionType(INT64, [INT64] * 5))
        return e.builder.call(e.builder.inttoptr(address, type_), given)

    given = types.int64 if isinstance(arguments, types.Integer) else arguments
    return types.int64(types.int64, given, *[types.int64] * 4), emit


@inline
def _work(call: int, counters: int, shared: int, context: int, scratch: int, thread: int, threads: int) -> None:
    """Take pieces of a call's items until none are left: of this thread's share, then of the others'."""
    items = -(-(entry(context, entry(call, COUNTED)) * entry(call, FACTOR)) // entry(call, DIVISOR))
    grain = entry(call, GRAIN)
    share = -(-items // (threads * grain)) * grain
    part = grain * (1 if threads == 1 else _PART)
    for offset in range(threads if items > 0 else 0):
        owner = (thread + offset) % threads
        counter, size = counters + owner * _COUNTER_BYTES, min(share, items - owner * share)
        done = current(counter)
        while done < size:
            if entry(context, StepField.CANCEL) != 0 or entry(shared, ERROR) != 0:
                break
            piece = min(-(-(size - done) // part) * grain, size - done)
            found = replace(counter, done, done + piece)
            if found == done:
                begin = owner * share + done
                status = call_operator(
                    entry(call, OPERATOR), call + 8 * FIRST_ARGUMENT, context, begin, begin + piece, scratch
                )
                if status != 0:
                    exchange(shared + 8 * ERROR, status)
                done = current(counter)
            else:
                done = found


@inline
def _address(shared: int, thread: int, entry: int) -> int:
    """The address of a thread's own entry."""
    return shared + 8 * (FIRST_THREAD + thread * THREAD_ENTRIES + entry)


@inline
def _own_core(shared: int, thread: int) -> None:
    """Say where this thread runs. Rarely news, and the other threads keep the line in their caches until it is."""
    core = current_core()
    address = _address(shared, thread, CORE)
    if core != read_int64(address):
        exchange(address, core)


@inline
def _patience(shared: int, thread: int, limit: int) -> Any:
    """How often to look before sleeping: not once while another thread of the last run needs this core."""
    core = current(_address(shared, thread, CORE))
    threads = entry(shared, THREADS)
    for offset in range(1, threads if core >= 0 else 1):
        if current(_address(shared, (thread + offset) % threads, CORE)) == core:
            return 0
    return entry(shared, limit)


@inline
def _wait(shared: int, thread: int, threads: int, barrier: int) -> int:
    """Wait for the other threads. The count of arrivals is never reset: a thread may still be leaving the last wait."""
    barrier += threads
    arrived = shared + 8 * ARRIVED
    _own_core(shared, thread)
    if fetch_add(arrived, 1) + 1 >= barrier:
        wake_waiting(arrived, shared + 8 * BARRIER_SLEEPERS)
    else:
        wait_until(arrived, shared + 8 * BARRIER_SLEEPERS, barrier, _patience(shared, thread, SPIN_LIMIT))
    return barrier


@inline
def _run_calls(shared: int, thread: int) -> None:
    calls, context, threads = entry(shared, CALLS), entry(shared, CONTEXT), entry(shared, THREADS)
    counters = entry(shared, COUNTERS)
    scratch = entry(shared, SCRATCH) + thread * entry(shared, SCRATCH_BYTES)
    barrier = entry(shared, FIRST_BARRIER)
    for index in range(entry(shared, CALL_COUNT)):
        call = calls + index * CALL_BYTES
        _work(call, counters + index * threads * _COUNTER_BYTES, shared, context, scratch, thread, threads)
        if entry(call, BARRIER) != 0 and threads > 1:
            barrier = _wait(shared, thread, threads, barrier)


@kernel
def run_program(shared: int) -> int:
    """Start the run that the table describes, take part in it as thread 0, and return when it is done."""
    if entry(shared, FORKED) != 0:
        return 0  # nobody is there
    counters, threads = entry(shared, COUNTERS), entry(shared, THREADS)
    for index in range(entry(shared, CALL_COUNT) * threads):
        write_int64(counters + index * _COUNTER_BYTES, 0)
    write_int64(shared + 8 * ERROR, 0)
    write_int64(shared + 8 * FIRST_BARRIER, entry(shared, ARRIVED))
    for thread in range(1, threads):
        started = _address(shared, thread, STARTED)
        fetch_add(started, 1)
        wake_waiting(started, _address(shared, thread, START_SLEEPERS))
    _run_calls(shared, 0)
    return 0


@kernel
def serve(shared: int, thread: int) -> int:
    """What the other threads run, for ever: every run that they are started for."""
    runs = 0
    while shared != 0:  # always: Numba wants a way to the end
        runs += 1
        _own_core(shared, thread)
        started, sleepers = _address(shared, thread, STARTED), _address(shared, thread, START_SLEEPERS)
        wait_until(started, sleepers, runs, _patience(shared, thread, START_SPIN_LIMIT))
        _run_calls(shared, thread)
    return 0

"""The machine code that runs a program, and the loop of the pool's threads.

Every thread has a share of a call's items. The items of a share are neighbours, so that the thread reads one range of
memory. A thread takes a part of its share's remaining items at a time. When its share is empty, the thread takes parts
of the other threads' shares (guided self-scheduling, Polychronopoulos and Kuck 1987). So all threads finish at about
the same time, and a thread that loses its core delays only one piece, not its whole share. Threads wait for each other
at the program's barriers. In a cancelled or failed run, the threads pass all barriers without doing the work, so that
they stay synchronised.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir

from ..jit.dsl import inline, typed_intrinsic, types
from ..jit.emit import INT64, Emitter
from ..jit.memory import entry, read_int64, write_int64
from ..jit.native import kernel
from .calls import BARRIER, CALL_BYTES, COUNTED, DIVISOR, FACTOR, FIRST_ARGUMENT, GRAIN, OPERATOR
from .step_table import StepField
from .waiting import current, current_core, exchange, fetch_add, replace, wait_until, wake_waiting

# The table that the threads of a run share, in cache lines of LINE_ENTRIES. Entries that several threads write are on
# separate lines. They are followed by three lines for each thread: the number of runs that the thread was started for,
# the number of threads that sleep until the next run (0 or 1), and the core that the thread runs on.
LINE_ENTRIES = 8
ARRIVED, BARRIER_SLEEPERS, ERROR, FORKED = 0, 8, 16, 17
CALLS, CALL_COUNT, CONTEXT, COUNTERS, SCRATCH, SCRATCH_BYTES, THREADS = 24, 25, 26, 27, 28, 29, 30
FIRST_BARRIER, SPIN_LIMIT, START_SPIN_LIMIT = 32, 33, 34
FIRST_THREAD = 40
STARTED, START_SLEEPERS, CORE = 0, 8, 16
THREAD_ENTRIES = 24
# A thread takes 1 / _PART of the remaining items at a time.
_PART = 4
# Each counter has a separate cache line: [calls][threads].
COUNTER_ENTRIES = LINE_ENTRIES
_COUNTER_BYTES = 8 * COUNTER_ENTRIES


def shared_entries(threads: int) -> int:
    """Return the number of entries that `threads` threads share."""
    return FIRST_THREAD + threads * THREAD_ENTRIES


@typed_intrinsic
def call_operator(op: Any, arguments: Any, context: Any, begin: Any, end: Any, scratch: Any) -> Any:
    """Call an operator by its address. `arguments` is an address, or a view of arguments to pass on."""

    def emit(e: Emitter, address: Any, *given: Any) -> Any:
        type_ = ir.PointerType(ir.FunctionType(INT64, [INT64] * 5))
        return e.builder.call(e.builder.inttoptr(address, type_), given)

    given = types.int64 if isinstance(arguments, types.Integer) else arguments
    return types.int64(types.int64, given, *[types.int64] * 4), emit


@inline
def _items(call: int, context: int) -> Any:
    """Return the number of a call's items."""
    return -(-entry(context, entry(call, COUNTED)) // entry(call, DIVISOR)) * entry(call, FACTOR)


@inline
def _work(call: int, counters: int, shared: int, context: int, scratch: int, thread: int, threads: int) -> None:
    """Take pieces of a call's items until none are left: first from this thread's share, then from other shares."""
    items = _items(call, context)
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
def _work_alone(call: int, shared: int, context: int, scratch: int) -> None:
    """Compute all items of a call, unless the run has failed or is cancelled."""
    items = _items(call, context)
    if items > 0 and entry(context, StepField.CANCEL) == 0 and entry(shared, ERROR) == 0:
        status = call_operator(entry(call, OPERATOR), call + 8 * FIRST_ARGUMENT, context, np.int64(0), items, scratch)
        if status != 0:
            exchange(shared + 8 * ERROR, status)


@inline
def _address(shared: int, thread: int, entry: int) -> int:
    """Return the address of one of a thread's entries."""
    return shared + 8 * (FIRST_THREAD + thread * THREAD_ENTRIES + entry)


@inline
def _own_core(shared: int, thread: int) -> None:
    """Publish the core that this thread runs on. The core rarely changes, so other threads can cache the line."""
    core = current_core()
    address = _address(shared, thread, CORE)
    if core != read_int64(address):
        exchange(address, core)


@inline
def _patience(shared: int, thread: int, limit: int) -> Any:
    """Return the number of spins before sleeping: 0 if another thread of the last run is on the same core."""
    core = current(_address(shared, thread, CORE))
    threads = entry(shared, THREADS)
    for offset in range(1, threads if core >= 0 else 1):
        if current(_address(shared, (thread + offset) % threads, CORE)) == core:
            return 0
    return entry(shared, limit)


@inline
def _wait(shared: int, thread: int, threads: int, barrier: int) -> int:
    """Wait for the other threads. The arrival count is never reset: a thread may still be leaving the last wait."""
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
        if entry(call, GRAIN) > 0:
            _work(call, counters + index * threads * _COUNTER_BYTES, shared, context, scratch, thread, threads)
        elif thread == 0:
            _work_alone(call, shared, context, scratch)
        if entry(call, BARRIER) != 0 and threads > 1:
            barrier = _wait(shared, thread, threads, barrier)


@kernel
def run_program(shared: int) -> int:
    """Start the run that the table describes, take part in it as thread 0, and return when it is done."""
    if entry(shared, FORKED) != 0:
        return 0  # the other threads do not exist in a forked process
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
def run_alone(calls: int, count: int, context: int, scratch: int) -> int:
    """Run `count` calls one after another on the calling thread. Return the code of the first error, or 0."""
    for index in range(count):
        call = calls + index * CALL_BYTES
        items = _items(call, context)
        if items > 0:
            status: int = call_operator(
                entry(call, OPERATOR), call + 8 * FIRST_ARGUMENT, context, np.int64(0), items, scratch
            )
            if status != 0:
                return status
    return 0


@kernel
def serve(shared: int, thread: int) -> int:
    """Take part in every run for which this thread of the pool is started. This function never returns."""
    runs = 0
    while shared != 0:  # always true: Numba requires a function that can return
        runs += 1
        _own_core(shared, thread)
        started, sleepers = _address(shared, thread, STARTED), _address(shared, thread, START_SLEEPERS)
        wait_until(started, sleepers, runs, _patience(shared, thread, START_SPIN_LIMIT))
        _run_calls(shared, thread)
    return 0

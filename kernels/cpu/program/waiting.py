"""Atomic words, and waiting for a word to change. Only this module depends on the operating system.

Threads spin first, because the other threads usually arrive within a microsecond, and the next run starts within a
millisecond. Waking a thread takes a tenth of a millisecond, which would slow down every small run (a session's nodes).
Threads do not spin if two threads of a run share a core, because a spinning thread delays the thread that it waits for.
After spinning, threads on Linux sleep on the word itself (futex) until a thread changes it and wakes them. Yielding
instead is harmful: with every core busy, it cost four fifths of the speed, whereas the futex cost half. Other systems
have no such call that plain code can make, so a waiting thread sleeps for a few microseconds at a time.
"""

from __future__ import annotations

import platform
import sys
from typing import Any

from ..jit.dsl import inline, intrinsic
from ..jit.emit import INT32, INT64, VOID, Emitter

# The number of spins at a barrier (about 0.15 ms), and the factor for waits between runs (about 1 ms).
SPINS, START_PATIENCE = 3000, 7
KNOWS_CORE = sys.platform.startswith("linux")
_SYS_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
HAS_FUTEX = KNOWS_CORE and _SYS_FUTEX is not None
_FUTEX_WAIT_PRIVATE, _FUTEX_WAKE_PRIVATE = 128, 129
_NAP_MICROSECONDS = 20


def _atomic(operation: str) -> Any:
    @intrinsic("int64", "int64", "int64")
    def change(e: Emitter, address: Any, value: Any) -> Any:
        return e.builder.atomic_rmw(operation, e.pointer(address), value, "seq_cst")

    return change


# Add to a word, or write it, atomically and after all earlier writes. Both return the word's old value.
fetch_add, exchange = _atomic("add"), _atomic("xchg")


@intrinsic("int64", "int64", "int64", "int64")
def replace(e: Emitter, address: Any, expected: Any, value: Any) -> Any:
    """Write a word atomically if it has the expected value. Returns its old value."""
    return e.builder.extract_value(e.builder.cmpxchg(e.pointer(address), expected, value, "seq_cst", "seq_cst"), 0)


@intrinsic("int64", "int64")
def current(e: Emitter, address: Any) -> Any:
    """Read a word atomically. Later reads see everything that was written before the word."""
    return e.builder.load_atomic(e.pointer(address), "acquire", 8, typ=INT64)


def _triple(e: Emitter) -> str:
    return str(e.context.codegen().magic_tuple()[0])


@intrinsic(None)
def pause(e: Emitter) -> None:
    """Signal to the core that this is a spin loop."""
    if _triple(e).startswith(("x86_64", "i")):
        e.call("llvm.x86.sse2.pause", VOID, [])


@intrinsic("int64")
def current_core(e: Emitter) -> Any:
    """Return the core that this thread runs on now; -1 if the system does not report it."""
    if not KNOWS_CORE:
        return INT64(-1)
    # This is not a system call: Linux keeps the number in the thread's memory or in a register.
    return e.builder.sext(e.call("sched_getcpu", INT32, []), INT64)


@intrinsic(None, "int64", "int64")
def _sleep_while(e: Emitter, address: Any, value: Any) -> None:
    """Sleep if the word still has this value, until a wake-up (or, without a futex, for a moment)."""
    if HAS_FUTEX:
        _futex(e, address, _FUTEX_WAIT_PRIVATE, value)
    else:
        name, unit = ("Sleep", 0) if sys.platform == "win32" else ("usleep", _NAP_MICROSECONDS)
        e.call(name, INT32, [INT32(unit)])


@intrinsic(None, "int64")
def _wake(e: Emitter, address: Any) -> None:
    """Wake every thread that sleeps on a word."""
    if HAS_FUTEX:
        _futex(e, address, _FUTEX_WAKE_PRIVATE, INT64(1 << 20))


def _futex(e: Emitter, address: Any, operation: int, value: Any) -> None:
    """Make the futex system call. It compares only the low half of the word, which every counter's change affects."""
    none = INT64(0)
    e.call("syscall", INT64, [INT64(_SYS_FUTEX), address, INT64(operation), value, none, none, none])


@inline
def wait_until(word: int, sleepers: int, target: int, spins: int) -> None:
    """Wait until a word has reached a target. Words only grow, so a thread cannot miss it."""
    tries = 0
    while current(word) < target:
        pause()
        tries += 1
        if tries >= spins:
            fetch_add(sleepers, 1)
            seen = current(word)
            if seen < target:
                _sleep_while(word, seen)
            fetch_add(sleepers, -1)


@inline
def wake_waiting(word: int, sleepers: int) -> None:
    """Wake the threads that sleep on a word. Called after the word has grown."""
    # This atomic read cannot move before the word's change. A sleeper first counts itself and then reads the word.
    if fetch_add(sleepers, 0) > 0:
        _wake(word)

"""Atomic words, and waiting for one to change: the only place that knows the operating system.

Threads spin first, because the other threads usually arrive within a microsecond, and the next run within a
millisecond: to wake a thread takes a tenth of that, which small runs (a session's nodes) would pay every time. Not
where threads of one run share a core: whoever spins there keeps away the one it waits for. Then Linux puts them to
sleep on the word itself (futex) and whoever changes it wakes them. Yielding instead would be harmful: with every core
busy it cost four fifths of the speed where the futex cost half. Other systems have no such call that plain code can
make: there a waiting thread sleeps for some microseconds at a time.
"""

from __future__ import annotations

import platform
import sys
from typing import Any

from ..jit.dsl import inline, intrinsic
from ..jit.emit import INT32, INT64, VOID, Emitter

# About 0.15 ms at a barrier; between runs about 1 ms.
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


# Add to a word atomically, or write it, after everything written before it; they return what it was.
fetch_add, exchange = _atomic("add"), _atomic("xchg")


@intrinsic("int64", "int64", "int64", "int64")
def replace(e: Emitter, address: Any, expected: Any, value: Any) -> Any:
    """Write a word atomically if it is what is expected; returns what it was."""
    return e.builder.extract_value(e.builder.cmpxchg(e.pointer(address), expected, value, "seq_cst", "seq_cst"), 0)


@intrinsic("int64", "int64")
def current(e: Emitter, address: Any) -> Any:
    """Read a word atomically; what is read afterwards is at least as new."""
    return e.builder.load_atomic(e.pointer(address), "acquire", 8, typ=INT64)


def _triple(e: Emitter) -> str:
    return str(e.context.codegen().magic_tuple()[0])


@intrinsic(None)
def pause(e: Emitter) -> None:
    """Tell the core that this is a waiting loop."""
    if _triple(e).startswith(("x86_64", "i")):
        e.call("llvm.x86.sse2.pause", VOID, [])


@intrinsic("int64")
def current_core(e: Emitter) -> Any:
    """The core that this thread runs on right now; -1 where the system does not tell."""
    if not KNOWS_CORE:
        return INT64(-1)
    # No system call: Linux keeps the number in memory of the thread, or in a register.
    return e.builder.sext(e.call("sched_getcpu", INT32, []), INT64)


@intrinsic(None, "int64", "int64")
def _sleep_while(e: Emitter, address: Any, value: Any) -> None:
    """Sleep if the word still has this value, until it is woken (or, without a futex, for a moment)."""
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
    """The system call; it looks at the low half of the word, which all our counters change."""
    none = INT64(0)
    e.call("syscall", INT64, [INT64(_SYS_FUTEX), address, INT64(operation), value, none, none, none])


@inline
def wait_until(word: int, sleepers: int, target: int, spins: int) -> None:
    """Until the word has reached a target; words only grow, so nobody can miss it."""
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
    """After the word has grown: wake those that sleep on it."""
    # An atomic read that cannot happen before the word grew: a sleeper counts itself first and then looks at the word.
    if fetch_add(sleepers, 0) > 0:
        _wake(word)

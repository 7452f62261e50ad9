"""Atomic words, and waiting for one to change: the only place that knows the operating system.

Threads spin first, because the other threads usually arrive within a microsecond, and the next step within a
millisecond: to wake a thread takes a tenth of that, which small steps (a session's nodes) would pay every time. Not
where threads of one team share a core: whoever spins there keeps away the one it waits for. Then Linux puts them to
sleep on the word itself (futex) and whoever changes it wakes them. Yielding instead would be harmful: with every core
busy it cost four fifths of the speed where the futex cost half. Other systems have no such call that plain code can
make: there a waiting thread sleeps for some microseconds at a time.
"""

from __future__ import annotations

import sys
from typing import Any

from llvmlite import ir

from ..lazy import cgutils, inline, intrinsic, types

# About 0.15 ms at a meeting; between steps about 1 ms.
SPINS, STEP_PATIENCE = 3000, 7
HAS_FUTEX = KNOWS_CORE = sys.platform.startswith("linux")
_SYS_FUTEX = {"x86_64": 202, "aarch64": 98}
_FUTEX_WAIT_PRIVATE, _FUTEX_WAKE_PRIVATE = 128, 129
_NAP_MICROSECONDS = 20

_POINTER, _INT64 = ir.PointerType(), ir.IntType(64)


@intrinsic
def fetch_add(typing_context: Any, address: Any, value: Any) -> Any:
    """Add to a word atomically; returns what it was."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", builder.inttoptr(args[0], _POINTER), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), lower


@intrinsic
def replace(typing_context: Any, address: Any, expected: Any, value: Any) -> Any:
    """Write a word atomically if it is what is expected; returns what it was."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        place = builder.inttoptr(args[0], _POINTER)
        return builder.extract_value(builder.cmpxchg(place, args[1], args[2], "seq_cst", "seq_cst"), 0)

    return types.int64(types.int64, types.int64, types.int64), lower


@intrinsic
def exchange(typing_context: Any, address: Any, value: Any) -> Any:
    """Write a word atomically, after everything written before it; returns what it was."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.atomic_rmw("xchg", builder.inttoptr(args[0], _POINTER), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), lower


@intrinsic
def current(typing_context: Any, address: Any) -> Any:
    """Read a word atomically; what is read afterwards is at least as new."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(args[0], _POINTER), "acquire", 8, typ=_INT64)

    return types.int64(types.int64), lower


@intrinsic
def pause(typing_context: Any) -> Any:
    """Tell the core that this is a waiting loop."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        triple = context.codegen().magic_tuple()[0]
        if triple.startswith(("x86_64", "i")):
            function = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(ir.VoidType(), []), "llvm.x86.sse2.pause"
            )
            builder.call(function, [])
        return context.get_dummy_value()

    return types.void(), lower


@intrinsic
def current_core(typing_context: Any) -> Any:
    """The core that this thread runs on right now; -1 where the system does not tell."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if not KNOWS_CORE:
            return _INT64(-1)
        # No system call: Linux keeps the number in memory of the thread, or in a register.
        function_type = ir.FunctionType(ir.IntType(32), [])
        function = cgutils.get_or_insert_function(builder.module, function_type, "sched_getcpu")
        return builder.sext(builder.call(function, []), _INT64)

    return types.int64(), lower


@intrinsic
def _sleep_while(typing_context: Any, address: Any, value: Any) -> Any:
    """Sleep if the word still has this value, until it is woken (or, without a futex, for a moment)."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if HAS_FUTEX:
            _futex(context, builder, args[0], _FUTEX_WAIT_PRIVATE, args[1])
        else:
            name, unit = ("Sleep", 0) if sys.platform == "win32" else ("usleep", _NAP_MICROSECONDS)
            integer = ir.IntType(32)
            function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(integer, [integer]), name)
            builder.call(function, [integer(unit)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), lower


@intrinsic
def _wake(typing_context: Any, address: Any) -> Any:
    """Wake every thread that sleeps on a word."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if HAS_FUTEX:
            _futex(context, builder, args[0], _FUTEX_WAKE_PRIVATE, _INT64(1 << 20))
        return context.get_dummy_value()

    return types.void(types.int64), lower


def _futex(context: Any, builder: Any, address: Any, operation: int, value: Any) -> None:
    """The system call; it looks at the low half of the word, which all our counters change."""
    triple = context.codegen().magic_tuple()[0]
    number = _SYS_FUTEX["aarch64" if triple.startswith(("aarch64", "arm64")) else "x86_64"]
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_INT64, [_INT64] * 7), "syscall")
    none = _INT64(0)
    builder.call(function, [_INT64(number), address, _INT64(operation), value, none, none, none])


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

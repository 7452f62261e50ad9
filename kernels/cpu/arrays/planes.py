"""Reductions of rows, and normalisation of the planes of channels: float32 arrays [planes, size].

A sum is computed in parts, so that the sums of long rows are accurate and do not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from ...checks import Float32, check
from ..jit.arguments import Address, Arguments, Binding
from ..jit.dsl import inline
from ..jit.memory import keep_first, load, load_float32, read_float32, store, write_float32
from ..jit.native import NativeOp, native_op
from ..jit.variants import once
from ..jit.vector import LANES, larger, reduce_add, reduce_larger, splat_float32
from ..program.bound_program import NodeProgram, run_alone
from ..program.calls import PIECE, Call, Items
from ..program.thread_pool import Threads

Reduction = Literal["sum", "mean", "max", "min", "squares", "norm"]
REDUCTIONS: tuple[Reduction, ...] = ("sum", "mean", "max", "min", "squares", "norm")
_NANOSECONDS_PER_NUMBER, _NANOSECONDS_PER_ADDED = 0.1, 0.4
_STEP = 4 * LANES


class PlanesArguments(Arguments):
    """Planes of `size` numbers, the results, and one factor and one shift for each of `channels` planes in turn."""

    x: Address
    out: Address
    factors: Address
    shifts: Address
    size: int
    channels: int
    epsilon: float


def _same(value: Any) -> Any:
    return value


def _negative(value: Any) -> Any:
    return 0.0 - value


def _square(value: Any) -> Any:
    return value * value


def _sum_of(function: Callable[[Any], Any]) -> Callable[[int, int], Any]:
    """Return a helper that adds up function(number) for all numbers of a row."""
    apply = inline(function)

    @inline
    def summed(x: int, size: int) -> Any:
        total = np.float32(0.0)
        for part in range(0, size, PIECE):
            end = min(size, part + PIECE)
            whole = part + (end - part) // _STEP * _STEP
            a = b = c = d = splat_float32(0.0)
            for first in range(part, whole, _STEP):
                at = x + 4 * first
                a = a + apply(load_float32(at))
                b = b + apply(load_float32(at + 4 * LANES))
                c = c + apply(load_float32(at + 8 * LANES))
                d = d + apply(load_float32(at + 12 * LANES))
            for first in range(whole, end, LANES):
                a = a + apply(load(x + 4 * first, end - first))
            total = total + reduce_add((a + b) + (c + d))
        return total

    return summed


def _max_of(function: Callable[[Any], Any]) -> Callable[[int, int], Any]:
    """Return a helper that returns the largest function(number) of a row, or NaN if the row contains NaN."""
    apply = inline(function)

    @inline
    def largest(x: int, size: int) -> Any:
        whole = size // _STEP * _STEP
        a = b = c = d = splat_float32(-np.inf)
        for first in range(0, whole, _STEP):
            at = x + 4 * first
            a = larger(a, apply(load_float32(at)))
            b = larger(b, apply(load_float32(at + 4 * LANES)))
            c = larger(c, apply(load_float32(at + 8 * LANES)))
            d = larger(d, apply(load_float32(at + 12 * LANES)))
        for first in range(whole, size, LANES):
            a = larger(a, keep_first(apply(load(x + 4 * first, size - first)), size - first, -np.inf))
        return reduce_larger(larger(larger(a, b), larger(c, d)))

    return largest


@once
def _reduced(kind: Reduction) -> Callable[[int, int], Any]:
    """Return the helper (address, size) that reduces a row, before the last step of `reduce_op`."""
    if kind in ("max", "min"):
        return _max_of(_same if kind == "max" else _negative)
    return _sum_of(_square if kind in ("squares", "norm") else _same)


@once
def reduce_op(kind: Reduction) -> NativeOp:
    """Return the operator. Items are planes, and each result is one number."""
    reduced = _reduced(kind)
    is_min, is_mean, is_norm = kind == "min", kind == "mean", kind == "norm"

    def reduce(arguments: PlanesArguments, context: int, begin: int, end: int, scratch: int) -> int:
        size = arguments.size
        for plane in range(begin, end):
            value = reduced(arguments.x + 4 * plane * size, size)
            if is_min:
                value = -value
            elif is_mean:
                value = value / np.float32(size)
            elif is_norm:
                value = np.float32(np.sqrt(value))
            write_float32(arguments.out + 4 * plane, value)
        return 0

    return native_op(PlanesArguments, name=f"reduce_{kind}")(reduce)


@inline
def _deviations(x: int, size: int, mean: float) -> Any:
    """Return the sum of the squares of the deviations from a mean."""
    total = np.float32(0.0)
    for part in range(0, size, PIECE):
        end = min(size, part + PIECE)
        a = b = splat_float32(0.0)
        whole = part + (end - part) // (2 * LANES) * (2 * LANES)
        for first in range(part, whole, 2 * LANES):
            one, two = load_float32(x + 4 * first) - mean, load_float32(x + 4 * (first + LANES)) - mean
            a, b = a + one * one, b + two * two
        for first in range(whole, end, LANES):
            one = keep_first(load(x + 4 * first, end - first) - mean, end - first, 0.0)
            a = a + one * one
        total = total + reduce_add(a + b)
    return total


@once
def scale_op(normalizes: bool) -> NativeOp:
    """Return the operator that computes x * factor + shift, of x as it is or of x with mean 0 and deviation 1.

    Items are planes.
    """
    mean_of = _reduced("sum")

    def scale(arguments: PlanesArguments, context: int, begin: int, end: int, scratch: int) -> int:
        size, channels = arguments.size, arguments.channels
        for plane in range(begin, end):
            channel = plane % channels
            x, out = arguments.x + 4 * plane * size, arguments.out + 4 * plane * size
            factor, shift = read_float32(arguments.factors + 4 * channel), read_float32(arguments.shifts + 4 * channel)
            if normalizes:
                mean = mean_of(x, size) / np.float32(size)
                variance = _deviations(x, size, mean) / np.float32(size)
                inverse = np.float32(1.0) / np.float32(np.sqrt(variance + np.float32(arguments.epsilon)))
                for first in range(0, size, LANES):
                    left = size - first
                    value = (load(x + 4 * first, left) - mean) * inverse * factor + shift
                    store(out + 4 * first, value, left)
            else:
                for first in range(0, size, LANES):
                    left = size - first
                    store(out + 4 * first, load(x + 4 * first, left) * factor + shift, left)
        return 0

    return native_op(PlanesArguments, name="normalize_planes" if normalizes else "scale_planes")(scale)


def reduced(kind: Reduction, x: Float32, *, threads: Threads | None = None) -> Float32:
    """Return one number for each row of x [rows, size]; size is at least 1."""
    check("x", x, (None, None))
    out = np.empty(len(x), np.float32)
    if out.size:
        _program(reduce_op(kind), *x.shape).run(threads, x=x, out=out)
    return out


def scaled(
    x: Float32, factors: Float32, shifts: Float32, *, epsilon: float | None = None, threads: Threads | None = None
) -> Float32:
    """Return x * factor + shift for each plane of x [planes, size].

    Args:
        factors, shifts: float32 [C]; consecutive planes belong to consecutive channels.
        epsilon: addend of the variance, if each plane is first normalised to mean 0 and deviation 1; None = it is not.
    """
    check("x", x, (None, None))
    check("factors", factors, (None,))
    check("shifts", shifts, factors.shape)
    out = np.empty(x.shape, np.float32)
    if x.size:
        program = _program(scale_op(epsilon is not None), *x.shape, len(factors), epsilon or 0.0)
        program.run(threads, x=x, out=out, factors=factors, shifts=shifts)
    return out


class RunningSumsArguments(Arguments):
    """Rows of `width` numbers. Items are groups of rows."""

    x: Address
    out: Address
    rows: int
    width: int


# Rows whose sums are computed side by side, because each addition waits for the one before it.
_SIDE_BY_SIDE = 4


@native_op(RunningSumsArguments)
def add_up(arguments: RunningSumsArguments, context: int, begin: int, end: int, scratch: int) -> int:
    """Write the sum of each number and all numbers before it in its row."""
    last, row_bytes = arguments.rows - 1, 4 * arguments.width
    for item in range(begin, end):
        # The last row may repeat.
        first = item * _SIDE_BY_SIDE
        one, two = first * row_bytes, min(first + 1, last) * row_bytes
        three, four = min(first + 2, last) * row_bytes, min(first + 3, last) * row_bytes
        x, out = arguments.x, arguments.out
        a = b = c = d = np.float32(0.0)
        for at in range(0, row_bytes, 4):
            a, b = a + read_float32(x + one + at), b + read_float32(x + two + at)
            c, d = c + read_float32(x + three + at), d + read_float32(x + four + at)
            write_float32(out + one + at, a)
            write_float32(out + two + at, b)
            write_float32(out + three + at, c)
            write_float32(out + four + at, d)
    return 0


def running_sums(x: Float32, *, threads: Threads | None = None) -> Float32:
    """Return the sum of each number and all numbers before it in its row of x [rows, width], added in order."""
    check("x", x, (None, None))
    out = np.empty(x.shape, np.float32)
    if out.size:
        items, work = Items(factor=-(-len(x) // _SIDE_BY_SIDE)), x.size * _NANOSECONDS_PER_ADDED
        run_alone(add_up, items, work, threads, x=x, out=out, rows=len(x), width=x.shape[1])
    return out


@lru_cache(maxsize=256)
def _program(op: NativeOp, planes: int, size: int, channels: int = 0, epsilon: float = 0.0) -> NodeProgram:
    factors, shifts = (Binding(name) if channels else None for name in ("factors", "shifts"))
    arguments = PlanesArguments(
        x=Binding("x"), out=Binding("out"), factors=factors, shifts=shifts, size=size, channels=channels,
        epsilon=epsilon,
    )  # fmt: skip
    items = Items(factor=planes, grain=max(1, PIECE // size))
    return NodeProgram([[Call(op, arguments, items)]], planes * size * _NANOSECONDS_PER_NUMBER)

"""Conversion of arrays between float16 and float32."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...checks import Float32
from ..jit import memory
from ..jit.arguments import Address, Arguments
from ..jit.native import NativeOp, native_op
from ..jit.vector import LANES
from ..program.bound_program import run_alone
from ..program.calls import Items
from ..program.thread_pool import Threads

_PIECE = 4096
_NANOSECONDS_PER_ELEMENT = 0.1


class HalvesArguments(Arguments):
    """`count` numbers in pieces, which are the items, and the destination for the results."""

    x: Address
    out: Address
    count: int


@native_op(HalvesArguments)
def widen_halves(arguments: HalvesArguments, context: int, begin: int, end: int, scratch: int) -> int:
    """Convert float16 to float32."""
    x, out, count = arguments.x, arguments.out, arguments.count
    for first in range(begin * _PIECE, min(end * _PIECE, count), LANES):
        left = count - first
        memory.store(out + 4 * first, memory.load_halves(x + 2 * first, left), left)
    return 0


@native_op(HalvesArguments)
def narrow_floats(arguments: HalvesArguments, context: int, begin: int, end: int, scratch: int) -> int:
    """Convert float32 to float16, rounded to nearest even."""
    x, out, count = arguments.x, arguments.out, arguments.count
    for first in range(begin * _PIECE, min(end * _PIECE, count), LANES):
        left = count - first
        memory.store_halves(out + 2 * first, memory.load(x + 4 * first, left), left)
    return 0


def from_halves(x: NDArray[np.float16], threads: Threads | None = None, *, out: Float32 | None = None) -> Float32:
    """Return float16 x, of any shape, as float32, in `out` or in a new array."""
    if out is not None and (out.shape != x.shape or out.dtype != np.float32 or not out.flags.c_contiguous):
        raise ValueError(f"out is {out.dtype}{list(out.shape)}, expected contiguous float32{list(x.shape)}")
    return _converted(widen_halves, x, np.float16, np.float32, threads, out)


def to_halves(x: Float32, threads: Threads | None = None) -> NDArray[np.float16]:
    """Return float32 x, of any shape, as float16, rounded to nearest even. Numbers from 65520 on become infinite."""
    return _converted(narrow_floats, x, np.float32, np.float16, threads)


def _converted(
    op: NativeOp, x: NDArray[Any], given: Any, wanted: Any, threads: Threads | None, out: NDArray[Any] | None = None
) -> NDArray[Any]:
    if x.dtype != given:
        raise ValueError(f"x is {x.dtype}, expected {np.dtype(given)}")
    x = np.ascontiguousarray(x).reshape(x.shape)
    out = np.empty(x.shape, wanted) if out is None else out
    if x.size:
        items, nanoseconds = Items(factor=-(-x.size // _PIECE)), x.size * _NANOSECONDS_PER_ELEMENT
        run_alone(op, items, nanoseconds, threads, x=x, out=out, count=x.size)
    return out

"""Bytes looked up in a table of 256."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .jit import native_op
from .memory import read_uint8, word, write_int8
from .tape.program import Call, Hole, Items
from .tape.replay import Crew, Replay

X, TABLE, OUT, COUNT = range(4)
_PIECE = 8192
_NANOSECONDS_PER_BYTE = 0.5
_ENTRIES = 256


@native_op
def look_up_bytes(arguments: int, context: int, begin: int, end: int, scratch: int) -> int:
    """out = table[x]; items are pieces."""
    x, table, out = word(arguments, X), word(arguments, TABLE), word(arguments, OUT)
    last = min(end * _PIECE, word(arguments, COUNT))
    for index in range(begin * _PIECE, last):
        write_int8(out + index, read_uint8(table + np.int64(read_uint8(x + index))))
    return 0


def looked_up(crew: Crew, x: NDArray[Any], table: NDArray[Any]) -> NDArray[Any]:
    """table[x] for bytes x of any shape, in the table's type; int8 values index as the uint8 of the same bits.

    Raises:
        ValueError: a type or the table's shape does not fit.
    """
    if x.dtype.itemsize != 1 or table.dtype.itemsize != 1 or table.shape != (_ENTRIES,):
        raise ValueError(f"x is {x.dtype}, the table {table.dtype} {list(table.shape)}, expected [{_ENTRIES}] bytes")
    x, table = np.ascontiguousarray(x), np.ascontiguousarray(table)
    out = np.empty(x.shape, table.dtype)
    if x.size:
        crew.run(_replay(x.size), {"x": x.ctypes.data, "table": table.ctypes.data, "out": out.ctypes.data})
    return out


@lru_cache(maxsize=512)
def _replay(size: int) -> Replay:
    call = Call(look_up_bytes, (Hole("x"), Hole("table"), Hole("out"), size), Items(factor=-(-size // _PIECE)))
    return Replay([[call]], size * _NANOSECONDS_PER_BYTE)

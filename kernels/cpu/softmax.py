"""Softmax over the last axis of an array."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from .checks import Float32
from .rowwise.softmax import softmax_op
from .tape.program import Call, Hole, Items
from .tape.replay import Crew, Replay

_NANOSECONDS_PER_ELEMENT = 0.5


def softmax_rows(crew: Crew, x: Float32) -> Float32:
    """e ** (x - max) / sum of these along the last axis of float32 x; a row with a NaN, or all -infinity, becomes NaN.

    Raises:
        ValueError: x is of another type, or has no axis.
    """
    if x.dtype != np.float32 or not x.ndim:
        raise ValueError(f"x is {x.dtype} {list(x.shape)}, expected float32 with an axis")
    x = np.ascontiguousarray(x)
    out = np.empty(x.shape, np.float32)
    if x.size:
        addresses = {"x": x.ctypes.data, "out": out.ctypes.data}
        crew.run(_replay(x.size // x.shape[-1], x.shape[-1]), addresses)
    return out


@lru_cache(maxsize=256)
def _replay(rows: int, width: int) -> Replay:
    arguments = (Hole("x"), 4 * width, Hole("out"), 4 * width, 1, width)
    return Replay([[Call(softmax_op, arguments, Items(factor=rows))]], rows * width * _NANOSECONDS_PER_ELEMENT)

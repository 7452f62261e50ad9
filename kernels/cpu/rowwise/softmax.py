"""Softmax of rows or of groups of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..functions import exp
from ..jit import native_op
from ..lazy import inline
from ..memory import keep_first, word
from ..tape.program import Call, Rows
from ..vector import LANES, maximum, reduce_add, reduce_max, splat_float32
from .lanes import load, store
from .layout import check_rows, group_items, group_size

X, X_STRIDE, OUT, OUT_STRIDE, GROUPS, SIZE = range(6)


def softmax(x: Rows, out: Rows, *, groups: int = 1) -> Call:
    """out = e ** (x - max) / sum of these, over every group of a row.

    Args:
        x: rows [T, F]. out: as many of the same width; may be x itself.
        groups: equal parts of a row, each alone.

    Raises:
        ValueError: rows that do not fit, or cannot be cut into such groups.
    """
    check_rows("x", x, out.counted, out.width)
    size = group_size("x", x, groups)
    arguments = (x.address, x.stride, out.address, out.stride, groups, size)
    return Call(softmax_op, arguments, group_items(x, groups), held=(x.held, out.held), label="softmax")


@inline
def _largest(x: int, size: int) -> Any:
    largest = splat_float32(-np.inf)
    for first in range(0, size, LANES):
        left = size - first
        largest = maximum(largest, keep_first(load(x + 4 * first, left), left, -np.inf))
    return reduce_max(largest)


@native_op
def softmax_op(arguments: int, context: int, begin: int, end: int, scratch: int) -> int:
    """Items are groups of rows. A group that is all -infinity, or has a NaN, becomes NaN, as the definition does."""
    groups, size = word(arguments, GROUPS), word(arguments, SIZE)
    for item in range(begin, end):
        row = item // groups
        place = (item - row * groups) * size * 4
        x = word(arguments, X) + row * word(arguments, X_STRIDE) + place
        out = word(arguments, OUT) + row * word(arguments, OUT_STRIDE) + place
        largest = _largest(x, size)
        total = splat_float32(0.0)
        for first in range(0, size, LANES):
            left = size - first
            weight = keep_first(exp(load(x + 4 * first, left) - largest), left, 0.0)
            store(out + 4 * first, weight, left)
            total = total + weight
        scale = reduce_add(total)
        for first in range(0, size, LANES):
            store(out + 4 * first, load(out + 4 * first, size - first) / scale, size - first)
    return 0

"""Sum, mean, maximum or minimum of rows, or of groups of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from ..jit import NativeOp, native_op
from ..memory import keep_first, word, write_float32
from ..tape.program import Call, Rows
from ..vector import LANES, nan_maximum, nan_minimum, reduce_add, reduce_nan_max, reduce_nan_min, splat_float32
from . import functions
from .lanes import load
from .layout import check_rows, group_items, group_size

X, X_STRIDE, OUT, OUT_STRIDE, GROUPS, SIZE = range(6)


@dataclass(frozen=True)
class Reduction:
    """How vectors are combined, then the lanes of one; what to begin with; whether to divide by the count."""

    combine: Callable[..., Any]
    across: Callable[..., Any]
    empty: float
    mean: bool = False


REDUCTIONS = {
    "max": Reduction(nan_maximum, reduce_nan_max, -np.inf),
    "mean": Reduction(functions.add, reduce_add, 0.0, mean=True),
    "min": Reduction(nan_minimum, reduce_nan_min, np.inf),
    "sum": Reduction(functions.add, reduce_add, 0.0),
}


def reduce(function: str, x: Rows, out: Rows, *, groups: int = 1) -> Call:
    """out[:, g] = function of group g of every row of x.

    Args:
        function: a key of REDUCTIONS.
        x: rows [T, F]. out: rows [T, groups], not x.
        groups: equal parts of a row of x.

    Raises:
        ValueError: no such function, rows that do not fit or cannot be cut into such groups.
    """
    if function not in REDUCTIONS:
        raise ValueError(f"no reduction is named {function!r}; there are {', '.join(REDUCTIONS)}")
    size = group_size("x", x, groups)
    check_rows("out", out, x.counted, groups)
    arguments = (x.address, x.stride, out.address, out.stride, groups, size)
    items = group_items(x, groups)
    return Call(reduction_op(function), arguments, items, held=(x.held, out.held), label=f"reduce {function}")


@cache
def reduction_op(name: str) -> NativeOp:
    """The operator of a reduction; items are groups of rows."""
    reduction = REDUCTIONS[name]
    combine, across, empty, mean = reduction.combine, reduction.across, reduction.empty, reduction.mean

    def op(arguments: int, context: int, begin: int, end: int, scratch: int) -> int:
        groups, size = word(arguments, GROUPS), word(arguments, SIZE)
        for item in range(begin, end):
            row = item // groups
            group = item - row * groups
            x = word(arguments, X) + row * word(arguments, X_STRIDE) + group * size * 4
            total = splat_float32(empty)
            for first in range(0, size, LANES):
                left = size - first
                total = combine(total, keep_first(load(x + 4 * first, left), left, empty))
            result = across(total)
            if mean:
                result = result / np.float32(size)
            write_float32(word(arguments, OUT) + row * word(arguments, OUT_STRIDE) + 4 * group, result)
        return 0

    op.__name__ = f"reduce_{name}"
    return native_op(op)

"""RMS norm (Zhang & Sennrich 2019) and layer norm (Ba et al. 2016) of rows or groups of columns, with an optional sum.

Numbers are float32, added up lane by lane. The variance is computed from deviations, in a second pass.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..jit.arguments import Address, Arguments, BoundVector
from ..jit.dsl import inline
from ..jit.memory import keep_first, load, store
from ..jit.native import NativeOp, native_op
from ..jit.variants import once
from ..jit.vector import LANES, reduce_add, splat_float32
from ..program.calls import NO_ROWS, Call, Rows, check_rows, check_vector, group_items, row_at


class NormArguments(Arguments):
    """Rows and vectors; an address of 0 means absent.

    Attributes:
        vector_step: bytes between the parts of weight and shift for consecutive groups.
    """

    x: Rows
    skip: Rows
    input_bias: Address
    total: Rows
    out: Rows
    weight: Address
    shift: Address
    vector_step: int
    groups: int
    size: int
    epsilon: float


Scales = NDArray[np.float32] | BoundVector
_NOWHERE = 0


def norm(
    x: Rows, weight: Scales, epsilon: float, out: Rows | None, *, centred: bool = False, bias: Scales | None = None,
    groups: int = 1, skip: Rows | None = None, input_bias: Scales | None = None, total: Rows | None = None,
) -> Call:  # fmt: skip
    """Return a call that computes out = s / sqrt(mean(s ** 2) + epsilon) * weight + bias, s = x + skip + input_bias.

    Each of out and total may be x or skip, but out and total must differ.

    Args:
        x: rows [T, F].
        skip: rows [T, F], or None.
        input_bias: float32 [F], or None.
        weight, bias: float32 [F / groups], the same for every group, or [F].
        out: rows [T, F], or None if only the sum is needed.
        total: rows [T, F] that receive s, or None.
        centred: True for layer norm, which first subtracts the mean.
        groups: number of equal parts of a row (such as the heads of q or k), each of which is normalised separately.
    """
    if out is None and total is None:
        raise ValueError("out and total are both None, expected at least one result")
    if total is not None and out is not None and total.address == out.address:
        raise ValueError("out and total are the same rows, expected different rows")
    if groups < 1 or x.width < groups or x.width % groups:
        raise ValueError(f"x is [{x.counted.name}, {x.width}], which cannot be divided into {groups} equal groups")
    size = x.width // groups
    check_vector("weight", weight, (size, x.width))
    if bias is not None:
        check_vector("bias", bias, (weight.size,))
    if input_bias is not None:
        check_vector("input_bias", input_bias, (x.width,))
    for name, rows in (("skip", skip), ("total", total), ("out", out)):
        if rows is not None:
            check_rows(name, rows, x.counted, x.width)
    arguments = NormArguments(
        x=x, skip=skip or NO_ROWS, input_bias=input_bias, total=total or NO_ROWS, out=out or NO_ROWS, weight=weight,
        shift=bias, vector_step=4 * size if weight.size > size else 0, groups=groups, size=size, epsilon=epsilon,
    )  # fmt: skip
    op = norm_op(centred, skip is not None or input_bias is not None or total is not None)
    return Call(op, arguments, group_items(x, groups))


@inline
def _add(x: int, skip: int, bias: int, size: int, total: int) -> None:
    for first in range(0, size, LANES):
        left = size - first
        value = load(x + 4 * first, left)
        if skip != _NOWHERE:
            value = value + load(skip + 4 * first, left)
        if bias != _NOWHERE:
            value = value + load(bias + 4 * first, left)
        store(total + 4 * first, value, left)


@inline
def _mean(x: int, size: int) -> Any:
    total = splat_float32(0.0)
    for first in range(0, size, LANES):
        total = total + load(x + 4 * first, size - first)
    return reduce_add(total) / np.float32(size)


@inline
def _variance(x: int, size: int, mean: float) -> Any:
    """Return the mean square of the deviations from a mean."""
    total = splat_float32(0.0)
    for first in range(0, size, LANES):
        left = size - first
        deviation = keep_first(load(x + 4 * first, left) - mean, left, np.float32(0.0))
        total = total + deviation * deviation
    return reduce_add(total) / np.float32(size)


@inline
def _write(x: int, size: int, mean: float, inverse: float, weight: int, shift: int, out: int) -> None:
    for first in range(0, size, LANES):
        left = size - first
        value = (load(x + 4 * first, left) - mean) * inverse * load(weight + 4 * first, left)
        if shift != _NOWHERE:
            value = value + load(shift + 4 * first, left)
        store(out + 4 * first, value, left)


@once
def norm_op(centred: bool, summed: bool) -> NativeOp:
    """Return the operator. Items are the groups of each row. With `summed`, it also adds inputs and writes the sum."""

    def op(arguments: NormArguments, context: int, begin: int, end: int, scratch: int) -> int:
        groups, size = arguments.groups, arguments.size
        step = arguments.vector_step
        for item in range(begin, end):
            row = item // groups
            group = item - row * groups
            offset = 4 * size * group
            x, out = row_at(arguments.x, row) + offset, arguments.out.address
            if out != _NOWHERE:
                out = row_at(arguments.out, row) + offset
            if summed:
                skip, bias, total = arguments.skip.address, arguments.input_bias, arguments.total.address
                if skip != _NOWHERE:
                    skip = row_at(arguments.skip, row) + offset
                if bias != _NOWHERE:
                    bias += offset
                # Without separate memory, the sum is written to the memory of the result.
                total = out if total == _NOWHERE else row_at(arguments.total, row) + offset
                _add(x, skip, bias, size, total)
                x = total
            if out != _NOWHERE:
                mean = _mean(x, size) if centred else np.float32(0.0)
                inverse = np.float32(1.0) / np.sqrt(_variance(x, size, mean) + arguments.epsilon)
                weight, shift = arguments.weight + group * step, arguments.shift
                if shift != _NOWHERE:
                    shift += group * step
                _write(x, size, mean, inverse, weight, shift, out)
        return 0

    return native_op(NormArguments, name=("layer_norm" if centred else "rms_norm") + ("_of_sum" if summed else ""))(op)

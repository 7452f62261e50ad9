"""RMS norm (Zhang & Sennrich 2019) and layer norm (Ba et al. 2016) of rows or of groups of them, alone or of a sum.

Numbers are float32, added up lane by lane; the variance is computed from deviations, in a second pass.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..jit import NativeOp, native_op
from ..lazy import inline
from ..memory import float_word, keep_first, word
from ..tape.program import Call, Rows
from ..vector import LANES, reduce_add, splat_float32
from .lanes import load, store
from .layout import check_rows, check_vector, group_items, group_size

(
    X, X_STRIDE, SKIP, SKIP_STRIDE, INPUT_BIAS, TOTAL, TOTAL_STRIDE, OUT, OUT_STRIDE, WEIGHT, SHIFT, VECTOR_STEP,
    GROUPS, SIZE, EPSILON,
) = range(15)  # fmt: skip

Vector = NDArray[np.float32]
_NOWHERE = 0


def rms_norm(
    x: Rows,
    weight: Vector,
    epsilon: float,
    out: Rows | None,
    *,
    groups: int = 1,
    skip: Rows | None = None,
    input_bias: Vector | None = None,
    total: Rows | None = None,
) -> Call:
    """out = s / sqrt(mean(s ** 2) + epsilon) * weight, where s = x + skip + input_bias.

    Args:
        x: rows [T, F]. skip, input_bias: [T, F] and float32 [F], or None.
        weight: float32 [F / groups], the same for every group, or [F].
        out: [T, F], or None if only the sum is wanted. total: [T, F] that gets s, or None.
        groups: equal parts of a row (the heads of q or k), each normalised alone.
        Any of out and total may be x or skip, but not both the same.

    Raises:
        ValueError: a shape or type does not fit, or nothing is to be written.
    """
    return _norm(False, x, weight, None, epsilon, out, groups, skip, input_bias, total)


def layer_norm(
    x: Rows,
    weight: Vector,
    bias: Vector | None,
    epsilon: float,
    out: Rows | None,
    *,
    groups: int = 1,
    skip: Rows | None = None,
    input_bias: Vector | None = None,
    total: Rows | None = None,
) -> Call:
    """out = (s - mean) / sqrt(variance + epsilon) * weight + bias; otherwise as `rms_norm`; bias is as weight."""
    return _norm(True, x, weight, bias, epsilon, out, groups, skip, input_bias, total)


def _norm(
    centred: bool, x: Rows, weight: Vector, shift: Vector | None, epsilon: float, out: Rows | None, groups: int,
    skip: Rows | None, input_bias: Vector | None, total: Rows | None,
) -> Call:  # fmt: skip
    if out is None and total is None:
        raise ValueError("neither the normalised rows nor the sum are wanted: out and total are None")
    if total is not None and out is not None and total.address == out.address:
        raise ValueError("out and total are the same rows")
    size = group_size("x", x, groups)
    check_vector("weight", weight, (size, x.width))
    if shift is not None:
        check_vector("bias", shift, (weight.size,))
    if input_bias is not None:
        check_vector("input_bias", input_bias, (x.width,))
    for name, rows in (("skip", skip), ("total", total), ("out", out)):
        if rows is not None:
            check_rows(name, rows, x.counted, x.width)
    arguments = (
        x.address, x.stride, *_place(skip), _address(input_bias), *_place(total), *_place(out), _address(weight),
        _address(shift), 4 * size if weight.size > size else 0, groups, size, float(epsilon),
    )  # fmt: skip
    held = (weight, shift, input_bias, *(rows.held for rows in (x, skip, total, out) if rows is not None))
    op = norm_op(centred, skip is not None or input_bias is not None or total is not None)
    return Call(op, arguments, group_items(x, groups), held=held, label=op.name)


def _place(rows: Rows | None) -> tuple[int, int]:
    return (_NOWHERE, 0) if rows is None else (rows.address, rows.stride)


def _address(vector: Vector | None) -> int:
    return _NOWHERE if vector is None else int(vector.ctypes.data)


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
    """The mean square of the deviations from a mean."""
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


@cache
def norm_op(centred: bool, summed: bool) -> NativeOp:
    """The operator; items are groups of rows. Only that of sums can add and write the sum."""

    def op(arguments: int, context: int, begin: int, end: int, scratch: int) -> int:
        groups, size = word(arguments, GROUPS), word(arguments, SIZE)
        step = word(arguments, VECTOR_STEP)
        for item in range(begin, end):
            row = item // groups
            group = item - row * groups
            place = 4 * size * group
            x = word(arguments, X) + row * word(arguments, X_STRIDE) + place
            out = word(arguments, OUT)
            if out != _NOWHERE:
                out += row * word(arguments, OUT_STRIDE) + place
            if summed:
                skip, bias, total = word(arguments, SKIP), word(arguments, INPUT_BIAS), word(arguments, TOTAL)
                if skip != _NOWHERE:
                    skip += row * word(arguments, SKIP_STRIDE) + place
                if bias != _NOWHERE:
                    bias += place
                # Without a place of its own the sum goes where the result will be.
                total = out if total == _NOWHERE else total + row * word(arguments, TOTAL_STRIDE) + place
                _add(x, skip, bias, size, total)
                x = total
            if out != _NOWHERE:
                mean = _mean(x, size) if centred else np.float32(0.0)
                inverse = np.float32(1.0) / np.sqrt(_variance(x, size, mean) + float_word(arguments, EPSILON))
                weight, shift = word(arguments, WEIGHT) + group * step, word(arguments, SHIFT)
                if shift != _NOWHERE:
                    shift += group * step
                _write(x, size, mean, inverse, weight, shift, out)
        return 0

    op.__name__ = ("layer_norm" if centred else "rms_norm") + ("_of_sum" if summed else "")
    return native_op(op)

"""Operators that reduce or normalise along axes, and NegativeLogLikelihoodLoss."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from genai.kernels.cpu.arrays import planes
from genai.kernels.cpu.arrays.copying import contiguous
from genai.kernels.cpu.arrays.functions import softmax_columns, softmax_rows
from genai.kernels.cpu.arrays.linear_models import extremes
from genai.kernels.cpu.program.thread_pool import Threads

from .registry import KernelError, NodeSpec, operator, scalar
from .support import axes_of, checked_axis, checked_indices, session_threads, widened

Reduction = Callable[..., Any]


def extreme(dtype: Any, *, lowest: bool) -> Any:
    """Return the identity of max (of min if lowest=False), which is the result for an empty input."""
    if dtype.kind == "b":
        return not lowest
    if dtype.kind in "iu":
        return np.iinfo(dtype).min if lowest else np.iinfo(dtype).max
    return dtype.type(-np.inf if lowest else np.inf)


def _log_sum_exp(x: Any, **how: Any) -> Any:
    """Subtract the max before exp, so that exp does not overflow."""
    if x.size == 0:
        return np.log(np.sum(np.exp(x), **how))
    largest = np.max(x, axis=how["axis"], keepdims=True)
    largest = np.where(np.isfinite(largest), largest, 0).astype(x.dtype)
    total = np.log(np.sum(np.exp(x - largest), **how))
    return total + (largest if how["keepdims"] else np.squeeze(largest, axis=how["axis"]))


_REDUCTIONS: dict[str, Reduction] = {
    "ReduceL1": lambda x, **how: np.sum(np.abs(x), **how),
    "ReduceL2": lambda x, **how: np.sqrt(np.sum(np.square(x), **how)),
    "ReduceLogSum": lambda x, **how: np.log(np.sum(x, **how)),
    "ReduceLogSumExp": _log_sum_exp,
    "ReduceMax": lambda x, **how: np.max(x, initial=extreme(x.dtype, lowest=True), **how),
    "ReduceMean": lambda x, **how: np.mean(x, **how) if x.size else np.sum(x, **how),
    "ReduceMin": lambda x, **how: np.min(x, initial=extreme(x.dtype, lowest=False), **how),
    "ReduceProd": np.prod,
    "ReduceSum": np.sum,
    "ReduceSumSquare": lambda x, **how: np.sum(np.square(x), **how),
}


# The reductions over the last axes that are compiled for float32.
COMPILED: dict[str, planes.Reduction] = {
    "ReduceL2": "norm",
    "ReduceMax": "max",
    "ReduceMean": "mean",
    "ReduceMin": "min",
    "ReduceSum": "sum",
    "ReduceSumSquare": "squares",
}


def _reduction(name: str, function: Reduction) -> Reduction:

    def reduced(
        x: Any, axes_input: Any = None, *, axes: tuple[int, ...] | None = None, keepdims: bool = True,
        noop_with_empty_axes: bool = False, threads: Threads | None,
    ) -> Any:  # fmt: skip
        # Without axes to reduce, the element-wise part of the function (such as a square) still applies.
        axis = axes_of(axes_input, axes) or (() if noop_with_empty_axes else None)
        if name in COMPILED and threads is not None and is_compiled(x):
            first = _first_of_last(axis, x.ndim)
            if first is not None:
                return over_last_axes(name, x, first, keepdims=keepdims, threads=threads)
        return np.asarray(function(widened(x), axis=axis, keepdims=keepdims)).astype(x.dtype, copy=False)

    return reduced


def _first_of_last(axis: tuple[int, ...] | None, rank: int) -> int | None:
    """Return the first of these axes if they are the last axes of a value of this rank, otherwise None."""
    if axis is None:
        return 0
    if not axis or min(axis) < -rank or max(axis) >= rank:
        return None
    found = {index % rank for index in axis}
    first = min(found)
    return first if len(found) == len(axis) == rank - first else None


def is_compiled(x: Any) -> bool:
    """Return True if compiled reductions support the value: float32 in C order, with elements."""
    return bool(x.dtype == np.float32 and x.size and x.flags.c_contiguous)


def over_last_axes(name: str, x: Any, first: int, *, keepdims: bool, threads: Threads | None) -> Any:
    """Reduce the axes from `first` on by an operator of COMPILED; x must be as `is_compiled` requires."""
    outer = x.shape[:first]
    found = planes.reduced(COMPILED[name], x.reshape(math.prod(outer), -1), threads=threads)
    return found.reshape(outer + (1,) * (x.ndim - first) * keepdims)


for _name, _function in _REDUCTIONS.items():
    operator(_name, threads=session_threads)(_reduction(_name, _function))


# For wider rows, NumPy compares several numbers at once, which takes less time than the compiled function.
_FEW = 256


def _arg(function: Reduction, *, least: bool) -> Reduction:
    def arg(
        x: Any, *, axis: int = 0, keepdims: bool = True, select_last_index: bool = False, spec: NodeSpec,
        threads: Threads | None,
    ) -> Any:  # fmt: skip
        if axis in (-1, x.ndim - 1) and not select_last_index and x.ndim and x.shape[-1] <= _FEW and is_compiled(x):
            found = extremes(x.reshape(-1, x.shape[-1]), least=least, threads=threads)
            return found.reshape(x.shape[:-1] + (1,) * keepdims)
        if x.size == 0 and x.shape[axis] == 0:
            shape = np.any(x, axis=axis, keepdims=keepdims).shape
            if 0 not in shape:
                raise KernelError(f"{spec.op_type}: axis {axis} of an input of shape {list(x.shape)} has no elements")
            return np.zeros(shape, np.int64)
        if select_last_index:
            positions = x.shape[axis] - 1 - function(np.flip(x, axis), axis=axis, keepdims=keepdims)
        else:
            positions = function(x, axis=axis, keepdims=keepdims)
        return np.asarray(positions, np.int64)

    return arg


operator("ArgMax")(_arg(np.argmax, least=False))
operator("ArgMin")(_arg(np.argmin, least=True))


def _cumulative(function: Reduction, neutral: int) -> Reduction:
    def cumulated(x: Any, axis: Any, *, exclusive: bool = False, reverse: bool = False) -> Any:
        along, step = checked_axis(int(scalar(axis)), x.ndim), -1 if reverse else 1
        moved = np.moveaxis(x, along, 0)[::step]
        result = function(moved, axis=0, dtype=x.dtype)
        if exclusive:
            result = np.concatenate([np.full_like(moved[:1], neutral), result[:-1]])
        return np.ascontiguousarray(np.moveaxis(result[::step], 0, along))

    return cumulated


_sums_in_numpy = _cumulative(np.cumsum, 0)


@operator("CumSum", since_version=11, threads=session_threads)
def cumulative_sum(
    x: Any, axis: Any, *, exclusive: bool = False, reverse: bool = False, threads: Threads | None
) -> Any:
    """Return the sums of each element and the elements before it; compiled for the last axis of float32."""
    if threads is not None and not exclusive and not reverse and is_compiled(x):
        along = checked_axis(int(scalar(axis)), x.ndim)
        if along == x.ndim - 1:
            return planes.running_sums(x.reshape(-1, x.shape[along]), threads=threads).reshape(x.shape)
    return _sums_in_numpy(x, axis, exclusive=exclusive, reverse=reverse)


operator("CumProd", since_version=26)(_cumulative(np.cumprod, 1))


def softmax(x: Any, axis: Any) -> Any:
    """exp(x - max) / sum; rows that are all -inf give NaN, as ONNX defines."""
    weights = np.subtract(x, np.max(x, axis=axis, keepdims=True))
    np.exp(weights, out=weights)
    weights /= np.sum(weights, axis=axis, keepdims=True)
    return weights


def _log_softmax(x: Any, axis: Any) -> Any:
    shifted = x - np.max(x, axis=axis, keepdims=True)
    return shifted - np.log(np.sum(np.exp(shifted), axis=axis, keepdims=True))


def _hardmax(x: Any, axis: Any) -> Any:
    if isinstance(axis, int):
        first = np.expand_dims(np.argmax(x, axis=axis), axis)
        result = np.zeros_like(x)
        np.put_along_axis(result, first, 1, axis=axis)
        return result
    flat = x.reshape(*x.shape[: axis[0]], -1) if axis else x
    return _hardmax(flat, -1).reshape(x.shape)


def _along_axis(function: Reduction) -> Reduction:
    """Apply a function along one axis, as defined since operator set 13."""

    def weights(x: Any, *, axis: int = -1, threads: Threads | None) -> Any:
        if x.size == 0:
            return x
        along = checked_axis(axis, x.ndim)
        if function is not _hardmax and threads is not None and x.dtype == np.float32:
            logarithm, inner = function is _log_softmax, math.prod(x.shape[along + 1 :])
            if along == x.ndim - 1:
                return softmax_rows(threads, x, logarithm=logarithm)
            matrices = contiguous(x).reshape(-1, x.shape[along], inner)
            return softmax_columns(threads, matrices, logarithm=logarithm).reshape(x.shape)
        return function(x if x.dtype == np.float16 else widened(x), along).astype(x.dtype, copy=False)

    return weights


def _from_axis(function: Reduction) -> Reduction:
    """Apply a function over `axis` and all axes after it, as defined before operator set 13."""

    def weights(x: Any, *, axis: int = 1, threads: Threads | None) -> Any:
        if x.size == 0:
            return x
        first = x.ndim if axis == x.ndim else checked_axis(axis, x.ndim)
        if function is not _hardmax and threads is not None and x.dtype == np.float32:
            rows = contiguous(x).reshape(math.prod(x.shape[:first]), -1)
            return softmax_rows(threads, rows, logarithm=function is _log_softmax).reshape(x.shape)
        return function(widened(x), tuple(range(first, x.ndim))).astype(x.dtype, copy=False)

    return weights


for _name, _function in {"Softmax": softmax, "LogSoftmax": _log_softmax, "Hardmax": _hardmax}.items():
    operator(_name, since_version=13, threads=session_threads)(_along_axis(_function))
    operator(_name, threads=session_threads)(_from_axis(_function))


@operator("NegativeLogLikelihoodLoss", since_version=12)
def negative_log_likelihood_loss(
    scores: Any, target: Any, weight: Any = None, *, reduction: Literal["none", "sum", "mean"] = "mean",
    ignore_index: int | None = None,
) -> Any:  # fmt: skip
    """-x at the target's class, times the class's weight; targets equal to ignore_index are ignored."""
    x = widened(scores)
    if x.ndim < 2 or target.shape != (len(x), *x.shape[2:]):
        raise KernelError(
            f"NegativeLogLikelihoodLoss: targets of shape {list(target.shape)} do not match scores of shape "
            f"{list(x.shape)}"
        )
    counts = np.ones(target.shape, bool) if ignore_index is None else target != ignore_index
    classes = np.where(counts, target, 0).astype(np.int64)
    checked_indices("NegativeLogLikelihoodLoss: targets", classes, x.shape[1])
    shares = counts.astype(x.dtype) if weight is None else np.where(counts, widened(weight)[classes], 0)
    losses = np.where(counts, -np.take_along_axis(x, classes[:, None], axis=1)[:, 0], 0) * shares
    if reduction != "none":
        losses = losses.sum() / shares.sum() if reduction == "mean" else losses.sum()
    return np.asarray(losses).astype(scores.dtype, copy=False)

"""Operators that reduce or normalise along axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..cpu.softmax import softmax_rows
from ..registry import Kernel, NodeSpec, register, scalar
from .support import axes_of, checked_axis, widened

Function = Callable[..., Any]


def _largest(x: Any, **how: Any) -> Any:
    return np.max(x, initial=_extreme(x.dtype, lowest=True), **how)


def _smallest(x: Any, **how: Any) -> Any:
    return np.min(x, initial=_extreme(x.dtype, lowest=False), **how)


def _extreme(dtype: Any, *, lowest: bool) -> Any:
    """What the maximum (or minimum) of nothing is."""
    if dtype.kind == "b":
        return not lowest
    if dtype.kind in "iu":
        return np.iinfo(dtype).min if lowest else np.iinfo(dtype).max
    return dtype.type(-np.inf if lowest else np.inf)


def _log_sum_exp(x: Any, **how: Any) -> Any:
    """Shifted by the largest element, so that nothing overflows."""
    if x.size == 0:
        return np.log(np.sum(np.exp(x), **how))
    largest = np.max(x, axis=how["axis"], keepdims=True)
    largest = np.where(np.isfinite(largest), largest, 0).astype(x.dtype)
    total = np.log(np.sum(np.exp(x - largest), **how))
    return total + (largest if how["keepdims"] else np.squeeze(largest, axis=how["axis"]))


_REDUCTIONS: dict[str, Function] = {
    "ReduceL1": lambda x, **how: np.sum(np.abs(x), **how),
    "ReduceL2": lambda x, **how: np.sqrt(np.sum(np.square(x), **how)),
    "ReduceLogSum": lambda x, **how: np.log(np.sum(x, **how)),
    "ReduceLogSumExp": _log_sum_exp,
    "ReduceMax": _largest,
    "ReduceMean": np.mean,
    "ReduceMin": _smallest,
    "ReduceProd": np.prod,
    "ReduceSum": np.sum,
    "ReduceSumSquare": lambda x, **how: np.sum(np.square(x), **how),
}


def _reduction(function: Function) -> Callable[[NodeSpec], Kernel]:
    def factory(spec: NodeSpec) -> Kernel:
        keepdims = bool(spec.attributes.get("keepdims", 1))
        empty_is_noop = bool(spec.attributes.get("noop_with_empty_axes", 0))

        def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
            x = inputs[0]
            axes = axes_of(spec, inputs)
            if not axes and empty_is_noop:
                # Nothing is reduced, but what is done to each element is.
                axis: tuple[int, ...] | None = ()
            else:
                axis = axes or None
            return (np.asarray(function(widened(x), axis=axis, keepdims=keepdims)).astype(x.dtype, copy=False),)

        return kernel

    return factory


for _name, _function in _REDUCTIONS.items():
    register(_name)(_reduction(_function))


def _arg(function: Function) -> Callable[[NodeSpec], Kernel]:
    def factory(spec: NodeSpec) -> Kernel:
        axis, keepdims = int(spec.attributes.get("axis", 0)), bool(spec.attributes.get("keepdims", 1))
        select_last = bool(spec.attributes.get("select_last_index", 0))

        def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
            x = inputs[0]
            if select_last:
                found = x.shape[axis] - 1 - function(np.flip(x, axis), axis=axis, keepdims=keepdims)
            else:
                found = function(x, axis=axis, keepdims=keepdims)
            return (np.asarray(found, np.int64),)

        return kernel

    return factory


register("ArgMax")(_arg(np.argmax))
register("ArgMin")(_arg(np.argmin))


def _cumulative(function: Function, neutral: int) -> Callable[[NodeSpec], Kernel]:
    def factory(spec: NodeSpec) -> Kernel:
        exclusive, reverse = bool(spec.attributes.get("exclusive", 0)), bool(spec.attributes.get("reverse", 0))

        def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
            x, axis = inputs[0], checked_axis(int(scalar(inputs[1])), inputs[0].ndim)
            moved = np.moveaxis(x, axis, 0)[:: -1 if reverse else 1]
            result = function(moved, axis=0, dtype=x.dtype)
            if exclusive:
                first = np.full_like(moved[:1], neutral)
                result = np.concatenate([first, result[:-1]])
            return (np.ascontiguousarray(np.moveaxis(result[:: -1 if reverse else 1], 0, axis)),)

        return kernel

    return factory


register("CumSum", since_version=11)(_cumulative(np.cumsum, 0))
register("CumProd", since_version=26)(_cumulative(np.cumprod, 1))


def _softmax(x: Any, axis: Any) -> Any:
    """exp(x - max) / sum; rows that are all -inf give NaN, as the definition does."""
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


def _along_axis(function: Function) -> Callable[[NodeSpec], Kernel]:
    """Since operator set 13: along one axis."""

    def factory(spec: NodeSpec) -> Kernel:
        axis, crew = int(spec.attributes.get("axis", -1)), spec.options.get("crew")

        def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
            x = inputs[0]
            if x.size == 0:
                return (x,)
            is_last = checked_axis(axis, x.ndim) == x.ndim - 1
            if function is _softmax and crew is not None and is_last and x.dtype == np.float32:
                return (softmax_rows(crew, x),)
            wide = x if x.dtype == np.float16 else widened(x)
            return (function(wide, checked_axis(axis, x.ndim)).astype(x.dtype, copy=False),)

        return kernel

    return factory


def _from_axis(function: Function) -> Callable[[NodeSpec], Kernel]:
    """Before: over all axes from one on."""

    def factory(spec: NodeSpec) -> Kernel:
        axis = int(spec.attributes.get("axis", 1))

        def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
            x = inputs[0]
            if x.size == 0:
                return (x,)
            first = x.ndim if axis == x.ndim else checked_axis(axis, x.ndim)
            return (function(widened(x), tuple(range(first, x.ndim))).astype(x.dtype, copy=False),)

        return kernel

    return factory


for _name, _function in {"Softmax": _softmax, "LogSoftmax": _log_softmax, "Hardmax": _hardmax}.items():
    register(_name, since_version=13)(_along_axis(_function))
    register(_name)(_from_axis(_function))

"""Operators that reduce or normalise along axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..registry import Kernel, NodeSpec, register

_REDUCTIONS: dict[str, Callable[..., Any]] = {
    "ReduceMax": np.max,
    "ReduceMean": np.mean,
    "ReduceMin": np.min,
    "ReduceProd": np.prod,
    "ReduceSum": np.sum,
}


def _reduction(function: Callable[..., Any]) -> Callable[[NodeSpec], Kernel]:
    def factory(spec: NodeSpec) -> Kernel:
        keepdims = bool(spec.attributes.get("keepdims", 1))
        empty_is_noop = bool(spec.attributes.get("noop_with_empty_axes", 0))

        def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
            x = inputs[0]
            axes = inputs[1] if len(inputs) > 1 and inputs[1] is not None else spec.attributes.get("axes", ())
            axis = tuple(int(a) for a in axes) or None
            if axis is None and empty_is_noop:
                return (x,)
            return (np.asarray(function(x, axis=axis, keepdims=keepdims)).astype(x.dtype, copy=False),)

        return kernel

    return factory


for _name, _function in _REDUCTIONS.items():
    register(_name)(_reduction(_function))


@register("Softmax", since_version=13)
def softmax(spec: NodeSpec) -> Kernel:
    """exp(x - max) / sum along one axis; rows that are all -inf give NaN, as the definition does."""
    axis = int(spec.attributes.get("axis", -1))

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x = inputs[0]
        weights = np.exp(x - np.max(x, axis=axis, keepdims=True))
        return (weights / np.sum(weights, axis=axis, keepdims=True),)

    return kernel

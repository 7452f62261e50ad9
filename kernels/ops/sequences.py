"""Sequences (Python lists) and optionals (a value or None)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..registry import Kernel, KernelError, NodeSpec, register, scalar
from .support import checked_axis, from_function, optional


def _position(values: list[Any], index: Any, *, end: int = 0) -> int:
    """An index into a list, negative ones from the end; `end` 1 allows the place behind the last element."""
    position = int(scalar(index))
    if not -len(values) <= position < len(values) + end:
        raise IndexError(f"position {position} is outside a sequence of {len(values)}")
    return position


def _at(values: list[Any], index: Any) -> Any:
    return values[_position(values, index)]


def _erase(values: list[Any], index: Any = None) -> list[Any]:
    rest = list(values)
    del rest[-1 if index is None else _position(values, index)]
    return rest


def _insert(values: list[Any], value: Any, index: Any = None) -> list[Any]:
    longer = list(values)
    longer.insert(len(values) if index is None else _position(values, index, end=1), value)
    return longer


register("SequenceAt", since_version=11)(from_function(_at))
register("SequenceConstruct", since_version=11)(from_function(lambda *values: list(values)))
register("SequenceEmpty", since_version=11)(from_function(list))
register("SequenceErase", since_version=11)(from_function(_erase))
register("SequenceInsert", since_version=11)(from_function(_insert))
register("SequenceLength", since_version=11)(from_function(lambda values: np.asarray(len(values), np.int64)))
register("OptionalGetElement", since_version=15)(from_function(lambda value: _present(value)))
register("OptionalHasElement", since_version=15)(from_function(lambda value=None: np.asarray(value is not None)))
register("Optional", since_version=15)(from_function(lambda value=None: value))


def _present(value: Any) -> Any:
    if value is None:
        raise KernelError("OptionalGetElement: the optional is empty")
    return value


@register("ConcatFromSequence", since_version=11)
def concat_from_sequence(spec: NodeSpec) -> Kernel:
    """Join the elements along an axis, or along a new one."""
    axis, new_axis = int(spec.attributes["axis"]), bool(spec.attributes.get("new_axis", 0))

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        return (np.stack(inputs[0], axis=axis) if new_axis else np.concatenate(inputs[0], axis=axis),)

    return kernel


@register("SplitToSequence", since_version=11)
def split_to_sequence(spec: NodeSpec) -> Kernel:
    """Cut into pieces of given sizes, of one size, or into single slices (whose axis may be dropped)."""
    axis, keepdims = int(spec.attributes.get("axis", 0)), bool(spec.attributes.get("keepdims", 1))

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x, sizes = inputs[0], optional(inputs, 1)
        along = checked_axis(axis, x.ndim)
        extent = x.shape[along]
        if sizes is None:
            pieces = np.split(x, range(1, extent), axis=along) if extent else []
            return (pieces if keepdims else [np.squeeze(piece, axis=along) for piece in pieces],)
        if np.ndim(sizes) == 0:
            size = int(sizes)
            if size < 1:
                raise KernelError(f"SplitToSequence: pieces of size {size}")
            ends = range(size, extent, size)
        else:
            if int(np.sum(sizes)) != extent or np.any(np.asarray(sizes) < 0):
                raise KernelError(f"SplitToSequence: sizes {np.asarray(sizes).tolist()} do not add up to {extent}")
            ends = np.cumsum(sizes)[:-1].tolist()
        return (np.split(x, ends, axis=along),)

    return kernel

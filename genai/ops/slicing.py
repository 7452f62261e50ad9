"""Parts of axes: Slice, Split, and the rows whose logits are wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from ..onnx.types import Dim, TensorType, Type
from .registry import KernelError, NodeSpec, operator
from .reshaping import MAX_RANK
from .shape_rules import NodeTypes, shape_rule

_MAX_INT32 = 2**31 - 1
_MAX_INDEX = 2**62


@operator("Split", since_version=2)
def split(x: Any, sizes_input: Any = None, *, axis: int = 0, split: Any = None, spec: NodeSpec) -> Any:
    """Cut along an axis into given sizes, or into equal chunks of which the last may be smaller."""
    sizes, count, extent = split if sizes_input is None else sizes_input, len(spec.outputs), x.shape[axis]
    if sizes is None:
        chunk = -(-extent // count)
        ends = [min(i * chunk, extent) for i in range(count)] + [extent]
    else:
        parts = np.asarray(sizes).tolist()
        if len(parts) != count or sum(parts) != extent or min(parts, default=0) < 0:
            raise KernelError(f"Split: sizes {parts} do not cut axis {axis} of {list(x.shape)}")
        ends = list(accumulate(parts, initial=0))
    before = (slice(None),) * (axis % x.ndim)
    return tuple([x[(*before, slice(first, last))] for first, last in pairwise(ends)])


@operator("Slice", since_version=10)
def slice_(x: Any, starts: Any, ends: Any, axes: Any = None, steps: Any = None) -> Any:
    """Starts, ends, axes and steps as inputs; out-of-range ends clamp as in NumPy."""
    axes = range(len(starts)) if axes is None else axes
    steps = [1] * len(starts) if steps is None else steps
    index = [slice(None)] * x.ndim
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        extent = x.shape[int(axis)]
        # Stepping backwards to before the first element has no integer end in Python: it is None. It begins at the
        # first element at the earliest, where Python would begin before it.
        stop = None if step < 0 and int(end) < -extent else int(end)
        first = max(int(start), -extent) if step < 0 else int(start)
        index[int(axis)] = slice(first, stop, int(step))
    return x[tuple(index)]


@operator("Slice")
def slice_by_attributes(x: Any, *, starts: Any, ends: Any, axes: Any = None) -> Any:
    """Starts, ends and axes as attributes, before operator set 10."""
    return slice_(x, starts, ends, axes or None)


@shape_rule("Slice", domain="")
def slice_types(types: NodeTypes) -> list[Type | None]:
    """Part of some axes; the others stay."""
    source = types.tensor(0)
    if source is None or source.shape is None:
        return [] if source is None else [TensorType(source.dtype)]
    starts, ends = _dims_of(types, "starts", 1), _dims_of(types, "ends", 2)
    steps = _dims_of(types, "steps", 4) if types.node.input(4) else (1,) * MAX_RANK
    axes = _sliced_axes(types, starts, len(source.shape))
    if axes is None:
        return [TensorType(source.dtype, (None,) * len(source.shape))]
    shape = list(source.shape)
    for position, axis in enumerate(axes):
        shape[axis] = _sliced(shape[axis], _item(starts, position), _item(ends, position), _item(steps, position))
    return [TensorType(source.dtype, tuple(shape))]


@shape_rule("Split", domain="")
def split_types(types: NodeTypes) -> list[Type | None]:
    """Parts of given sizes along an axis, or of equal size with a smaller last one."""
    source, count = types.source, len(types.node.outputs)
    axis = types.attribute("axis", 0)
    if source.shape is None or not -len(source.shape) <= axis < len(source.shape):
        return [TensorType(source.dtype)] * count
    axis %= len(source.shape)
    sizes = _split_sizes(types, source.shape[axis], count)
    return [replace(source, shape=(*source.shape[:axis], size, *source.shape[axis + 1 :])) for size in sizes]


def _split_sizes(types: NodeTypes, extent: Dim, count: int) -> list[Dim]:
    attribute = types.node.attribute("split")
    constant = types.constant(1)
    sizes = attribute if attribute is not None else None if constant is None else constant.reshape(-1).tolist()
    if sizes is not None:
        return list(sizes) if len(sizes) == count else [None] * count
    if not isinstance(extent, int) or types.node.input(1):
        return [None] * count
    size = -(-extent // count)
    return [*[size] * (count - 1), max(extent - size * (count - 1), 0)]


def _dims_of(types: NodeTypes, name: str, index: int) -> Sequence[Dim] | None:
    """A parameter that older operator sets keep in an attribute."""
    attribute = types.node.attribute(name)
    if isinstance(attribute, list):
        return attribute
    value = types.value(index)
    return None if value is None else value.dims


def _item(dims: Sequence[Dim] | None, position: int) -> Dim:
    return dims[position] if dims is not None and position < len(dims) else None


def _sliced_axes(types: NodeTypes, starts: Sequence[Dim] | None, rank: int) -> list[int] | None:
    """Which axes a Slice cuts: those given, or the first ones; None where that is open or impossible."""
    if types.node.input(3) or "axes" in types.node.attributes:
        axes_given = _dims_of(types, "axes", 3)
    else:
        axes_given = None if starts is None else list(range(len(starts)))
    axes = [axis for axis in axes_given or () if isinstance(axis, int) and -rank <= axis < rank]
    return axes if axes_given is not None and len(axes) == len(axes_given) else None


def _sliced(extent: Dim, start: Dim, end: Dim, step: Dim) -> Dim:
    if not isinstance(start, int) or not isinstance(end, int) or not isinstance(step, int) or step == 0:
        return None
    if isinstance(extent, int):
        stop = None if step < 0 and end < -extent else end
        return len(range(*slice(start, stop, step).indices(extent))) if extent < _MAX_INDEX else None
    return extent if start == 0 and step == 1 and end >= _MAX_INT32 else None

"""Parts of axes: Slice and Split."""

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
    """Split along an axis into given sizes, or into equal chunks, except that the last chunk may be smaller."""
    sizes, count, extent = split if sizes_input is None else sizes_input, len(spec.outputs), x.shape[axis]
    if sizes is None:
        chunk = -(-extent // count)
        ends = [min(i * chunk, extent) for i in range(count)] + [extent]
    else:
        parts = np.asarray(sizes).tolist()
        if len(parts) != count or sum(parts) != extent or min(parts, default=0) < 0:
            raise KernelError(
                f"Split: the sizes {parts} do not match the node's outputs or axis {axis} of an input of shape "
                f"{list(x.shape)}"
            )
        ends = list(accumulate(parts, initial=0))
    before = (slice(None),) * (axis % x.ndim)
    return tuple([x[(*before, slice(first, last))] for first, last in pairwise(ends)])


@operator("Slice", since_version=10)
def slice_(x: Any, starts: Any, ends: Any, axes: Any = None, steps: Any = None) -> Any:
    """Slice with starts, ends, axes and steps as inputs; out-of-range ends are clamped, as in NumPy."""
    axes = range(len(starts)) if axes is None else axes
    steps = [1] * len(starts) if steps is None else steps
    index = [slice(None)] * x.ndim
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        extent = x.shape[int(axis)]
        # For a negative step, ONNX clamps the end to the position before the first element, which is None in a Python
        # slice, and the start to the first element; Python would clamp the start to the position before that element.
        stop = None if step < 0 and int(end) < -extent else int(end)
        first = max(int(start), -extent) if step < 0 else int(start)
        index[int(axis)] = slice(first, stop, int(step))
    return x[tuple(index)]


@operator("Slice")
def slice_by_attributes(x: Any, *, starts: Any, ends: Any, axes: Any = None) -> Any:
    """Slice as defined before operator set 10, with starts, ends and axes as attributes."""
    return slice_(x, starts, ends, axes or None)


@shape_rule("Slice", domain="")
def slice_types(types: NodeTypes) -> list[Type | None]:
    """The input with some axes sliced."""
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
    """Parts of given sizes along an axis, or parts of equal size except for a smaller last part."""
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
    """Return a parameter from an input, or from the attribute that older operator sets use."""
    attribute = types.node.attribute(name)
    if isinstance(attribute, list):
        return attribute
    value = types.value(index)
    return None if value is None else value.dims


def _item(dims: Sequence[Dim] | None, position: int) -> Dim:
    return dims[position] if dims is not None and position < len(dims) else None


def _sliced_axes(types: NodeTypes, starts: Sequence[Dim] | None, rank: int) -> list[int] | None:
    """Return the axes that a Slice cuts (default: the first axes); None if they are unknown or invalid."""
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

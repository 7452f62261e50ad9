"""Parts of axes: Slice, Split, and the rows whose logits are wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from genai.kernels.ir import LogitsRows, Per, RowsType

from ..lowering.rows import Kind, NotFlattenable, RowDim, State
from ..lowering.rules import (
    Made,
    NodeRows,
    NodeTypes,
    RowSpec,
    States,
    columns_record,
    record_rule,
    row_rule,
    shape_rule,
)
from ..onnx.node import OURS
from ..onnx.types import Dim, TensorType, Type
from .registry import KernelError, NodeSpec, operator
from .reshaping import MAX_RANK

_MAX_INT32 = 2**31 - 1
_MAX_INDEX = 2**62


@operator("Split", since_version=2)
def split(x: Any, given: Any = None, *, axis: int = 0, split: Any = None, spec: NodeSpec) -> Any:
    """Cut along an axis into given sizes, or into equal chunks of which the last may be smaller."""
    sizes, count, extent = split if given is None else given, len(spec.outputs), x.shape[axis]
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
    starts, ends = _listed(types, "starts", 1), _listed(types, "ends", 2)
    steps = _listed(types, "steps", 4) if types.node.input(4) else (1,) * MAX_RANK
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
    listed = types.node.attribute("split")
    given = types.constant(1)
    sizes = listed if listed is not None else None if given is None else given.reshape(-1).tolist()
    if sizes is not None:
        return list(sizes) if len(sizes) == count else [None] * count
    if not isinstance(extent, int) or types.node.input(1):
        return [None] * count
    size = -(-extent // count)
    return [*[size] * (count - 1), max(extent - size * (count - 1), 0)]


def _listed(types: NodeTypes, name: str, index: int) -> Sequence[Dim] | None:
    """A parameter that older operator sets keep in an attribute."""
    listed = types.node.attribute(name)
    if isinstance(listed, list):
        return listed
    value = types.value(index)
    return None if value is None else value.dims


def _item(listed: Sequence[Dim] | None, position: int) -> Dim:
    return listed[position] if listed is not None and position < len(listed) else None


def _sliced_axes(types: NodeTypes, starts: Sequence[Dim] | None, rank: int) -> list[int] | None:
    """Which axes a Slice cuts: those given, or the first ones; None where that is open or impossible."""
    if types.node.input(3) or "axes" in types.node.attributes:
        given = _listed(types, "axes", 3)
    else:
        given = None if starts is None else list(range(len(starts)))
    axes = [axis for axis in given or () if isinstance(axis, int) and -rank <= axis < rank]
    return axes if given is not None and len(axes) == len(given) else None


def _sliced(extent: Dim, start: Dim, end: Dim, step: Dim) -> Dim:
    if not isinstance(start, int) or not isinstance(end, int) or not isinstance(step, int) or step == 0:
        return None
    if isinstance(extent, int):
        stop = None if step < 0 and end < -extent else end
        return len(range(*slice(start, stop, step).indices(extent))) if extent < _MAX_INDEX else None
    return extent if start == 0 and step == 1 and end >= _MAX_INT32 else None


@row_rule("Split")
def split_rows(at: NodeRows) -> States:
    state = at.rows
    axis = at.axis(state, 0)
    at.keep_off(state, axis)
    if at.node.input(1):
        sizes = at.ints(1)
    else:
        listed = at.node.attribute("split", None)
        sizes = listed or _even_sizes(state.known_shape[axis].factor, len(at.node.outputs))
    return [state.resized(axis, RowDim(size)) for size in sizes]


def _even_sizes(width: int, count: int) -> list[int]:
    chunk = -(-width // count)
    return [min(chunk, width - i * chunk) for i in range(count)]


@row_rule("Slice")
def slice_rows(at: NodeRows) -> States:
    state = at.first()
    starts, ends, axes, steps = _slice_arguments(at)
    if state.kind is Kind.LENGTHS:
        return [State(Kind.LENGTHS, entries=state.entries[starts[0] : ends[0] : steps[0]])]
    shape = list(state.known_shape)
    for start, end, axis, step in zip(starts, ends, axes or range(len(starts)), steps, strict=False):
        axis = state.place(axis)
        at.keep_off(state, axis)
        shape[axis] = RowDim(len(range(shape[axis].factor)[start:end:step]))
    return [state.with_shape(tuple(shape))]


def _slice_arguments(at: NodeRows) -> tuple[list[int], list[int], list[int], list[int]]:
    if len(at.node.inputs) == 1:
        starts, ends = (list(at.node.attribute(name, [])) for name in ("starts", "ends"))
        return starts, ends, list(at.node.attribute("axes", None) or range(len(starts))), [1] * len(starts)
    given = [_known_ints(at, index) for index in range(1, len(at.states))]
    starts, ends = given[0] or [], given[1] or []
    axes = given[2] if len(given) > 2 and given[2] is not None else list(range(len(starts)))
    steps = given[3] if len(given) > 3 and given[3] is not None else [1] * len(starts)
    return starts, ends, axes, steps


def _known_ints(at: NodeRows, index: int) -> list[int] | None:
    """A constant, or dimensions that do not vary."""
    state, name = at.states[index], at.node.inputs[index]
    if state is not None and state.kind is Kind.LENGTHS:
        if any(dim.batch or dim.tokens for dim in state.entries):
            raise NotFlattenable(f"{name!r} depends on the number of tokens")
        return [dim.factor for dim in state.entries]
    return at.ints(index) if name else None


@record_rule("Slice")
def slice_record(spec: RowSpec) -> Made | None:
    """A run of the last axis."""
    x = spec.rows(0)
    computed = any(spec.constants[i] is None for i in range(1, len(spec.inputs)) if spec.has(i))
    if x is None or x.last != x.width or computed or len(spec.inputs) < 3:
        return None
    starts, ends = spec.constant(1).reshape(-1), spec.constant(2).reshape(-1)
    axes = spec.constant(3).reshape(-1) if spec.has(3) else np.arange(len(starts))
    steps = spec.constant(4).reshape(-1) if spec.has(4) else np.ones(len(starts), np.int64)
    if len(starts) != 1 or int(axes[0]) not in (-1, len(x.shape) - 1) or int(steps[0]) != 1:
        return None
    first, last, _ = slice(int(starts[0]), int(ends[0])).indices(x.width)
    return columns_record(spec, x.with_width(last - first), first) if last > first else None


@record_rule("Split")
def split_record(spec: RowSpec) -> Made | None:
    """Runs of the last axis that follow each other."""
    x, axis = spec.rows(0), int(spec.attributes.get("axis", 0))
    if x is None or x.last != x.width or axis not in (-1, len(x.shape) - 1) or not all(spec.outputs):
        return None
    if spec.has(1):
        sizes = None if spec.constants[1] is None else [int(size) for size in spec.constant(1).reshape(-1)]
    else:
        given = spec.attributes.get("split")
        sizes = list(given) if given else _even_sizes(x.width, len(spec.outputs))
    if sizes is None or len(sizes) != len(spec.outputs) or min(sizes) < 1 or sum(sizes) != x.width:
        return None
    starts = np.cumsum([0, *sizes]).tolist()
    parts = [columns_record(spec, x.with_width(size), starts[i], i) for i, size in enumerate(sizes)]
    return Made(
        [record for part in parts for record in part.records],
        {name: type_ for part in parts for name, type_ in part.types.items()},
    )


@record_rule("LogitsRows", domain=OURS)
def logits_rows(spec: RowSpec) -> Made | None:
    """The rows whose logits are wanted."""
    x, out = spec.rows(0), spec.outputs[0]
    if x is None or x.per is not Per.TOKEN or x.last != x.width:
        return None
    shape = (-1, x.width) if spec.attributes.get("squeeze", 0) else (1, -1, x.width)
    return Made([LogitsRows(spec.inputs[0], out, op_type=spec.op_type)], {out: RowsType(shape, x.width, Per.LOGITS)})

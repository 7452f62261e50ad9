"""Row and lowering rules of operators that move or reshape values."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from genai.kernels.ir import JoinColumns, LogitsRows, Per, RowsType

from ..onnx.node import OURS
from .elementwise import elementwise_rows
from .rows import ONE, Kind, NotFlattenable, RowDim, RowShape, State, product, rows
from .rules import Lowered, LoweringSpec, NodeRows, States, lowering_rule, row_rule, single_rows_state, slice_columns


@row_rule("If")
def choose_tables(at: NodeRows) -> States:
    condition = at.states[0]
    if condition is None or condition.kind is not Kind.CONTEXT:
        raise NotFlattenable("a branch depends on a value other than the total length")
    for branch in at.node.subgraphs():
        if any(inner.op_type != "Constant" for inner in branch.nodes):
            raise NotFlattenable("a branch does more than select constants")
    at.analysis.table_choices.append(at.node)
    return [State(Kind.TABLES)] * len(at.node.outputs)


@row_rule("Expand")
def expand_rows(at: NodeRows) -> States:
    state = single_rows_state(at.states[:1])
    target = at.lengths(1)
    if target is None or len(target) > state.rank:
        raise NotFlattenable("the new shape is unknown")
    shape = list(state.known_shape)
    for index, dim in enumerate(target, start=state.rank - len(target)):
        if index != state.axis and dim != ONE:
            shape[index] = dim
    return [state.with_shape(tuple(shape))]


@row_rule("TopK")
def top_k_rows(at: NodeRows) -> States:
    state = at.rows
    axis = at.axis(state, -1)
    at.keep_off(state, axis)
    k = at.ints(1)[0]
    return [state.resized(axis, RowDim(k))] * 2


@row_rule("Transpose")
def transpose_rows(at: NodeRows) -> States:
    state = at.rows
    order = at.node.attribute("perm", None) or list(range(state.rank))[::-1]
    return [State(Kind.ROWS, tuple(state.known_shape[i] for i in order), list(order).index(state.axis))]


@row_rule("GatherElements", "ScatterElements")
def element_rows(at: NodeRows) -> States:
    """Return the state of elements that are selected or replaced inside each row."""
    states = [state for state in at.states if state is not None]
    if any(state.kind is not Kind.ROWS or state.axis != states[0].axis for state in states):
        raise NotFlattenable("elements of rows are combined with values that are not per token")
    for state in states:
        at.keep_off(state, at.axis(state, 0))
    return [states[1] if at.node.op_type == "GatherElements" else states[0]]


@row_rule("ConstantOfShape")
def filled_rows(at: NodeRows) -> States:
    """Return the state of a constant with one entry per token, or of one whose shape is not known here."""
    shape = at.lengths(0)
    if shape is None or sum(dim.tokens for dim in shape) != 1:
        return [State(Kind.CONTEXT)]
    return [rows(shape)]


@row_rule("Concat")
def concat_rows(at: NodeRows) -> States:
    states = [state for state in at.states if state is not None]
    if any(state.kind is Kind.LENGTHS for state in states):
        parts = [at.lengths(index) for index in range(len(at.states))]
        if all(part is not None for part in parts):
            return [State(Kind.LENGTHS, entries=tuple(dim for part in parts for dim in part or ()))]
        return [State(Kind.CONTEXT)]
    if any(state.kind is not Kind.ROWS for state in states):
        raise NotFlattenable("tokens are concatenated with values that are not per token")
    first = states[0]
    axis = at.axis(first, 0)
    for state in states:
        at.keep_off(state, axis)
    if len({state.axis for state in states}) != 1:
        raise NotFlattenable("the token axes of two values differ")
    width = sum(state.known_shape[axis].factor for state in states)
    return [first.resized(axis, RowDim(width))]


@lowering_rule("Concat")
def lower_concat(spec: LoweringSpec) -> Lowered | None:
    """Lower a concatenation of the last axes of values with one vector per row."""
    parts = [spec.rows(index) for index in range(len(spec.inputs))]
    known = [part for part in parts if part is not None and part.last == part.width]
    if len(known) != len(parts) or len({part.with_width(1) for part in known}) != 1:
        return None
    if int(spec.attributes.get("axis", 0)) not in (-1, len(known[0].shape) - 1):
        return None
    out = spec.outputs[0]
    op = JoinColumns(tuple(spec.inputs), out, op_type=spec.op_type)
    return Lowered([op], {out: known[0].with_width(sum(part.width for part in known))})


row_rule("Dropout")(elementwise_rows)


@row_rule("Shape")
def shape_of_rows(at: NodeRows) -> States:
    state = at.first()
    if state.kind in (Kind.ROWS, Kind.UNIFORM, Kind.CONTEXT) and state.shape is not None:
        start, end = int(at.node.attribute("start", 0)), at.node.attribute("end", None)
        return [State(Kind.LENGTHS, entries=state.known_shape[start : None if end is None else int(end)])]
    return [State(Kind.CONTEXT)]


@row_rule("Reshape")
def reshape_rows(at: NodeRows) -> States:
    state = at.first()
    if state.kind is Kind.LENGTHS:
        return [state]
    if state.kind is not Kind.ROWS:
        return [State(state.kind)]
    target = at.lengths(1)
    if target is None:
        raise NotFlattenable("the new shape is unknown")
    shape = _resolve(state.known_shape, target, bool(at.node.attribute("allowzero", 0)))
    return [_regrouped(state, shape)]


def _resolve(old: RowShape, target: RowShape, allow_zero: bool) -> RowShape:
    copied = [old[i] if dim == RowDim(0) and not allow_zero and i < len(old) else dim for i, dim in enumerate(target)]
    rest = product(tuple(dim for dim in copied if dim != RowDim(-1)))
    total = product(old)
    if RowDim(-1) not in copied:
        return tuple(copied)
    if (
        rest.factor == 0
        or total.factor % rest.factor
        or (rest.batch and not total.batch)
        or (rest.tokens and not total.tokens)
    ):
        raise NotFlattenable(f"{total} elements cannot be divided by {rest}")
    missing = RowDim(total.factor // rest.factor, total.batch and not rest.batch, total.tokens and not rest.tokens)
    return tuple(missing if dim == RowDim(-1) else dim for dim in copied)


def _regrouped(state: State, shape: RowShape) -> State:
    """Reshape a state; tokens stay rows if the number of elements before their axis stays the same (batch = 1)."""
    axes = [i for i, dim in enumerate(shape) if dim.tokens]
    if len(axes) != 1:
        raise NotFlattenable(f"the shape [{', '.join(map(str, shape))}] does not have exactly one token axis")
    before_old = product(state.known_shape[: state.axis]).factor
    before_new = product(shape[: axes[0]]).factor
    if before_old != before_new:
        raise NotFlattenable("the new shape splits or merges tokens")
    return State(Kind.ROWS, shape, axes[0])


@row_rule("Flatten")
def flatten_rows(at: NodeRows) -> States:
    state = at.rows
    axis = at.axis(state, 1)
    shape = (product(state.known_shape[:axis]), product(state.known_shape[axis:]))
    return [_regrouped(state, shape)]


@row_rule("Unsqueeze")
def unsqueeze_rows(at: NodeRows) -> States:
    state = at.first()
    if state.kind is Kind.LENGTHS:
        return [state]
    axes = at.axes() or []
    rank = state.rank + len(axes)
    axes = sorted(axis + rank if axis < 0 else axis for axis in axes)
    shape = list(state.known_shape)
    for axis in axes:
        shape.insert(axis, ONE)
    return [rows(tuple(shape))]


@row_rule("Squeeze")
def squeeze_rows(at: NodeRows) -> States:
    state = at.first()
    if state.kind is Kind.LENGTHS:
        return [state]
    axes = at.axes()
    if axes is None:
        raise NotFlattenable("the axes to remove depend on run-time sizes")
    axes = [state.axis_index(axis) for axis in axes]
    for axis in axes:
        at.keep_off(state, axis)
    return [state.without_axes(axes)]


@lowering_rule("Reshape")
def lower_reshape(spec: LoweringSpec) -> Lowered | None:
    """Lower Reshape if the size of the last axis divides a row."""
    x, target = spec.rows(0), spec.constants[1]
    if x is None or target is None or (int(spec.attributes.get("allowzero", 0)) and 0 in target):
        return None
    dims = [int(d) if d != 0 else x.shape[i] for i, d in enumerate(target.reshape(-1)) if d != 0 or i < len(x.shape)]
    if dims[:2] == [1, -1] and dims.count(-1) == 2 and list(target.reshape(-1)[:2]) == [0, 0]:
        inner = math.prod(d for d in dims[2:] if d > 0)
        dims = [1, -1, *(x.width // inner if d == -1 else d for d in dims[2:])]
    fixed = [d for d in dims if d > 0]
    if len(dims) != target.size or dims.count(-1) != 1 or dims[-1] <= 0 or x.width % dims[-1]:
        return None
    # The -1 dimension must be a whole number per row for any number of rows.
    if x.width % int(np.prod(fixed)) or dims.index(-1) > 1 or any(d != 1 for d in dims[: dims.index(-1)]):
        return None
    return slice_columns(spec, replace(x, shape=tuple(dims)))


@row_rule("Split")
def split_rows(at: NodeRows) -> States:
    state = at.rows
    axis = at.axis(state, 0)
    at.keep_off(state, axis)
    if at.node.input(1):
        sizes = at.ints(1)
    else:
        split = at.node.attribute("split", None)
        sizes = split or _even_sizes(state.known_shape[axis].factor, len(at.node.outputs))
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
        axis = state.axis_index(axis)
        at.keep_off(state, axis)
        shape[axis] = RowDim(len(range(shape[axis].factor)[start:end:step]))
    return [state.with_shape(tuple(shape))]


def _slice_arguments(at: NodeRows) -> tuple[list[int], list[int], list[int], list[int]]:
    if len(at.node.inputs) == 1:
        starts, ends = (list(at.node.attribute(name, [])) for name in ("starts", "ends"))
        return starts, ends, list(at.node.attribute("axes", None) or range(len(starts))), [1] * len(starts)
    arguments = [_known_ints(at, index) for index in range(1, len(at.states))]
    starts, ends = arguments[0] or [], arguments[1] or []
    axes = arguments[2] if len(arguments) > 2 and arguments[2] is not None else list(range(len(starts)))
    steps = arguments[3] if len(arguments) > 3 and arguments[3] is not None else [1] * len(starts)
    return starts, ends, axes, steps


def _known_ints(at: NodeRows, index: int) -> list[int] | None:
    """Return the integers of a constant, or of fixed dimensions in a shape; None if the input is absent."""
    state, name = at.states[index], at.node.inputs[index]
    if state is not None and state.kind is Kind.LENGTHS:
        if any(dim.batch or dim.tokens for dim in state.entries):
            raise NotFlattenable(f"{name!r} depends on the number of tokens")
        return [dim.factor for dim in state.entries]
    return at.ints(index) if name else None


@lowering_rule("Slice")
def lower_slice(spec: LoweringSpec) -> Lowered | None:
    """Lower a slice of the last axis, or of the first axis of a row."""
    x = spec.rows(0)
    computed = any(spec.constants[i] is None for i in range(1, len(spec.inputs)) if spec.has(i))
    if x is None or computed or len(spec.inputs) < 3:
        return None
    starts, ends = spec.constant(1).reshape(-1), spec.constant(2).reshape(-1)
    axes = spec.constant(3).reshape(-1) if spec.has(3) else np.arange(len(starts))
    steps = spec.constant(4).reshape(-1) if spec.has(4) else np.ones(len(starts), np.int64)
    if len(starts) != 1 or int(steps[0]) != 1 or (axis := _contiguous_axis(x, int(axes[0]))) is None:
        return None
    first, last, _ = slice(int(starts[0]), int(ends[0])).indices(x.shape[axis])
    return slice_columns(spec, *_part(x, axis, first, last - first)) if last > first else None


def _contiguous_axis(x: RowsType, axis: int) -> int | None:
    """Return an axis from the front if its parts are columns of a row: all axes between the token axis and it are 1."""
    axis += len(x.shape) if axis < 0 else 0
    if axis == len(x.shape) - 1 and x.last == x.width:
        return axis
    is_inner = x.shape[:2] == (1, -1) and 2 <= axis < len(x.shape) and math.prod(x.shape[2:]) == x.width
    return axis if is_inner and math.prod(x.shape[2:axis]) == 1 else None


def _part(x: RowsType, axis: int, first: int, size: int) -> tuple[RowsType, int]:
    """Return the type of a part of a contiguous axis, and its first column."""
    inner = x.width // x.shape[axis]
    return RowsType((*x.shape[:axis], size, *x.shape[axis + 1 :]), inner * size, x.per), inner * first


@lowering_rule("Split")
def lower_split(spec: LoweringSpec) -> Lowered | None:
    """Lower Split to consecutive slices of the last axis, or of the first axis of a row."""
    x = spec.rows(0)
    axis = None if x is None else _contiguous_axis(x, int(spec.attributes.get("axis", 0)))
    if x is None or axis is None or not all(spec.outputs):
        return None
    if spec.has(1):
        sizes = None if spec.constants[1] is None else [int(size) for size in spec.constant(1).reshape(-1)]
    else:
        split = spec.attributes.get("split")
        sizes = list(split) if split else _even_sizes(x.shape[axis], len(spec.outputs))
    if sizes is None or len(sizes) != len(spec.outputs) or min(sizes) < 1 or sum(sizes) != x.shape[axis]:
        return None
    starts = np.cumsum([0, *sizes]).tolist()
    ranges = [_part(x, axis, first, size) for first, size in zip(starts, sizes, strict=False)]
    parts = [slice_columns(spec, part, first, index) for index, (part, first) in enumerate(ranges)]
    return Lowered(
        [op for part in parts for op in part.ops],
        {name: type_ for part in parts for name, type_ in part.types.items()},
    )


@lowering_rule("LogitsRows", domain=OURS)
def logits_rows(spec: LoweringSpec) -> Lowered | None:
    """Lower the selection of the rows that need logits."""
    x, out = spec.rows(0), spec.outputs[0]
    if x is None or x.per is not Per.TOKEN or x.last != x.width:
        return None
    shape = (-1, x.width) if spec.attributes.get("squeeze", 0) else (1, -1, x.width)
    return Lowered([LogitsRows(spec.inputs[0], out, op_type=spec.op_type)], {out: RowsType(shape, x.width, Per.LOGITS)})


@lowering_rule("Squeeze", "Unsqueeze")
def lower_axes(spec: LoweringSpec) -> Lowered | None:
    """Lower added and removed axes of size 1 behind the token axis, which change no number."""
    x, axes = spec.rows(0), _constant_axes(spec)
    if x is None or axes is None or x.shape[:2] != (1, -1):
        return None
    rank = len(x.shape) + (len(axes) if spec.op_type == "Unsqueeze" else 0)
    axes = sorted(axis % rank for axis in axes)
    if axes[:1] < [2]:
        return None
    shape = list(x.shape)
    if spec.op_type == "Unsqueeze":
        for axis in axes:
            shape.insert(axis, 1)
    elif any(shape[axis] != 1 for axis in axes):
        return None
    else:
        shape = [size for axis, size in enumerate(shape) if axis not in axes]
    return slice_columns(spec, replace(x, shape=tuple(shape)))


def _constant_axes(spec: LoweringSpec) -> list[int] | None:
    if spec.has(1):
        axes = spec.constants[1]
        return None if axes is None else [int(axis) for axis in axes.reshape(-1)]
    axes = spec.attributes.get("axes")
    return None if axes is None else [int(axis) for axis in axes]


def item_of_row(spec: LoweringSpec, x: RowsType, index: int, axis: int) -> Lowered | None:
    """Lower x[..., index, ...] along the first axis of a row, such as the queries of [B, T, 3, heads, size]."""
    found = _contiguous_axis(x, axis)
    if found is None or found < 2 or found == len(x.shape) - 1 or not -x.shape[found] <= index < x.shape[found]:
        return None
    part, first = _part(x, found, index % x.shape[found], 1)
    return slice_columns(spec, replace(part, shape=(*part.shape[:found], *part.shape[found + 1 :])), first)

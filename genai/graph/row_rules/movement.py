"""Operators that move, cut or reshape data, and the arithmetic of shapes that feeds them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..rows import BATCH, ONE, Dim, Found, Kind, NotFlattenable, Shape, State, product, rows, with_shape
from ..types import DataType, TensorType
from .base import (
    MS,
    States,
    constant_ints,
    given_axes,
    keep_off,
    length_entries,
    normal_axis,
    resized,
    rule,
    the_rows,
    without_axes,
)

if TYPE_CHECKING:
    from ..ir import Graph, Node


@rule("Gather", "GatherBlockQuantized")
@rule("GatherBlockQuantized", domain=MS)
def gather(graph: Graph, node: Node, states: Sequence[State | None], found: Found) -> States:
    data, indices = states[0], states[1]
    assert data is not None and indices is not None
    name = "gather_axis" if node.op_type == "GatherBlockQuantized" else "axis"
    if data.kind is Kind.LENGTHS:
        return [_pick_lengths(graph, node, data)]
    axis = normal_axis(int(node.attribute(name, 0)), data.rank)
    if data.kind is Kind.UNIFORM and indices.kind is Kind.ROWS:
        shape = [*data.known_shape[:axis], *indices.known_shape, *data.known_shape[axis + 1 :]]
        if node.op_type == "GatherBlockQuantized":
            shape[-1] = _unpacked_width(graph, node, data)
        return [State(Kind.ROWS, tuple(shape), axis + indices.axis)]
    if data.kind is Kind.ROWS and indices.kind is Kind.UNIFORM:
        if axis == data.axis:
            return [_last_row(graph, node, data, indices, found)]
        shape = [*data.known_shape[:axis], *indices.known_shape, *data.known_shape[axis + 1 :]]
        return [State(Kind.ROWS, tuple(shape), data.axis + (indices.rank - 1) * (axis < data.axis))]
    raise NotFlattenable("tokens are looked up by other tokens")


def _unpacked_width(graph: Graph, node: Node, data: State) -> Dim:
    """Elements in a row of a quantised table: a uint8 one holds several to a byte, an int4 one says its own number."""
    stored = graph.type_of(node.inputs[0])
    packed = isinstance(stored, TensorType) and stored.dtype is DataType.UINT8
    return Dim(data.known_shape[-1].factor * (8 // int(node.attribute("bits", 4)) if packed else 1))


def _last_row(graph: Graph, node: Node, data: State, indices: State, found: Found) -> State:
    """Gather(index -1) along the token axis: the last row of each sequence, the wanted rows of the step."""
    index = graph.constant(node.inputs[1])
    if index is None or index.ndim != 0 or int(index) != -1 or data.axis != 1 or data.known_shape[0] != BATCH:
        raise NotFlattenable("picks tokens by their place in the sequence")
    found.last_row_gathers.append(node)
    shape = (Dim(1, tokens=True), *data.known_shape[2:])
    return State(Kind.ROWS, shape, 0)


def _pick_lengths(graph: Graph, node: Node, data: State) -> State:
    picks = constant_ints(graph, node.inputs[1])
    try:
        entries = tuple(data.entries[i] for i in picks)
    except IndexError:
        raise NotFlattenable(f"picks dimension {picks} of {len(data.entries)}") from None
    return State(Kind.LENGTHS, entries=entries)


@rule("Shape")
def shape_of(graph: Graph, node: Node, states: Sequence[State | None], found: Found) -> States:
    state = states[0]
    assert state is not None
    if state.kind in (Kind.ROWS, Kind.UNIFORM) and state.shape is not None:
        start, end = int(node.attribute("start", 0)), node.attribute("end", None)
        return [State(Kind.LENGTHS, entries=state.known_shape[start : None if end is None else int(end)])]
    return [State(Kind.CONTEXT)]


@rule("Reshape")
def reshape(graph: Graph, node: Node, states: Sequence[State | None], found: Found) -> States:
    state, target = states[0], states[1]
    assert state is not None and target is not None
    if state.kind is Kind.LENGTHS:
        return [state]
    if state.kind is not Kind.ROWS:
        return [State(state.kind)]
    wanted = length_entries(graph, node.inputs[1], target)
    if wanted is None:
        raise NotFlattenable("the new shape is not known")
    shape = _resolve(state.known_shape, wanted, bool(node.attribute("allowzero", 0)))
    return [_regrouped(state, shape)]


def _resolve(old: Shape, wanted: Shape, allow_zero: bool) -> Shape:
    copied = [old[i] if dim == Dim(0) and not allow_zero and i < len(old) else dim for i, dim in enumerate(wanted)]
    rest = product(tuple(dim for dim in copied if dim != Dim(-1)))
    total = product(old)
    if Dim(-1) not in copied:
        return tuple(copied)
    if (
        rest.factor == 0
        or total.factor % rest.factor
        or (rest.batch and not total.batch)
        or (rest.tokens and not total.tokens)
    ):
        raise NotFlattenable(f"cannot divide {total} elements by {rest}")
    missing = Dim(total.factor // rest.factor, total.batch and not rest.batch, total.tokens and not rest.tokens)
    return tuple(missing if dim == Dim(-1) else dim for dim in copied)


def _regrouped(state: State, shape: Shape) -> State:
    """Tokens stay rows if as many elements lie before their axis as did before (the batch counting as one)."""
    axes = [i for i, dim in enumerate(shape) if dim.tokens]
    if len(axes) != 1:
        raise NotFlattenable(f"no token axis is left in [{', '.join(map(str, shape))}]")
    before_old = product(state.known_shape[: state.axis]).factor
    before_new = product(shape[: axes[0]]).factor
    if before_old != before_new:
        raise NotFlattenable("the new shape cuts across tokens")
    return State(Kind.ROWS, shape, axes[0])


@rule("Flatten")
def flatten(graph: Graph, node: Node, states: Sequence[State | None], found: Found) -> States:
    state = the_rows(states)
    axis = normal_axis(int(node.attribute("axis", 1)), state.rank)
    shape = (product(state.known_shape[:axis]), product(state.known_shape[axis:]))
    return [_regrouped(state, shape)]


@rule("Transpose")
def transpose(graph: Graph, node: Node, states: Sequence[State | None], found: Found) -> States:
    state = the_rows(states)
    order = node.attribute("perm", None) or list(range(state.rank))[::-1]
    return [State(Kind.ROWS, tuple(state.known_shape[i] for i in order), list(order).index(state.axis))]


@rule("Unsqueeze")
def unsqueeze(graph: Graph, node: Node, states: Sequence[State | None], found: Found) -> States:
    state = states[0]
    assert state is not None
    if state.kind is Kind.LENGTHS:
        return [state]
    axes = given_axes(graph, node) or []
    rank = state.rank + len(axes)
    axes = sorted(normal_axis(axis, rank) for axis in axes)
    shape = list(state.known_shape)
    for axis in axes:
        shape.insert(axis, ONE)
    return [rows(tuple(shape))]


@rule("Squeeze")
def squeeze(graph: Graph, node: Node, states: Sequence[State | None], found: Found) -> States:
    state = states[0]
    assert state is not None
    if state.kind is Kind.LENGTHS:
        return [state]
    axes = given_axes(graph, node)
    if axes is None:
        raise NotFlattenable("the axes to drop depend on run-time sizes")
    axes = [normal_axis(axis, state.rank) for axis in axes]
    for axis in axes:
        keep_off(state, axis, "Squeeze")
    return [without_axes(state, axes)]


@rule("Concat")
def concat(graph: Graph, node: Node, states: Sequence[State | None], found: Found) -> States:
    given = [state for state in states if state is not None]
    if any(state.kind is Kind.LENGTHS for state in given):
        parts = [length_entries(graph, name, state) for name, state in zip(node.inputs, states, strict=True)]
        if all(part is not None for part in parts):
            return [State(Kind.LENGTHS, entries=tuple(dim for part in parts for dim in part or ()))]
        return [State(Kind.CONTEXT)]
    if any(state.kind is not Kind.ROWS for state in given):
        raise NotFlattenable("tokens are joined with values that are not per token")
    first = given[0]
    axis = normal_axis(int(node.attribute("axis", 0)), first.rank)
    for state in given:
        keep_off(state, axis, "Concat")
    if len({state.axis for state in given}) != 1:
        raise NotFlattenable("two values bring their tokens along different axes")
    width = sum(state.known_shape[axis].factor for state in given)
    return [resized(first, axis, Dim(width))]


@rule("Split")
def split(graph: Graph, node: Node, states: Sequence[State | None], found: Found) -> States:
    state = the_rows(states)
    axis = normal_axis(int(node.attribute("axis", 0)), state.rank)
    keep_off(state, axis, "Split")
    sizes = _split_sizes(graph, node, state.known_shape[axis].factor)
    return [resized(state, axis, Dim(size)) for size in sizes]


def _split_sizes(graph: Graph, node: Node, width: int) -> list[int]:
    if len(node.inputs) > 1 and node.inputs[1]:
        return constant_ints(graph, node.inputs[1])
    if node.attribute("split", None):
        return [int(size) for size in node.attribute("split", None)]
    count = len(node.outputs)
    chunk = -(-width // count)
    return [min(chunk, width - i * chunk) for i in range(count)]


@rule("Slice")
def slice_(graph: Graph, node: Node, states: Sequence[State | None], found: Found) -> States:
    state = states[0]
    assert state is not None
    starts, ends, axes, steps = _slice_arguments(graph, node, states)
    if state.kind is Kind.LENGTHS:
        return [State(Kind.LENGTHS, entries=state.entries[starts[0] : ends[0] : steps[0]])]
    shape = list(state.known_shape)
    for start, end, axis, step in zip(starts, ends, axes or range(len(starts)), steps, strict=False):
        axis = normal_axis(axis, state.rank)
        keep_off(state, axis, "Slice")
        shape[axis] = Dim(len(range(shape[axis].factor)[start:end:step]))
    return [with_shape(state, tuple(shape), state.axis)]


def _slice_arguments(
    graph: Graph, node: Node, states: Sequence[State | None]
) -> tuple[list[int], list[int], list[int], list[int]]:
    if len(node.inputs) == 1:
        starts, ends = (list(node.attribute(name, [])) for name in ("starts", "ends"))
        return starts, ends, list(node.attribute("axes", None) or range(len(starts))), [1] * len(starts)
    given = [_known_ints(graph, name, state) for name, state in zip(node.inputs[1:], states[1:], strict=False)]
    starts, ends = given[0] or [], given[1] or []
    axes = given[2] if len(given) > 2 and given[2] is not None else list(range(len(starts)))
    steps = given[3] if len(given) > 3 and given[3] is not None else [1] * len(starts)
    return starts, ends, axes, steps


def _known_ints(graph: Graph, name: str, state: State | None) -> list[int] | None:
    """A constant, or dimensions that do not vary."""
    if state is not None and state.kind is Kind.LENGTHS:
        if any(dim.batch or dim.tokens for dim in state.entries):
            raise NotFlattenable(f"{name!r} depends on the number of tokens")
        return [dim.factor for dim in state.entries]
    return constant_ints(graph, name) if name else None


@rule("Expand")
def expand(graph: Graph, node: Node, states: Sequence[State | None], found: Found) -> States:
    state = the_rows([states[0]])
    wanted = length_entries(graph, node.inputs[1], states[1])
    if wanted is None or len(wanted) > state.rank:
        raise NotFlattenable("the new shape is not known")
    shape = list(state.known_shape)
    for index, dim in enumerate(wanted, start=state.rank - len(wanted)):
        if index != state.axis and dim != ONE:
            shape[index] = dim
    return [with_shape(state, tuple(shape), state.axis)]

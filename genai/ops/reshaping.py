"""Operators that keep the elements and change the shape, and those that ask for it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from ..lowering.rows import ONE, Kind, NotFlattenable, RowDim, RowShape, State, product, rows
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
from ..onnx.types import Dim, Shape, TensorType, Type
from .registry import KernelError, operator
from .support import axes_of, checked_axis

operator("Size")(lambda x: np.asarray(np.size(x), np.int64))


@operator("Shape")
def shape_of(x: Any, *, start: int = 0, end: int | None = None) -> Any:
    """Dimensions as int64, optionally a slice of them."""
    return np.asarray(x.shape[start:end], np.int64)


MAX_RANK = 64


@operator("Reshape", since_version=5)
def reshape(x: Any, wanted: Any, *, allowzero: bool = False) -> Any:
    """0 copies a dimension unless allowzero; -1 is inferred."""
    sizes = [int(size) for size in wanted]
    return x.reshape(sizes if allowzero else [x.shape[i] if size == 0 else size for i, size in enumerate(sizes)])


@operator("Squeeze")
def squeeze(x: Any, given: Any = None, *, axes: tuple[int, ...] | None = None) -> Any:
    """Drop axes of size one."""
    return np.squeeze(x, axis=axes_of(given, axes))


@operator("Unsqueeze")
def unsqueeze(x: Any, given: Any = None, *, axes: tuple[int, ...] | None = None) -> Any:
    """Insert axes of size one; axes count in the result."""
    inserted = axes_of(given, axes)
    if inserted is None:
        raise KernelError("Unsqueeze needs axes")
    return np.expand_dims(x, inserted)


@operator("Flatten")
def flatten(x: Any, *, axis: int = 1) -> Any:
    """To 2-D: axes before `axis`, and the others."""
    first = x.ndim if axis == x.ndim else checked_axis(axis, x.ndim)
    return x.reshape(math.prod(x.shape[:first]), math.prod(x.shape[first:]))


@shape_rule("Reshape", domain="")
def reshape_types(types: NodeTypes) -> list[Type | None]:
    """The elements in another shape; 0 keeps an extent, -1 takes what is left."""
    source = types.source
    target = types.value(1)
    listed = types.node.attribute("shape")
    dims = tuple(listed) if isinstance(listed, list) else None if target is None else target.dims
    if dims is None:
        return [TensorType(source.dtype, open_shape(types.shape(1)))]
    keeps_zero = types.attribute("allowzero", 0) != 0
    resolved: list[Dim] = []
    for axis, dim in enumerate(dims):
        if dim == 0 and not keeps_zero:
            resolved.append(source.shape[axis] if source.shape is not None and axis < len(source.shape) else None)
        else:
            resolved.append(dim)
    if dims.count(-1) == 1:
        position = dims.index(-1)
        rest = (*resolved[:position], *resolved[position + 1 :])
        resolved[position] = None if source.shape is None else _left_over(source.shape, rest)
    return [TensorType(source.dtype, tuple(resolved))]


def open_shape(shape_of_shape: Shape | None) -> Shape | None:
    """A shape of which only the rank is known, if that much."""
    rank = shape_of_shape[0] if shape_of_shape is not None and len(shape_of_shape) == 1 else None
    return (None,) * rank if isinstance(rank, int) and 0 <= rank <= MAX_RANK else None


def _left_over(source: Shape, rest: Shape) -> Dim:
    """The extent that keeps the number of elements: symbols and numbers on both sides cancel."""
    have, used = list(source), list(rest)
    for dim in rest:
        if dim in have and not isinstance(dim, int):
            have.remove(dim)
            used.remove(dim)
    if None in have or None in used:
        return None
    numbers = math.prod(dim for dim in have if isinstance(dim, int))
    divisor = math.prod(dim for dim in used if isinstance(dim, int))
    symbols = [dim for dim in have if isinstance(dim, str)]
    if any(isinstance(dim, str) for dim in used) or divisor <= 0 or numbers % divisor:
        return None
    if not symbols:
        return numbers // divisor
    return symbols[0] if len(symbols) == 1 and numbers == divisor else None


@row_rule("Shape")
def shape_of_rows(at: NodeRows) -> States:
    state = at.first()
    if state.kind in (Kind.ROWS, Kind.UNIFORM) and state.shape is not None:
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
    wanted = at.lengths(1)
    if wanted is None:
        raise NotFlattenable("the new shape is not known")
    shape = _resolve(state.known_shape, wanted, bool(at.node.attribute("allowzero", 0)))
    return [_regrouped(state, shape)]


def _resolve(old: RowShape, wanted: RowShape, allow_zero: bool) -> RowShape:
    copied = [old[i] if dim == RowDim(0) and not allow_zero and i < len(old) else dim for i, dim in enumerate(wanted)]
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
        raise NotFlattenable(f"cannot divide {total} elements by {rest}")
    missing = RowDim(total.factor // rest.factor, total.batch and not rest.batch, total.tokens and not rest.tokens)
    return tuple(missing if dim == RowDim(-1) else dim for dim in copied)


def _regrouped(state: State, shape: RowShape) -> State:
    """Tokens stay rows if as many elements lie before their axis as did before (the batch counting as one)."""
    axes = [i for i, dim in enumerate(shape) if dim.tokens]
    if len(axes) != 1:
        raise NotFlattenable(f"no token axis is left in [{', '.join(map(str, shape))}]")
    before_old = product(state.known_shape[: state.axis]).factor
    before_new = product(shape[: axes[0]]).factor
    if before_old != before_new:
        raise NotFlattenable("the new shape cuts across tokens")
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
        raise NotFlattenable("the axes to drop depend on run-time sizes")
    axes = [state.place(axis) for axis in axes]
    for axis in axes:
        at.keep_off(state, axis)
    return [state.without_axes(axes)]


@record_rule("Reshape")
def reshape_record(spec: RowSpec) -> Made | None:
    """Rows stay rows while the last axis holds a whole part of one."""
    x, target = spec.rows(0), spec.constants[1]
    if x is None or target is None or int(spec.attributes.get("allowzero", 0)):
        return None
    dims = [int(d) if d != 0 else x.shape[i] for i, d in enumerate(target.reshape(-1)) if d != 0 or i < len(x.shape)]
    fixed = [d for d in dims if d > 0]
    if len(dims) != target.size or dims.count(-1) != 1 or dims[-1] <= 0 or x.width % dims[-1]:
        return None
    # What the open dimension gets must be a whole number per row, however many rows there are.
    if x.width % int(np.prod(fixed)) or dims.index(-1) > 1 or any(d != 1 for d in dims[: dims.index(-1)]):
        return None
    return columns_record(spec, replace(x, shape=tuple(dims)))

"""Operators that gather, scatter, select and sort by index."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from operator import setitem
from typing import Any

import numpy as np

from genai.kernels.cpu.arrays.copying import contiguous
from genai.kernels.cpu.arrays.elements import picked_slices
from genai.kernels.cpu.arrays.selection import largest as selected, picked
from genai.kernels.cpu.program.thread_pool import Threads, recorder_of_thread
from genai.kernels.errors import StepError

from ..onnx.node import MS
from ..onnx.types import DataType, TensorType, Type
from .registry import KernelError, NodeSpec, operator, scalar
from .shape_rules import NodeTypes, shape_rule
from .support import as_array, checked_axis, checked_indices, checked_shape, session_threads, widened


def in_range(indices: Any, extent: int, subject: str) -> Any:
    """Return indices counted from the front. Raises IndexError if an index is out of range."""
    indices = np.asarray(indices)
    if indices.size and (indices.min() < -extent or indices.max() >= extent):
        bad = indices[(indices < -extent) | (indices >= extent)].reshape(-1)[0]
        raise IndexError(f"{subject}: index {bad} must be within the inclusive range [{-extent}, {extent - 1}]")
    return np.where(indices < 0, indices + extent, indices)


def _along(indices: Any, axis: int) -> tuple[Any, ...]:
    """Return an index that selects `indices` along one axis, and at each position its own coordinate on other axes."""
    grid = list(np.ogrid[tuple(slice(extent) for extent in indices.shape)])
    grid[axis] = indices
    return tuple(grid)


# Bytes of the numbers that compiled kernels gather.
_PICKED = (4, 8)


@operator("Gather")
def gather(x: Any, indices: Any, *, axis: int = 0) -> Any:
    """Gather slices along an axis. Negative indices count from the end. Raises IndexError if one is out of range."""
    if recorder_of_thread() is not None:
        along = checked_axis(axis, x.ndim)
        if np.ndim(indices) == 0:
            return as_array(x[(slice(None),) * along + (int(indices),)])
        found = picked_slices(x, np.asarray(indices), along)
        if found is not None:
            return found
    return as_array(np.take(x, indices, axis=axis))


@operator("GatherElements", since_version=11, threads=session_threads)
def gather_elements(x: Any, indices: Any, *, axis: int = 0, threads: Threads | None) -> Any:
    """Gather one element per index along an axis."""
    along = checked_axis(axis, x.ndim)
    is_last = along == x.ndim - 1 and x.shape[:-1] == indices.shape[:-1] and indices.dtype == np.int64
    if threads is not None and is_last and x.dtype.kind in "fiu" and x.dtype.itemsize in _PICKED and indices.size:
        rows = [contiguous(value).reshape(-1, value.shape[-1]) for value in (x, indices)]
        with suppress(StepError):  # an index out of range, which the message below names
            return picked(*rows, threads=threads).reshape(indices.shape)
    return x[_along(in_range(indices, x.shape[along], "GatherElements"), along)]


def _slices_at(x: Any, indices: Any) -> tuple[Any, Any] | None:
    """Return the data as slices [count, ...] and the number of each coordinate's slice [count of coordinates].

    One number per slice is faster to gather and to scatter by than several coordinates. Returns None if the data is not
    contiguous, or if a coordinate is negative or out of range.
    """
    depth = indices.shape[-1]
    extents = x.shape[:depth]
    if not 0 < depth <= x.ndim or not indices.size or not x.flags.c_contiguous or indices.dtype != np.int64:
        return None
    flat = indices.reshape(-1, depth)
    if flat.min() < 0 or any(flat[:, axis].max() >= extent for axis, extent in enumerate(extents)):
        return None
    numbers = flat[:, 0]
    for axis in range(1, depth):
        numbers = numbers * extents[axis] + flat[:, axis]
    return x.reshape((math.prod(extents), *x.shape[depth:])), numbers


@operator("GatherND", domain=MS)
@operator("GatherND", since_version=11)
def gather_nd(x: Any, indices: Any, *, batch_dims: int = 0) -> Any:
    """Gather slices at coordinates, which lie along the last axis of the indices; leading axes may be a batch."""
    depth = indices.shape[-1] if indices.ndim else 0
    if not 0 <= batch_dims < min(x.ndim, indices.ndim) or batch_dims + depth > x.ndim:
        raise KernelError(
            f"GatherND: indices of shape {list(indices.shape)} do not match data of shape {list(x.shape)}"
        )
    if not batch_dims and (found := _slices_at(x, indices)) is not None:
        slices, numbers = found
        recorded = picked_slices(slices, numbers, 0)
        if recorded is not None:
            return recorded.reshape((*indices.shape[:-1], *x.shape[depth:]))
        return slices.take(numbers, axis=0).reshape((*indices.shape[:-1], *x.shape[depth:]))
    batch = tuple(np.ogrid[tuple(slice(extent) for extent in indices.shape[:-1])])[:batch_dims]
    coordinates = tuple(in_range(indices[..., i], x.shape[batch_dims + i], "GatherND") for i in range(depth))
    if not depth:  # without coordinates, each index selects the whole slice of its batch entry
        return np.broadcast_to(x[batch], (*indices.shape[:-1], *x.shape[batch_dims:])).copy()
    return as_array(x[batch + coordinates])


_SCATTERS: dict[str, Callable[..., None]] = {
    "none": setitem,
    "add": np.add.at,
    "mul": np.multiply.at,
    "max": np.maximum.at,
    "min": np.minimum.at,
}


def _scatter(target: Any, index: tuple[Any, ...], updates: Any, reduction: str) -> None:
    if reduction not in _SCATTERS:
        raise KernelError(f"the reduction {reduction!r} is unknown")
    _SCATTERS[reduction](target, index, updates)


@operator("Scatter", since_version=9)
@operator("ScatterElements", since_version=11)
def scatter_elements(
    x: Any, indices: Any, updates: Any, *, axis: int = 0, reduction: str = "none", spec: NodeSpec
) -> Any:
    """Return a copy of the data with elements along one axis replaced by, or combined with, updates."""
    along, result = checked_axis(axis, x.ndim), np.array(x)
    _scatter(result, _along(in_range(indices, x.shape[along], spec.op_type), along), updates, reduction)
    return result


@operator("ScatterND", since_version=11)
def scatter_nd(x: Any, indices: Any, updates: Any, *, reduction: str = "none") -> Any:
    """Return a copy of the data with slices at coordinates replaced by, or combined with, updates."""
    result = np.array(x, order="C")
    depth = indices.shape[-1]
    if updates.shape == (*indices.shape[:-1], *x.shape[depth:]) and (found := _slices_at(result, indices)) is not None:
        slices, numbers = found
        _scatter(slices, (numbers,), updates.reshape((len(numbers), *x.shape[depth:])), reduction)
        return result
    index = tuple(in_range(indices[..., i], x.shape[i], "ScatterND") for i in range(indices.shape[-1]))
    if not index:  # without coordinates, each index updates the whole array
        _scatter(result[None], (np.zeros(indices.shape[:-1], np.int64),), updates, reduction)
        return result
    _scatter(result, index, updates, reduction)
    return result


@operator("OneHot", since_version=9)
def one_hot(indices: Any, depth: Any, values: Any, *, axis: int = -1, spec: NodeSpec) -> Any:
    """Return values[1] ("on") at each index, values[0] ("off") elsewhere; indices out of range are ignored."""
    count, rank = int(scalar(depth)), indices.ndim + 1
    along = checked_axis(axis, rank)
    checked_shape(spec, (*indices.shape[:along], count, *indices.shape[along:]), values.dtype.itemsize)
    class_indices = indices.astype(np.int64)
    class_indices = np.where(class_indices < 0, class_indices + count, class_indices)
    classes = np.arange(count).reshape([-1 if i == along else 1 for i in range(rank)])
    return np.where(np.expand_dims(class_indices, along) == classes, values[1], values[0]).astype(values.dtype)


# Types whose largest elements a kernel selects, types that it selects as int32, and the limit on the axis.
_SELECTED = (np.float32, np.int32)
_NARROW_INTEGERS = (np.int8, np.uint8, np.int16, np.uint16)
_MOST_SELECTED = 1 << 31


@operator("TopK", since_version=10)
def top_k(x: Any, k: Any, *, axis: int = -1, largest: bool = True, threads: Threads | None) -> Any:
    """Return the k largest (or smallest) elements along an axis, sorted; equal values are ordered by index."""
    count, along = int(scalar(k)), checked_axis(axis, x.ndim)
    if not 0 <= count <= x.shape[along]:
        raise KernelError(f"TopK: k is {count}, but the axis has {x.shape[along]} elements")
    is_last = along == x.ndim - 1
    moved = x if is_last else np.moveaxis(x, along, -1)
    keys, values = widened(moved), None
    if keys.dtype in _NARROW_INTEGERS:
        keys = keys.astype(np.int32)
    if keys.dtype in _SELECTED and keys.shape[-1] < _MOST_SELECTED:
        rows, shape = contiguous(keys), (*keys.shape[:-1], count)
        rows = rows.reshape(math.prod(shape[:-1]), keys.shape[-1])
        order = selected(rows, count, smallest=not largest, threads=threads)
        if keys is moved:
            values = picked(rows, order, threads=threads).reshape(shape)
        order = order.reshape(shape)
    elif largest:
        # Stable descending sort: reverse, sort stably, reverse again.
        order = moved.shape[-1] - 1 - np.argsort(moved[..., ::-1], axis=-1, kind="stable")[..., ::-1]
    else:
        order = np.argsort(moved, axis=-1, kind="stable")
    order = order[..., :count].astype(np.int64, copy=False)
    if values is None:
        values = np.take_along_axis(moved, order, axis=-1)
    return (values, order) if is_last else (np.moveaxis(values, -1, along), np.moveaxis(order, -1, along))


@operator("Compress", since_version=9)
def compress(x: Any, condition: Any, *, axis: int | None = None) -> Any:
    """Select the elements, or slices along an axis, for which the condition is true; extra conditions are ignored."""
    extent = x.size if axis is None else x.shape[checked_axis(axis, x.ndim)]
    # onnxruntime reads conditions of any rank in order.
    return np.compress(condition.reshape(-1)[:extent], x, axis=axis)


operator("NonZero", since_version=9)(lambda x: np.array(np.nonzero(np.atleast_1d(x)), np.int64))


@operator("Unique", since_version=11)
def unique(x: Any, *, axis: int | None = None, sorted: bool = True) -> Any:
    """Return the distinct elements (or slices), their first positions, each element's index among them, and counts."""
    # NumPy cannot sort slices of objects, so strings are replaced by their ranks, which have the same order.
    keys = x if axis is None or x.dtype.kind != "O" else np.unique(x, return_inverse=True)[1].reshape(x.shape)
    values, first, inverse, counts = np.unique(
        keys, return_index=True, return_inverse=True, return_counts=True, axis=axis
    )
    inverse = inverse.reshape(-1)
    if keys is not x:
        values = np.take(x, first, axis=axis)
    if not sorted:
        order = np.argsort(first, kind="stable")
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        values = np.take(values, order, axis=0 if axis is None else axis)
        first, inverse, counts = first[order], rank[inverse], counts[order]
    return values, first.astype(np.int64), inverse.astype(np.int64), counts.astype(np.int64)


@operator("Unique", domain=MS)
def unique_in_order(x: Any) -> Any:
    """Return the distinct numbers of a vector in the order of their first positions, each number's index, and counts.

    Every NaN is distinct from all other numbers.
    """
    if x.ndim != 1:
        raise KernelError(f"Unique: x has shape {list(x.shape)}, expected a vector")
    _, first, inverse, counts = np.unique(
        x, return_index=True, return_inverse=True, return_counts=True, equal_nan=False
    )
    order = np.argsort(first, kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return x[first[order]], rank[inverse.reshape(-1)].astype(np.int64), counts[order].astype(np.int64)


@shape_rule("Unique")
def unique_in_order_types(types: NodeTypes) -> list[Type | None]:
    """The distinct numbers, an index per number of the input, and a count per distinct number."""
    numbers = types.shape(0, rank=1) or (None,)
    source = types.source
    return [TensorType(source.dtype, (None,)), TensorType(DataType.INT64, numbers), TensorType(DataType.INT64, (None,))]


@operator("ReverseSequence", since_version=10)
def reverse_sequence(x: Any, lengths: Any, *, batch_axis: int = 1, time_axis: int = 0) -> Any:
    """Reverse the first `length` steps of each batch entry."""
    moved = np.moveaxis(x, (batch_axis, time_axis), (0, 1))
    steps = np.arange(moved.shape[1])
    if np.any(lengths > moved.shape[1]) or np.any(lengths < 0):
        raise KernelError(
            f"ReverseSequence: a sequence length is out of range; lengths must be from 0 to {moved.shape[1]}"
        )
    limits = np.asarray(lengths)[:, None]
    source = np.where(steps < limits, limits - 1 - steps, steps)
    result = moved[np.arange(len(moved))[:, None], source]
    return np.ascontiguousarray(np.moveaxis(result, (0, 1), (batch_axis, time_axis)))


@operator("TensorScatter", since_version=24)
def tensor_scatter(cache: Any, update: Any, starts: Any = None, *, axis: int = -2, mode: str = "linear") -> Any:
    """Write an update into a cache [batch, ..., sequence, ...], at a separate position in each row."""
    along, result = checked_axis(axis, cache.ndim), np.array(cache)
    extent, length = cache.shape[along], update.shape[along]
    for row in range(len(cache)):
        positions = np.arange(length) + (0 if starts is None else int(starts[row]))
        positions = (
            positions % extent
            if mode == "circular"
            else checked_indices("TensorScatter: write positions", positions, extent)
        )
        np.moveaxis(result[row], along - 1, 0)[positions] = np.moveaxis(update[row], along - 1, 0)
    return result


@shape_rule("GatherND", domain="")
@shape_rule("GatherND")
def gather_nd_types(types: NodeTypes) -> list[Type | None]:
    """Data [batch..., data...] at indices [batch..., more..., k] is [batch..., more..., data[k:]...]."""
    source, data, indices = types.source, types.shape(0), types.shape(1)
    start = types.attribute("batch_dims", 0)
    count = indices[-1] if indices else None
    if data is None or not indices or not isinstance(count, int) or not 0 <= start + count <= len(data):
        return [TensorType(source.dtype)]
    return [TensorType(source.dtype, (*indices[:-1], *data[start + count :]))]

"""Operators that look up, scatter, select and sort by indices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..registry import Kernel, KernelError, NodeSpec, register, scalar
from .support import checked_axis, checked_shape, from_function, optional


def in_range(indices: Any, extent: int, what: str) -> Any:
    """Indices counted from the front.

    Raises:
        IndexError: one is out of range.
    """
    indices = np.asarray(indices)
    if indices.size and (indices.min() < -extent or indices.max() >= extent):
        bad = indices[(indices < -extent) | (indices >= extent)].reshape(-1)[0]
        raise IndexError(f"{what}: index {bad} must be within the inclusive range [{-extent}, {extent - 1}]")
    return np.where(indices < 0, indices + extent, indices)


def _along(indices: Any, axis: int) -> tuple[Any, ...]:
    """An index that takes `indices` along one axis and each position's own coordinate along the others."""
    grid = list(np.ogrid[tuple(slice(extent) for extent in indices.shape)])
    grid[axis] = indices
    return tuple(grid)


@register("GatherElements", since_version=11)
def gather_elements(spec: NodeSpec) -> Kernel:
    """Along one axis an index per element."""
    axis = int(spec.attributes.get("axis", 0))

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x, indices = inputs
        along = checked_axis(axis, x.ndim)
        return (x[_along(in_range(indices, x.shape[along], "GatherElements"), along)],)

    return kernel


@register("GatherND", since_version=11)
def gather_nd(spec: NodeSpec) -> Kernel:
    """The last axis of the indices holds coordinates; leading axes may be a batch."""
    batch_dims = int(spec.attributes.get("batch_dims", 0))

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x, indices = inputs
        depth = indices.shape[-1]
        if not 0 <= batch_dims < min(x.ndim, indices.ndim) or batch_dims + depth > x.ndim:
            raise KernelError(f"GatherND: indices of shape {list(indices.shape)} do not fit data {list(x.shape)}")
        batch = tuple(
            np.arange(size).reshape(*([1] * axis), size, *([1] * (indices.ndim - 2 - axis)))
            for axis, size in enumerate(indices.shape[:batch_dims])
        )
        coordinates = tuple(in_range(indices[..., i], x.shape[batch_dims + i], "GatherND") for i in range(depth))
        return (x[batch + coordinates],)

    return kernel


_SCATTERS: dict[str, Callable[..., None]] = {
    "add": np.add.at,
    "mul": np.multiply.at,
    "max": np.maximum.at,
    "min": np.minimum.at,
}


def _scatter(target: Any, index: tuple[Any, ...], updates: Any, reduction: str) -> None:
    if reduction == "none":
        target[index] = updates
    elif reduction in _SCATTERS:
        _SCATTERS[reduction](target, index, updates)
    else:
        raise KernelError(f"reduction {reduction!r} is unknown")


@register("Scatter", since_version=9)
@register("ScatterElements", since_version=11)
def scatter_elements(spec: NodeSpec) -> Kernel:
    """A copy of the data in which elements are replaced, or combined with updates, along one axis."""
    axis, reduction = int(spec.attributes.get("axis", 0)), str(spec.attributes.get("reduction", "none"))

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x, indices, updates = inputs
        along = checked_axis(axis, x.ndim)
        result = np.array(x)
        _scatter(result, _along(in_range(indices, x.shape[along], spec.op_type), along), updates, reduction)
        return (result,)

    return kernel


@register("ScatterND", since_version=11)
def scatter_nd(spec: NodeSpec) -> Kernel:
    """A copy of the data in which slices at coordinates are replaced, or combined with updates."""
    reduction = str(spec.attributes.get("reduction", "none"))

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x, indices, updates = inputs
        result = np.array(x)
        index = tuple(in_range(indices[..., i], x.shape[i], "ScatterND") for i in range(indices.shape[-1]))
        _scatter(result, index, updates, reduction)
        return (result,)

    return kernel


@register("OneHot", since_version=9)
def one_hot(spec: NodeSpec) -> Kernel:
    """`off` everywhere but `on` at each index; indices out of range give no `on`."""
    axis = int(spec.attributes.get("axis", -1))

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        indices, depth, values = np.asarray(inputs[0]), int(scalar(inputs[1])), inputs[2]
        rank = indices.ndim + 1
        along = checked_axis(axis, rank)
        shape = (*indices.shape[:along], depth, *indices.shape[along:])
        checked_shape(spec, shape, values.dtype.itemsize)
        wanted = indices.astype(np.int64)
        wanted = np.where(wanted < 0, wanted + depth, wanted)
        classes = np.arange(depth).reshape([-1 if i == along else 1 for i in range(rank)])
        return (np.where(np.expand_dims(wanted, along) == classes, values[1], values[0]).astype(values.dtype),)

    return kernel


@register("TopK", since_version=10)
def top_k(spec: NodeSpec) -> Kernel:
    """The k largest (or smallest) along an axis, sorted; among equals the lower index comes first."""
    axis = int(spec.attributes.get("axis", -1))
    largest = bool(spec.attributes.get("largest", 1))

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x, k = inputs[0], int(scalar(inputs[1]))
        along = checked_axis(axis, x.ndim)
        if not 0 <= k <= x.shape[along]:
            raise KernelError(f"TopK: k is {k}, the axis has {x.shape[along]} elements")
        moved = np.moveaxis(x, along, -1)
        order = _order(moved, k, largest)
        values = np.take_along_axis(moved, order, axis=-1)
        return np.moveaxis(values, -1, along), np.moveaxis(order, -1, along).astype(np.int64)

    return kernel


def _order(x: Any, k: int, largest: bool) -> Any:
    """Positions of the first k in order along the last axis."""
    if largest:
        # A stable descending sort: reversed, sorted stably, reversed back.
        order = x.shape[-1] - 1 - np.argsort(x[..., ::-1], axis=-1, kind="stable")[..., ::-1]
    else:
        order = np.argsort(x, axis=-1, kind="stable")
    return order[..., :k]


register("NonZero", since_version=9)(from_function(lambda x: np.array(np.nonzero(np.atleast_1d(x)), np.int64)))


@register("Compress", since_version=9)
def compress(spec: NodeSpec) -> Kernel:
    """Slices along an axis (or elements of the flat array) where the condition holds."""
    axis = spec.attributes.get("axis")

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        return (np.compress(inputs[1], inputs[0], axis=axis),)

    return kernel


@register("Unique", since_version=11)
def unique(spec: NodeSpec) -> Kernel:
    """Different elements (or slices), where each was first, which each element is, and how often each occurs."""
    axis, is_sorted = spec.attributes.get("axis"), bool(spec.attributes.get("sorted", 1))

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x = inputs[0]
        values, first, inverse, counts = np.unique(
            x, return_index=True, return_inverse=True, return_counts=True, axis=axis
        )
        inverse = inverse.reshape(-1)
        if not is_sorted:
            order = np.argsort(first, kind="stable")
            rank = np.empty_like(order)
            rank[order] = np.arange(len(order))
            values = np.take(values, order, axis=0 if axis is None else axis)
            first, inverse, counts = first[order], rank[inverse], counts[order]
        return values, first.astype(np.int64), inverse.astype(np.int64), counts.astype(np.int64)

    return kernel


@register("ReverseSequence", since_version=10)
def reverse_sequence(spec: NodeSpec) -> Kernel:
    """Per batch entry the first `length` steps in reverse order."""
    batch_axis, time_axis = int(spec.attributes.get("batch_axis", 1)), int(spec.attributes.get("time_axis", 0))

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x, lengths = inputs
        moved = np.moveaxis(x, (batch_axis, time_axis), (0, 1))
        steps = np.arange(moved.shape[1])
        if np.any(lengths > moved.shape[1]) or np.any(lengths < 0):
            raise KernelError(f"ReverseSequence: a length is outside 0 to {moved.shape[1]}")
        limits = np.asarray(lengths)[:, None]
        source = np.where(steps < limits, limits - 1 - steps, steps)
        result = moved[np.arange(len(moved))[:, None], source]
        return (np.ascontiguousarray(np.moveaxis(result, (0, 1), (batch_axis, time_axis))),)

    return kernel


@register("TensorScatter", since_version=24)
def tensor_scatter(spec: NodeSpec) -> Kernel:
    """Write an update into a cache [batch, ..., sequence, ...] at each row's own position."""
    axis, circular = int(spec.attributes.get("axis", -2)), spec.attributes.get("mode", "linear") == "circular"

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        cache, update, starts = inputs[0], inputs[1], optional(inputs, 2)
        along = checked_axis(axis, cache.ndim)
        extent, length = cache.shape[along], update.shape[along]
        result = np.array(cache)
        for row in range(len(cache)):
            places = np.arange(length) + (0 if starts is None else int(starts[row]))
            places = places % extent if circular else in_range(places, extent, "TensorScatter")
            np.moveaxis(result[row], along - 1, 0)[places] = np.moveaxis(update[row], along - 1, 0)
        return (result,)

    return kernel

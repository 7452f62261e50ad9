"""Operators that move, shape or look up data without computing on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..registry import Kernel, KernelError, NodeSpec, register, scalar


def _axes(spec: NodeSpec, inputs: Sequence[Any]) -> tuple[int, ...] | None:
    """Axes from the second input (newer versions) or the attribute (older ones)."""
    if len(inputs) > 1 and inputs[1] is not None:
        return tuple(int(axis) for axis in inputs[1].reshape(-1))
    axes = spec.attributes.get("axes")
    return None if axes is None else tuple(int(axis) for axis in axes)


@register("Shape")
def shape(spec: NodeSpec) -> Kernel:
    """Dimensions as int64, optionally a slice of them."""
    start, end = spec.attributes.get("start", 0), spec.attributes.get("end")

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        return (np.asarray(inputs[0].shape[start:end], np.int64),)

    return kernel


@register("Reshape", since_version=5)
def reshape(spec: NodeSpec) -> Kernel:
    """0 copies a dimension unless allowzero; -1 is inferred."""
    allow_zero = bool(spec.attributes.get("allowzero", 0))

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x, wanted = inputs
        sizes = [int(size) for size in wanted]
        if not allow_zero:
            sizes = [x.shape[i] if size == 0 else size for i, size in enumerate(sizes)]
        return (x.reshape(sizes),)

    return kernel


@register("Transpose")
def transpose(spec: NodeSpec) -> Kernel:
    """A view with the axes in another order."""
    order = spec.attributes.get("perm")

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        return (np.transpose(inputs[0], order),)

    return kernel


@register("Squeeze")
def squeeze(spec: NodeSpec) -> Kernel:
    """Drop axes of size one."""

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        return (np.squeeze(inputs[0], axis=_axes(spec, inputs)),)

    return kernel


@register("Unsqueeze")
def unsqueeze(spec: NodeSpec) -> Kernel:
    """Insert axes of size one; axes count in the result."""

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        axes = _axes(spec, inputs)
        if axes is None:
            raise KernelError("Unsqueeze needs axes")
        return (np.expand_dims(inputs[0], axes),)

    return kernel


@register("Concat", since_version=4)
def concat(spec: NodeSpec) -> Kernel:
    """Join along an axis."""
    axis = int(spec.attributes["axis"])

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        return (np.concatenate(inputs, axis=axis),)

    return kernel


@register("Split", since_version=2)
def split(spec: NodeSpec) -> Kernel:
    """Cut along an axis into given sizes, or into equal chunks of which the last may be smaller."""
    axis = int(spec.attributes.get("axis", 0))
    count = len(spec.outputs)

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x = inputs[0]
        sizes = inputs[1] if len(inputs) > 1 and inputs[1] is not None else spec.attributes.get("split")
        if sizes is None:
            chunk = -(-x.shape[axis] // count)
            ends = [min((i + 1) * chunk, x.shape[axis]) for i in range(count - 1)]
        else:
            ends = list(np.cumsum(np.asarray(sizes, np.int64))[:-1])
        return tuple(np.split(x, ends, axis=axis))

    return kernel


@register("Slice", since_version=10)
def slice_(spec: NodeSpec) -> Kernel:
    """Starts, ends, axes and steps as inputs; out-of-range ends clamp as in NumPy."""

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x, starts, ends = inputs[:3]
        axes = inputs[3] if len(inputs) > 3 and inputs[3] is not None else range(len(starts))
        steps = inputs[4] if len(inputs) > 4 and inputs[4] is not None else [1] * len(starts)
        index = [slice(None)] * x.ndim
        for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
            # Stepping backwards to before the first element has no integer end in Python: it is None.
            stop = None if step < 0 and int(end) < -x.shape[int(axis)] else int(end)
            index[int(axis)] = slice(int(start), stop, int(step))
        return (x[tuple(index)],)

    return kernel


@register("Gather")
def gather(spec: NodeSpec) -> Kernel:
    """Look up slices along an axis; negative indices count from the end. Raises IndexError when out of range."""
    axis = int(spec.attributes.get("axis", 0))

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        return (np.asarray(np.take(inputs[0], inputs[1], axis=axis)),)

    return kernel


@register("Expand", since_version=8)
def expand(spec: NodeSpec) -> Kernel:
    """Broadcast both ways: a 1 in the target keeps the dimension."""

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x, wanted = inputs
        target = np.broadcast_shapes(x.shape, tuple(int(size) for size in wanted))
        return (np.broadcast_to(x, target),)

    return kernel


@register("ConstantOfShape", since_version=9)
def constant_of_shape(spec: NodeSpec) -> Kernel:
    """Fill a shape with one value (float32 zero unless given)."""
    value = spec.attributes.get("value")
    fill = np.zeros(1, np.float32) if value is None else np.asarray(value)

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        return (np.full(tuple(int(size) for size in inputs[0]), fill.reshape(-1)[0], dtype=fill.dtype),)

    return kernel


@register("Range", since_version=11)
def range_(spec: NodeSpec) -> Kernel:
    """start, start + delta, … below limit."""

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        start, limit, delta = (scalar(value) for value in inputs)
        return (np.arange(start, limit, delta, dtype=inputs[0].dtype),)

    return kernel

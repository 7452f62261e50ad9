"""Operators that move, shape or look up data without computing on it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from ..registry import Kernel, KernelError, NodeSpec, register, scalar
from .casting import dtype_of
from .support import axes_of, checked_axis, checked_shape, from_function, optional


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
        return (np.squeeze(inputs[0], axis=axes_of(spec, inputs)),)

    return kernel


@register("Unsqueeze")
def unsqueeze(spec: NodeSpec) -> Kernel:
    """Insert axes of size one; axes count in the result."""

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        axes = axes_of(spec, inputs)
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
        extent = x.shape[axis]
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
        checked_shape(spec, target, x.dtype.itemsize)
        return (np.broadcast_to(x, target),)

    return kernel


@register("ConstantOfShape", since_version=9)
def constant_of_shape(spec: NodeSpec) -> Kernel:
    """Fill a shape with one value (float32 zero unless given)."""
    value = spec.attributes.get("value")
    fill = np.zeros(1, np.float32) if value is None else np.asarray(value)

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        return (np.full(checked_shape(spec, inputs[0], fill.dtype.itemsize), fill.reshape(-1)[0], dtype=fill.dtype),)

    return kernel


@register("Range", since_version=11)
def range_(spec: NodeSpec) -> Kernel:
    """start, start + delta, ... below limit."""

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        start, limit, delta = (scalar(value) for value in inputs)
        if not delta:
            raise KernelError("Range: delta is 0")
        dtype = inputs[0].dtype
        steps = (limit - start) / delta
        if not np.isfinite(steps):
            raise KernelError(f"Range from {start} to {limit} by {delta} has no end")
        count = max(int(np.ceil(steps)), 0)
        checked_shape(spec, (count,), 8)
        if dtype.kind in "iu":
            return (np.arange(start, limit, delta, dtype=dtype),)
        return ((start + np.arange(count) * delta).astype(dtype),)

    return kernel


register("Size")(from_function(lambda x: np.asarray(np.size(x), np.int64)))


@register("Flatten")
def flatten(spec: NodeSpec) -> Kernel:
    """To 2-D: axes before `axis`, and the others."""
    axis = int(spec.attributes.get("axis", 1))

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x = inputs[0]
        first = x.ndim if axis == x.ndim else checked_axis(axis, x.ndim)
        return (x.reshape(math.prod(x.shape[:first]), math.prod(x.shape[first:])),)

    return kernel


@register("Tile", since_version=6)
def tile(spec: NodeSpec) -> Kernel:
    """Repeat along every axis."""

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x, repeats = inputs[0], [int(count) for count in inputs[1]]
        if len(repeats) != x.ndim:
            raise KernelError(f"Tile: {len(repeats)} repeats for rank {x.ndim}")
        checked_shape(spec, [size * count for size, count in zip(x.shape, repeats, strict=True)], x.dtype.itemsize)
        return (np.tile(x, repeats),)

    return kernel


_PAD_MODES = {"constant": "constant", "reflect": "reflect", "edge": "edge", "wrap": "wrap"}


@register("Pad", since_version=2)
def pad(spec: NodeSpec) -> Kernel:
    """Add before and after axes by value or by what is there; negative pads take away."""
    mode = str(spec.attributes.get("mode", "constant"))
    if mode not in _PAD_MODES:
        raise KernelError(f"Pad: mode {mode!r} is unknown")
    old = spec.attributes.get("pads")

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x = inputs[0]
        pads = [int(size) for size in (old if old is not None else inputs[1])]
        value = spec.attributes.get("value", 0) if old is not None else optional(inputs, 2)
        axes = [checked_axis(a, x.ndim) for a in axes_of(spec, inputs, 3) or range(x.ndim)]
        if len(pads) != 2 * len(axes):
            raise KernelError(f"Pad: {len(pads)} pads for {len(axes)} axes")
        widths = [(0, 0)] * x.ndim
        for i, axis in enumerate(axes):
            widths[axis] = (pads[i], pads[i + len(axes)])
        return (_padded(spec, x, widths, mode, value),)

    return kernel


def _padded(spec: NodeSpec, x: Any, widths: Sequence[tuple[int, int]], mode: str, value: Any) -> Any:
    inner = tuple(
        slice(max(-before, 0), size - max(-after, 0)) for (before, after), size in zip(widths, x.shape, strict=True)
    )
    x = x[inner]
    grown = [(max(before, 0), max(after, 0)) for before, after in widths]
    checked_shape(spec, [b + size + a for (b, a), size in zip(grown, x.shape, strict=True)], x.dtype.itemsize)
    if mode != "constant":
        return np.pad(x, grown, mode=_PAD_MODES[mode])  # type: ignore[call-overload]
    fill = ("" if x.dtype.kind == "O" else 0) if value is None else np.asarray(value).reshape(-1)[0]
    return np.pad(x, grown, mode="constant", constant_values=fill)


@register("Trilu", since_version=14)
@register("Trilu", domain="com.microsoft")
def trilu(spec: NodeSpec) -> Kernel:
    """The upper or lower triangle of the last two axes; zeros elsewhere."""
    upper = bool(spec.attributes.get("upper", 1))

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x, given = inputs[0], optional(inputs, 1)
        k = 0 if given is None else max(min(int(scalar(given)), x.shape[-1] + 1), -x.shape[-2] - 1)
        return (np.triu(x, k) if upper else np.tril(x, k),)

    return kernel


@register("EyeLike", since_version=9)
def eye_like(spec: NodeSpec) -> Kernel:
    """Ones on a diagonal, of the input's shape."""
    wanted, k = spec.attributes.get("dtype"), int(spec.attributes.get("k", 0))

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x = inputs[0]
        dtype = x.dtype if wanted is None else dtype_of(int(wanted))
        return (np.eye(x.shape[0], x.shape[1], k=k).astype(dtype),)

    return kernel


def _block_size(spec: NodeSpec) -> int:
    size = int(spec.attributes["blocksize"])
    if size < 1:
        raise KernelError(f"{spec.op_type}: blocksize is {size}")
    return size


@register("DepthToSpace")
def depth_to_space(spec: NodeSpec) -> Kernel:
    """Channels into blocks of pixels; DCR puts the block before the channel, CRD after."""
    size, depth_first = _block_size(spec), spec.attributes.get("mode", "DCR") == "DCR"

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x = inputs[0]
        n, c, h, w = x.shape
        if depth_first:
            blocks = x.reshape(n, size, size, c // size**2, h, w).transpose(0, 3, 4, 1, 5, 2)
        else:
            blocks = x.reshape(n, c // size**2, size, size, h, w).transpose(0, 1, 4, 2, 5, 3)
        return (blocks.reshape(n, c // size**2, h * size, w * size),)

    return kernel


@register("SpaceToDepth")
def space_to_depth(spec: NodeSpec) -> Kernel:
    """Blocks of pixels into channels."""
    size, depth_first = _block_size(spec), spec.attributes.get("mode", "DCR") == "DCR"

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x = inputs[0]
        n, c, h, w = x.shape
        blocks = x.reshape(n, c, h // size, size, w // size, size)
        order = (0, 3, 5, 1, 2, 4) if depth_first else (0, 1, 3, 5, 2, 4)
        return (blocks.transpose(order).reshape(n, c * size**2, h // size, w // size),)

    return kernel


@register("Slice")
def slice_by_attributes(spec: NodeSpec) -> Kernel:
    """Starts, ends and axes as attributes, before operator set 10."""
    starts, ends = spec.attributes["starts"], spec.attributes["ends"]
    axes = spec.attributes.get("axes") or range(len(starts))

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        index = [slice(None)] * inputs[0].ndim
        for start, end, axis in zip(starts, ends, axes, strict=True):
            index[int(axis)] = slice(int(start), int(end))
        return (inputs[0][tuple(index)],)

    return kernel


@register("Dropout", since_version=7)
def dropout(spec: NodeSpec) -> Kernel:
    """The input itself and a mask of True. With training_mode elements are dropped, which is borrowed."""
    from .borrowed import make

    in_training: list[Kernel] = []

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        mode, ratio = optional(inputs, 2), optional(inputs, 1)
        if mode is not None and bool(scalar(mode)) and (ratio is None or scalar(ratio) != 0):
            if not in_training:
                in_training.append(make(spec))
            return in_training[0](context, inputs)
        x = inputs[0]
        return x, np.ones(x.shape, bool if spec.version >= 10 else x.dtype)

    return kernel

"""Operators that change or return the shape and keep the elements."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from genai.kernels.cpu.arrays.copying import reshaped

from ..onnx.types import Dim, Shape, TensorType, Type
from .registry import KernelError, operator
from .shape_rules import NodeTypes, shape_rule
from .support import axes_of, checked_axis

operator("Size")(lambda x: np.asarray(np.size(x), np.int64))


@operator("Shape")
def shape_of(x: Any, *, start: int = 0, end: int | None = None) -> Any:
    """Return the dimensions as int64, optionally a slice of them."""
    return np.asarray(x.shape[start:end], np.int64)


MAX_RANK = 64


@operator("Reshape", since_version=5)
def reshape(x: Any, shape: Any, *, allowzero: bool = False) -> Any:
    """Reshape; 0 copies a dimension, unless allowzero is set, and -1 is inferred."""
    sizes = shape.tolist()
    if 0 in sizes and not allowzero:
        sizes = [x.shape[i] if size == 0 else size for i, size in enumerate(sizes)]
    return reshaped(x, sizes)


@operator("Squeeze")
def squeeze(x: Any, axes_input: Any = None, *, axes: tuple[int, ...] | None = None) -> Any:
    """Remove axes of size 1."""
    return np.squeeze(x, axis=axes_of(axes_input, axes))


@operator("Unsqueeze")
def unsqueeze(x: Any, axes_input: Any = None, *, axes: tuple[int, ...] | None = None) -> Any:
    """Insert axes of size 1; the axes are indices into the result."""
    inserted = axes_of(axes_input, axes)
    if inserted is None:
        raise KernelError("Unsqueeze: the node has no axes")
    return np.expand_dims(x, inserted)


@operator("Flatten")
def flatten(x: Any, *, axis: int = 1) -> Any:
    """Flatten to 2-D: the axes before `axis`, and the remaining axes."""
    first = x.ndim if axis == x.ndim else checked_axis(axis, x.ndim)
    return reshaped(x, (math.prod(x.shape[:first]), math.prod(x.shape[first:])))


@shape_rule("Reshape", domain="")
def reshape_types(types: NodeTypes) -> list[Type | None]:
    """The same elements in another shape; 0 keeps a dimension, and -1 is inferred."""
    source = types.source
    target = types.value(1)
    shape = types.node.attribute("shape")
    dims = tuple(shape) if isinstance(shape, list) else None if target is None else target.dims
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
    """Return a shape of which only the rank is known, or None if the rank is unknown too."""
    rank = shape_of_shape[0] if shape_of_shape is not None and len(shape_of_shape) == 1 else None
    return (None,) * rank if isinstance(rank, int) and 0 <= rank <= MAX_RANK else None


def _left_over(source: Shape, rest: Shape) -> Dim:
    """Return the dimension that preserves the number of elements; symbols and numbers on both sides cancel."""
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

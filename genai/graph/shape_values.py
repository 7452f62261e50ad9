"""Values of shape computations, as far as they are known before a run: Shape, Gather, Concat, Mul and their like.

A value here is a small integer tensor whose elements are extents: known, symbolic, or open.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from .node import Node
from .tensor import Tensor
from .types import ArrayTypes, DataType, Dim, Shape, Type

# More dimensions than NumPy has; longer vectors are data, not shapes.
_MAX_ELEMENTS = 64
_INTEGERS = frozenset({DataType.INT32, DataType.INT64})


@dataclass(frozen=True)
class ShapeValue:
    """A vector of extents, or a single one."""

    dims: Shape
    is_scalar: bool = False


ValueRule = Callable[[Node, Sequence[ShapeValue | None], Sequence[Type | None]], ShapeValue | None]


def constant_value(array: NDArray[Any] | None) -> ShapeValue | None:
    """A constant as a shape value, if it can be one."""
    if array is None or array.dtype.kind not in "ib" or array.ndim > 1 or array.size > _MAX_ELEMENTS:
        return None
    return ShapeValue(tuple(map(int, array.reshape(-1).tolist())), is_scalar=array.ndim == 0)


def is_shape_computation(node: Node) -> bool:
    """Whether `computed_value` has a rule for a node."""
    return node.op_type in _RULES and node.key[0] == ""


def computed_value(node: Node, values: Sequence[ShapeValue | None], types: Sequence[Type | None]) -> ShapeValue | None:
    """What a node computes from shape values and types; None where it is no shape computation or nothing is known."""
    if not is_shape_computation(node) or not node.inputs:
        return None
    found = _RULES[node.op_type](node, values, types)
    return found if found is None or len(found.dims) <= _MAX_ELEMENTS else None


def _first(values: Sequence[ShapeValue | None]) -> ShapeValue | None:
    return values[0] if values else None


def _shape(node: Node, values: Sequence[ShapeValue | None], types: Sequence[Type | None]) -> ShapeValue | None:
    source = types[0]
    if not isinstance(source, ArrayTypes) or source.shape is None:
        return None
    end = node.integer("end", len(source.shape))
    return ShapeValue(source.shape[node.integer("start", 0) : end])


def _size(node: Node, values: Sequence[ShapeValue | None], types: Sequence[Type | None]) -> ShapeValue | None:
    source = types[0]
    count = source.num_elements if isinstance(source, ArrayTypes) else None
    return ShapeValue((count,), is_scalar=True)


def _same(node: Node, values: Sequence[ShapeValue | None], types: Sequence[Type | None]) -> ShapeValue | None:
    return _first(values)


def _cast(node: Node, values: Sequence[ShapeValue | None], types: Sequence[Type | None]) -> ShapeValue | None:
    return _first(values) if node.attribute("to") in _INTEGERS else None


def _gather(node: Node, values: Sequence[ShapeValue | None], types: Sequence[Type | None]) -> ShapeValue | None:
    source, indices = _pair(values)
    if source is None or indices is None or source.is_scalar or node.integer("axis", 0) not in (0, -1):
        return None
    count = len(source.dims)
    if not all(isinstance(index, int) and -count <= index < count for index in indices.dims):
        return None
    picked = tuple(source.dims[index] for index in indices.dims if isinstance(index, int))
    return ShapeValue(picked, indices.is_scalar)


def _slice(node: Node, values: Sequence[ShapeValue | None], types: Sequence[Type | None]) -> ShapeValue | None:
    source = _first(values)
    starts = _single(node, "starts", values, 1)
    ends = _single(node, "ends", values, 2)
    step = 1 if not node.input(4) else _single(node, "steps", values, 4)
    if source is None or source.is_scalar or starts is None or ends is None or not step:
        return None
    return ShapeValue(source.dims[starts : None if step < 0 and ends < -len(source.dims) else ends : step])


def _concat(node: Node, values: Sequence[ShapeValue | None], types: Sequence[Type | None]) -> ShapeValue | None:
    parts = [value for value in values if value is not None and not value.is_scalar]
    return ShapeValue(tuple(dim for part in parts for dim in part.dims)) if len(parts) == len(node.inputs) else None


def _to_vector(node: Node, values: Sequence[ShapeValue | None], types: Sequence[Type | None]) -> ShapeValue | None:
    source = _first(values)
    return ShapeValue(source.dims) if source is not None and source.is_scalar else None


def _to_scalar(node: Node, values: Sequence[ShapeValue | None], types: Sequence[Type | None]) -> ShapeValue | None:
    source = _first(values)
    return ShapeValue(source.dims, is_scalar=True) if source is not None and len(source.dims) == 1 else None


def _reshape(node: Node, values: Sequence[ShapeValue | None], types: Sequence[Type | None]) -> ShapeValue | None:
    source, target = _pair(values)
    if source is None or target is None or len(target.dims) > 1:
        return None
    return ShapeValue(source.dims, is_scalar=not target.dims)


def _product(node: Node, values: Sequence[ShapeValue | None], types: Sequence[Type | None]) -> ShapeValue | None:
    source = _first(values)
    if source is None or source.is_scalar:
        return None
    extents = [dim for dim in source.dims if isinstance(dim, int)]
    total = _bounded(math.prod(extents)) if len(extents) == len(source.dims) else None
    return ShapeValue((total,), is_scalar=not node.integer("keepdims", 1))


def _elementwise(calculate: Callable[[Dim, Dim], Dim]) -> ValueRule:
    def rule(node: Node, values: Sequence[ShapeValue | None], types: Sequence[Type | None]) -> ShapeValue | None:
        first, second = _pair(values)
        if first is None or second is None:
            return None
        count = max(len(first.dims), len(second.dims), 1)
        if len(first.dims) not in (1, count) or len(second.dims) not in (1, count):
            return None
        pairs = zip(first.dims * (count // len(first.dims)), second.dims * (count // len(second.dims)), strict=True)
        return ShapeValue(tuple(calculate(*pair) for pair in pairs), first.is_scalar and second.is_scalar)

    return rule


def _integers(calculate: Callable[[int, int], int], neutral: int, commutes: bool) -> ValueRule:
    """Arithmetic of known extents; a symbol stays itself beside the neutral element."""

    def dims(first: Dim, second: Dim) -> Dim:
        if isinstance(first, int) and isinstance(second, int):
            return _bounded(calculate(first, second))
        if second == neutral:
            return first
        return second if commutes and first == neutral else None

    return _elementwise(dims)


def _bounded(value: int) -> Dim:
    """Numbers that an extent cannot have are open, so that long products stay small."""
    return value if abs(value) < 2**62 else None


def _quotient(first: Dim, second: Dim) -> Dim:
    if second == 1:
        return first
    if isinstance(first, int) and isinstance(second, int) and second != 0:
        return int(first / second) if abs(first) < 2**52 else None  # ONNX rounds towards zero.
    return None


def _equals(first: Dim, second: Dim) -> Dim:
    """1, 0 or open. A symbol is an extent, so it never equals a negative number."""
    if first is None or second is None:
        return None
    if type(first) is type(second):
        return int(first == second) if isinstance(first, int) or first == second else None
    number = first if isinstance(first, int) else second
    return 0 if isinstance(number, int) and number < 0 else None


def _where(node: Node, values: Sequence[ShapeValue | None], types: Sequence[Type | None]) -> ShapeValue | None:
    if len(values) != 3 or any(value is None or value.is_scalar for value in values):
        return None
    columns = [value.dims for value in values if value is not None]
    if len({len(column) for column in columns}) != 1:
        return None
    return ShapeValue(
        tuple(
            (yes if condition else no) if isinstance(condition, int) else (yes if yes == no else None)
            for condition, yes, no in zip(*columns, strict=True)
        )
    )


def _filled(node: Node, values: Sequence[ShapeValue | None], types: Sequence[Type | None]) -> ShapeValue | None:
    """A vector of one number, as ConstantOfShape makes it."""
    shape, fill = _first(values), node.attribute("value")
    count = shape.dims[0] if shape is not None and len(shape.dims) == 1 and not shape.is_scalar else None
    if not isinstance(count, int) or not 0 <= count <= _MAX_ELEMENTS or not isinstance(fill, Tensor):
        return None
    number = constant_value(fill.array()) if fill.nbytes <= _MAX_ELEMENTS else None
    return ShapeValue(number.dims * count) if number is not None and len(number.dims) == 1 else None


_RULES: dict[str, ValueRule] = {
    "Shape": _shape,
    "Size": _size,
    "Identity": _same,
    "Cast": _cast,
    "Gather": _gather,
    "Slice": _slice,
    "Concat": _concat,
    "Unsqueeze": _to_vector,
    "Squeeze": _to_scalar,
    "Reshape": _reshape,
    "ReduceProd": _product,
    "Add": _integers(operator.add, 0, commutes=True),
    "Sub": _integers(operator.sub, 0, commutes=False),
    "Mul": _integers(operator.mul, 1, commutes=True),
    "Div": _elementwise(_quotient),
    "Equal": _elementwise(_equals),
    "Where": _where,
    "ConstantOfShape": _filled,
}


def _pair(values: Sequence[ShapeValue | None]) -> tuple[ShapeValue | None, ShapeValue | None]:
    return (values[0], values[1]) if len(values) > 1 else (None, None)


def _single(node: Node, name: str, values: Sequence[ShapeValue | None], index: int) -> int | None:
    """The one known element of a Slice parameter, which older operator sets keep in an attribute."""
    listed = node.attribute(name)
    if listed is None:
        value = values[index] if index < len(values) else None
        listed = list(value.dims) if value is not None else []
    return listed[0] if isinstance(listed, list) and len(listed) == 1 and isinstance(listed[0], int) else None

"""Values of shape computations (Shape, Gather, Concat, Mul and similar), as far as they are known before a run.

A value in this module is a small integer tensor with dimensions as elements: known, symbolic or unknown. Most operators
compute such values with their own kernels, which run on arrays of objects that implement the arithmetic of dimensions.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.ops.registry import evaluated

from ..onnx.node import Node
from ..onnx.types import ArrayTypes, DataType, Dim, ShapeValue, Type

# More dimensions than NumPy allows; longer vectors are data, not shapes.
MAX_ELEMENTS = 64
_INTEGERS = frozenset({DataType.INT32, DataType.INT64})
# Operators with kernels that also work on arrays of dimensions.
_BY_KERNEL = frozenset(
    "Add Concat ConstantOfShape Div Gather Identity Mod Mul ReduceProd Reshape Slice Squeeze Sub Transpose "
    "Unsqueeze".split()
)


class _Extent:
    """An array element: a number, a symbol, or None if unknown."""

    def __init__(self, dim: Dim) -> None:
        self.dim = dim

    def __int__(self) -> int:
        if isinstance(self.dim, int):
            return self.dim
        raise TypeError("the dimension is not a known number")

    def __add__(self, other: Any) -> _Extent:
        return self._with(other, operator.add, 0, commutes=True)

    def __sub__(self, other: Any) -> _Extent:
        return self._with(other, operator.sub, 0)

    def __mul__(self, other: Any) -> _Extent:
        return self._with(other, operator.mul, 1, commutes=True)

    def __truediv__(self, other: Any) -> _Extent:
        return self._with(other, _quotient, 1)

    def __mod__(self, other: Any) -> _Extent:
        return self._with(other, _remainder, None)

    def _with(
        self, other: Any, calculate: Callable[[int, int], Dim], neutral: int | None, commutes: bool = False
    ) -> _Extent:
        """Compute with known dimensions; a symbol combined with the neutral element is unchanged."""
        first, second = self.dim, _dim(other)
        if isinstance(first, int) and isinstance(second, int):
            # Numbers that cannot be dimensions become unknown, so that numbers in long products stay small.
            result = calculate(first, second)
            return _Extent(result if isinstance(result, int) and abs(result) < 2**62 else None)
        if neutral is not None and second == neutral:
            return self
        return _Extent(second if commutes and first == neutral else None)


def _dim(element: Any) -> Dim:
    return element.dim if isinstance(element, _Extent) else operator.index(element)


def _quotient(first: int, second: int) -> Dim:
    """Divide towards zero, as ONNX does; None if the divisor is 0 or the result may be inexact."""
    return int(first / second) if second != 0 and abs(first) < 2**52 else None


def _remainder(first: int, second: int) -> Dim:
    """Return the remainder with the divisor's sign; None if the divisor is 0."""
    return first % second if second != 0 else None


def constant_value(array: NDArray[Any] | None) -> ShapeValue | None:
    """Return a constant as a shape value, or None if it cannot be a shape value."""
    if array is None or array.dtype.kind not in "ib" or array.size > MAX_ELEMENTS:
        return None
    return ShapeValue(tuple(map(int, array.reshape(-1).tolist())), array.shape)


def is_shape_computation(node: Node) -> bool:
    """Return True if `computed_value` supports a node's operator."""
    return node.key[0] == "" and (node.op_type in _BY_KERNEL or node.op_type in _RULES) and bool(node.inputs)


def computed_value(
    node: Node, version: int, values: Sequence[ShapeValue | None], types: Sequence[Type | None]
) -> ShapeValue | None:
    """Compute a node on shape values and types; None if it is not a shape computation or nothing is known."""
    if not is_shape_computation(node):
        return None
    rule = _RULES.get(node.op_type)
    value = rule(node, values, types) if rule is not None else _by_kernel(node, version, values)
    return value if value is None or len(value.dims) <= MAX_ELEMENTS else None


def _by_kernel(node: Node, version: int, values: Sequence[ShapeValue | None]) -> ShapeValue | None:
    """Run the operator's kernel on dimensions: objects for the first input; for other inputs, numbers if known."""
    if any(name and value is None for name, value in zip(node.inputs, values, strict=True)):
        return None
    arrays = [None if value is None else _array(value, index > 0) for index, value in enumerate(values)]
    try:
        array = np.asarray(evaluated(node, version, arrays, max_value_bytes=8 * MAX_ELEMENTS)[0])
        dims = tuple(map(_dim, array.reshape(-1).tolist()))
    except Exception:  # On any error, the value is unknown.
        return None
    return ShapeValue(dims, array.shape) if array.dtype.kind in "ibO" else None


def _array(value: ShapeValue, as_numbers: bool) -> NDArray[Any]:
    is_known = as_numbers and all(isinstance(dim, int) for dim in value.dims)
    array = np.array(value.dims if is_known else [_Extent(dim) for dim in value.dims], np.int64 if is_known else object)
    return array.reshape(value.shape)


def _shape(node: Node, values: Sequence[ShapeValue | None], types: Sequence[Type | None]) -> ShapeValue | None:
    source = types[0]
    if not isinstance(source, ArrayTypes) or source.shape is None:
        return None
    end = node.integer("end", len(source.shape))
    return ShapeValue(source.shape[node.integer("start", 0) : end])


def _size(node: Node, values: Sequence[ShapeValue | None], types: Sequence[Type | None]) -> ShapeValue | None:
    return ShapeValue((types[0].num_elements if isinstance(types[0], ArrayTypes) else None,), ())


def _cast(node: Node, values: Sequence[ShapeValue | None], types: Sequence[Type | None]) -> ShapeValue | None:
    return values[0] if node.attribute("to") in _INTEGERS else None


def _equal(node: Node, values: Sequence[ShapeValue | None], types: Sequence[Type | None]) -> ShapeValue | None:
    """Compare elements; each result is 1, 0 or unknown."""
    first, second = values if len(values) == 2 else (None, None)
    if first is None or second is None or max(len(first.shape), len(second.shape)) > 1:
        return None
    count = max(len(first.dims), len(second.dims), 1)
    if len(first.dims) not in (1, count) or len(second.dims) not in (1, count):
        return None
    pairs = zip(first.dims * (count // len(first.dims)), second.dims * (count // len(second.dims)), strict=True)
    axes = () if first.shape == second.shape == () else None
    return ShapeValue(tuple(_are_equal(*pair) for pair in pairs), axes)


def _are_equal(first: Dim, second: Dim) -> Dim:
    """Compare two dimensions; a symbol never equals a negative number, because it is a size."""
    if first is None or second is None:
        return None
    if type(first) is type(second):
        return int(first == second) if isinstance(first, int) or first == second else None
    number = first if isinstance(first, int) else second
    return 0 if isinstance(number, int) and number < 0 else None


def _where(node: Node, values: Sequence[ShapeValue | None], types: Sequence[Type | None]) -> ShapeValue | None:
    columns = [value.dims for value in values if value is not None and len(value.shape) == 1]
    if len(columns) != 3 or len({len(column) for column in columns}) != 1:
        return None
    return ShapeValue(
        tuple(
            (yes if condition else no) if isinstance(condition, int) else (yes if yes == no else None)
            for condition, yes, no in zip(*columns, strict=True)
        )
    )


_RULES: dict[str, Callable[[Node, Sequence[ShapeValue | None], Sequence[Type | None]], ShapeValue | None]] = {
    "Shape": _shape,
    "Size": _size,
    "Cast": _cast,
    "Equal": _equal,
    "Where": _where,
}

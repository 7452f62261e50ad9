"""Shape rules for standard operators: shape computations with symbols, and what ONNX's own inference crashes on.

ONNX follows the values of shape computations only in a mode that allocates without bound for hostile or merely long
vectors, so the operators that turn such values into shapes have rules here. The others are those whose inference in
onnx 1.23 crashes the process or never ends when a type or attribute is not as expected (found by fuzzing).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from .shape_rules import NodeTypes, shape_rule
from .shape_values import ShapeValue
from .tensor import Tensor
from .types import DataType, Dim, Shape, TensorType, Type

_MAX_RANK = 64
_MAX_INT32 = 2**31 - 1
_MAX_INDEX = 2**62


@shape_rule("Reshape", domain="")
def reshape(types: NodeTypes) -> list[Type | None]:
    """The elements in another shape; 0 keeps an extent, -1 takes what is left."""
    source = types.tensor(0)
    if source is None:
        return []
    target = types.value(1)
    listed = types.node.attribute("shape")
    dims = tuple(listed) if isinstance(listed, list) else None if target is None else target.dims
    if dims is None:
        return [TensorType(source.dtype, _open_shape(types.shape(1)))]
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


@shape_rule("Expand", domain="")
def expand(types: NodeTypes) -> list[Type | None]:
    """The input broadcast with a shape."""
    source, target = types.tensor(0), types.value(1)
    if source is None:
        return []
    if source.shape is None or target is None:
        return [TensorType(source.dtype)]
    rank = max(len(source.shape), len(target.dims))
    first: Shape = (1,) * (rank - len(source.shape)) + source.shape
    second: Shape = (1,) * (rank - len(target.dims)) + target.dims
    return [TensorType(source.dtype, tuple(_broadcast(a, b) for a, b in zip(first, second, strict=True)))]


@shape_rule("ConstantOfShape", domain="")
def constant_of_shape(types: NodeTypes) -> list[Type | None]:
    """A constant in every element of a shape."""
    value, target = types.node.attribute("value"), types.value(0)
    dtype = value.dtype if isinstance(value, Tensor) else DataType.FLOAT
    return [TensorType(dtype, _open_shape(types.shape(0)) if target is None else target.dims)]


@shape_rule("Range", domain="")
def number_range(types: NodeTypes) -> list[Type | None]:
    """Numbers from a start, below a limit, in steps; counting from 0 to an extent gives that many."""
    source = types.tensor(0) or types.tensor(1) or types.tensor(2)
    if source is None:
        return []
    start, limit, step = (_only(types.value(index)) for index in range(3))
    if start == 0 and step == 1 and isinstance(limit, str):
        return [TensorType(source.dtype, (limit,))]
    # Of fractions the count depends on rounding at run time, so only whole numbers are counted.
    if isinstance(start, int) and isinstance(limit, int) and isinstance(step, int) and step != 0:
        return [TensorType(source.dtype, (max(-((start - limit) // step), 0),))]
    return [TensorType(source.dtype, (None,))]


@shape_rule("Slice", domain="")
def slice_(types: NodeTypes) -> list[Type | None]:
    """Part of some axes; the others stay."""
    source = types.tensor(0)
    if source is None or source.shape is None:
        return [] if source is None else [TensorType(source.dtype)]
    starts, ends = _listed(types, "starts", 1), _listed(types, "ends", 2)
    steps = _listed(types, "steps", 4) if types.node.input(4) else (1,) * _MAX_RANK
    axes = _sliced_axes(types, starts, len(source.shape))
    if axes is None:
        return [TensorType(source.dtype, (None,) * len(source.shape))]
    shape = list(source.shape)
    for position, axis in enumerate(axes):
        shape[axis] = _sliced(shape[axis], _item(starts, position), _item(ends, position), _item(steps, position))
    return [TensorType(source.dtype, tuple(shape))]


@shape_rule("LayerNormalization", domain="")
def layer_normalization(types: NodeTypes) -> list[Type | None]:
    """The normalised input, mean and inverse deviation."""
    source = types.tensor(0)
    if source is None:
        return []
    statistics = replace(
        statistics_type(source, types.attribute("axis", -1)), dtype=_data_type(types.attribute("stash_type", 1))
    )
    return [source, statistics, statistics]


@shape_rule("RegexFullMatch", domain="")
def regex_full_match(types: NodeTypes) -> list[Type | None]:
    """One truth value per string."""
    return [TensorType(DataType.BOOL, types.shape(0))]


@shape_rule("Split", domain="")
def split(types: NodeTypes) -> list[Type | None]:
    """Parts of given sizes along an axis, or of equal size with a smaller last one."""
    source, count = types.tensor(0), len(types.node.outputs)
    if source is None:
        return []
    axis = types.attribute("axis", 0)
    if source.shape is None or not -len(source.shape) <= axis < len(source.shape):
        return [TensorType(source.dtype)] * count
    axis %= len(source.shape)
    sizes = _split_sizes(types, source.shape[axis], count)
    return [replace(source, shape=(*source.shape[:axis], size, *source.shape[axis + 1 :])) for size in sizes]


@shape_rule("LabelEncoder", domain="ai.onnx.ml")
def label_encoder(types: NodeTypes) -> list[Type | None]:
    """One label per element, of the type of the attribute that lists the labels."""
    for name, dtype in (
        ("values_strings", DataType.STRING),
        ("values_int64s", DataType.INT64),
        ("values_floats", DataType.FLOAT),
    ):
        if name in types.node.attributes:
            return [TensorType(dtype, types.shape(0))]
    labels = types.node.attribute("values_tensor")
    return [TensorType(labels.dtype, types.shape(0))] if isinstance(labels, Tensor) else []


@shape_rule("TreeEnsemble", domain="ai.onnx.ml")
def tree_ensemble(types: NodeTypes) -> list[Type | None]:
    """[N, features] to [N, targets]."""
    source, shape = types.tensor(0), types.shape(0, rank=2)
    if source is None:
        return []
    return [TensorType(source.dtype, (shape[0] if shape else None, types.attribute("n_targets", 1)))]


@shape_rule("EyeLike", domain="")
def eye_like(types: NodeTypes) -> list[Type | None]:
    """A matrix of the input's shape, in the type of the attribute or of the input."""
    source, dtype = types.tensor(0), _data_type(types.attribute("dtype", 0))
    if dtype is DataType.UNDEFINED and source is None:
        return []
    return [TensorType(dtype or (source.dtype if source else DataType.FLOAT), types.shape(0, rank=2))]


@shape_rule("GatherND", domain="")
def gather_nd(types: NodeTypes) -> list[Type | None]:
    """data [batch..., data...] at indices [batch..., more..., k]: [batch..., more..., data[k:]...]."""
    source, data, indices = types.tensor(0), types.shape(0), types.shape(1)
    if source is None:
        return []
    start = types.attribute("batch_dims", 0)
    count = indices[-1] if indices else None
    if data is None or not indices or not isinstance(count, int) or not 0 <= start + count <= len(data):
        return [TensorType(source.dtype)]
    return [TensorType(source.dtype, (*indices[:-1], *data[start + count :]))]


def _split_sizes(types: NodeTypes, extent: Dim, count: int) -> list[Dim]:
    listed = types.node.attribute("split")
    given = types.constant(1)
    sizes = listed if listed is not None else None if given is None else given.reshape(-1).tolist()
    if sizes is not None:
        return list(sizes) if len(sizes) == count else [None] * count
    if not isinstance(extent, int) or types.node.input(1):
        return [None] * count
    size = -(-extent // count)
    return [*[size] * (count - 1), max(extent - size * (count - 1), 0)]


def _data_type(number: int) -> DataType:
    return DataType(number) if number in set(DataType) else DataType.UNDEFINED


def statistics_type(source: TensorType, axis: int) -> TensorType:
    """Means or deviations of a normalisation: the input's shape, with ones from `axis` on."""
    shape = source.shape
    if not shape or not -len(shape) <= axis < len(shape):
        return TensorType(DataType.FLOAT)
    start = axis % len(shape)
    return TensorType(DataType.FLOAT, (*shape[:start], *(1 for _ in shape[start:])))


def _only(value: ShapeValue | None) -> Dim:
    return value.dims[0] if value is not None and len(value.dims) == 1 else None


def _listed(types: NodeTypes, name: str, index: int) -> Sequence[Dim] | None:
    """A parameter that older operator sets keep in an attribute."""
    listed = types.node.attribute(name)
    if isinstance(listed, list):
        return listed
    value = types.value(index)
    return None if value is None else value.dims


def _item(listed: Sequence[Dim] | None, position: int) -> Dim:
    return listed[position] if listed is not None and position < len(listed) else None


def _sliced_axes(types: NodeTypes, starts: Sequence[Dim] | None, rank: int) -> list[int] | None:
    """Which axes a Slice cuts: those given, or the first ones; None where that is open or impossible."""
    if types.node.input(3) or "axes" in types.node.attributes:
        given = _listed(types, "axes", 3)
    else:
        given = None if starts is None else list(range(len(starts)))
    axes = [axis for axis in given or () if isinstance(axis, int) and -rank <= axis < rank]
    return axes if given is not None and len(axes) == len(given) else None


def _sliced(extent: Dim, start: Dim, end: Dim, step: Dim) -> Dim:
    if not isinstance(start, int) or not isinstance(end, int) or not isinstance(step, int) or step == 0:
        return None
    if isinstance(extent, int):
        stop = None if step < 0 and end < -extent else end
        return len(range(*slice(start, stop, step).indices(extent))) if extent < _MAX_INDEX else None
    return extent if start == 0 and step == 1 and end >= _MAX_INT32 else None


def _open_shape(shape_of_shape: Shape | None) -> Shape | None:
    """A shape of which only the rank is known, if that much."""
    rank = shape_of_shape[0] if shape_of_shape is not None and len(shape_of_shape) == 1 else None
    return (None,) * rank if isinstance(rank, int) and 0 <= rank <= _MAX_RANK else None


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


def _broadcast(first: Dim, second: Dim) -> Dim:
    if first == second or second == 1:
        return first
    if first == 1:
        return second
    # A known extent above one wins, since the other side must be one or equal to it.
    for dim in (first, second):
        if isinstance(dim, int):
            return dim
    return None

"""Results in the form that callers may keep: arrays of their own, contiguous, of the declared type."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..graph.ir import Value
from ..graph.types import DataType, TensorType
from .errors import Fail


class ResultCheck:
    """Checks results against what the model declares, and copies what others could still change."""

    def __init__(self, outputs: Sequence[Value]) -> None:
        self._outputs = [(value, _dtype(value), _fixed_dims(value)) for value in outputs]

    def __call__(self, results: Sequence[Any], feeds: Sequence[tuple[int, Any]]) -> list[Any]:
        """The results, in order.

        Raises:
            Fail: the model computed something else than it declares.
        """
        taken = {id(_root(value)) for _, value in feeds if type(value) is np.ndarray}
        checked: list[Any] = []
        for (value, dtype, dims), result in zip(self._outputs, results, strict=True):
            if isinstance(result, np.ndarray | np.generic):
                array = _owned(np.asarray(result), taken)
                _check(value, dtype, dims, array)
                checked.append(array)
            else:
                checked.append(_container(result, taken))
        return checked


def _owned(array: Any, taken: set[int]) -> Any:
    """The array, or a copy where it shares memory with a feed, a constant or an earlier result."""
    root = _root(array)
    if id(root) in taken or not array.flags.writeable or not array.flags.c_contiguous or not root.flags.owndata:
        return np.array(array, order="C")
    taken.add(id(root))
    return array


def _container(value: Any, taken: set[int]) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return _owned(np.asarray(value), taken)
    if isinstance(value, list | tuple):
        return [_container(item, taken) for item in value]
    return value


def _root(array: Any) -> Any:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _dtype(value: Value) -> Any:
    known = value.type
    return known.dtype.numpy_dtype if isinstance(known, TensorType) and known.dtype is not DataType.UNDEFINED else None


def _fixed_dims(value: Value) -> tuple[int | None, ...] | None:
    shape = value.type.shape if isinstance(value.type, TensorType) else None
    return None if shape is None else tuple(dim if isinstance(dim, int) else None for dim in shape)


def _check(value: Value, dtype: Any, dims: tuple[int | None, ...] | None, array: Any) -> None:
    if dtype is not None and array.dtype != dtype:
        raise Fail(
            f"output {value.name!r} is {array.dtype}, the model declares {value.type}",
            "what a node computes and what the graph declares contradict each other",
            "correct the output's element type in the model",
        )
    if dims is None or array.shape == dims:
        return
    if len(dims) != array.ndim or any(
        want is not None and want != have for want, have in zip(dims, array.shape, strict=False)
    ):
        # Converters declare wrong shapes often enough, and the values are right: onnxruntime warns too.
        warnings.warn(
            f"output {value.name!r} has shape {list(array.shape)}, the model declares "
            f"{[dim if dim is not None else '?' for dim in dims]}",
            stacklevel=5,
        )

"""Checks what a caller feeds against what the model's inputs say, and brings it into the form that kernels take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..graph.ir import Value
from ..graph.types import DataType, MapType, OptionalType, SequenceType, TensorType, Type
from .errors import InvalidArgument
from .values import OrtValue, array_from_dlpack, type_name


class InputCheck:
    """One input: its type, prepared so that an array that fits costs two comparisons."""

    def __init__(self, value: Value) -> None:
        self.name = value.name
        self.type = value.type
        tensor = value.type if isinstance(value.type, TensorType) else None
        known = tensor is not None and tensor.dtype is not DataType.UNDEFINED
        self._dtype = tensor.dtype.numpy_dtype if tensor is not None and known else None
        shape = None if tensor is None else tensor.shape
        self._rank = -1 if shape is None else len(shape)
        self._fixed = [(axis, dim) for axis, dim in enumerate(shape or ()) if isinstance(dim, int)]

    def __call__(self, value: Any) -> Any:
        """The value as kernels take it.

        Raises:
            InvalidArgument: of another kind, element type, rank or extent.
        """
        if type(value) is np.ndarray and value.dtype is self._dtype:
            array = value
        elif isinstance(self.type, TensorType) or self.type is None:
            array = self._array(value)
        else:
            return _container(self.name, self.type, value)
        if self._rank >= 0:
            self._check_shape(array)
        return array

    def _array(self, value: Any) -> Any:
        if isinstance(value, OrtValue):
            value = value.value
        if not isinstance(value, np.ndarray | np.generic):
            if value is None and self.type is not None:
                raise _wrong_kind(self.name, "tensor", value)
            if isinstance(value, list | tuple | int | float | bool | str | bytes | complex):
                value = self._from_python(value)
            elif hasattr(value, "__dlpack__"):
                value = array_from_dlpack(value)
            elif self.type is None:
                return value
            else:
                raise _wrong_kind(self.name, str(self.type), value)
        array = np.asarray(value)
        if array.dtype.kind in "USTO":
            array = array.astype(object) if array.dtype.kind != "O" else array
        elif not array.dtype.isnative:
            array = array.astype(array.dtype.newbyteorder("="))
        if self._dtype is not None and array.dtype != self._dtype:
            raise InvalidArgument(
                f"input {self.name!r}: unexpected data type. Actual: {type_name(array)}, expected: {self.type}",
                "element types are not converted, as that could lose values",
                f"pass array.astype({self._dtype.name!r})",
            )
        return array

    def _from_python(self, value: Any) -> Any:
        """A list or number; without a dtype of its own it takes the input's, where no value is lost."""
        try:
            array = np.asarray(value)
            if self._dtype is None or array.dtype == self._dtype or array.dtype.kind in "UO":
                return array
            converted = array.astype(self._dtype)
        except (ValueError, TypeError, OverflowError) as error:
            raise InvalidArgument(
                f"input {self.name!r}: the {type(value).__name__} is not an array", str(error), "pass a NumPy array"
            ) from error
        same_kind = np.can_cast(array.dtype, self._dtype, "same_kind") or array.size == 0 or array.dtype.kind in "biu"
        return converted if same_kind else array

    def _check_shape(self, array: Any) -> None:
        shape = array.shape
        if len(shape) != self._rank:
            raise InvalidArgument(
                f"invalid rank for input: {self.name} Got: {len(shape)} Expected: {self._rank}",
                f"the array has shape {list(shape)}, the model says {_shape_text(self.type)}",
                "reshape the array, or fix the model's input",
            )
        for axis, extent in self._fixed:
            if shape[axis] != extent:
                raise InvalidArgument(
                    f"got invalid dimensions for input: {self.name} "
                    f"index: {axis} Got: {shape[axis]} Expected: {extent}",
                    f"the array has shape {list(shape)}, the model says {_shape_text(self.type)}",
                    "reshape the array, or export the model with a free dimension there",
                )


class FeedCheck:
    """All inputs of a model: names, and each value by its `InputCheck`.

    Args:
        inputs: of the graph, in order.
        optional: names of inputs that have a default.
        slots: where the plan keeps each input.
    """

    def __init__(self, inputs: list[Value], optional: set[str], slots: Mapping[str, int]) -> None:
        self._checks = {value.name: (slots[value.name], InputCheck(value)) for value in inputs}
        self._required = [value.name for value in inputs if value.name not in optional]
        self._num_required = len(self._required)

    def __call__(self, feed: Mapping[str, Any]) -> list[tuple[int, Any]]:
        """(slot, value) per input given.

        Raises:
            InvalidArgument: an unknown name, a missing input, or a value that does not fit.
        """
        checks = self._checks
        try:
            result = [(checks[name][0], checks[name][1](value)) for name, value in feed.items()]
        except KeyError:
            raise self._unknown(feed) from None
        except AttributeError:
            raise InvalidArgument(
                f"the feed is a {type(feed).__name__}", "it maps input names to arrays", "pass a dict"
            ) from None
        if len(result) < self._num_required or not all(name in feed for name in self._required):
            missing = [name for name in self._required if name not in feed]
            raise InvalidArgument(
                f"required inputs ({missing}) are missing from input feed ({list(feed)})",
                f"the model needs {self._required}",
                "add them to the feed",
            )
        return result

    def _unknown(self, feed: Mapping[str, Any]) -> InvalidArgument:
        unknown = [str(name) for name in feed if name not in self._checks]
        return InvalidArgument(
            f"invalid input name: {', '.join(unknown)}",
            f"the model's inputs are {', '.join(self._checks) or 'none'}",
            "rename the key of the feed",
        )


def _container(name: str, type: Type, value: Any) -> Any:
    """A sequence, optional or map, its elements as arrays."""
    if isinstance(value, OrtValue):
        value = value.value
    if isinstance(type, OptionalType):
        if value is None:
            return None
        return _container(name, type.element, value) if type.element else value
    if isinstance(type, SequenceType):
        if not isinstance(value, list | tuple):
            raise _wrong_kind(name, str(type), value)
        return [_container(name, type.element, item) if type.element else item for item in value]
    if isinstance(type, MapType):
        if not isinstance(value, dict):
            raise _wrong_kind(name, str(type), value)
        return value
    if isinstance(type, TensorType):
        return InputCheck(Value(name, type))(value)
    return value


def _wrong_kind(name: str, expected: str, value: Any) -> InvalidArgument:
    return InvalidArgument(
        f"input {name!r}: unable to handle object of type {type(value).__name__}",
        f"the model expects {expected}",
        "pass a NumPy array, or for sequences a list of arrays",
    )


def _shape_text(known: Type | None) -> str:
    shape = known.shape if isinstance(known, TensorType) else None
    return str([dim if isinstance(dim, int) else dim or "?" for dim in shape or ()])

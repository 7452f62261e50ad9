"""Descriptions of a session's inputs and outputs, and the checks of feeds and results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from genai.common.warning import warn_caller
from genai.kernels.cpu.arrays.copying import contiguous
from genai.kernels.cuda.arrays.memory import DeviceTensor

from ..errors import ArgumentError, NodeError
from ..onnx.ir import Value
from ..onnx.types import ArrayTypes, DataType, Dim, MapType, OptionalType, SequenceType, TensorType, Type
from .tensors import arrays_in, type_name, value_from_dlpack


def shape_of(value: Value) -> list[Dim]:
    """Return a size, a symbol or None (unknown) for each dimension; [] for a scalar or an unknown rank."""
    return list(value.type.shape or ()) if isinstance(value.type, ArrayTypes) else []


class InputCheck:
    """A check of one input, prepared in advance so that checking a valid array costs only two comparisons."""

    def __init__(self, value: Value) -> None:
        self.name = value.name
        self.type = value.type
        self._dtype, shape = _declared(value)
        # The element type of arrays that are accepted as they are; strings need a closer look.
        self._plain = None if self._dtype is None or self._dtype.hasobject else self._dtype
        # The last accepted shape, which most calls repeat.
        self._known: tuple[int, ...] | None = None
        # onnxruntime does not check scalars: exporters declare a scalar where they mean an array with one element.
        self._rank = len(shape) if shape else -1
        self._fixed = [(axis, dim) for axis, dim in enumerate(shape or ()) if isinstance(dim, int)]

    def __call__(self, value: Any) -> Any:
        """Return the value in the form that kernels accept. Values in device memory remain there."""
        if type(value) is np.ndarray and value.dtype is self._plain:
            if value.shape != self._known:
                self._check_shape(value)
                self._known = value.shape
            return value
        if isinstance(self.type, TensorType) or self.type is None:
            array = self._array(value)
        else:
            return _container(self.name, self.type, value)
        self._check_shape(array)
        return array

    def _array(self, value: Any) -> Any:
        if not isinstance(value, np.ndarray | np.generic | DeviceTensor):
            if value is None and self.type is not None:
                raise _wrong_kind(self.name, "tensor", value)
            if isinstance(value, list | tuple | int | float | bool | str | bytes | complex):
                value = self._from_python(value)
            elif hasattr(value, "__dlpack__"):
                value = value_from_dlpack(value)
            elif self.type is None:
                return value
            else:
                raise _wrong_kind(self.name, str(self.type), value)
        array: Any = value if isinstance(value, DeviceTensor) else np.asarray(value)
        if array.dtype.kind in "USTO" or array.dtype.type is np.void:
            array = _texts(self.name, array)
        elif not array.dtype.isnative:
            array = array.astype(array.dtype.newbyteorder("="))
        if self._dtype is not None and array.dtype != self._dtype:
            raise ArgumentError(
                f"input {self.name!r}: unexpected data type. Actual: {type_name(array)}, expected: {self.type}",
                "element types are not converted, because a conversion could lose values",
                f"pass array.astype({self._dtype.name!r})",
            )
        return array

    def _from_python(self, value: Any) -> Any:
        """Convert a list or number. It has no dtype, so it gets the input's dtype, provided that no value is lost."""
        try:
            array = np.asarray(value)
            if self._dtype is None or array.dtype == self._dtype or array.dtype.kind in "UO":
                return array
            converted = array.astype(self._dtype)
        except (ValueError, TypeError, OverflowError) as error:
            raise ArgumentError(
                f"input {self.name!r}: the {type(value).__name__} is not an array", str(error), "pass a NumPy array"
            ) from error
        same_kind = np.can_cast(array.dtype, self._dtype, "same_kind") or array.size == 0 or array.dtype.kind in "biu"
        return converted if same_kind else array

    def _check_shape(self, array: Any) -> None:
        if self._rank < 0:
            return
        shape = array.shape
        if len(shape) != self._rank:
            raise ArgumentError(
                f"invalid rank for input: {self.name} Got: {len(shape)} Expected: {self._rank}",
                f"the array has shape {list(shape)}, but the model declares {_shape_text(self.type)}",
                "reshape the array, or correct the shape of the model's input",
            )
        for axis, extent in self._fixed:
            if shape[axis] != extent:
                raise ArgumentError(
                    f"got invalid dimensions for input: {self.name} "
                    f"index: {axis} Got: {shape[axis]} Expected: {extent}",
                    f"the array has shape {list(shape)}, but the model declares {_shape_text(self.type)}",
                    "reshape the array, or export the model with a dynamic dimension at this index",
                )


def _texts(name: str, array: Any) -> Any:
    """Return the elements as strings. Bytes are UTF-8; np.void is accepted because it preserves trailing zeros."""
    try:
        texts = [item.decode() if isinstance(item, bytes) else str(item) for item in array.ravel().tolist()]
    except UnicodeDecodeError as error:
        raise ArgumentError(
            f"input {name!r} contains bytes that are not UTF-8", str(error), "pass strings, or bytes in UTF-8"
        ) from error
    return np.array(texts, object).reshape(array.shape)


class FeedCheck:
    """A check of all inputs of a model: their names, and each value by its `InputCheck`."""

    def __init__(
        self, inputs: list[Value], optional: set[str], slots: Mapping[str, int], on_device: frozenset[str]
    ) -> None:
        """`on_device`: inputs that may remain in device memory; other inputs are copied to the host."""
        self.on_device = on_device
        self._checks = {value.name: (slots[value.name], InputCheck(value)) for value in inputs}
        self._required = [value.name for value in inputs if value.name not in optional]

    def __call__(self, feed: Mapping[str, Any]) -> list[tuple[int, Any]]:
        """Return (slot, value) for each input in the feed."""
        checks = self._checks
        result = []
        try:
            for name, value in feed.items():
                slot, check = checks[name]
                array = check(value)
                if type(array) is not np.ndarray:
                    array = self._placed(name, array)
                result.append((slot, array))
        except KeyError:
            unknown = [str(name) for name in feed if name not in checks]
            raise ArgumentError(
                f"invalid input name: {', '.join(unknown)}",
                f"the model's inputs are {', '.join(checks) or 'none'}",
                "correct the key in the feed",
            ) from None
        except AttributeError:
            raise ArgumentError(
                f"the feed is a {type(feed).__name__}", "a feed must map input names to arrays", "pass a dict"
            ) from None
        for needed in self._required:
            if needed not in feed:
                raise self._missing(feed)
        return result

    def _missing(self, feed: Mapping[str, Any]) -> ArgumentError:
        missing = [name for name in self._required if name not in feed]
        return ArgumentError(
            f"required inputs ({missing}) are missing from input feed ({list(feed)})",
            f"the model needs {self._required}",
            "add the missing inputs to the feed",
        )

    def _placed(self, name: str, value: Any) -> Any:
        return value.numpy() if isinstance(value, DeviceTensor) and name not in self.on_device else value


def _container(name: str, type: Type, value: Any) -> Any:
    """Check a sequence, optional or map, and convert its elements to arrays."""
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
        for key in value:
            if not isinstance(key, str if type.key is DataType.STRING else int | np.integer):
                raise _wrong_kind(name, f"{type}, but the key is {key!r}", key)
        return value
    if isinstance(type, TensorType):
        found = InputCheck(Value(name, type))(value)
        return found.numpy() if isinstance(found, DeviceTensor) else found
    return value


def _wrong_kind(name: str, expected: str, value: Any) -> ArgumentError:
    return ArgumentError(
        f"input {name!r}: unable to handle object of type {type(value).__name__}",
        f"the model expects {expected}",
        "pass a NumPy array; for a sequence, pass a list of arrays",
    )


def _shape_text(known: Type | None) -> str:
    shape = known.shape if isinstance(known, TensorType) else None
    return str([dim if isinstance(dim, int) else dim or "?" for dim in shape or ()])


class ResultCheck:
    """A check of results against the model's declarations. Copies results that other code could still modify."""

    def __init__(self, outputs: Sequence[Value]) -> None:
        self._outputs = [(value, *_declared(value)) for value in outputs]
        # The last accepted shape of each output, which most runs repeat.
        self._known: list[Any] = [None] * len(self._outputs)

    def __call__(self, results: Sequence[Any], feeds: Sequence[tuple[int, Any]]) -> list[Any]:
        """Return the results in order."""
        taken: set[int] = set()
        for _, value in feeds:
            if type(value) is np.ndarray:
                taken.add(id(value if value.base is None else root_of(value)))
            else:
                taken.update(id(root_of(array)) for array in arrays_in(value))
        checked: list[Any] = []
        known = self._known
        for index, ((value, dtype, shape), result) in enumerate(zip(self._outputs, results, strict=True)):
            owned = result
            if type(result) is np.ndarray and _is_new(result) and id(result) not in taken:
                taken.add(id(result))
                if result.dtype is not dtype or result.shape != known[index]:
                    known[index] = result.shape if _check(value, dtype, shape, result) else None
            else:
                owned = _owned(result, taken)
                if isinstance(owned, _CHECKED):
                    _check(value, dtype, shape, owned)
            checked.append(owned)
        return checked

    def are_declared(self, results: Sequence[Any]) -> bool:
        """Return True if results with these shapes and types need no further check, unless they share memory.

        Sequences need no check if all their values are new objects.
        """
        return all(
            type(result) is list if dtype is None else _is_array_of(result, dtype, known)
            for (_, dtype, _), known, result in zip(self._outputs, self._known, results, strict=True)
        )


_CHECKED = (np.ndarray, DeviceTensor)


def _is_array_of(value: Any, dtype: Any, shape: Any) -> bool:
    return type(value) is np.ndarray and value.dtype is dtype and value.shape == shape


def _is_new(array: Any) -> bool:
    """Return True if no other array is known to share the memory of an array that can be returned as it is."""
    flags = array.flags
    return array.base is None and flags.carray and flags.owndata


def _owned(value: Any, taken: set[int]) -> Any:
    """Return the value; arrays that share memory with a feed, a constant or an earlier result are copied."""
    if isinstance(value, list | tuple):
        return [_owned(item, taken) for item in value]
    if not isinstance(value, np.ndarray | np.generic):
        return value
    array = np.asarray(value)
    root, flags = root_of(array), array.flags
    is_owned = (flags if root is array else root.flags).owndata
    if id(root) in taken or not (is_owned and flags.writeable and flags.c_contiguous):
        return array.copy() if flags.c_contiguous else contiguous(array)
    taken.add(id(root))
    return array


def root_of(array: Any) -> Any:
    """Return the array that owns the memory of a view."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _declared(value: Value) -> tuple[Any, tuple[int | str | None, ...] | None]:
    """Return the declared NumPy dtype and shape; None for properties that are not declared."""
    if not isinstance(value.type, TensorType):
        return None, None
    dtype = value.type.dtype
    return None if dtype is DataType.UNDEFINED else dtype.numpy_dtype, value.type.shape


def _check(value: Value, dtype: Any, shape: tuple[int | str | None, ...] | None, array: Any) -> bool:
    """Return True if an output has the declared shape. Raises NodeError if it has another element type."""
    if dtype is not None and array.dtype != dtype:
        raise NodeError(
            f"output {value.name!r} is {array.dtype}, but the model declares {value.type}",
            "the computed type contradicts the type that the graph declares",
            "correct the output's element type in the model",
        )
    if shape is None or array.shape == shape:
        return True
    fixed = [(axis, dim) for axis, dim in enumerate(shape) if isinstance(dim, int)]
    is_declared = len(shape) == array.ndim and all(array.shape[axis] == dim for axis, dim in fixed)
    if not is_declared:
        # Converters often declare wrong shapes for correct values, so this is only a warning, as in onnxruntime.
        warn_caller(
            f"output {value.name!r} has shape {list(array.shape)}, but the model declares "
            f"{[dim if isinstance(dim, int) else '?' for dim in shape]}"
        )
    return is_declared

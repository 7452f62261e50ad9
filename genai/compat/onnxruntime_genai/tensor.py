"""Tensor: an array with onnxruntime-genai's accessors."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator
from typing import Any, NoReturn

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ...errors import InputError, kind_of

_KINDS = "biuf"


class Tensor:
    """A copy of a numeric array.

    Args:
        array: any shape, of a boolean, integer or floating-point dtype.

    Attributes:
        row_lengths: number of ids per row without padding, if Tokenizer.encode_batch created the tensor; else None.

    Raises:
        InputError: `array` is not a NumPy array, or its dtype is not numeric.
    """

    row_lengths: tuple[int, ...] | None = None

    def __init__(self, array: NDArray[Any]) -> None:
        if not isinstance(array, np.ndarray):
            raise InputError(f"Tensor received {kind_of(array)}", "a NumPy array is expected", "pass np.asarray(…)")
        # Types of ml_dtypes such as bfloat16 have kind "V", but unlike records their scalar type is not np.void.
        if array.dtype.kind not in _KINDS and (array.dtype.kind != "V" or array.dtype.type is np.void):
            raise InputError(
                f"Tensor received an array of {array.dtype}",
                "numbers or booleans are expected",
                "convert the array first",
            )
        self._array = np.array(array, order="C")

    def shape(self) -> list[int]:
        """Return the sizes of the axes."""
        return list(self._array.shape)

    def type(self) -> np.dtype[Any]:
        """Return the NumPy dtype of the elements."""
        return self._array.dtype

    def as_numpy(self) -> NDArray[Any]:
        """Return the array without a copy."""
        return self._array

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        """Return the array for NumPy. The array is copied only if `copy` is set."""
        return np.array(self._array, dtype) if copy else np.asarray(self._array, dtype)

    def data(self) -> memoryview:
        """Return the raw bytes without a copy."""
        return self._array.reshape(-1).view(np.uint8).data

    def __repr__(self) -> str:
        return f"Tensor(shape={self.shape()}, dtype={self._array.dtype})"


class NamedTensors(UserDict[str, Tensor]):
    """Tensors by name, as onnxruntime-genai's processors return them: a dictionary that also accepts arrays."""

    def __setitem__(self, name: str, value: Tensor | NDArray[Any]) -> None:
        """Add or replace a tensor; an array is copied.

        Raises:
            InputError: the name is not a string, or the value is neither a Tensor nor a NumPy array.
        """
        if not isinstance(name, str):
            raise InputError(f"NamedTensors received the name {name!r}", "a name must be a string", "pass a str")
        super().__setitem__(name, value if isinstance(value, Tensor) else Tensor(value))

    def __missing__(self, name: object) -> NoReturn:
        held = ", ".join(self.data) or "none"
        raise InputError(f"NamedTensors contains no {name!r}", f"the names are {held}", "use one of these names")

    def __delitem__(self, name: str) -> None:
        self[name]  # raises InputError if the name is unknown
        super().__delitem__(name)

    def keys(self) -> list[str]:  # type: ignore[override]
        """Return a copy of the names, so that tensors may be deleted during iteration."""
        return list(self.data)

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

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
        row_lengths: in what Tokenizer.encode_batch returns, how many ids of each row are not fill; else None.

    Raises:
        InputError: not a NumPy array, or a dtype that is not numeric.
    """

    row_lengths: tuple[int, ...] | None = None

    def __init__(self, array: NDArray[Any]) -> None:
        if not isinstance(array, np.ndarray):
            raise InputError(f"Tensor: got {kind_of(array)}", "a NumPy array is expected", "pass np.asarray(…)")
        # Types such as bfloat16 come from ml_dtypes and are of kind "V", but unlike records they have no fields.
        if array.dtype.kind not in _KINDS and (array.dtype.kind != "V" or array.dtype.type is np.void):
            raise InputError(
                f"Tensor: dtype {array.dtype}", "numbers or booleans are expected", "convert the array first"
            )
        self._array = np.array(array, order="C")

    def shape(self) -> list[int]:
        """Sizes of the axes."""
        return list(self._array.shape)

    def type(self) -> np.dtype[Any]:
        """The NumPy dtype of the elements."""
        return self._array.dtype

    def as_numpy(self) -> NDArray[Any]:
        """The array itself, not a copy."""
        return self._array

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        """For NumPy, and for calls that take whatever it makes an array of: the array itself unless `copy` is set."""
        return np.array(self._array, dtype) if copy else np.asarray(self._array, dtype)

    def data(self) -> memoryview:
        """The raw bytes, not a copy."""
        return self._array.reshape(-1).view(np.uint8).data

    def __repr__(self) -> str:
        return f"Tensor(shape={self.shape()}, dtype={self._array.dtype})"


class NamedTensors(UserDict[str, Tensor]):
    """Tensors by name, as onnxruntime-genai's processors return them: a dictionary that takes arrays too."""

    def __setitem__(self, name: str, value: Tensor | NDArray[Any]) -> None:
        """Add or replace a tensor; an array is copied.

        Raises:
            InputError: the name is no text, or the value neither a Tensor nor a NumPy array.
        """
        if not isinstance(name, str):
            raise InputError(f"NamedTensors: name {name!r}", "a name is a text", "pass a str")
        super().__setitem__(name, value if isinstance(value, Tensor) else Tensor(value))

    def __missing__(self, name: object) -> NoReturn:
        held = ", ".join(self.data) or "none"
        raise InputError(f"NamedTensors: there is no {name!r}", f"names here: {held}", "use one of these")

    def __delitem__(self, name: str) -> None:
        self[name]  # or InputError
        super().__delitem__(name)

    def keys(self) -> list[str]:  # type: ignore[override]
        """The names; a copy, so that tensors may be deleted meanwhile."""
        return list(self.data)

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

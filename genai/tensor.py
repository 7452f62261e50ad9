"""Tensor: an array with onnxruntime-genai's accessors."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import InputError

_KINDS = "biuf"


class Tensor:
    """A copy of a numeric array.

    Args:
        array: any shape, of a boolean, integer or floating-point dtype.

    Raises:
        InputError: not a NumPy array, or a dtype that is not numeric.
    """

    def __init__(self, array: NDArray[Any]) -> None:
        if not isinstance(array, np.ndarray):
            raise InputError(f"Tensor: got a {type(array).__name__}", "a NumPy array is expected", "pass np.asarray(…)")
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

    def data(self) -> memoryview:
        """The raw bytes, not a copy."""
        return self._array.reshape(-1).view(np.uint8).data

    def __repr__(self) -> str:
        return f"Tensor(shape={self.shape()}, dtype={self._array.dtype})"

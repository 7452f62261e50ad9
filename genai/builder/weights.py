"""Named weights, checked as they are read: one tensor at a time, each with the shape that the architecture asks for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError

# Floats that are converted at once: 16 MiB of float32.
_CHUNK_FLOATS = 1 << 22


class Weights:
    """Reads tensors by their Hugging Face names from a mapping that may load them lazily.

    Raises:
        InputError: a tensor is missing, is not of a float type, has another shape, or holds NaN or infinity.
    """

    def __init__(self, tensors: Mapping[str, NDArray[Any]]) -> None:
        self._tensors = tensors

    def tensor(self, name: str, shape: tuple[int, ...]) -> NDArray[Any]:
        """The tensor as it is stored."""
        try:  # not `in`: a mapping's default test is to load the tensor
            tensor = np.asarray(self._tensors[name])
        except KeyError as error:
            raise self._missing(name) from error
        # bfloat16 and the 8-bit floats of ml_dtypes say "V", or nothing, as their kind.
        if tensor.dtype.kind != "f" and "float" not in tensor.dtype.name:
            raise InputError(
                f"{name} has type {tensor.dtype}",
                "weights are floating-point numbers",
                "give the float checkpoint, not a quantised one",
            )
        if tensor.shape != shape:
            raise InputError(
                f"{name} has shape {list(tensor.shape)}, expected {list(shape)}",
                "the sizes follow from the model's configuration",
                "check that configuration and weights belong together",
            )
        return tensor

    def vector(self, name: str, size: int) -> NDArray[np.float32]:
        """A norm weight or a bias as float32."""
        vector = self.tensor(name, (size,)).astype(np.float32)
        require_finite(name, vector)
        return vector

    def _missing(self, name: str) -> InputError:
        known = sorted(self._tensors)
        close = get_close_matches(name, known, 3)
        return InputError(
            f"the weights have no tensor {name!r}",
            f"there are {len(known)} tensors" + (f"; the closest names are {', '.join(close)}" if close else ""),
            "name tensors as Hugging Face does, and check the configuration's biases, norms and tied embeddings",
        )


def row_chunks(name: str, matrix: NDArray[Any], *, finite: bool = True) -> Iterator[NDArray[np.float32]]:
    """A matrix as float32, some rows at a time; InputError if they are to be finite and are not."""
    step = max(1, _CHUNK_FLOATS // matrix.shape[1])
    for first in range(0, len(matrix), step):
        chunk = matrix[first : first + step].astype(np.float32)
        if finite:
            require_finite(name, chunk)
        yield chunk


def transposed_chunks(matrices: Mapping[str, NDArray[Any]]) -> Iterator[NDArray[np.float32]]:
    """The transpose of matrices [n_i, k] below each other, as float32 [k, sum of n_i], some rows at a time."""
    columns = next(iter(matrices.values())).shape[1]
    rows = sum(len(matrix) for matrix in matrices.values())
    step = max(1, _CHUNK_FLOATS // rows)
    for first in range(0, columns, step):
        part = slice(first, min(first + step, columns))
        chunk = np.empty((part.stop - first, rows), np.float32)
        start = 0
        for name, matrix in matrices.items():
            place = chunk[:, start : start + len(matrix)]
            place[:] = matrix[:, part].T
            require_finite(name, place)
            start += len(matrix)
        yield chunk


def narrowed(name: str, values: NDArray[np.float32]) -> NDArray[np.float16]:
    """Values as float16.

    Raises:
        InputError: one of them is too large for it.
    """
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float16)
    if not np.isfinite(narrow).all():
        raise InputError(
            f"{name} holds {float(np.abs(values).max()):g}",
            f"float16 ends at {float(np.finfo(np.float16).max):g}",
            "store these weights as fp32, int8 or int4",
        )
    return narrow


def require_finite(name: str, values: NDArray[np.float32]) -> None:
    """Raise InputError if there is NaN or infinity among the values."""
    if not np.isfinite(values).all():
        raise not_finite(name)


def not_finite(name: str) -> InputError:
    """The error for a tensor with NaN or infinity."""
    return InputError(
        f"{name} holds NaN or infinite values",
        "every token would come out wrong",
        "check the training run or the download that made these weights",
    )

"""Shape checks at the edge of the kernels: machine code checks nothing, so a wrong array must not get there."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]
FLOAT32 = np.dtype(np.float32)

# What kernels take for an absent array.
NO_VECTOR = np.empty(0, np.float32)
NO_MATRIX = np.empty((0, 0), np.float32)
NO_CUBE = np.empty((0, 0, 0), np.float32)
for _array in (NO_VECTOR, NO_MATRIX, NO_CUBE):
    _array.flags.writeable = False


def check(name: str, array: NDArray[Any], shape: tuple[int | None, ...], dtype: np.dtype[Any] = FLOAT32) -> None:
    """The array has this type and shape (None = any extent) and is C-contiguous.

    Raises:
        ValueError: it has not; the message names the array, what it is and what it should be.
    """
    found = array.shape
    fits = len(found) == len(shape) and all(
        want is None or want == have for want, have in zip(shape, found, strict=True)
    )
    if not fits or array.dtype != dtype or not array.flags.c_contiguous:
        _refuse(name, array, shape, dtype, "C-contiguous")


def check_rows(name: str, array: NDArray[Any], shape: tuple[int | None, ...]) -> None:
    """Like `check` for float32, but only each row (all axes but the first) must be contiguous: column slices fit."""
    found = array.shape
    fits = len(found) == len(shape) and all(
        want is None or want == have for want, have in zip(shape, found, strict=True)
    )
    if not fits or array.dtype != FLOAT32 or not array[:1].flags.c_contiguous:
        _refuse(name, array, shape, FLOAT32, "row by row C-contiguous")


def output(name: str, out: Float32 | None, shape: tuple[int, ...]) -> Float32:
    """`out` after a check, or a new array."""
    if out is None:
        return np.empty(shape, np.float32)
    check(name, out, shape)
    return out


def _refuse(name: str, array: NDArray[Any], shape: tuple[int | None, ...], dtype: np.dtype[Any], layout: str) -> None:
    wanted = ", ".join("any" if extent is None else str(extent) for extent in shape)
    strides = "" if array.flags.c_contiguous else f" with strides {list(array.strides)}"
    raise ValueError(f"{name} is {array.dtype} {list(array.shape)}{strides}, expected {layout} {dtype} [{wanted}]")

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
for _array in (NO_VECTOR, NO_MATRIX):
    _array.flags.writeable = False


def check(name: str, array: NDArray[Any], shape: tuple[int | None, ...], dtype: np.dtype[Any] = FLOAT32) -> None:
    """The array has this type and shape (None = any extent) and is C-contiguous.

    Raises:
        ValueError: it has not; the message names the array, what it is and what it should be.
    """
    if not (_fits(array.shape, shape) and array.dtype == dtype and array.flags.c_contiguous):
        _refuse(name, array, shape, dtype, "C-contiguous")


def check_rows(name: str, array: NDArray[Any], shape: tuple[int | None, ...]) -> None:
    """Like `check` for float32, but only each row (all axes but the first) must be contiguous: column slices fit."""
    if not (_fits(array.shape, shape) and array.dtype == FLOAT32):
        _refuse(name, array, shape, FLOAT32, "row by row C-contiguous")
    if not (array.flags.c_contiguous or array[:1].flags.c_contiguous):
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


def _fits(found: tuple[int, ...], shape: tuple[int | None, ...]) -> bool:
    if found == shape:
        return True
    if len(found) != len(shape):
        return False
    for have, want in zip(found, shape, strict=True):  # noqa: SIM110 - this runs before every kernel, all() is slower
        if want is not None and want != have:
            return False
    return True

"""Shape checks before kernels are called. Compiled kernels check nothing, so a wrong array must not reach them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]
FLOAT32 = np.dtype(np.float32)


class FormatError(ValueError):
    """Arrays that do not match the requested layout; the message contains the shapes."""


def check(
    name: str, array: NDArray[Any], shape: tuple[int | None, ...], dtype: np.dtype[Any] = FLOAT32, *,
    by_rows: bool = False,
) -> None:  # fmt: skip
    """Raise an error unless the array has this type and shape (None = any size) and is C-contiguous.

    Args:
        by_rows: True if only each row (all axes but the first) must be contiguous, so that column slices are accepted.

    Raises:
        ValueError: the array does not match; the message contains its name, its properties and the expected properties.
    """
    is_contiguous = array.flags.c_contiguous or (by_rows and array[:1].flags.c_contiguous)
    if is_contiguous and array.dtype == dtype and _fits(array.shape, shape):
        return
    wanted = ", ".join("any" if extent is None else str(extent) for extent in shape)
    strides = "" if array.flags.c_contiguous else f" with strides {list(array.strides)}"
    layout = "row by row C-contiguous" if by_rows else "C-contiguous"
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

"""Floats without a NumPy type, whose bits every device stores as unsigned integers."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

# For each of these floats, NumPy's type for its bits and ml_dtypes' type for its values. float8 is OCP's E4M3.
FLOAT_BITS = {"bfloat16": "uint16", "float8": "uint8"}
_MEANINGS: dict[str, Any] = {"bfloat16": ml_dtypes.bfloat16, "float8": ml_dtypes.float8_e4m3fn}
LARGEST_FLOAT8 = 448.0


def stored_floats(x: NDArray[Any], kind: str) -> NDArray[Any]:
    """Return numbers in the stored form of a kind of float (NumPy's own kinds included), rounded to nearest even.

    float8 has no infinity: numbers that are too large become its largest finite number. NaN stays NaN.
    """
    if kind not in FLOAT_BITS:
        return x.astype(kind)
    narrow = np.clip(x, -LARGEST_FLOAT8, LARGEST_FLOAT8) if kind == "float8" else x
    bits: NDArray[Any] = narrow.astype(np.float32).astype(_MEANINGS[kind]).view(FLOAT_BITS[kind])
    return bits


def read_floats(stored: NDArray[Any], kind: str) -> NDArray[Any]:
    """Return stored floats as numbers, in float32 if NumPy has no type for them."""
    return stored.view(_MEANINGS[kind]).astype(np.float32) if kind in FLOAT_BITS else stored

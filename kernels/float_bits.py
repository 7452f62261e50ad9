"""Floats that NumPy has no type for: memory holds their bits as whole numbers, on every device."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

# Kinds of such floats, and NumPy's type of their bits; what the bits mean. float8 is OCP's E4M3.
FLOAT_BITS = {"bfloat16": "uint16", "float8": "uint8"}
_MEANINGS: dict[str, Any] = {"bfloat16": ml_dtypes.bfloat16, "float8": ml_dtypes.float8_e4m3fn}
LARGEST_FLOAT8 = 448.0


def stored_floats(x: NDArray[Any], kind: str) -> NDArray[Any]:
    """Numbers as memory holds floats of a kind, NumPy's included: rounded to nearest even.

    float8 has no infinity: what is beyond its largest number becomes that one. NaN stays NaN.
    """
    if kind not in FLOAT_BITS:
        return x.astype(kind)
    narrow = np.clip(x, -LARGEST_FLOAT8, LARGEST_FLOAT8) if kind == "float8" else x
    bits: NDArray[Any] = narrow.astype(np.float32).astype(_MEANINGS[kind]).view(FLOAT_BITS[kind])
    return bits


def read_floats(stored: NDArray[Any], kind: str) -> NDArray[Any]:
    """What memory holds as numbers, of float32 where NumPy has no type for them."""
    return stored.view(_MEANINGS[kind]).astype(np.float32) if kind in FLOAT_BITS else stored

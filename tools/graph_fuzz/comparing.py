"""The comparison of results within tolerances."""

from __future__ import annotations

from typing import Any

import numpy as np


def difference(ours: list[Any], theirs: list[Any], *, loose: bool = False) -> str:
    """Return a description of the difference, or "".

    Args:
        loose: True after several nodes: their rounding errors accumulate and may change rounded integers.
    """
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if isinstance(a, list) or isinstance(b, list):  # sequences
            if not isinstance(a, list) or not isinstance(b, list) or len(a) != len(b):
                return f"output {number} is {_kind(a)}, not {_kind(b)}"
            if what := difference(a, b, loose=loose):
                return f"sequence {number}: {what}"
            continue
        a, b = np.asarray(a), np.asarray(b)
        if a.dtype != b.dtype or a.shape != b.shape:
            return f"output {number} is {a.dtype}{list(a.shape)}, not {b.dtype}{list(b.shape)}"
        if a.dtype.kind != "f":
            equal = a == b
            near = loose and a.dtype.itemsize == 1 and a.dtype.kind in "iu"
            if near:
                equal = np.abs(a.astype(int) - b.astype(int)) <= 1
            if not np.all(equal):
                return f"output {number}: {_shown(a[~np.asarray(equal)])} instead of {_shown(b[~np.asarray(equal)])}"
            continue
        # float16 numbers near 0 differ, because onnxruntime may compute several nodes in float32 before it rounds.
        least = 2e-3 if a.dtype == np.float16 else 1e-6
        tolerance = (2e-2 if a.dtype == np.float16 else 2e-4) * (10 if loose else 1)
        finite = np.abs(b[np.isfinite(b)].astype(np.float64))
        with np.errstate(all="ignore"):
            close = np.isclose(
                a.astype(np.float64),
                b.astype(np.float64),
                tolerance,
                max(tolerance * min(float(finite.max(initial=0)), 1e3), least),
                equal_nan=True,
            )
        if not np.all(close):
            return f"output {number}: {_shown(a[~close])} instead of {_shown(b[~close])}"
    return ""


def _kind(value: Any) -> str:
    return f"a sequence of {len(value)}" if isinstance(value, list) else f"{value.dtype}{list(value.shape)}"


def _shown(values: Any) -> str:
    return str(np.asarray(values).reshape(-1)[:4].tolist())

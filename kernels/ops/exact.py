"""Sums of products of 8-bit integers through float BLAS: runs of terms whose sums float32 holds exactly."""

from __future__ import annotations

from typing import Any

import numpy as np

# Differences of 8-bit values are at most 255 in size, and float32 holds integers up to 2 ** 24.
_LARGEST = 255
_EXACT = 1 << 24
# 256 * 255 * 255 < 2 ** 24: so many terms are exact whatever they are.
BLOCK = 256


def exact_runs(terms: int, weights: Any = None) -> list[slice]:
    """Runs of terms that may be summed in one product.

    Args:
        weights: [terms, outputs], one operand of the products; what they are makes runs longer than `BLOCK`.
    """
    if terms <= BLOCK or weights is None:
        return [slice(first, first + BLOCK) for first in range(0, max(terms, 1), BLOCK)]
    starts = np.arange(0, terms, BLOCK)
    sums = np.add.reduceat(np.abs(weights), starts, axis=0, dtype=np.float64) * _LARGEST
    runs, first, total = [], 0, sums[0]
    for block, start in enumerate(starts.tolist()[1:], 1):
        total = total + sums[block]
        if total.max(initial=0) >= _EXACT:
            runs.append(slice(first, start))
            first, total = start, sums[block]
    return [*runs, slice(first, terms)]

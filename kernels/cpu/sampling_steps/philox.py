"""Philox4x64-10, a counter-based generator (Salmon et al. 2011): a number for each (seed, row, position), in any order.

The numbers are those of `numpy.random.Philox(key=[seed, row], counter=[position, 0, 0, 0])`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..lazy import helper

_ROUNDS = 10
_MULTIPLIER_0, _MULTIPLIER_1 = np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157)
_WEYL_0, _WEYL_1 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBB67AE8584CAA73B)
_HALF, _LOW_HALF = np.uint64(32), np.uint64(0xFFFFFFFF)
_ZERO, _ONE, _SPARE_BITS = np.uint64(0), np.uint64(1), np.uint64(11)


@helper
def uniforms(seed: Any, row: Any, position: Any) -> Any:
    """Two independent numbers in [0, 1); the arguments are uint64."""
    # NumPy's generator counts before it draws.
    a, b, c, d = position + _ONE, _ZERO, _ZERO, _ZERO
    key_0, key_1 = seed, row
    for turn in range(_ROUNDS):
        if turn:
            key_0, key_1 = key_0 + _WEYL_0, key_1 + _WEYL_1
        high_0, low_0 = _high_product(_MULTIPLIER_0, a), _MULTIPLIER_0 * a
        high_1, low_1 = _high_product(_MULTIPLIER_1, c), _MULTIPLIER_1 * c
        a, b, c, d = high_1 ^ b ^ key_0, low_1, high_0 ^ d ^ key_1, low_0
    return np.float64(a >> _SPARE_BITS) * 2.0**-53, np.float64(b >> _SPARE_BITS) * 2.0**-53


@helper
def _high_product(x: Any, y: Any) -> Any:
    """The upper 64 of the 128 bits of x * y."""
    x_low, x_high, y_low, y_high = x & _LOW_HALF, x >> _HALF, y & _LOW_HALF, y >> _HALF
    middle = x_high * y_low + ((x_low * y_low) >> _HALF)
    other = x_low * y_high + (middle & _LOW_HALF)
    return x_high * y_high + (middle >> _HALF) + (other >> _HALF)

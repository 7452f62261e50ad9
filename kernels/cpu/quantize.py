"""Activations to 8-bit integers, per row and block of columns, as com.microsoft::MatMulNBits does at accuracy level 4.

scale = max |x| / 127 of the block, integer = x / scale rounded to nearest even: symmetric, within [-127, 127]. The
integers are written in the type that the product wants: int16 or float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .jit import Kernel, kernel
from .lazy import inline

_INFINITY_BITS = np.int32(0x7F800000)
_SIGN_MASK = np.int32(0x7FFFFFFF)


@inline
def _float_of_bits(bits: Any) -> Any:
    return np.float64(np.int32(bits).view(np.float32))


def _make(name: str, integer: str) -> Kernel:
    convert = np.dtype(integer).type

    def quantize_rows(
        x: Any, x_bits: Any, block_size: int, integers: Any, scales: Any, sums: Any, begin: int, end: int
    ) -> None:
        """Rows [begin, end) of x (and the same memory as int32); columns beyond x are filled with zeros."""
        columns = x.shape[1]
        for row in range(begin, end):
            for block in range(scales.shape[1]):
                first = block * block_size
                last = min(first + block_size, columns)
                # Without their sign, floats compare as their bits do, and infinities and NaNs come out on top.
                largest = np.int32(0)
                for i in range(first, last):
                    largest = max(largest, np.int32(x_bits[row, i] & _SIGN_MASK))
                total, inverse = 0.0, 0.0
                scales[row, block] = 0
                if largest >= _INFINITY_BITS:
                    scales[row, block] = np.nan
                elif largest > 0:
                    magnitude = _float_of_bits(largest)
                    scales[row, block] = magnitude / 127.0
                    inverse = 127.0 / magnitude
                if inverse > 0.0:
                    for i in range(first, last):
                        rounded = np.rint(np.float64(x[row, i]) * inverse)
                        integers[row, i] = convert(rounded)
                        total += rounded
                else:
                    integers[row, first:last] = 0
                integers[row, last : first + block_size] = 0
                sums[row, block] = total

    quantize_rows.__name__ = name
    signature = "void(float32[:,::1], int32[:,::1], int64, {}[:,::1], float32[:,::1], float32[:,::1], int64, int64)"
    # Sums of integers are exact, so their order may change.
    return kernel(signature.format(integer), fastmath={"reassoc"})(quantize_rows)


quantize_to_int16 = _make("quantize_to_int16", "int16")
quantize_to_float32 = _make("quantize_to_float32", "float32")

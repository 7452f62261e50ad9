"""Packing operands: constants by NumPy, once; rows that are computed by an operator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..jit import native_op
from ..large import huge_array
from ..memory import read_int32, word, write_int32
from .tiling import Tiling, first_row


@dataclass(frozen=True)
class Packed:
    """A packed operand: `data` in words; `lines` are its rows (left) or columns (right)."""

    data: NDArray[Any]
    lines: int
    words: int


def pack_right(matrix: NDArray[np.float32], tiling: Tiling) -> Packed:
    """[K, N] float32 as panels [panel][K][columns], zeros beyond the last column."""
    words, lines = matrix.shape
    width = tiling.columns
    data = huge_array((tiling.panels(lines), words, width), matrix.dtype)
    for panel, target in enumerate(data):
        part = matrix[:, panel * width : (panel + 1) * width]
        target[:, : part.shape[1]] = part
    return Packed(data, lines, words)


def pack_left(matrix: NDArray[np.float32], tiling: Tiling) -> Packed:
    """[M, K] float32 as panels of rows, word by word."""
    lines, words = matrix.shape
    data = huge_array((lines * words,), matrix.dtype)
    panels = -(-lines // tiling.rows)
    for panel in range(panels):
        row, following = (first_row(index, panels, lines) for index in (panel, panel + 1))
        data[row * words : following * words] = matrix[row:following].T.reshape(-1)
    return Packed(data, lines, words)


# Arguments of `pack_rows`.
X, X_STRIDE, ROWS, PANELS, WORDS, OUT = range(6)


@native_op
def pack_rows(arguments: int, context: int, begin: int, end: int, scratch: int) -> int:
    """Rows of words, each contiguous, as left panels; items are panels."""
    stride, rows, panels = word(arguments, X_STRIDE), word(arguments, ROWS), word(arguments, PANELS)
    words = word(arguments, WORDS)
    for panel in range(begin, end):
        row = first_row(panel, panels, rows)
        height = first_row(panel + 1, panels, rows) - row
        x, out = word(arguments, X) + row * stride, word(arguments, OUT) + 4 * row * words
        for index in range(words):
            for m in range(height):
                write_int32(out + 4 * (index * height + m), read_int32(x + m * stride + 4 * index))
    return 0

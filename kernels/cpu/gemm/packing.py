"""Packing operands: constants by NumPy, once; rows that are computed by an operator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..jit import NativeOp, native_op
from ..large import Arena, huge_array, new_array
from ..memory import word
from ..tape.program import Call, Items
from ..tape.replay import Crew, Replay
from .tiling import Tiling, first_row
from .transposing import turn_lines
from .windows import PIECE_WORDS, pack_windows

_NANOSECONDS_PER_BYTE = 0.3


@dataclass(frozen=True)
class Packed:
    """A packed operand: `data` in words; `lines` are its rows (left) or columns (right)."""

    data: NDArray[Any]
    lines: int
    words: int


def pack_right(crew: Crew, matrix: NDArray[np.float32], tiling: Tiling, arena: Arena | None = None) -> Packed:
    """[K, N] float32 of any strides as panels [panel][K][columns]; what lies beyond the last column is unused.

    Args:
        arena: where the panels get their memory; None = on their own.

    Raises:
        ValueError: the matrix spans more than tables of int32 reach.
    """
    words, lines = matrix.shape
    data = new_array(arena, (tiling.panels(lines), words, tiling.columns), matrix.dtype)
    bases, offsets = matrix_tables(matrix, tiling, words)
    run_packing(crew, pack_windows(tiling), matrix.ctypes.data, bases, offsets, words, lines, data, 0)
    return Packed(data, lines, words)


def matrix_tables(matrix: NDArray[Any], tiling: Tiling, rows: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Where the rows of a matrix begin (filled up to so many), and where its columns lie in a row, in elements.

    Raises:
        ValueError: the matrix spans more than int32 reaches, or goes backwards.
    """
    steps = [stride // matrix.itemsize for stride in matrix.strides]
    if min(steps) < 0 or sum(step * size for step, size in zip(steps, matrix.shape, strict=True)) >= 1 << 31:
        raise ValueError(f"a matrix of shape {list(matrix.shape)} and strides {list(matrix.strides)} cannot be packed")
    bases = np.zeros(rows, np.int32)
    bases[: len(matrix)] = np.arange(len(matrix)) * steps[0]
    offsets = np.zeros(tiling.panels(matrix.shape[1]) * tiling.columns, np.int32)
    offsets[: matrix.shape[1]] = np.arange(matrix.shape[1]) * steps[1]
    return bases, offsets


def run_packing(
    crew: Crew,
    op: NativeOp,
    source: int,
    bases: NDArray[np.int32],
    offsets: NDArray[np.int32],
    words: int,
    lines: int,
    out: NDArray[Any],
    flip: int,
    then: tuple[Call, ...] = (),
) -> None:
    """Pack all panels of a matrix at once, and do what is to be done with them."""
    arguments = (source, bases.ctypes.data, offsets.ctypes.data, words, 0, lines, out.ctypes.data, flip)
    items = Items(factor=len(out) * -(-words // PIECE_WORDS))
    phases = [[Call(op, arguments, items)], *([call] for call in then)]
    crew.run(Replay(phases, out.nbytes * _NANOSECONDS_PER_BYTE), {})


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
        turn_lines((x, stride, height, words, out, 4 * height))
    return 0

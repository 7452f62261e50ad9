"""Sums of products a.T @ b over many tokens, such as the second moments of a linear layer's inputs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from genai.common.host_memory import huge_array

from ...weight_layout import num_tiles
from ..program.calls import Rows, program_of
from ..program.step_table import ContextTable, StepField
from ..program.thread_pool import Threads
from .bfloat_tiles import row_tiles_call, row_tiles_in, row_tiles_size
from .calls import Affine, has_bfloat_products, prefill_call
from .dense import DenseMatrix, pack_dense
from .prefill_kernel import STEP_COLUMNS

_NANOSECONDS_PER_PRODUCT = 0.001
_SQUARE = 64
# Number of rows of the result that are computed at a time. If the result is symmetric, the rows are computed up to the
# column of the last row, and the other columns are mirrored.
_BLOCK_ROWS = 1024


class SumOfProducts:
    """sum(a.T @ b) over all tokens, in float32. a and b are rounded to bfloat16 on machines where this is much faster.

    Args:
        widths: numbers of columns of a and of b.
        threads: threads that share the work.
        same: True if a and b are always the same array, so that only half of the sum is computed.
    """

    def __init__(self, widths: tuple[int, int], threads: Threads, *, same: bool = False) -> None:
        self._total, self._same = np.zeros(widths, np.float32), same
        self._threads = threads

    def add(self, a: NDArray[np.float32], b: NDArray[np.float32]) -> None:
        """Add tokens: a is [tokens, width of a], b is [tokens, width of b]."""
        if has_bfloat_products():
            self._add_tiles(a, b)
        else:  # NumPy computes only half of the product if both are the same array
            self._total += a.T @ b

    def mean(self, count: int) -> NDArray[np.float32]:
        """Return the sum divided by `count`, float32 [width of a, width of b]. No tokens can be added afterwards."""
        total = self._total
        total /= np.float32(count)
        if self._same and has_bfloat_products():
            for rows in self._blocks():
                total[: rows.start, rows] = total[rows, : rows.start].T
        return total

    def _blocks(self) -> list[slice]:
        rows = len(self._total)
        step = _BLOCK_ROWS if self._same else rows
        return [slice(first, min(first + step, rows)) for first in range(0, rows, step)]

    def _add_tiles(self, a: NDArray[np.float32], b: NDArray[np.float32]) -> None:
        tokens, columns = len(a), -(-len(a) // STEP_COLUMNS) * STEP_COLUMNS
        with ThreadPoolExecutor(2) as pool:
            transposing, packing = pool.submit(_transposed, a), pool.submit(_packed, b, columns)
            transposed, packed = transposing.result(), packing.result()
        for part in self._blocks():
            rows, width = part.stop - part.start, part.stop if self._same else b.shape[1]
            tiles = row_tiles_in(huge_array((row_tiles_size(columns, rows),), np.uint8), columns)
            out = Rows.of(self._total[part, :width])
            matrix = Affine(DenseMatrix(width, columns, "bfloat16", packed[: num_tiles(width)]), addend=out)
            phases = [[row_tiles_call(Rows.of(transposed[part]), tiles)], [prefill_call(tiles, matrix, out)]]
            context = ContextTable()
            for field, count in ((StepField.TOKENS, rows), (StepField.DECODE_ROWS, 0), (StepField.PREFILL_ROWS, rows)):
                context.count(field, count)
            self._threads.run(program_of(phases), context, nanoseconds=rows * tokens * width * _NANOSECONDS_PER_PRODUCT)


def _transposed(a: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return a contiguous transpose, copied in squares that fit in the first-level cache."""
    transposed = np.empty(a.shape[::-1], np.float32)
    for i in range(0, a.shape[0], _SQUARE):
        for j in range(0, a.shape[1], _SQUARE):
            transposed[j : j + _SQUARE, i : i + _SQUARE] = a[i : i + _SQUARE, j : j + _SQUARE].T
    return transposed


def _packed(b: NDArray[np.float32], columns: int) -> NDArray[np.uint16]:
    """Pack the transpose of b [tokens, width] as weights, padded with zero tokens up to `columns`."""
    narrow = np.zeros((columns, b.shape[1]), ml_dtypes.bfloat16)
    narrow[: len(b)] = b
    return pack_dense(narrow).data

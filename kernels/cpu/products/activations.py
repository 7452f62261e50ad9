"""Activations rounded to 8 bits per row and block of columns, as com.microsoft::MatMulNBits does at accuracy level 4.

scale = max |x| / 127 of the block, integer = x / scale rounded to nearest even: symmetric, within [-127, 127].
Infinities and NaNs make a block's scale NaN, and with it all results of the row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...block_matrix import BlockMatrix, RecordLayout
from ..jit import native_op
from ..lazy import inline
from ..memory import load_first, store_as_int8, store_float32, word, write_float32, write_int32
from ..tape.context import Word
from ..tape.program import Call, Items, Rows
from ..vector import LANES, maximum, reduce_add, reduce_max, splat_float32

_LINE = 64
# Columns that one item quantises: a wide row is shared out.
_ITEM_COLUMNS = 1024
_LARGEST = 127.0
# Adding and taking away 1.5 * 2 ** 23 rounds a float32 to a whole number, ties to even.
_ROUND = np.float32(12582912.0)
# 127 / x overflows for numbers below this; they are multiplied by _BOOST first.
_SMALL, _BOOST = np.float32(2.0**-100), np.float32(2.0**100)


@dataclass(frozen=True)
class Quantized:
    """Rows of 8-bit activations in memory: integers, then per block a float32 scale, then per block a correction.

    The correction is what the product adds for a block: minus the default zero point times the sum of the integers
    (int32), or for matrices with zero points of their own (`zero_point` 0) the sum itself (float32).

    Attributes:
        address: of the first row. stride: bytes from a row to the next.
        blocks, block_size: of the matrices that these rows fit.
        zero_point: the default one: 8, 128, or 0.
        counted: which count of the context says how many rows there are.
    """

    address: int
    stride: int
    blocks: int
    block_size: int
    zero_point: int
    counted: Word
    held: Any

    @property
    def scales(self) -> int:
        """Where the scales begin in a row."""
        return self.blocks * self.block_size

    def fits(self, matrix: BlockMatrix) -> bool:
        """Whether these rows were made for such a matrix."""
        layout = matrix.layout
        wanted = (matrix.blocks, layout.block_size, default_zero_point(layout))
        return (self.blocks, self.block_size, self.zero_point) == wanted

    @property
    def corrections(self) -> int:
        """Where the corrections begin in a row."""
        return self.scales + 4 * self.blocks


def default_zero_point(layout: RecordLayout) -> int:
    """The zero point that all blocks share; 0 if each brings its own."""
    return 0 if layout.zero_points else 1 << (layout.bits - 1)


def quantized_size(matrix: BlockMatrix, max_rows: int) -> int:
    """Bytes of memory for the activations that a matrix multiplies; kernels read a line beyond the last row."""
    return max_rows * _stride(matrix) + _LINE


def quantized_in(memory: NDArray[np.uint8], matrix: BlockMatrix, counted: Word) -> Quantized:
    """Activations for a matrix, in this memory."""
    zero_point = default_zero_point(matrix.layout)
    block_size = matrix.layout.block_size
    return Quantized(memory.ctypes.data, _stride(matrix), matrix.blocks, block_size, zero_point, counted, memory)


def _stride(matrix: BlockMatrix) -> int:
    return -(-matrix.blocks * (matrix.layout.block_size + 8) // _LINE) * _LINE


(X, X_STRIDE, COLUMNS, OUT, OUT_STRIDE, BLOCKS, BLOCK_SIZE, ZERO_POINT, PIECES, PIECE_BLOCKS) = range(10)
WIDTH = BLOCKS


@inline
def _quantize_block(x: int, columns: int, block_size: int, out: int, scale: int, correction: int, zero: int) -> None:
    """One block, of which `columns` (possibly none) exist."""
    largest, poison = splat_float32(0.0), splat_float32(0.0)
    for first in range(0, columns, LANES):
        values = load_first(x + 4 * first, columns - first)
        largest = maximum(largest, maximum(values, splat_float32(0.0) - values))
        poison = poison + values * 0.0  # NaN where a value is infinite or NaN
    magnitude = reduce_max(largest)
    boost = _BOOST if magnitude < _SMALL else np.float32(1.0)
    inverse = np.float32(_LARGEST) / (magnitude * boost) if magnitude > 0.0 else np.float32(0.0)
    total = splat_float32(0.0)
    for first in range(0, block_size, LANES):
        scaled = load_first(x + 4 * first, columns - first) * boost * inverse
        rounded = (scaled + _ROUND) - _ROUND
        store_as_int8(out + first, rounded)
        total = total + rounded
    write_float32(scale, np.float32(magnitude / np.float32(_LARGEST)) + reduce_add(poison))
    if zero == 0:
        write_float32(correction, reduce_add(total))
    else:
        write_int32(correction, np.int32(-zero * reduce_add(total)))


@native_op
def quantize(arguments: int, context: int, begin: int, end: int, scratch: int) -> int:
    """Items [begin, end): each some blocks of a row. Columns beyond x are zeros."""
    blocks, block_size = word(arguments, BLOCKS), word(arguments, BLOCK_SIZE)
    pieces, piece_blocks = word(arguments, PIECES), word(arguments, PIECE_BLOCKS)
    for item in range(begin, end):
        row, piece = item // pieces, item % pieces
        x = word(arguments, X) + row * word(arguments, X_STRIDE)
        out = word(arguments, OUT) + row * word(arguments, OUT_STRIDE)
        scales = out + blocks * block_size
        for block in range(piece * piece_blocks, min(blocks, (piece + 1) * piece_blocks)):
            first = block * block_size
            columns = min(block_size, max(0, word(arguments, COLUMNS) - first))
            places = scales + 4 * block, scales + 4 * (blocks + block)
            _quantize_block(
                x + 4 * first, columns, block_size, out + first, places[0], places[1], word(arguments, ZERO_POINT)
            )
    return 0


def quantize_call(x: Rows, out: Quantized) -> Call:
    """Round rows to 8 bits.

    Raises:
        ValueError: x has more columns than the blocks.
    """
    if x.width > out.scales:
        raise ValueError(f"x has {x.width} columns, {out.blocks} blocks of {out.block_size} hold {out.scales}")
    piece_blocks = max(1, _ITEM_COLUMNS // out.block_size)
    pieces = -(-out.blocks // piece_blocks)
    arguments = (
        x.address, x.stride, x.width, out.address, out.stride, out.blocks, out.block_size, out.zero_point, pieces,
        piece_blocks,
    )  # fmt: skip
    return Call(quantize, arguments, Items(out.counted, pieces), held=(x.held, out.held))


@native_op
def widen(arguments: int, context: int, begin: int, end: int, scratch: int) -> int:
    """Rows [begin, end) copied, with zeros up to a larger width (a multiple of LANES)."""
    columns, width = word(arguments, COLUMNS), word(arguments, WIDTH)
    for row in range(begin, end):
        x = word(arguments, X) + row * word(arguments, X_STRIDE)
        out = word(arguments, OUT) + row * word(arguments, OUT_STRIDE)
        for first in range(0, width, LANES):
            store_float32(out + 4 * first, load_first(x + 4 * first, max(0, columns - first)))
    return 0


def widen_call(x: Rows, out: Rows) -> Call:
    """Copy rows into wider ones, zeros behind them.

    Raises:
        ValueError: out is narrower, or no multiple of LANES.
    """
    if out.width < x.width or out.width % LANES:
        raise ValueError(f"x has {x.width} columns, out {out.width}: expected more, and a multiple of {LANES}")
    arguments = (x.address, x.stride, x.width, out.address, out.stride, out.width)
    return Call(widen, arguments, Items(x.counted), held=(x.held, out.held))

"""Activations quantised to 8 bits per row and block of columns.

The scale of a block is max |x| / 127, and an integer is x / scale, rounded to nearest even. So the quantisation is
symmetric, with integers in [-127, 127]. An infinity or a NaN makes the scale of its block NaN, and therefore all
results of the row.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...weight_layout import BlockMatrix, RecordLayout
from ..jit.arguments import Address, Arguments, Binding, Held
from ..jit.dsl import inline
from ..jit.memory import load_first, read_int32, store_bytes, store_float32, write_float32, write_int32
from ..jit.native import native_op
from ..jit.vector import LANES, maximum, reduce_add, reduce_max, splat_float32
from ..jit.vector_math import rounded
from ..program.calls import Call, Items, Rows, row_at
from ..program.step_table import StepField
from .dense import DenseMatrix, Matrix

_LINE = 64
# Number of columns that an item quantises. A wide row is split into several items.
_ITEM_COLUMNS = 1024
_LARGEST = 127.0
# The `zero_point` for matrices whose blocks have offsets.
SCALED = -1
# 127 / x overflows for x below _SMALL, so such numbers are multiplied by _BOOST first.
_SMALL, _BOOST = np.float32(2.0**-100), np.float32(2.0**100)


class Quantized(Arguments, kw_only=False):
    """Rows of 8-bit activations in memory: integers, then a float32 scale per block, then a correction per block.

    The correction is the term that a matmul adds for a block: minus the default zero point times the sum of the
    integers (int32). For matrices with zero points per block (`zero_point` 0), the correction is the sum itself
    (float32). For matrices with offsets (SCALED), it is the sum times the scale.

    Attributes:
        address: address of the first row.
        stride: bytes between consecutive rows.
        blocks, block_size: shape of the matrices that these rows fit.
        zero_point: default zero point, such as 8 or 128; 0 for zero points per block; SCALED for offsets.
        counted: field of the context that holds the number of rows.
        held: object that keeps the memory alive.
    """

    address: Address
    stride: int
    blocks: int
    block_size: int
    zero_point: int
    counted: StepField
    held: Held = None

    @property
    def scales(self) -> int:
        """Offset of the scales in a row."""
        return self.blocks * self.block_size

    def fits(self, matrix: BlockMatrix) -> bool:
        """Return True if these rows were made for this matrix."""
        layout = matrix.layout
        wanted = (matrix.blocks, layout.block_size, zero_point_of(layout))
        return (self.blocks, self.block_size, self.zero_point) == wanted

    @property
    def corrections(self) -> int:
        """Offset of the corrections in a row."""
        return self.scales + 4 * self.blocks


def zero_point_of(layout: RecordLayout) -> int:
    """Return the zero point that all blocks share, 0 if blocks have zero points, or SCALED if blocks have offsets."""
    return SCALED if layout.is_group and layout.zero_points else layout.zero_point


# Inputs of a matrix: rows quantised to 8 bits, or float32 rows padded with zeros.
Inputs = Quantized | Rows


def input_bytes(matrix: Matrix, rows: int, *, exact: bool) -> int:
    """Return the bytes of memory for the input rows of a matrix. Kernels read up to a cache line past the last row."""
    return rows * _stride(matrix, exact) + _LINE


def inputs_at(address: int | Binding, matrix: Matrix, counted: StepField, held: Any = None, *, exact: bool) -> Inputs:
    """Return the input rows of a matrix at an address: float32 if `exact` or the matrix is dense, else 8-bit."""
    stride = _stride(matrix, exact)
    if exact or isinstance(matrix, DenseMatrix):
        return Rows(address, stride, matrix.padded_columns, counted, held)
    zero_point = zero_point_of(matrix.layout)
    return Quantized(address, stride, matrix.blocks, matrix.layout.block_size, zero_point, counted, held)


def _stride(matrix: Matrix, exact: bool) -> int:
    if exact or isinstance(matrix, DenseMatrix):
        return -(-4 * matrix.padded_columns // _LINE) * _LINE
    return -(-matrix.blocks * (matrix.layout.block_size + 8) // _LINE) * _LINE


def whole_rows(rows: Inputs) -> Rows:
    """Return the rows, including their padding, as rows of four-byte numbers."""
    return Rows(rows.address, rows.stride, rows.stride // 4, rows.counted, rows.held)


def input_call(x: Rows, out: Inputs, *, times: int = 1) -> Call:
    """Return a call that converts rows to the inputs of a matrix: `times` rows per unit of their count."""
    if isinstance(out, Quantized):
        return quantize_call(x, out, times=times)
    return widen_call(x, whole_rows(out), times=times)


class QuantizeArguments(Arguments):
    """Rows and their quantised form. An item is one of the `pieces` of a row and contains `piece_blocks` blocks."""

    x: Rows
    out: Quantized
    pieces: int
    piece_blocks: int


class WidenArguments(Arguments):
    """Rows to copy into wider rows. `sources` is 0, or the address of the int32 indices of the rows to copy."""

    x: Rows
    out: Rows
    sources: Address


@inline
def _quantize_block(x: int, columns: int, block_size: int, out: int, scale: int, correction: int, zero: int) -> None:
    """Quantise one block, of which `columns` columns (possibly none) exist."""
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
        whole = rounded(scaled)
        store_bytes(out + first, whole)
        total = total + whole
    factor = np.float32(magnitude / np.float32(_LARGEST)) + reduce_add(poison)
    write_float32(scale, factor)
    if zero == SCALED:
        write_float32(correction, reduce_add(total) * factor)
    elif zero == 0:
        write_float32(correction, reduce_add(total))
    else:
        write_int32(correction, np.int32(-zero * reduce_add(total)))


@native_op(QuantizeArguments)
def quantize(arguments: QuantizeArguments, context: int, begin: int, end: int, scratch: int) -> int:
    """Quantise items [begin, end), each of which is a few blocks of a row. Columns after the end of x are zeros."""
    blocks, block_size, zero_point = arguments.out.blocks, arguments.out.block_size, arguments.out.zero_point
    pieces, piece_blocks = arguments.pieces, arguments.piece_blocks
    for item in range(begin, end):
        row, piece = item // pieces, item % pieces
        x, out = row_at(arguments.x, row), row_at(arguments.out, row)
        scales = out + blocks * block_size
        for block in range(piece * piece_blocks, min(blocks, (piece + 1) * piece_blocks)):
            first = block * block_size
            columns = min(block_size, max(0, arguments.x.width - first))
            addresses = scales + 4 * block, scales + 4 * (blocks + block)
            _quantize_block(x + 4 * first, columns, block_size, out + first, *addresses, zero_point)
    return 0


def quantize_call(x: Rows, out: Quantized, *, times: int = 1) -> Call:
    """Return a call that quantises rows to 8 bits: `times` rows per unit of their count."""
    if x.width > out.scales:
        raise ValueError(
            f"x has {x.width} columns, but {out.blocks} blocks of {out.block_size} have only {out.scales} columns"
        )
    piece_blocks = max(1, _ITEM_COLUMNS // out.block_size)
    pieces = -(-out.blocks // piece_blocks)
    arguments = QuantizeArguments(x=x, out=out, pieces=pieces, piece_blocks=piece_blocks)
    return Call(quantize, arguments, Items(out.counted, times * pieces))


@native_op(WidenArguments)
def widen(arguments: WidenArguments, context: int, begin: int, end: int, scratch: int) -> int:
    """Copy rows, which are the items, and pad them with zeros. Bits are copied unchanged, whatever their type."""
    columns, width, sources = arguments.x.width, arguments.out.width, arguments.sources
    for row in range(begin, end):
        x = row_at(arguments.x, np.int64(read_int32(sources + 4 * row)) if sources != 0 else row)
        out = row_at(arguments.out, row)
        for first in range(0, width, LANES):
            store_float32(out + 4 * first, load_first(x + 4 * first, max(0, columns - first)))
    return 0


def widen_call(x: Rows, out: Rows, *, times: int = 1, sources: int | Binding | None = None) -> Call:
    """Return a call that copies x[i], or x[sources[i]], to out[i] and pads it: `times` rows per unit of their count."""
    if out.width < x.width or out.width % LANES:
        raise ValueError(
            f"x has {x.width} columns and out has {out.width}, expected no fewer in out, and a multiple of {LANES}"
        )
    return Call(widen, WidenArguments(x=x, out=out, sources=sources), Items(x.counted, times))

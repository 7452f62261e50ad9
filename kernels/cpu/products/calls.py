"""Products on a tape: from typed rows and matrices to calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...block_matrix import BlockMatrix
from ...formats import TILE_ROWS
from ..isa import isa
from ..large import huge_array
from ..tape.program import Call, Items, Rows
from ..tiles import TILE_ROW_BYTES, tile_config
from .activations import Quantized
from .dense import DenseMatrix
from .dot import dot_for
from .few import STREAMS, few_op, tile_memory
from .float_kernel import Dense, FloatBlocks
from .integer_kernel import IntegerBlocks
from .many import SCRATCH_BYTES as MANY_SCRATCH_BYTES
from .many import TABLE_ZEROS, many_op, span_steps
from .many_kernel import STEP_COLUMNS
from .steps import Kind
from .tile_rows import RowTiles
from .tile_weights import supported, weights_of

Matrix = BlockMatrix | DenseMatrix
# Pairs of tiles that a thread takes at once, at most: as many meet the row tiles in its cache.
_PAIRS_TOGETHER = 8


@dataclass(frozen=True)
class Second:
    """What a gate multiplies: the second matrix of a gated product, and its bias."""

    matrix: Matrix
    bias: NDArray[np.float32] | None = None


def few_call(
    x: Quantized | Rows,
    matrix: Matrix,
    out: Rows,
    *,
    bias: NDArray[np.float32] | None = None,
    addend: Rows | None = None,
    gate: str = "",
    gated: Second | None = None,
) -> Call:
    """out = x @ matrix.T + bias + addend, or gate(x @ matrix.T + bias) * (x @ gated.matrix.T + gated.bias).

    Args:
        x: what `quantize_call` made, or float32 rows, as wide as the matrix is filled up to. Its `counted` says how
            many rows there are.
        bias: float32 [matrix.rows].

    Raises:
        ValueError: shapes do not fit together.
    """
    second = Second(matrix) if gated is None else gated
    _check(x, matrix, out, bias, addend, bool(gate), gated)
    kind = kind_of(matrix, quantized=isinstance(x, Quantized))
    tiles = tile_memory(kind, matrix.records)
    scales, corrections = (x.scales, x.corrections) if isinstance(x, Quantized) else (0, 0)
    arguments = (
        x.counted, matrix.data.ctypes.data, second.matrix.data.ctypes.data, matrix.records * kind.record_bytes,
        matrix.records, x.address, x.stride, scales, corrections, out.address, out.stride, matrix.rows,
        _address(bias), _address(second.bias), 0 if addend is None else addend.address,
        0 if addend is None else addend.stride, *tiles.arguments,
    )  # fmt: skip
    groups = matrix.tiles // (STREAMS // 2 if gate else STREAMS)
    held = (x.held, matrix, second, out.held, bias, addend, tiles.held)
    return Call(few_op(kind, gate), arguments, Items(factor=groups), tiles.scratch, held)


def has_many(matrix: Matrix) -> bool:
    """Whether `many_call` multiplies such a matrix on this machine."""
    return isa() == "amx" and isinstance(matrix, BlockMatrix) and supported(matrix.layout)


def many_call(
    x: RowTiles,
    matrix: Matrix,
    out: Rows,
    *,
    bias: NDArray[np.float32] | None = None,
    addend: Rows | None = None,
    gate: str = "",
    gated: Second | None = None,
) -> Call:
    """What `few_call` computes, for the step's rows that x holds, in bfloat16 tiles; see `has_many`.

    Args:
        x: what `row_tiles_call` made. out, addend: rows of the whole step; those of x are written.

    Raises:
        ValueError: shapes do not fit together, or this machine has no tiles for such a matrix.
    """
    second = Second(matrix) if gated is None else gated
    _check_shapes(matrix, out, bias, addend, bool(gate), gated)
    if not (has_many(matrix) and isinstance(matrix, BlockMatrix) and isinstance(second.matrix, BlockMatrix)):
        raise ValueError(f"no tiles of this machine multiply {matrix}")
    if x.columns != matrix.padded_columns:
        raise ValueError(f"row tiles have {x.columns} columns, the matrix is filled up to {matrix.padded_columns}")
    tile_bytes = matrix.records * matrix.layout.nbytes
    steps = matrix.padded_columns // STEP_COLUMNS
    table = huge_array((TABLE_ZEROS + TILE_ROW_BYTES,), np.uint8)
    table[:TABLE_ZEROS] = tile_config()
    arguments = (
        x.counted, x.first, matrix.data.ctypes.data, second.matrix.data.ctypes.data + (0 if gate else tile_bytes),
        tile_bytes if gate else 2 * tile_bytes, steps, span_steps(steps), x.address, x.powers, out.address, out.stride,
        matrix.rows, _address(bias), _address(second.bias), 0 if addend is None else addend.address,
        0 if addend is None else addend.stride, table.ctypes.data,
    )  # fmt: skip
    pairs = -(-matrix.rows // (TILE_ROWS if gate else 2 * TILE_ROWS))
    items = Items(factor=pairs, grain=min(_PAIRS_TOGETHER, max(1, pairs // 8)))
    op = many_op(weights_of(matrix, second.matrix), gate)
    return Call(op, arguments, items, MANY_SCRATCH_BYTES, (x.held, matrix, second, out.held, bias, addend, table))


def kind_of(matrix: Matrix, *, quantized: bool) -> Kind:
    """How a matrix meets quantised or float32 activations."""
    if isinstance(matrix, DenseMatrix):
        return Dense(matrix.type)
    return (
        IntegerBlocks(matrix.layout, dot_for(isa(), matrix.layout.bits), isa())
        if quantized
        else FloatBlocks(matrix.layout)
    )


def _address(array: NDArray[np.float32] | None) -> int:
    return 0 if array is None else array.ctypes.data


def _check(
    x: Quantized | Rows, matrix: Matrix, out: Rows, bias: Any, addend: Rows | None, gate: bool, gated: Second | None
) -> None:
    if isinstance(x, Rows):
        if x.width != matrix.padded_columns:
            raise ValueError(f"x has {x.width} columns, the matrix is filled up to {matrix.padded_columns}")
    elif isinstance(matrix, DenseMatrix) or not x.fits(matrix):
        raise ValueError(f"activations {x} were not made for this matrix: {matrix}")
    _check_shapes(matrix, out, bias, addend, gate, gated)


def _check_shapes(matrix: Matrix, out: Rows, bias: Any, addend: Rows | None, gate: bool, gated: Second | None) -> None:
    if out.width != matrix.rows or (addend is not None and addend.width != matrix.rows):
        raise ValueError(f"out has {out.width} columns, the matrix gives {matrix.rows}")
    if bias is not None and bias.shape != (matrix.rows,):
        raise ValueError(f"bias is {list(bias.shape)}, expected [{matrix.rows}]")
    if gate != (gated is not None):
        raise ValueError("a gate and a second matrix come together")
    if gated is not None and not _alike(matrix, gated.matrix):
        raise ValueError(f"the two matrices differ: {matrix}, {gated.matrix}")


def _alike(a: Matrix, b: Matrix) -> bool:
    if isinstance(a, BlockMatrix) and isinstance(b, BlockMatrix) and a.layout != b.layout:
        return False
    return type(a) is type(b) and (a.rows, a.columns) == (b.rows, b.columns)

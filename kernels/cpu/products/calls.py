"""Products on a tape: from typed rows and matrices to calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...block_matrix import BlockMatrix
from ..isa import isa
from ..tape.program import Call, Items, Rows
from .activations import Quantized
from .dense import DenseMatrix
from .dot import dot_for
from .few import SCRATCH_BYTES, STREAMS, few_op
from .float_kernel import Dense, FloatBlocks
from .integer_kernel import IntegerBlocks
from .steps import Kind

Matrix = BlockMatrix | DenseMatrix


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
    scales, corrections = (x.scales, x.corrections) if isinstance(x, Quantized) else (0, 0)
    arguments = (
        x.counted, matrix.data.ctypes.data, second.matrix.data.ctypes.data, matrix.records * kind.record_bytes,
        matrix.records, x.address, x.stride, scales, corrections, out.address, out.stride, matrix.rows,
        _address(bias), _address(second.bias), 0 if addend is None else addend.address,
        0 if addend is None else addend.stride,
    )  # fmt: skip
    groups = matrix.tiles // (STREAMS // 2 if gate else STREAMS)
    held = (x.held, matrix, second, out.held, bias, addend)
    return Call(few_op(kind, gate), arguments, Items(factor=groups), SCRATCH_BYTES, held)


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

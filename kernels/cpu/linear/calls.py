"""Calls of the matmul operators, made from typed rows and matrices."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from genai.common.host_memory import huge_array

from ...weight_layout import TILE_ROWS, BlockMatrix
from ..jit.amx import TILE_CONFIG, TILE_ROW_BYTES
from ..jit.isa import isa
from ..program.calls import NO_ROWS, Call, Items, Rows
from .activations import Inputs, Quantized
from .bfloat_tiles import (
    NO_TARGET_TILES,
    PARTS,
    DenseWeights,
    RowTiles,
    SplitTarget,
    SplitWeights,
    TileWeights,
    supported,
    weights_of,
)
from .decode import STREAMS, Packing, ProductArguments, SwigluArguments, decode_op, tile_memory
from .dense import DenseMatrix, Matrix
from .dot import dot_for
from .epilogue import TermsArguments
from .lora import NO_TARGET
from .micro_kernels import Dense, FloatBlocks, IntegerBlocks
from .prefill import (
    BLOCK_ROWS,
    SCRATCH_BYTES as PREFILL_SCRATCH_BYTES,
    TABLE_ZEROS,
    WAITING_PAIRS,
    PrefillArguments,
    prefill_op,
    span_steps,
)
from .prefill_kernel import STEP_COLUMNS

# Maximum number of pairs of tiles that a thread takes at a time. The pairs share the row tiles in the thread's cache.
_PAIRS_TOGETHER = 8
# Maximum bytes of pairs, and of blocks of rows, that are multiplied while both stay in a thread's cache.
_BYTES_TOGETHER = 5 << 17
# Range of the largest weight for which the products of parts neither overflow nor become denormal, for any activations.
_SPLIT_RANGE = 2.0**-50, 2.0**50
# Activations whose results are at most as large as their arguments.
_BOUNDED = ("gelu", "gelu_tanh", "relu", "silu")
# Maximum of the numbers of SplitTarget. Results are smaller than the bound, and lose no bits unless they are 2 ** 70
# times as small.
_LARGEST_BOUND = 2.0**30


@dataclass(frozen=True)
class Affine:
    """x @ matrix.T + bias + addend + the adapters' delta at a target.

    Attributes:
        matrix: packed weights.
        bias: float32 [matrix.rows].
        addend: rows as wide as the result; they may be the result's rows.
        target: adapter target whose hidden rows `shrink_call` has computed; NO_TARGET = no adapter can apply.
    """

    matrix: Matrix
    bias: NDArray[np.float32] | None = None
    addend: Rows | None = None
    target: int = NO_TARGET

    @property
    def terms(self) -> TermsArguments:
        """The scale and the terms to add, as arguments of operators."""
        scale = self.matrix.row_scales if isinstance(self.matrix, BlockMatrix) else None
        return TermsArguments(scale=scale, bias=self.bias, addend=self.addend or NO_ROWS, target=self.target)


def decode_call(
    x: Inputs, projection: Affine, out: Rows, *, gate: str = "", gated: Affine | None = None,
    swiglu: SwigluArguments | None = None,
) -> Call:  # fmt: skip
    """Return a call that computes out = projection(x), or gate(projection(x)) * gated(x).

    Args:
        x: rows from `quantize_call`, or float32 rows as wide as the padded matrix. `x.counted` determines the number of
            rows.
        projection: first or only linear layer.
        out: rows as wide as the projection's results.
        gate: a key of UNARY, or SWIGLU; only together with `gated`.
        gated: linear layer that the gate multiplies; its matrix has the same kind and size.
        swiglu: parameters of SWIGLU; None = (1, 0, no limit).
    """
    matrix, second = projection.matrix, gated or projection
    _check(x, projection, out, bool(gate), gated)
    kind = kind_of(matrix, quantized=isinstance(x, Quantized))
    tiles, scratch = tile_memory(kind, matrix.records)
    scales, corrections = (x.scales, x.corrections) if isinstance(x, Quantized) else (0, 0)
    arguments = ProductArguments(
        x=Rows(x.address, x.stride, matrix.padded_columns, x.counted, x.held), scales=scales, corrections=corrections,
        weights=matrix.data, gated_weights=second.matrix.data, tile_stride=matrix.records * kind.record_bytes,
        records=matrix.records, out=out, terms=projection.terms, gated_terms=second.terms, tiles=tiles,
        grid=_grid(matrix), gated_grid=_grid(second.matrix), swiglu=swiglu or SwigluArguments(),
    )  # fmt: skip
    groups = matrix.tiles // (STREAMS // 2 if gate else STREAMS)
    return Call(decode_op(kind, gate), arguments, Items(factor=groups), scratch)


def _grid(matrix: Matrix) -> NDArray[np.uint8] | None:
    return matrix.grid if isinstance(matrix, BlockMatrix) else None


def halves_of(projection: Affine) -> tuple[Affine, Affine]:
    """Return the first and the second half of the columns of a linear layer without addend, as views."""
    matrix, bias = projection.matrix, projection.bias
    assert isinstance(matrix, DenseMatrix)
    rows = matrix.rows // 2
    if matrix.rows % (2 * TILE_ROWS) or projection.addend is not None:
        raise ValueError(f"{matrix.rows} columns, or columns with an addend, do not have halves of whole tiles")
    first, second = (
        Affine(
            replace(matrix, rows=rows, data=matrix.data[begin // TILE_ROWS : (begin + rows) // TILE_ROWS]),
            None if bias is None else bias[begin : begin + rows],
        )
        for begin in (0, rows)
    )
    return first, second


def has_prefill(matrix: Matrix) -> bool:
    """Return True if `prefill_call` supports this matrix on this machine."""
    if not has_bfloat_products():
        return False
    if isinstance(matrix, DenseMatrix):
        return matrix.type == "bfloat16" and not matrix.narrowed and matrix.padded_columns % STEP_COLUMNS == 0
    return supported(matrix.layout)


def can_split(matrix: Matrix) -> bool:
    """Return True if `prefill_call` can multiply by this matrix in bfloat16 parts, as accurately as in float32."""
    if not has_bfloat_products() or not isinstance(matrix, DenseMatrix) or matrix.type == "float16":
        return False
    return matrix.padded_columns % STEP_COLUMNS == 0 and _SPLIT_RANGE[0] <= matrix.largest <= _SPLIT_RANGE[1]


def can_split_results(projection: Affine, activation: str) -> bool:
    """Return True if `prefill_call` can write the results as the row tiles of the next matmul, in bfloat16 parts."""
    matrix = projection.matrix
    if activation not in _BOUNDED or projection.addend is not None or not can_split(matrix):
        return False
    return matrix.rows % STEP_COLUMNS == 0 and all(bound <= _LARGEST_BOUND for bound in _bound_of(projection).values())


def _bound_of(projection: Affine) -> dict[str, float]:
    """Return the factor of a row's power of two, and the number to add, that bound the row's results."""
    matrix, bias = projection.matrix, projection.bias
    assert isinstance(matrix, DenseMatrix)
    offset = 0.0 if bias is None else float(np.abs(bias).max(initial=0))
    return {"factor": 2.0 * matrix.columns * matrix.largest, "offset": offset}


def has_bfloat_products() -> bool:
    """Return True if this machine multiplies bfloat16 several times as fast as float32."""
    return isa() == "amx"


def _tile_weights(first: Matrix, second: Matrix, row_parts: int) -> TileWeights:
    if isinstance(first, BlockMatrix) and isinstance(second, BlockMatrix):
        return weights_of(first, second)
    assert isinstance(first, DenseMatrix)
    return SplitWeights() if first.type == "float32" else DenseWeights(row_parts=row_parts)


def prefill_call(
    x: RowTiles, projection: Affine, out: Rows | RowTiles, *, gate: str = "", gated: Affine | None = None,
    activation: str = "",
) -> Call:  # fmt: skip
    """Return a call that computes the same as `decode_call`, in bfloat16 tiles; see `has_prefill` and `can_split`.

    Args:
        x: tiles that `row_tiles_call` fills from some rows of the step; in PARTS parts if the matrix is to be split.
        projection, gate, gated: as for `decode_call`; addends are rows of the whole step.
        activation: key of UNARY, applied to the result; only for weights that are split, and without a gate.
        out: rows of the whole step. Only the rows of x are written. If `can_split_results`, out may be row tiles.
    """
    matrix, second = projection.matrix, gated or projection
    split = NO_TARGET_TILES
    if isinstance(out, RowTiles):
        if not can_split_results(projection, activation) or (out.columns, out.parts) != (matrix.rows, PARTS):
            raise ValueError(f"the results of {matrix} with the activation {activation!r} do not fit the tiles {out}")
        split, out = SplitTarget(tiles=out, **_bound_of(projection)), Rows(None, 0, matrix.rows)
    _check_shapes(projection, out, bool(gate), gated)
    if not all(has_prefill(one) or can_split(one) for one in (matrix, second.matrix)):
        raise ValueError(f"this machine has no tile kernel for the matrix {matrix}")
    weights = _tile_weights(matrix, second.matrix, x.parts)
    if (x.columns, x.parts) != (matrix.padded_columns, weights.row_parts):
        raise ValueError(
            f"row tiles have {x.columns} columns in {x.parts} parts, but the padded matrix has "
            f"{matrix.padded_columns} columns in {weights.row_parts} parts"
        )
    tile_bytes = matrix.records * kind_of(matrix, quantized=False).record_bytes
    steps = matrix.padded_columns // STEP_COLUMNS
    table = huge_array((TABLE_ZEROS + TILE_ROW_BYTES,), np.uint8)
    table[:TABLE_ZEROS] = TILE_CONFIG
    pairs = -(-matrix.rows // (TILE_ROWS if gate else 2 * TILE_ROWS))
    span = span_steps(steps, weights)
    blocks = max(1, _BYTES_TOGETHER // (2 * BLOCK_ROWS * x.columns * x.parts))
    together = WAITING_PAIRS if span < steps else max(1, _BYTES_TOGETHER // (2 * tile_bytes))
    arguments = PrefillArguments(
        x=x, first=matrix.data, second=second.matrix.data if gate else matrix.data.ctypes.data + tile_bytes,
        pair_bytes=tile_bytes if gate else 2 * tile_bytes, pairs=pairs, blocks=blocks, together=together,
        steps=steps,
        span=span, out=out, terms=projection.terms, gated_terms=second.terms, split=split,
        table=table,
    )  # fmt: skip
    items = Items(factor=pairs, grain=min(_PAIRS_TOGETHER, max(1, pairs // 8)))
    if weights.row_parts > 1:
        items = items._replace(counted=x.counted, divisor=BLOCK_ROWS)
    op = prefill_op(weights, gate, activation, splits_results=split is not NO_TARGET_TILES)
    return Call(op, arguments, items, PREFILL_SCRATCH_BYTES)


def kind_of(matrix: Matrix, *, quantized: bool) -> Packing:
    """Return the kind of product of a matrix with quantised or float32 activations."""
    if isinstance(matrix, DenseMatrix):
        return Dense(matrix.type)
    if quantized:
        return IntegerBlocks(matrix.layout, isa(), dot_for(isa(), matrix.layout.byte_bits))
    return FloatBlocks(matrix.layout, isa())


def _check(x: Inputs, projection: Affine, out: Rows, gate: bool, gated: Affine | None) -> None:
    matrix = projection.matrix
    if isinstance(x, Rows):
        if x.width != matrix.padded_columns:
            raise ValueError(f"x has {x.width} columns, but the padded matrix has {matrix.padded_columns}")
    elif isinstance(matrix, DenseMatrix) or not x.fits(matrix):
        raise ValueError(f"activations {x} do not match the matrix {matrix}")
    _check_shapes(projection, out, gate, gated)


def _check_shapes(projection: Affine, out: Rows, gate: bool, gated: Affine | None) -> None:
    matrix = projection.matrix
    if gate != (gated is not None):
        raise ValueError("a gate and a second matrix must be given together")
    if gated is not None and not alike(matrix, gated.matrix):
        raise ValueError(f"the two matrices differ in format or size: {matrix}, {gated.matrix}")
    if out.width != matrix.rows:
        raise ValueError(f"out has {out.width} columns, but the matrix has {matrix.rows} rows")
    for one in (projection, gated or projection):
        if one.addend is not None and one.addend.width != matrix.rows:
            raise ValueError(f"addend has {one.addend.width} columns, but the matrix has {matrix.rows} rows")
        if one.bias is not None and one.bias.shape != (matrix.rows,):
            raise ValueError(f"bias is {list(one.bias.shape)}, expected [{matrix.rows}]")


def alike(a: Matrix, b: Matrix) -> bool:
    """Return True if two matrices have the same format and size, so that one call can multiply by both."""
    if isinstance(a, BlockMatrix) and isinstance(b, BlockMatrix) and a.layout != b.layout:
        return False
    return type(a) is type(b) and (a.rows, a.columns) == (b.rows, b.columns)

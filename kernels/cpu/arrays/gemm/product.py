"""The operator that multiplies packed operands, and the operators that finish tiles of sums.

Finishing adds terms, applies a function and writes results. Integer sums stay int32, or are converted to float32, or
are quantised to 8 bits again. For operands that were moved to signed a and unsigned b with zero points p and q, the
product of a row and a column is sum(a b) - q sum(a) - p sum(b) + K p q. So three terms are added: a factor per column
times a number per row, a number per row, and a number per column.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from ....checks import Float32
from ...jit import memory
from ...jit.amx import TILE_CONFIG, configure_tiles, release_tiles
from ...jit.arguments import Address, Arguments
from ...jit.dsl import inline
from ...jit.native import NativeOp, native_op
from ...jit.variants import once
from ...jit.vector import (
    LANES,
    bits_as_float32,
    bits_as_int32,
    maximum,
    minimum,
    splat_float32,
    splat_int32,
    to_float32,
)
from ...jit.vector_math import UNARY, rounded
from ...program.calls import Call, Items
from ...program.driver import call_operator
from ..copying import operand
from .micro import BLOCK_WORDS, TILED, VECTOR_BYTES, WORD_BYTES, Floats, Grid, Kind, first_row, grid, micro, tiled_micro


class FinishArguments(Arguments):
    """The destination for tiles, and the terms to add to them per column, per row and per element; 0 = none.

    `p` and `q` are the two parameters that every function takes. The fields after `q` are for integers:
    `column_factors` are multiplied by `row_sums`; `point`, `low` and `high` are the zero point and the limits of bytes.
    """

    out: Address
    out_stride: int
    width: int
    column_bias: Address = None
    row_bias: Address = None
    addend: Address = None
    addend_stride: int = 0
    p: float = 0.0
    q: float = 0.0
    row_sums: Address = None
    column_factors: Address = None
    row_terms: Address = None
    column_terms: Address = None
    row_scales: Address = None
    column_scales: Address = None
    point: float = 0.0
    low: float = 0.0
    high: float = 0.0


def fitting(name: str, terms: Float32 | None, shape: tuple[int, ...]) -> Float32 | None:
    """Return terms as a contiguous array after checking their shape. The name includes a verb, as in "bias is"."""
    if terms is None:
        return None
    if terms.shape != shape or terms.dtype != np.float32:
        raise ValueError(f"{name} {terms.dtype} {list(terms.shape)}, expected float32 {list(shape)}")
    return operand(terms)


Result = Literal["int32", "float32", "bytes"]


def result_of(dtype: np.dtype[Any]) -> Result:
    """Return the kind of result that integer sums are converted to, from the type of the results."""
    return "bytes" if dtype.itemsize == 1 else "int32" if dtype == np.int32 else "float32"


def limits(dtype: np.dtype[Any], point: int) -> dict[str, Any]:
    """Return the zero point and limits as fields of FinishArguments for a type of bytes; no fields for other types."""
    if dtype.itemsize > 1:
        return {}
    return {"point": point, "low": np.iinfo(dtype).min, "high": np.iinfo(dtype).max}


@once
def finish_op(kind: Kind, function: str, result: Result = "float32") -> NativeOp:
    """Return the operator (arguments, address of the sums, first row, first column, rows) that finishes a tile.

    It computes function(sums + biases + addend). Integer sums are scaled to floats first, stay int32, or are converted
    to bytes: round(scaled) + point, saturated.
    """
    apply, vectors, is_float = UNARY[function].function, kind.tiling.vectors, isinstance(kind, Floats)
    is_int32, is_bytes = result == "int32", result == "bytes"
    item = 1 if is_bytes else 4

    def finish(arguments: FinishArguments, sums: int, row: int, column: int, rows: int) -> int:
        width, stride, p, q = arguments.width, arguments.out_stride, arguments.p, arguments.q
        column_bias, row_bias = arguments.column_bias, arguments.row_bias
        row_sums, factors = arguments.row_sums, arguments.column_factors
        row_terms, column_terms = arguments.row_terms, arguments.column_terms
        row_scales, column_scales = arguments.row_scales, arguments.column_scales
        point, low, high = arguments.point, arguments.low, arguments.high
        addend, addend_stride = arguments.addend, arguments.addend_stride
        out = arguments.out + row * stride
        for vector in range(vectors):
            first = column + vector * LANES
            left = min(width - first, LANES)
            if left > 0:
                # The terms of a column are read once for all rows, because the compiler cannot move reads past written
                # results.
                factor, term = splat_int32(0), splat_int32(0)
                scales, shift = splat_float32(1.0), splat_float32(0.0)
                if column_bias != 0:
                    shift = memory.load_first(column_bias + 4 * first, left)
                if factors != 0:
                    factor = bits_as_int32(memory.load_first(factors + 4 * first, left))
                if column_terms != 0:
                    term = bits_as_int32(memory.load_first(column_terms + 4 * first, left))
                if column_scales != 0:
                    scales = memory.load_first(column_scales + 4 * first, left)
                for m in range(rows):
                    address = sums + (m * vectors + vector) * VECTOR_BYTES
                    there = out + m * stride + item * first
                    if is_float:
                        value = memory.load_float32(address)
                        if column_bias != 0:
                            value = value + shift
                        if row_bias != 0:
                            value = value + memory.read_float32(row_bias + 4 * (row + m))
                    else:
                        total = memory.load_int32(address) + term
                        if factors != 0:
                            total = total + factor * memory.read_int32(row_sums + 4 * (row + m))
                        if row_terms != 0:
                            total = total + memory.read_int32(row_terms + 4 * (row + m))
                        if is_int32:
                            memory.store_first(there, bits_as_float32(total), left)
                            continue
                        value = to_float32(total)
                        if row_scales != 0:
                            value = value * memory.read_float32(row_scales + 4 * (row + m))
                        value = value * scales + shift
                    if addend != 0:
                        value = value + memory.load_first(addend + (row + m) * addend_stride + 4 * first, left)
                    value = apply(value, p, q)
                    if is_bytes:
                        value = minimum(maximum(value, low - point), high - point)
                        memory.store_as_bytes(there, rounded(value) + point, left)
                    else:
                        memory.store_first(there, value, left)
        return 0

    name = f"finish_{function}_{vectors}" if is_float else f"finish_{result}_{function}_{vectors}"
    return native_op(FinishArguments, name=name)(finish)


class GemmArguments(Arguments):
    """Packed operands of `word_count` words along K, their partition, and the operator that finishes tiles.

    `finishing` holds the arguments of `finish`.
    """

    left: Address
    rows: int
    right: Address
    cut: Grid
    word_count: int
    finish: Address
    tile_config: Address = None
    finishing: FinishArguments


def _tiled() -> Any:
    one, two = tiled_micro(1), tiled_micro(2)
    vectors = TILED.rows * TILED.vectors

    @inline
    def chosen(height: int, operands: Any) -> None:
        sums, fresh = operands[3], operands[4]
        if fresh != 0:
            for index in range(vectors):
                memory.store_int32(sums + index * VECTOR_BYTES, splat_int32(0))
        if height <= LANES:
            one(operands)
        else:
            two(operands)

    return chosen


def _untiled(kind: Kind) -> Any:
    """Return a function that calls the micro-kernel for a tile's height: a chain of inlined branches, tallest first."""
    smallest = micro(kind, 1)
    chosen = inline(lambda height, operands: smallest(operands))
    for rows in range(2, kind.tiling.rows + 1):
        chosen = _either(rows, micro(kind, rows), chosen)
    return chosen


def _either(rows: int, kernel: Any, other: Any) -> Any:
    @inline
    def chosen(height: int, operands: Any) -> None:
        if height == rows:
            kernel(operands)
        else:
            other(height, operands)

    return chosen


@once
def product_op(kind: Kind) -> NativeOp:
    """Return the matmul operator. An item is a group of left panels and a group of right panels (see `micro.Grid`)."""
    multiply = _tiled() if kind.tiling.is_tiled else _untiled(kind)
    tile_rows, tile_vectors = kind.tiling.rows, kind.tiling.vectors
    tile_bytes = tile_rows * tile_vectors * VECTOR_BYTES
    right_word_bytes = tile_vectors * VECTOR_BYTES
    tile_columns, is_tiled = kind.tiling.columns, kind.tiling.is_tiled

    def product(arguments: GemmArguments, context: int, begin: int, end: int, scratch: int) -> int:
        rows, left_panels, right_panels = arguments.rows, arguments.cut.left_panels, arguments.cut.right_panels
        left_group, right_group = arguments.cut.left_group, arguments.cut.right_group
        words, finish = arguments.word_count, arguments.finish
        left_groups = -(-left_panels // left_group)
        if is_tiled:
            configure_tiles(arguments.tile_config)
        for item in range(begin, end):
            right_item = item // left_groups
            left_first = (item - right_item * left_groups) * left_group
            left_last = min(left_panels, left_first + left_group)
            right_first = right_item * right_group
            right_last = min(right_panels, right_first + right_group)
            for block in range(0, words, BLOCK_WORDS):
                count = min(BLOCK_WORDS, words - block)
                fresh = 1 if block == 0 else 0
                sums = scratch
                for right_panel in range(right_first, right_last):
                    right = arguments.right + (right_panel * words + block) * right_word_bytes
                    for left_panel in range(left_first, left_last):
                        row = first_row(left_panel, left_panels, rows)
                        height = first_row(left_panel + 1, left_panels, rows) - row
                        skipped = block if is_tiled else block * height
                        left = arguments.left + (row * words + skipped) * WORD_BYTES
                        multiply(height, (left, right, count, sums, fresh, words * WORD_BYTES))
                        if block + count == words:
                            column = right_panel * tile_columns
                            call_operator(finish, arguments.finishing, sums, row, column, height)
                        sums += tile_bytes
        if is_tiled:
            release_tiles()
        return 0

    return native_op(GemmArguments, name=f"product_{kind.name}")(product)


def product_call(
    kind: Kind, left: Any, rows: int, right: Any, right_panels: int, words: int, finish: NativeOp,
    finishing: FinishArguments, *, threads: int,
) -> Call:  # fmt: skip
    """Return the call that multiplies packed rows by packed columns and finishes every tile.

    Args:
        left, right: address, or an array or binding that represents one.
        finishing: arguments of `finish`.
        threads: number of threads at run time.
    """
    cut = grid(kind.tiling, rows, right_panels, threads)
    arguments = GemmArguments(
        left=left, rows=rows, right=right, cut=cut, word_count=words, finish=finish,
        tile_config=TILE_CONFIG if kind.tiling.is_tiled else None, finishing=finishing,
    )  # fmt: skip
    return Call(product_op(kind), arguments, Items(factor=cut.items), cut.scratch_bytes(kind.tiling))

"""Products of few rows with block-quantised weights: decoding, where the time is that of reading the weights once.

Per block an exact integer product, then float32: sum = dot * (activation scale * weight scale) + sum, blocks in order.
This is the same to the last bit for any number of rows, threads, and instruction set.

Weights are read as four streams of tiles side by side: with fewer the memory is not kept busy, and each stream asks for
its cache lines some records ahead. More rows reuse what was read: then fewer tiles are worked on at once, so that sums
stay in registers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from ...block_matrix import BLOCKS_PER_RECORD, GROUP_BYTES, TILES_TOGETHER, BlockMatrix, RecordLayout
from ...formats import TILE_ROWS
from ..emit import FLOAT, FLOAT_VECTOR, INT32, INT32_VECTOR, INT64, LANES, Emitter, constant, micro_kernel
from ..functions import gelu_tanh, inline, silu
from ..isa import isa
from ..jit import NativeOp, native_op
from ..memory import load_first, load_float32, store_first, word
from ..tape.program import Call, Items, Rows
from .activations import Quantized
from .dot import Dot, dot_for

# Streams of tiles that a call works on: four of a matrix, or two each of a gate and what it gates.
STREAMS = TILES_TOGETHER
# Rows at once -> tiles at once.
_SHAPES = {1: 4, 2: 4, 4: 2, 8: 1}
_PREFETCH_BYTES = 2048
_LINE = 64
_VECTOR_BYTES = 4 * LANES
# Results of the micro-kernels: [row][stream] vectors.
_ROW_BYTES = STREAMS * _VECTOR_BYTES
_SCRATCH = max(_SHAPES) * _ROW_BYTES

Gate = Literal["", "silu", "gelu_tanh"]
_GATES = {"silu": silu, "gelu_tanh": gelu_tanh}

(ROWS_WORD, WEIGHTS, GATED_WEIGHTS, TILE_STRIDE, RECORDS, X, X_STRIDE, SCALES, CORRECTIONS, OUT, OUT_STRIDE, WIDTH, BIAS,
 GATED_BIAS, ADDEND, ADDEND_STRIDE) = range(16)  # fmt: skip


@dataclass(frozen=True)
class _Weights:
    """The vectors of a sub-block, unpacked: per group of columns, where its activations are."""

    vectors: list[Any]
    columns: list[int]


def _unpacked(e: Emitter, address: Any, layout: RecordLayout) -> _Weights:
    groups = layout.sub_block * layout.bits // 8 // 4
    loaded = [e.load(e.at(address, GROUP_BYTES * g), INT32_VECTOR) for g in range(groups)]
    columns = [4 * g for g in range(groups)]
    if layout.bits == 8:
        return _Weights(loaded, columns)
    mask = constant(INT32_VECTOR, 0x0F0F0F0F)
    low = [e.builder.and_(vector, mask) for vector in loaded]
    high = [e.builder.and_(e.builder.lshr(vector, constant(INT32_VECTOR, 4)), mask) for vector in loaded]
    return _Weights(low + high, columns + [layout.sub_block // 2 + c for c in columns])


def _micro_kernel(rows: int, tiles: int, layout: RecordLayout, dot: Dot) -> Any:
    """Sums of `tiles` tiles with `rows` rows, over all records, to scratch [rows][STREAMS] vectors.

    Its arguments: the addresses of the tiles; records; the address of the first row's integers, its stride; offsets of
    scales and corrections in a row; the address of the results.
    """

    def emit(e: Emitter, *values: Any) -> None:
        streams, (records, x, stride, scales, corrections, out) = values[:tiles], values[tiles:]
        row_at = [e.at(x, e.builder.mul(stride, INT64(m))) for m in range(rows)]
        zeros = [constant(FLOAT_VECTOR, 0.0)] * (rows * tiles)
        with e.loop(records, zeros) as (record, sums, following):
            sums = list(sums)
            offset = e.builder.mul(record, INT64(layout.nbytes))
            at = [e.at(stream, offset) for stream in streams]
            for address in at:
                for line in range(0, layout.nbytes, _LINE):
                    e.prefetch(e.at(address, line + _PREFETCH_BYTES))
            for block in range(BLOCKS_PER_RECORD):
                _block(e, block, record, at, row_at, scales, corrections, sums)
            following(*sums)
        for m in range(rows):
            for t in range(tiles):
                e.store(sums[m * tiles + t], e.at(out, m * _ROW_BYTES + t * _VECTOR_BYTES))

    def _block(
        e: Emitter, block: int, record: Any, at: Any, row_at: Any, scales: Any, corrections: Any, sums: list[Any]
    ) -> None:
        b = e.builder
        number = b.add(b.shl(record, INT64(1)), INT64(block))
        word_offset = b.shl(number, INT64(2))
        column = b.mul(number, INT64(layout.block_size))
        x_at = [e.at(row, column) for row in row_at]
        correction_at = [e.at(e.at(row, corrections), word_offset) for row in row_at]
        totals = _integer_products(e, block, at, x_at, correction_at)
        for t, address in enumerate(at):
            weight_scale = _factor(e, e.at(address, layout.scales + block * layout.factor_bytes))
            points = _factor(e, e.at(address, layout.points + block * layout.factor_bytes)) if layout.zero_points else None
            for m, row in enumerate(row_at):
                value = b.sitofp(totals[m * len(at) + t], FLOAT_VECTOR)
                if points is not None:
                    count = e.splat(e.load(correction_at[m], FLOAT))
                    value = e.multiply_add(b.fneg(points), count, value)
                row_scale = e.splat(e.load(e.at(e.at(row, scales), word_offset), FLOAT))
                place = m * len(at) + t
                sums[place] = e.multiply_add(value, b.fmul(row_scale, weight_scale), sums[place])

    def _integer_products(e: Emitter, block: int, at: Any, x_at: Any, correction_at: Any) -> list[Any]:
        """Per row and tile the integer product of a block."""
        none = constant(INT32_VECTOR, 0)
        starts = [none if layout.zero_points else e.splat(e.load(place, INT32)) for place in correction_at]
        totals = [start for start in starts for _ in at]
        first = block * layout.block_bytes
        if layout.sub_blocks == 1:
            return _sub_block(e, [e.at(address, first) for address in at], x_at, totals)
        size, columns = INT64(layout.block_bytes // layout.sub_blocks), INT64(layout.sub_block)
        with e.loop(INT64(layout.sub_blocks), totals) as (index, running, following):
            moved = e.builder.add(INT64(first), e.builder.mul(index, size))
            shifted = [e.at(x, e.builder.mul(index, columns)) for x in x_at]
            totals = _sub_block(e, [e.at(address, moved) for address in at], shifted, running)
            following(*totals)
        return totals

    def _sub_block(e: Emitter, at: Any, x_at: Any, totals: list[Any]) -> list[Any]:
        results = list(totals)
        for t, address in enumerate(at):
            weights = _unpacked(e, address, layout)
            for m, x in enumerate(x_at):
                running = dot.start(e, totals[m * len(at) + t])
                for vector, column in zip(weights.vectors, weights.columns, strict=True):
                    running = dot.add(e, running, vector, e.load(e.at(x, column), INT32))
                results[m * len(at) + t] = dot.total(e, running)
        return results

    def _factor(e: Emitter, address: Any) -> Any:
        return e.load(address, FLOAT_VECTOR) if layout.wide else e.load_halves(address)

    return micro_kernel(emit)


@inline
def _with_bias(sums: Any, bias: int, column: int, left: int) -> Any:
    return sums + load_first(bias + 4 * column, left) if bias != 0 else sums


@inline
def _write(arguments: int, scratch: int, group: int, row: int, count: int) -> None:
    """out = sums + bias + addend, for columns that exist."""
    width, bias, addend = word(arguments, WIDTH), word(arguments, BIAS), word(arguments, ADDEND)
    for m in range(count):
        out = word(arguments, OUT) + (row + m) * word(arguments, OUT_STRIDE)
        for stream in range(STREAMS):
            column = (group * STREAMS + stream) * TILE_ROWS
            left = width - column
            if left > 0:
                value = load_float32(scratch + m * _ROW_BYTES + stream * _VECTOR_BYTES)
                value = _with_bias(value, bias, column, left)
                if addend != 0:
                    there = addend + (row + m) * word(arguments, ADDEND_STRIDE)
                    value = value + load_first(there + 4 * column, left)
                store_first(out + 4 * column, value, left)


def _gated_writer(activate: Any) -> Any:
    @inline
    def write(arguments: int, scratch: int, group: int, row: int, count: int) -> None:
        """out = activation(gate) * gated: the first two streams are the gate's."""
        width, half = word(arguments, WIDTH), STREAMS // 2
        for m in range(count):
            out = word(arguments, OUT) + (row + m) * word(arguments, OUT_STRIDE)
            for stream in range(half):
                column = (group * half + stream) * TILE_ROWS
                left = width - column
                if left > 0:
                    place = scratch + m * _ROW_BYTES + stream * _VECTOR_BYTES
                    gate = _with_bias(load_float32(place), word(arguments, BIAS), column, left)
                    gated = load_float32(place + half * _VECTOR_BYTES)
                    gated = _with_bias(gated, word(arguments, GATED_BIAS), column, left)
                    store_first(out + 4 * column, activate(gate) * gated, left)

    return write


@cache
def few_op(layout: RecordLayout, gate: Gate, isa_name: str) -> NativeOp:
    """The operator for a layout: items are groups of STREAMS tiles."""
    dot = dot_for(isa_name, layout.bits)
    one, two, four, eight = (_micro_kernel(rows, tiles, layout, dot) for rows, tiles in _SHAPES.items())
    write = _gated_writer(_GATES[gate]) if gate else _write

    def few(arguments: int, context: int, begin: int, end: int, scratch: int) -> int:
        rows = word(context, word(arguments, ROWS_WORD))
        stride, records = word(arguments, X_STRIDE), word(arguments, RECORDS)
        scales, corrections = word(arguments, SCALES), word(arguments, CORRECTIONS)
        tile = word(arguments, TILE_STRIDE)
        for group in range(begin, end):
            if gate:
                a = word(arguments, WEIGHTS) + 2 * group * tile
                c = word(arguments, GATED_WEIGHTS) + 2 * group * tile
            else:
                a = word(arguments, WEIGHTS) + STREAMS * group * tile
                c = a + 2 * tile
            b, d = a + tile, c + tile
            row = 0
            while row < rows:
                x = word(arguments, X) + row * stride
                if rows - row >= 8:
                    count = 8
                    eight((a, records, x, stride, scales, corrections, scratch))
                    eight((b, records, x, stride, scales, corrections, scratch + _VECTOR_BYTES))
                    eight((c, records, x, stride, scales, corrections, scratch + 2 * _VECTOR_BYTES))
                    eight((d, records, x, stride, scales, corrections, scratch + 3 * _VECTOR_BYTES))
                elif rows - row >= 4:
                    count = 4
                    four((a, b, records, x, stride, scales, corrections, scratch))
                    four((c, d, records, x, stride, scales, corrections, scratch + 2 * _VECTOR_BYTES))
                elif rows - row >= 2:
                    count = 2
                    two((a, b, c, d, records, x, stride, scales, corrections, scratch))
                else:
                    count = 1
                    one((a, b, c, d, records, x, stride, scales, corrections, scratch))
                write(arguments, scratch, group, row, count)
                row += count
        return 0

    few.__name__ = "_".join(
        ["few", str(layout.bits), str(layout.block_size), "wide" * layout.wide, "points" * layout.zero_points, gate]
    )
    return native_op(few)


def few_call(
    x: Quantized,
    matrix: BlockMatrix,
    out: Rows,
    *,
    bias: Any = None,
    addend: Rows | None = None,
    gate: Gate = "",
    gated: BlockMatrix | None = None,
    gated_bias: Any = None,
) -> Call:
    """out = x @ matrix.T + bias + addend, or activation(x @ matrix.T + bias) * (x @ gated.T + gated_bias).

    Args:
        x: what `quantize_call` made; its `counted` says how many rows there are.
        bias, gated_bias: float32 [rows], contiguous.

    Raises:
        ValueError: shapes do not fit together.
    """
    _check(x, matrix, out, bias, addend, gate, gated)
    second = matrix if gated is None else gated
    arguments = (
        x.counted, matrix.data.ctypes.data, second.data.ctypes.data, matrix.records * matrix.layout.nbytes,
        matrix.records, x.address, x.stride, x.scales, x.corrections, out.address, out.stride, matrix.rows,
        0 if bias is None else bias.ctypes.data, 0 if gated_bias is None else gated_bias.ctypes.data,
        0 if addend is None else addend.address, 0 if addend is None else addend.stride,
    )  # fmt: skip
    groups = matrix.tiles // (STREAMS // 2 if gate else STREAMS)
    held = (x.held, matrix, second, out.held, bias, gated_bias, None if addend is None else addend.held)
    return Call(few_op(matrix.layout, gate, isa()), arguments, Items(factor=groups), _SCRATCH, held)


def _check(
    x: Quantized, matrix: BlockMatrix, out: Rows, bias: Any, addend: Rows | None, gate: Gate, gated: BlockMatrix | None
) -> None:
    layout = matrix.layout
    zero_point = 0 if layout.zero_points else 1 << (layout.bits - 1)
    if (x.blocks, x.block_size, x.zero_point) != (matrix.blocks, layout.block_size, zero_point):
        raise ValueError(f"activations {x} were not made for a matrix of {matrix.blocks} blocks with {layout}")
    if out.width != matrix.rows or (addend is not None and addend.width != matrix.rows):
        raise ValueError(f"out has {out.width} columns, the matrix gives {matrix.rows}")
    if bias is not None and bias.shape != (matrix.rows,):
        raise ValueError(f"bias is {list(bias.shape)}, expected [{matrix.rows}]")
    if bool(gate) != (gated is not None):
        raise ValueError(f"gate is {gate!r}, and there is {'a' if gated else 'no'} second matrix")
    if gated is not None and (gated.rows, gated.layout, gated.records) != (matrix.rows, layout, matrix.records):
        raise ValueError(f"the two matrices differ: {matrix.rows} and {gated.rows} rows, {layout} and {gated.layout}")

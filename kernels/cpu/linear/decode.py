"""Matmuls with decode numerics, for decoding and short prompts. They take as long as reading the weights once.

Weights are read as four streams of tiles side by side, because fewer streams do not use the full memory bandwidth. Each
stream prefetches its cache lines some records ahead. Several rows reuse the weights that were read. In this case, fewer
tiles are processed at a time, so that sums stay in registers; or, on a machine with AMX, up to sixteen rows are
multiplied in tiles (see `decode_amx`). A row's result does not depend on the number of rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from ...weight_layout import BLOCKS_PER_RECORD, TILE_ROWS, TILES_TOGETHER, RecordLayout
from ..jit.amx import configure_tiles, release_tiles
from ..jit.arguments import Address, Arguments
from ..jit.dsl import inline
from ..jit.emit import FLOAT_VECTOR, INT64, LANES, Emitter, constant, micro_kernel
from ..jit.isa import isa, stream_prefetch
from ..jit.memory import entry, load_float32, store_first, store_float32
from ..jit.native import NativeOp, native_op
from ..jit.variants import once
from ..jit.vector import maximum, minimum
from ..jit.vector_math import UNARY, sigmoid
from ..program.calls import Rows, row_at
from . import decode_amx
from .epilogue import TermsArguments, addend_of, scaled, with_terms
from .lora import ASKED_BYTES, NOT_ASKED, RUN_LINES, add_adapters, start_asking
from .micro_kernels import DENSE_COLUMNS, Dense, FloatBlocks, IntegerBlocks, LoopStep, shares_activations

# A kind of weights and activations. `step` adds the products of a step along the columns to sums [row][tile].
Packing = Dense | FloatBlocks | IntegerBlocks
# Streams of tiles that a call processes: four of one matrix, or two each of a gate and the matrix that it gates.
STREAMS = TILES_TOGETHER
# The only gate that has parameters. All other gates are keys of UNARY, which depend only on x.
SWIGLU = "swiglu"


class Shape(NamedTuple):
    """A number of rows and of tiles that are multiplied at a time, with their sums in registers.

    Attributes:
        rows: number of rows.
        tiles: number of tiles: 1, 2 or STREAMS.
        least: smallest number of rows for which the shape is used. The last row is repeated for the missing rows.
    """

    rows: int
    tiles: int
    least: int


# Shapes for block-quantised weights, unless `shares_activations` applies. Their micro-kernels unroll the columns of a
# block, so larger shapes would take minutes to compile.
_BLOCK_SHAPES = (Shape(1, 4, 1), Shape(2, 4, 2), Shape(4, 2, 3), Shape(8, 1, 8))
# Shapes for dense weights. With 32 registers of 64 bytes, two tiles by twelve rows read 14 vectors for 24
# multiply-adds, so that the processor's load ports are not the limit. With 16 registers of 32 bytes, more than six rows
# by one tile do not fit.
_WIDE_SHAPES = (Shape(1, 4, 1), Shape(2, 4, 2), Shape(4, 4, 3), Shape(8, 2, 8), Shape(12, 2, 11))
_NARROW_SHAPES = (Shape(1, 4, 1), Shape(2, 2, 2), Shape(4, 1, 3), Shape(6, 1, 5))
_LINE = 64
# The following rows of activations are prefetched by shapes of this number of rows or more.
_ROWS_THAT_FOLLOW = 6
_STEPS_PER_LINE = _LINE // (4 * DENSE_COLUMNS)
_VECTOR_BYTES = 4 * LANES
# The micro-kernels write [row][stream] vectors.
_ROW_BYTES = STREAMS * _VECTOR_BYTES
# Approximate memory latency, in steps.
_STEPS_TO_COME = 5
_SUMS_BYTES = max(shape.rows for shape in (*_BLOCK_SHAPES, *_WIDE_SHAPES, *_NARROW_SHAPES)) * _ROW_BYTES
# Whole cache lines, because the memory that follows is stored by lines.
SCRATCH_BYTES = -(-(_SUMS_BYTES + ASKED_BYTES) // _LINE) * _LINE
# Bytes of the sums of a group of STREAMS tiles with sixteen rows.
_GROUP_BYTES = TILE_ROWS * _ROW_BYTES
# Maximum bytes of weights that all blocks of rows are multiplied by before the next weights are read.
_BYTES_TOGETHER = 1 << 20
# Maximum number of groups that are multiplied in tiles before their sums are written.
_RUN_GROUPS = 8


class TileArguments(Arguments):
    """Arguments for rows that are multiplied in AMX tiles.

    Attributes:
        configurations: tile configurations by number of rows (see `decode_amx.configurations`).
        scratch: offset of the transposed scales in the scratch memory; corrections and sums follow.
        transposed_bytes: bytes of the transposed scales, and of the transposed corrections.
        together: number of groups that all blocks of rows are multiplied by before the next groups are read.
    """

    configurations: Address = 0
    scratch: int = 0
    transposed_bytes: int = 0
    together: int = 0


class SwigluArguments(Arguments):
    """g sigmoid(alpha g) (u + beta), where g = min(gate, limit) and u is `gated`, clamped to [-limit, limit]."""

    alpha: float = 1.0
    beta: float = 0.0
    limit: float = math.inf


class ProductArguments(Arguments):
    """Activations, tiles of one or two matrices, and the terms that are added before the gate; see `calls`.

    Attributes:
        scales, corrections: offsets of the scales and corrections in a row of activations.
        tile_stride: bytes between consecutive tiles.
        grid, gated_grid: lookup tables of the two matrices (see `unpacking`).
    """

    x: Rows
    scales: int
    corrections: int
    weights: Address
    gated_weights: Address
    tile_stride: int
    records: int
    out: Rows
    terms: TermsArguments
    gated_terms: TermsArguments
    tiles: TileArguments
    grid: Address = None
    gated_grid: Address = None
    swiglu: SwigluArguments = SwigluArguments()


class _Noted(NamedTuple):
    """Runs of lines that `lora` has noted for the next group.

    Each of the last steps of the passes over a group prefetches one run. So the lines arrive in time, and are not
    evicted by other reads before they are used.

    Attributes:
        address: address of the notes.
        count: number of runs.
        before: number of passes before this pass.
        last: step, counted over all passes, that prefetches the first run.
    """

    address: Any
    count: Any
    before: int
    last: Any

    def ask(self, e: Emitter, round_: Any) -> None:
        b = e.builder
        number = b.sub(self.last, round_)
        with b.if_then(b.icmp_unsigned("<", number, self.count), likely=False):  # false for negative numbers, too
            run = e.load(e.at(e.at(self.address, b.mul(number, INT64(8))), 16), INT64)
            for line in range(RUN_LINES):
                e.prefetch(e.at(run, line * _LINE), 2)


def _shapes(kind: Packing) -> tuple[Shape, ...]:
    """Return the shapes of a kind of product on this machine, in the order of their rows."""
    if isinstance(kind, Dense):
        return _WIDE_SHAPES if isa() in ("amx", "vnni") else _NARROW_SHAPES
    return tuple(shape._replace(tiles=2) if shares_activations(kind, shape.rows) else shape for shape in _BLOCK_SHAPES)


def _micro_kernel(kind: Packing, shape: Shape, beside: int) -> Any:
    """Return a micro-kernel that multiplies a group's STREAMS tiles by the rows of a shape, over all steps.

    The sums are written to scratch as [rows][STREAMS] vectors. Arguments: the addresses of the tiles; the number of
    records; the address and the stride of the rows of activations; the offsets of scales and corrections in a row; the
    address of the results; the bytes of a tile; the grids of the first and of the last half of the tiles; the runs that
    `lora` has noted; the index of the last row, which is repeated for the missing rows.

    Args:
        beside: number of tiles of the matrix between a tile and the tile in the same position of the next group.
    """
    rows, tiles = shape.rows, shape.tiles
    ahead = {1: 0, 2: 1, STREAMS: beside}[tiles]  # tiles between the end of a tile and its stream's next tile

    def emit(e: Emitter, *values: Any) -> None:
        streams, rest = values[:STREAMS], values[STREAMS:]
        records, x, stride, scales, corrections, out, tile, grid, gated_grid, asked, last = rest
        b = e.builder
        row_at = [e.at(x, b.mul(stride, INT64(m))) for m in range(rows - 1)]
        row_at.append(e.at(x, b.mul(stride, last)))
        to_next = b.mul(tile, INT64(ahead))
        rounds = b.mul(records, INT64(kind.steps_per_record * STREAMS // tiles))
        last_round = b.sub(rounds, INT64(_STEPS_TO_COME))
        for first in range(0, STREAMS, tiles):
            some, target = streams[first : first + tiles], e.at(out, first * _VECTOR_BYTES)
            grids = [grid if stream < STREAMS // 2 else gated_grid for stream in range(first, first + tiles)]
            loaded = [kind.grid(e, address) for address in grids]
            noted = _Noted(asked, e.load(asked, INT64), first // tiles, last_round)
            _emit_pass(e, kind, some, loaded, records, row_at, stride, scales, corrections, target, to_next, noted)

    return micro_kernel(emit)


def _emit_pass(
    e: Emitter, kind: Packing, streams: Sequence[Any], grids: list[Any], records: Any, row_at: list[Any], stride: Any,
    scales: Any, corrections: Any, out: Any, to_next: Any, noted: _Noted,
) -> None:  # fmt: skip
    """Emit the loop over the steps of some tiles."""
    b, per_record, tiles = e.builder, kind.steps_per_record, len(streams)
    following = isinstance(kind, Dense) and len(row_at) >= _ROWS_THAT_FOLLOW
    level, distance = stream_prefetch()
    records_ahead = -(-distance // kind.record_bytes)
    steps = b.mul(records, INT64(per_record))
    with e.loop(steps, [constant(FLOAT_VECTOR, 0.0)] * (len(row_at) * tiles)) as (index, sums):
        part = b.and_(index, INT64(per_record - 1))  # per_record is a power of two
        record = b.lshr(index, INT64(per_record.bit_length() - 1))
        offset = b.mul(record, INT64(kind.record_bytes))
        at = [e.at(stream, offset) for stream in streams]
        asked = e.at(record, records_ahead)
        moved = b.select(b.icmp_signed("<", asked, records), INT64(0), to_next)

        def ask(number: Any, count: int, at: Any = at, moved: Any = moved) -> None:
            lines = -(-kind.record_bytes // (_LINE * count))
            share = b.mul(number, INT64(lines * _LINE))
            for address in at:
                for line in range(lines):
                    ahead = e.at(e.at(address, e.at(moved, share)), _LINE * line + records_ahead * kind.record_bytes)
                    e.prefetch(ahead, level)

        if not kind.asks:
            ask(part, per_record)
        noted.ask(e, e.at(index, b.mul(steps, INT64(noted.before))))
        if following and noted.before == 0:
            _ask_rows(e, index, row_at[0], stride, len(row_at))
        sums[:] = kind.step(e, LoopStep(index, part, at, row_at, stride, scales, corrections, grids, ask), sums)
    for m in range(len(row_at)):
        for t in range(tiles):
            e.store(sums[m * tiles + t], e.at(out, m * _ROW_BYTES + t * _VECTOR_BYTES))


def _ask_rows(e: Emitter, index: Any, x: Any, stride: Any, rows: int) -> None:
    """Prefetch the columns of step `index` in the rows that follow. The steps of a cache line share the rows."""
    b, share = e.builder, -(-rows // _STEPS_PER_LINE)
    first = b.add(b.mul(b.and_(index, INT64(_STEPS_PER_LINE - 1)), INT64(share)), INT64(rows))
    at = e.at(e.at(x, b.mul(first, stride)), b.mul(index, INT64(4 * DENSE_COLUMNS)))
    for row in range(share):
        e.prefetch(e.at(at, b.mul(stride, INT64(row))), 2)


@inline
def _swiglu(gate: Any, gated: Any, parameters: SwigluArguments) -> Any:
    limit = parameters.limit
    gate, gated = minimum(gate, limit), maximum(minimum(gated, limit), -limit)
    return gate * sigmoid(gate * parameters.alpha) * (gated + parameters.beta)


def _gate(name: str) -> Any:
    """Return a gate's function of two vectors and the SWIGLU parameters.

    Without a gate, the function returns the first vector.
    """
    if name == SWIGLU:
        return _swiglu
    if not name:
        return inline(lambda sums, gated, parameters: sums)
    activate = UNARY[name].function
    return inline(lambda gate, gated, parameters: activate(gate, 0.0, 0.0) * gated)


@inline
def scale_sums(scale: int, sums: int, count: int, first: int, tiles: int, width: int) -> None:
    """Multiply sums [row][stream] in place by the scales, if there are any. Adapters must be added afterwards."""
    if scale != 0:
        for stream in range(tiles):
            column = first + stream * TILE_ROWS
            if column < width:
                for m in range(count):
                    address = sums + m * _ROW_BYTES + stream * _VECTOR_BYTES
                    store_float32(address, scaled(load_float32(address), scale, column, width - column))


def _writer(name: str) -> Any:
    combine, is_gated, beside = _gate(name), name != "", STREAMS // 2 if name else STREAMS

    @inline
    def write(
        arguments: ProductArguments, context: int, scratch: int, asked: int, group: int, row: int, count: int
    ) -> None:
        """Write out = sums, or gate(gate's sums, gated sums), with the terms of each. The gate's streams come first.

        The adapter lines that the next group needs are noted in `asked`.
        """
        width, first = arguments.out.width, group * beside * TILE_ROWS
        scale_sums(arguments.terms.scale, scratch, count, first, beside, width)
        add_adapters(arguments.terms.target, context, scratch, _ROW_BYTES, asked, row, count, first, beside)
        if is_gated:
            behind = scratch + beside * _VECTOR_BYTES
            scale_sums(arguments.gated_terms.scale, behind, count, first, beside, width)
            add_adapters(arguments.gated_terms.target, context, behind, _ROW_BYTES, asked, row, count, first, beside)
        for m in range(count):
            out, addend = row_at(arguments.out, row + m), addend_of(arguments.terms, row + m)
            for stream in range(beside):
                column = (group * beside + stream) * TILE_ROWS
                left = width - column
                if left > 0:
                    address = scratch + m * _ROW_BYTES + stream * _VECTOR_BYTES
                    value = with_terms(load_float32(address), arguments.terms.bias, addend, column, left)
                    gated = value
                    if is_gated:
                        gated_addend = addend_of(arguments.gated_terms, row + m)
                        gated = load_float32(address + beside * _VECTOR_BYTES)
                        gated = with_terms(gated, arguments.gated_terms.bias, gated_addend, column, left)
                    store_first(out + 4 * column, combine(value, gated, arguments.swiglu), left)

    return write


def _by_vectors(kind: Packing, gate: str, shapes: tuple[Shape, ...]) -> Any:
    """Return a function that multiplies a group's tiles by the first rows, at most as many as the largest shape has.

    The function takes the arguments of the micro-kernels except the last row, and the number of remaining rows. It uses
    the largest micro-kernel that fits, and returns the number of rows that were multiplied.
    """
    chosen: Any = None
    for shape in shapes:
        kernel = _micro_kernel(kind, shape, (STREAMS // 2 if gate else STREAMS) - 1)
        chosen = _rows_or_fewer(kernel, shape, chosen)
    return chosen


def _rows_or_fewer(kernel: Any, shape: Shape, fewer: Any) -> Any:
    """Return a function that uses the kernel of a shape, or `fewer` for fewer rows."""
    if fewer is None:

        @inline
        def take_one(values: Any, left: int) -> int:
            kernel((*values, 0))
            return 1

        return take_one
    rows, least = shape.rows, shape.least

    @inline
    def take(values: Any, left: int) -> Any:
        if left >= least:
            last = min(left, rows) - 1
            kernel((*values, last))
            return last + 1
        return fewer(values, left)

    return take


def _by_tiles(layout: RecordLayout, gate: str, write: Any) -> Any:
    """Return a function that multiplies whole blocks of sixteen rows in tiles.

    Remaining rows are included unless there are fewer than MIN_ROWS. The function returns the number of rows that were
    multiplied. Weights that several blocks of rows need are processed in parts that stay in the cache.
    """
    half, whole = (decode_amx.tiles_kernel(layout, rows) for rows in decode_amx.SHAPES)
    round_ = decode_amx.transpose_kernel()
    side_by_side = STREAMS // 2 if gate else STREAMS
    points = layout.zero_points

    @inline
    def multiply(count: int, values: Any) -> None:
        if count <= decode_amx.SHAPES[0]:
            half(values)
        else:
            whole(values)

    @inline
    def by_tiles(arguments: ProductArguments, context: int, all_rows: int, begin: int, end: int, scratch: int) -> int:
        left = all_rows % TILE_ROWS
        rows = all_rows - left if left < decode_amx.MIN_ROWS else all_rows
        records, tile, stride = arguments.records, arguments.tile_stride, arguments.x.stride
        scales = scratch + arguments.tiles.scratch
        corrections = scales + arguments.tiles.transposed_bytes
        sums = corrections + arguments.tiles.transposed_bytes
        for first in range(begin, end, arguments.tiles.together):
            last = min(first + arguments.tiles.together, end)
            for row in range(0, rows, TILE_ROWS):
                count = min(TILE_ROWS, rows - row)
                configure_tiles(arguments.tiles.configurations + decode_amx.CONFIGURATION_BYTES * count)
                x = row_at(arguments.x, row)
                blocks = BLOCKS_PER_RECORD * records
                round_((x + arguments.scales, stride, count, blocks, scales))
                if points:
                    round_((x + arguments.corrections, stride, count, blocks, corrections))
                for run in range(first, last, _RUN_GROUPS):
                    groups = min(_RUN_GROUPS, last - run)
                    tiles, offset = groups * side_by_side, run * side_by_side * tile
                    weights = arguments.weights + offset
                    multiply(count, (weights, tiles, records, x, stride, scales, corrections, scratch, sums,
                                     side_by_side, _ROW_BYTES, _GROUP_BYTES))  # fmt: skip
                    if gate:
                        gated = arguments.gated_weights + offset
                        multiply(count, (gated, tiles, records, x, stride, scales, corrections, scratch,
                                         sums + side_by_side * _VECTOR_BYTES, side_by_side, _ROW_BYTES,
                                         _GROUP_BYTES))  # fmt: skip
                    for m in range(count):
                        for group in range(groups):
                            address = sums + group * _GROUP_BYTES + m * _ROW_BYTES
                            write(arguments, context, address, NOT_ASKED, run + group, row + m, 1)
        if rows > 0:
            release_tiles()
        return rows

    return by_tiles


@inline
def _no_tiles(arguments: ProductArguments, context: int, all_rows: int, begin: int, end: int, scratch: int) -> int:
    return 0


def _has_tiles(kind: Packing) -> bool:
    return isinstance(kind, IntegerBlocks) and kind.isa == "amx" and decode_amx.supported(kind.layout)


def tile_memory(kind: Packing, records: int) -> tuple[TileArguments, int]:
    """Return the tile arguments and the bytes of scratch memory that `decode_op` needs for `records` records per tile.

    Without tiles, the scratch memory is only for the vector kernels.
    """
    if not _has_tiles(kind):
        return TileArguments(), SCRATCH_BYTES
    assert isinstance(kind, IntegerBlocks)
    table = decode_amx.configurations(kind.layout)
    first = max(SCRATCH_BYTES, decode_amx.scratch_bytes(kind.layout))
    transposed = decode_amx.transposed_bytes(BLOCKS_PER_RECORD * records)
    together = max(1, _BYTES_TOGETHER // (STREAMS * records * kind.record_bytes))
    arguments = TileArguments(configurations=table, scratch=first, transposed_bytes=transposed, together=together)
    return arguments, first + 2 * transposed + _RUN_GROUPS * _GROUP_BYTES


@once
def decode_op(kind: Packing, gate: str) -> NativeOp:
    """Return the operator for a kind of product. Items are groups of STREAMS tiles.

    Args:
        gate: a key of UNARY, SWIGLU, or "" for none.
    """
    write, shapes, by_tiles = _writer(gate), _shapes(kind), _no_tiles
    if _has_tiles(kind):
        assert isinstance(kind, IntegerBlocks)
        # More rows than these are multiplied in tiles.
        by_tiles, shapes = _by_tiles(kind.layout, gate, write), shapes[:-1]
    by_vectors = _by_vectors(kind, gate, shapes)
    # Maximum number of rows for which one pass covers all tiles of a group. More rows take several passes.
    rows_of_one_pass = max(shape.rows for shape in shapes if shape.tiles == STREAMS)
    per_record = kind.steps_per_record

    def decode(arguments: ProductArguments, context: int, begin: int, end: int, scratch: int) -> int:
        rows = entry(context, arguments.x.counted)
        stride, records = arguments.x.stride, arguments.records
        steps = records * per_record
        scales, corrections = arguments.scales, arguments.corrections
        tile, grid = arguments.tile_stride, arguments.grid
        gated_grid = arguments.gated_grid if gate else grid
        asked = scratch + _SUMS_BYTES
        done = by_tiles(arguments, context, rows, begin, end, scratch)
        start_asking(asked, 0)
        for group in range(begin, end if done < rows else begin):
            if gate:
                a = arguments.weights + 2 * group * tile
                c = arguments.gated_weights + 2 * group * tile
            else:
                a = arguments.weights + STREAMS * group * tile
                c = a + 2 * tile
            b, d = a + tile, c + tile
            row = done
            while row < rows:
                x = row_at(arguments.x, row)
                values = (a, b, c, d, records, x, stride, scales, corrections, scratch, tile, grid, gated_grid, asked)
                count = by_vectors(values, rows - row)
                start_asking(asked, steps * (1 if count <= rows_of_one_pass else 2))
                write(arguments, context, scratch, asked, group, row, count)
                row += count
        return 0

    return native_op(ProductArguments, name=f"decode_{kind.name}{'_' * bool(gate)}{gate}")(decode)

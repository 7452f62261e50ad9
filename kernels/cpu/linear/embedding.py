"""Row look-ups in a block-quantised table, such as an embedding that shares its packed weights with the LM head."""

from __future__ import annotations

from typing import Any

from ...weight_layout import GROUP_COLUMNS, TILE_ROWS, BlockMatrix, RecordLayout
from ..jit.arguments import Address, Arguments
from ..jit.emit import FLOAT, INT32, INT64, Emitter, micro_kernel
from ..jit.isa import isa
from ..jit.memory import entry, load_first, read_float32, read_int64, store
from ..jit.native import NativeOp, native_op
from ..jit.variants import once
from ..jit.vector import LANES
from ..program.calls import Call, Items, Rows, row_at
from ..program.step_table import ErrorCode, StepField
from .unpacking import factor, unpacked


class BlockRowsArguments(Arguments):
    """A packed table, and the rows that are read from it.

    Attributes:
        scales: row scales, or 0.
        grid: lookup table, or 0.
        indices: field of the context that holds the address of the row indices.
    """

    table: Address
    rows: int
    records: int
    scales: Address
    grid: Address
    out: Rows
    indices: int


_OUTSIDE = int(ErrorCode.INDEX_OUTSIDE_TABLE)


def _record_kernel(layout: RecordLayout) -> Any:
    """Return a micro-kernel that dequantises a record of one row.

    Arguments: the addresses of the record, the result and the grid; the row's index in the tile.
    """

    def emit(e: Emitter, record: Any, out: Any, grid: Any, row: Any) -> None:
        b, lane = e.builder, e.builder.trunc(row, INT32)

        def number(address: Any, kind: Any, *, high: bool = False) -> Any:
            return b.extract_element(factor(e, address, kind, high=high), lane)

        group, minimum = FLOAT(1.0), FLOAT(0.0)
        if layout.is_group:
            group = number(e.at(record, layout.group_scales), layout.group)
            if layout.zero_points:
                minimum = number(e.at(record, layout.group_scales + layout.group_bytes), layout.group)
        with e.loop(INT64(layout.blocks)) as (block, _):
            scale, point, less = group, FLOAT(float(layout.zero_point)), FLOAT(0.0)
            if layout.factors != "none":
                at = e.at(record, b.mul(block, INT64(layout.factor_bytes)))
                own = number(e.at(at, layout.scales), layout.factors)
                scale = b.fmul(group, own) if layout.is_group else own
            if layout.zero_points:
                at = e.at(record, b.mul(block, INT64(layout.offset_bytes)))
                point = number(e.at(at, layout.points), layout.offsets, high=True)
                if layout.is_group:
                    less, point = b.fmul(minimum, point), FLOAT(0.0)
            with e.loop(INT64(layout.sub_blocks)) as (sub_block, _):
                index = b.add(b.mul(block, INT64(layout.sub_blocks)), sub_block)
                integers = e.at(record, b.mul(index, INT64(layout.block_bytes // layout.sub_blocks)))
                target = e.at(out, b.mul(index, INT64(4 * layout.sub_block)))
                for vector, column in unpacked(e, integers, layout):
                    codes = b.extract_element(vector, lane)
                    for i in range(GROUP_COLUMNS):
                        code = b.and_(b.lshr(codes, INT32(8 * i)), INT32(0xFF))
                        if layout.grid:
                            value = e.load(e.at(grid, b.shl(b.zext(code, INT64), INT64(2))), FLOAT)
                        else:
                            value = b.fsub(b.uitofp(code, FLOAT), point)
                        e.store(b.fsub(b.fmul(value, scale), less), e.at(target, 4 * (column + i)))

    return micro_kernel(emit)


@once
def gather_op(layout: RecordLayout) -> NativeOp:
    """Return the operator for tables of a layout. Items are rows of the result."""
    read_record = _record_kernel(layout)
    columns, nbytes = layout.blocks * layout.block_size, layout.nbytes

    def gather_block_rows(arguments: BlockRowsArguments, context: int, begin: int, end: int, scratch: int) -> int:
        width, scales = arguments.out.width, arguments.scales
        for index in range(begin, end):
            row = read_int64(entry(context, arguments.indices) + 8 * index)
            if row < 0 or row >= arguments.rows:
                return _OUTSIDE
            record = arguments.table + row // TILE_ROWS * arguments.records * nbytes
            out = row_at(arguments.out, index)
            for first in range(0, width, columns):
                read_record((record, scratch, arguments.grid, row % TILE_ROWS))
                record += nbytes
                for column in range(first, min(first + columns, width), LANES):
                    left = width - column
                    values = load_first(scratch + 4 * (column - first), left)
                    if scales != 0:
                        values = values * read_float32(scales + 4 * row)
                    store(out + 4 * column, values, left)
        return 0

    return native_op(BlockRowsArguments, name=f"gather_block_rows_{layout.name}_{isa()}")(gather_block_rows)


def gather_blocks(table: BlockMatrix, out: Rows, indices: StepField = StepField.TOKEN_IDS) -> Call:
    """Return a call that computes out[i] = table[indices[i]] as float32.

    A run with an index outside the table fails (INDEX_OUTSIDE_TABLE).
    """
    if out.width != table.columns:
        raise ValueError(f"out has {out.width} columns, but the table has {table.columns}")
    arguments = BlockRowsArguments(
        table=table.data, rows=table.rows, records=table.records, scales=table.row_scales, grid=table.grid, out=out,
        indices=indices,
    )  # fmt: skip
    scratch = 4 * table.layout.blocks * table.layout.block_size
    return Call(gather_op(table.layout), arguments, Items(out.counted), scratch)

"""Rows of a block-quantised table, such as an embedding that shares its packed form with the head."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...formats import BLOCKS_PER_RECORD, GROUP_BYTES, TILE_ROWS, BlockMatrix
from ..arguments import Address, Arguments
from ..jit import native_op
from ..lazy import inline
from ..memory import entry, read_float32, read_half, read_int64, read_uint8, write_float32
from ..program.calls import Call, Items, Rows, row_at
from ..program.context import ErrorCode, StepField
from .packing import LayoutArguments, layout_arguments


class BlockRowsArguments(Arguments):
    """A packed table and the rows taken from it; `indices`: a field of the context."""

    table: Address
    rows: int
    records: int
    layout: LayoutArguments
    out: Rows
    indices: int


_OUTSIDE = int(ErrorCode.INDEX_OUTSIDE_TABLE)


@inline
def _factor(address: int, lane: int, wide: int) -> Any:
    return read_float32(address + 4 * lane) if wide else read_half(address + 2 * lane)


@native_op(BlockRowsArguments)
def gather_block_rows(arguments: BlockRowsArguments, context: int, begin: int, end: int, scratch: int) -> int:
    """out[i] = table[indices[i]], dequantised, for i in [begin, end)."""
    layout, width = arguments.layout, arguments.out.width
    bits, block_size, sub_block, wide = layout.bits, layout.block_size, layout.sub_block, layout.wide
    factor_bytes = TILE_ROWS * (4 if wide else 2)
    block_bytes = TILE_ROWS * block_size * bits // 8
    # With 4 bits, the second half of a sub-block lies in the high nibbles of the first.
    half = sub_block // 2 if bits == 4 else sub_block
    for index in range(begin, end):
        row = read_int64(entry(context, arguments.indices) + 8 * index)
        if row < 0 or row >= arguments.rows:
            return _OUTSIDE
        tile, lane = row // TILE_ROWS, row % TILE_ROWS
        first_record = arguments.table + tile * arguments.records * layout.nbytes
        out = row_at(arguments.out, index)
        for block in range(-(-width // block_size)):
            part = block % BLOCKS_PER_RECORD
            record = first_record + block // BLOCKS_PER_RECORD * layout.nbytes
            scale = _factor(record + layout.scales + part * factor_bytes, lane, wide)
            point = np.float32(1 << (bits - 1))
            if layout.zero_points:
                point = _factor(record + layout.points + part * factor_bytes, lane, wide)
            integers = record + part * block_bytes + 4 * lane
            for i in range(min(block_size, width - block * block_size)):
                sub, within = i // sub_block, i % sub_block
                column = within % half
                place = sub * TILE_ROWS * sub_block * bits // 8 + column // 4 * GROUP_BYTES + column % 4
                byte = read_uint8(integers + place)
                integer = byte if bits == 8 else (byte >> (4 * (within // half))) & 15
                write_float32(out + 4 * (block * block_size + i), (np.float32(integer) - point) * scale)
    return 0


def gather_blocks(table: BlockMatrix, out: Rows, indices: StepField = StepField.TOKEN_IDS) -> Call:
    """out[i] = table[indices[i]] as float32; a run with an index outside the table fails (INDEX_OUTSIDE_TABLE)."""
    if out.width != table.columns:
        raise ValueError(f"out has {out.width} columns, the table {table.columns}")
    arguments = BlockRowsArguments(
        table=table.data, rows=table.rows, records=table.records, layout=layout_arguments(table.layout), out=out,
        indices=indices,
    )  # fmt: skip
    return Call(gather_block_rows, arguments, Items(out.counted))

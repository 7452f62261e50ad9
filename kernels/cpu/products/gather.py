"""Rows of a block-quantised table, such as an embedding that shares its packed form with the head."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...block_matrix import BLOCKS_PER_RECORD, GROUP_BYTES, BlockMatrix
from ...formats import TILE_ROWS
from ..jit import native_op
from ..lazy import inline
from ..memory import read_float32, read_half, read_int64, read_uint8, word, write_float32
from ..tape.context import ErrorCode, Word
from ..tape.program import Call, Items, Rows

(
    TABLE, ROWS, RECORDS, RECORD_BYTES, BITS, BLOCK_SIZE, SUB_BLOCK, WIDE, ZERO_POINTS, SCALE_OFFSET, POINT_OFFSET,
    OUT, OUT_STRIDE, WIDTH, INDICES,
) = range(15)  # fmt: skip
_OUTSIDE = int(ErrorCode.INDEX_OUTSIDE_TABLE)


@inline
def _factor(address: int, lane: int, wide: int) -> Any:
    return read_float32(address + 4 * lane) if wide else read_half(address + 2 * lane)


@native_op
def gather_block_rows(arguments: int, context: int, begin: int, end: int, scratch: int) -> int:
    """out[i] = table[indices[i]], dequantised, for i in [begin, end)."""
    bits, block_size, sub_block = word(arguments, BITS), word(arguments, BLOCK_SIZE), word(arguments, SUB_BLOCK)
    wide, width = word(arguments, WIDE), word(arguments, WIDTH)
    factor_bytes = TILE_ROWS * (4 if wide else 2)
    block_bytes = TILE_ROWS * block_size * bits // 8
    # With 4 bits, the second half of a sub-block lies in the high nibbles of the first.
    half = sub_block // 2 if bits == 4 else sub_block
    for index in range(begin, end):
        row = read_int64(word(context, word(arguments, INDICES)) + 8 * index)
        if row < 0 or row >= word(arguments, ROWS):
            return _OUTSIDE
        tile, lane = row // TILE_ROWS, row % TILE_ROWS
        first_record = word(arguments, TABLE) + tile * word(arguments, RECORDS) * word(arguments, RECORD_BYTES)
        out = word(arguments, OUT) + index * word(arguments, OUT_STRIDE)
        for block in range(-(-width // block_size)):
            part = block % BLOCKS_PER_RECORD
            record = first_record + block // BLOCKS_PER_RECORD * word(arguments, RECORD_BYTES)
            scale = _factor(record + word(arguments, SCALE_OFFSET) + part * factor_bytes, lane, wide)
            point = np.float32(1 << (bits - 1))
            if word(arguments, ZERO_POINTS):
                point = _factor(record + word(arguments, POINT_OFFSET) + part * factor_bytes, lane, wide)
            integers = record + part * block_bytes + 4 * lane
            for i in range(min(block_size, width - block * block_size)):
                sub, within = i // sub_block, i % sub_block
                column = within % half
                place = sub * TILE_ROWS * sub_block * bits // 8 + column // 4 * GROUP_BYTES + column % 4
                byte = read_uint8(integers + place)
                integer = byte if bits == 8 else (byte >> (4 * (within // half))) & 15
                write_float32(out + 4 * (block * block_size + i), (np.float32(integer) - point) * scale)
    return 0


def gather_blocks(table: BlockMatrix, out: Rows, indices: Word = Word.TOKEN_IDS) -> Call:
    """out[i] = table[indices[i]] as float32; a walk with an index outside the table fails (INDEX_OUTSIDE_TABLE).

    Raises:
        ValueError: out is not as wide as the table.
    """
    if out.width != table.columns:
        raise ValueError(f"out has {out.width} columns, the table {table.columns}")
    layout = table.layout
    arguments = (
        table.data.ctypes.data, table.rows, table.records, layout.nbytes, layout.bits, layout.block_size,
        layout.sub_block, int(layout.wide), int(layout.zero_points), layout.scales, layout.points, out.address,
        out.stride, out.width, indices,
    )  # fmt: skip
    return Call(gather_block_rows, arguments, Items(out.counted), held=(table, out.held))

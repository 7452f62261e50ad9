"""Micro-kernel of five to sixteen rows on AMX: the integer product of a block is a tile product, or a few of them.

What is computed is that of `integer_kernel`, to the last bit: per block an exact integer product, then float32. Some
records of weights at a time pass three stages: their integers become bytes, tiles multiply them, the products are
scaled and added. What a stage leaves to the next stays in the first-level cache.

The stages come one after the other because tiles hold up vector instructions beside them: as long as tile products
are under way, one port multiplies and converts instead of two, and stores of tiles let nothing pass
(`tools/tile_ports.py`). Only stores of tiles and later tile products overlap. Requests for memory must come evenly: a
burst of them holds everything up, and in a pause memory has nothing to do. So each of the two long stages asks for
something.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from genai.common.host_memory import huge_array

from ...weight_layout import BLOCKS_PER_RECORD, GROUP_BYTES, TILE_ROWS, TILES_TOGETHER, RecordLayout
from ..jit.amx import TILE_BYTES, TILE_ROW_BYTES, add_byte_product, clear_tile, load_tile, store_tile
from ..jit.emit import FLOAT, FLOAT_VECTOR, INT8, INT32_VECTOR, INT64, LANES, Emitter, constant, micro_kernel
from ..jit.variants import once
from .unpacking import factor, has_plain_records

# Fewer rows take less time without tiles.
MIN_ROWS = 5
# Rows that the micro-kernels are made for.
SHAPES = (TILE_ROWS // 2, TILE_ROWS)

_SUB_BLOCK = 32
_SUB_BLOCK_BYTES = TILE_ROWS * _SUB_BLOCK
CONFIGURATION_BYTES = 64
_LINE = 64
# The second-level cache gets records a tile ahead, the first-level cache so many records ahead.
_RECORDS_AHEAD = 6
# Bytes that weights become at a time. With blocks of 32 their products take twice as much, and rows want to stay in the
# first-level cache, too.
_UNPACKED_BYTES = 1 << 12
_BYTES = ir.VectorType(INT8, 4 * LANES)
# Tile registers: products of the two blocks of a record, activations, weights.
_SUMS, _ROWS, _WEIGHTS = (0, 1), (4, 5), (6, 7)


def supported(layout: RecordLayout) -> bool:
    """Whether the blocks of such records are whole tiles.

    The product of a block is always exact in float32: it is at most 256 * 255 * 127, which is less than 2 ** 24.
    """
    return has_plain_records(layout) and layout.block_size % _SUB_BLOCK == 0


def tile_columns(layout: RecordLayout) -> int:
    """Columns of a tile product: as many as a tile holds, and no more than a block."""
    return 64 if layout.block_size % 64 == 0 else _SUB_BLOCK


def configurations(layout: RecordLayout) -> NDArray[np.uint8]:
    """What tiles are configured with for 0 to 16 rows: palette 1, uint8 [17, 64] (Intel SDM, LDTILECFG)."""
    table = huge_array((TILE_ROWS + 1, CONFIGURATION_BYTES), np.uint8)
    columns = tile_columns(layout)
    for rows in range(TILE_ROWS + 1):
        table[rows, 0] = 1
        row_bytes = table[rows, 16:32].view(np.uint16)
        row_bytes[:] = TILE_ROW_BYTES
        row_bytes[list(_ROWS)] = columns
        table[rows, 48:56] = rows
        table[rows, [48 + tile for tile in _WEIGHTS]] = columns // 4
    return table


def transposed_bytes(blocks: int) -> int:
    """Bytes of a number per row and block, by blocks (see `transpose_kernel`)."""
    return -(-blocks // LANES) * LANES * TILE_ROW_BYTES


@once
def transpose_kernel() -> Any:
    """Transpose numbers that lie by rows, so that those of a block lie side by side: [blocks][16 rows].

    Its arguments: the address of the first row's numbers, the stride; rows, 1 to 16, of which the last one is repeated;
    blocks; the address of the result. Up to fifteen numbers behind those of a row are read.
    """

    def emit(e: Emitter, numbers: Any, stride: Any, rows: Any, blocks: Any, out: Any) -> None:
        b = e.builder
        last = b.sub(rows, INT64(1))
        row_at = []
        for m in range(TILE_ROWS):
            row = b.select(b.icmp_signed("<", INT64(m), last), INT64(m), last)
            row_at.append(e.at(numbers, b.mul(row, stride)))
        count = b.lshr(b.add(blocks, INT64(LANES - 1)), INT64(4))
        with e.loop(count) as (index, _):
            offset = b.shl(index, INT64(6))
            vectors = e.transposed([e.load(e.at(row, offset), INT32_VECTOR) for row in row_at])
            target = e.at(out, b.shl(offset, INT64(4)))
            for block, vector in enumerate(vectors):
                e.store(vector, e.at(target, block * TILE_ROW_BYTES), align=64)

    return micro_kernel(emit)


def _records_together(layout: RecordLayout) -> int:
    """Records that pass the stages at a time: a power of two."""
    return max(1, _UNPACKED_BYTES // (BLOCKS_PER_RECORD * layout.block_size * TILE_ROWS))


def scratch_bytes(layout: RecordLayout) -> int:
    """Scratch memory of `tiles_kernel`: some records' weights as bytes, and their products."""
    return _records_together(layout) * BLOCKS_PER_RECORD * (layout.block_size * TILE_ROWS + TILE_BYTES)


@once
def tiles_kernel(layout: RecordLayout, rows: int) -> Any:
    """Products of neighbouring tiles of weights with up to `rows` rows (8 or 16), all columns.

    Its arguments: the address of the first tile of weights; tiles; records per tile; the address of the first row's
    integers, their stride; transposed scales and corrections; scratch; the address of the sums; how many tiles' sums
    lie side by side (a power of two), the bytes from a row of sums to the next, those from such a group to the next.
    Tiles must be configured for the number of rows.
    """

    def emit(e: Emitter, *values: Any) -> None:
        _Tiles(e, layout, rows, _Given(*values)).emit()

    return micro_kernel(emit)


# Arguments of the micro-kernel, see `tiles_kernel`.
_Given = namedtuple(
    "_Given", "weights tiles records x stride scales corrections scratch out side_by_side row_bytes group_bytes"
)


class _Tiles:
    """What `tiles_kernel` emits."""

    def __init__(self, e: Emitter, layout: RecordLayout, rows: int, given: _Given) -> None:
        self.e, self.layout, self.rows, self.given = e, layout, rows, given
        self.columns = tile_columns(layout)
        self.together = _records_together(layout)
        self.unpacked_bytes = BLOCKS_PER_RECORD * layout.block_size * TILE_ROWS
        self.products = e.at(given.scratch, self.together * self.unpacked_bytes)

    def emit(self) -> None:
        e, b = self.e, self.e.builder
        times = b.lshr(b.add(self.given.records, INT64(self.together - 1)), INT64(self.together.bit_length() - 1))
        with e.loop(self.given.tiles, [self.given.weights, self.given.out]) as (tile, state):
            begin, out = state
            zeros = [constant(FLOAT_VECTOR, 0.0)] * self.rows
            with e.loop(times, [begin, *zeros]) as (time, inner):
                records, *sums = inner
                first = b.mul(time, INT64(self.together))
                left = b.sub(self.given.records, first)
                count = b.select(b.icmp_signed("<", left, INT64(self.together)), left, INT64(self.together))
                self._unpack(records, count)
                self._multiply(begin, first, count)
                sums = self._scale(records, first, count, sums)
                records = e.at(records, b.mul(count, INT64(self.layout.nbytes)))
                inner[:] = records, *sums
            for m, total in enumerate(sums):
                e.store(total, e.at(out, b.mul(self.given.row_bytes, INT64(m))))
            ends = b.and_(b.add(tile, INT64(1)), b.sub(self.given.side_by_side, INT64(1)))
            beside = b.mul(b.sub(self.given.side_by_side, INT64(1)), INT64(TILE_ROW_BYTES))
            to_group = b.sub(self.given.group_bytes, beside)
            moved = b.select(b.icmp_signed("==", ends, INT64(0)), to_group, INT64(TILE_ROW_BYTES))
            state[:] = records, e.at(out, moved)

    def _unpack(self, records: Any, count: Any) -> None:
        """Integers of `count` records as bytes in scratch memory, as rows of tiles."""
        e, b, layout = self.e, self.e.builder, self.layout
        per_vector = 8 // layout.bits
        vectors = _SUB_BLOCK_BYTES // GROUP_BYTES // per_vector
        with e.loop(count) as (index, _):
            record = e.at(records, b.mul(index, INT64(layout.nbytes)))
            unpacked = self._unpacked(index)
            for sub_block in range(BLOCKS_PER_RECORD * layout.sub_blocks):
                source = e.at(record, sub_block * _SUB_BLOCK_BYTES // per_vector)
                target = e.at(unpacked, sub_block * _SUB_BLOCK_BYTES)
                for vector in range(vectors):
                    integers = e.load(e.at(source, vector * GROUP_BYTES), _BYTES)
                    for half in range(per_vector):
                        value = self._centred(integers, half)
                        e.store(value, e.at(target, (half * vectors + vector) * GROUP_BYTES), align=64)

    def _centred(self, integers: Any, half: int) -> Any:
        """Signed bytes, the default zero point taken away; unsigned ones if blocks bring zero points of their own."""
        e, layout = self.e, self.layout
        if layout.bits == 8:
            return integers if layout.zero_points else e.builder.xor(integers, constant(_BYTES, -128))
        # An affine map of bits: nibble - 8 has the nibble's lower three bits, and its upper one inverted in all others.
        sign = 1 << 3 + 4 * half
        rows_of_bits = [1 << bit + 4 * half for bit in range(4)] + [0 if layout.zero_points else sign] * 4
        matrix = ir.Constant(_BYTES, [byte - 256 if byte > 127 else byte for byte in reversed(rows_of_bits)] * 8)
        flipped = INT8(0 if layout.zero_points else 0xF8 - 256)
        return e.call("llvm.x86.vgf2p8affineqb.512", _BYTES, [integers, matrix, flipped])

    def _multiply(self, begin: Any, first: Any, count: Any) -> None:
        """Products of `count` unpacked records; those of one are stored while those of the next one are computed.

        Args:
            begin: the address of the tile's records. first: the number of the first one of these.
        """
        b = self.e.builder
        for block in range(BLOCKS_PER_RECORD):
            self._multiply_block(begin, first, INT64(0), block)
        others = b.sub(count, INT64(1))
        with b.if_then(b.icmp_signed(">", others, INT64(0))), self.e.loop(others) as (before, _):
            for block in range(BLOCKS_PER_RECORD):
                self._store(before, block)
                self._multiply_block(begin, first, self.e.at(before, 1), block)
        for block in range(BLOCKS_PER_RECORD):
            self._store(others, block)

    def _multiply_block(self, begin: Any, first: Any, index: Any, block: int) -> None:
        e, b, size = self.e, self.e.builder, self.layout.block_size
        record, unpacked = e.at(first, index), self._unpacked(index)
        x = e.at(self.given.x, b.mul(record, INT64(BLOCKS_PER_RECORD * size)))
        clear_tile(e, _SUMS[block])
        for column in range(block * size, (block + 1) * size, self.columns):
            load_tile(e, _WEIGHTS[block], e.at(unpacked, column * TILE_ROWS))
            load_tile(e, _ROWS[block], e.at(x, column), self.given.stride)
            add_byte_product(e, _SUMS[block], _ROWS[block], _WEIGHTS[block], signed=not self.layout.zero_points)
        self._ask_later(begin, record, block)

    def _store(self, index: Any, block: int) -> None:
        store_tile(self.e, _SUMS[block], self._products(index, block))

    def _scale(self, records: Any, first: Any, count: Any, sums: list[Any]) -> list[Any]:
        """The sums, and the products of `count` records scaled."""
        e, b, layout = self.e, self.e.builder, self.layout
        with e.loop(count, sums) as (index, sums):
            record = e.at(records, b.mul(index, INT64(layout.nbytes)))
            numbers = b.mul(e.at(first, index), INT64(BLOCKS_PER_RECORD * TILE_ROW_BYTES))
            asked = self._ask_soon(record)
            for block in range(BLOCKS_PER_RECORD):
                factors, offset = e.at(record, block * layout.factor_bytes), e.at(numbers, block * TILE_ROW_BYTES)
                weight_scale = factor(e, e.at(factors, layout.scales), layout.factors)
                points = b.fneg(factor(e, e.at(factors, layout.points), layout.offsets)) if layout.zero_points else None
                scales, corrections = e.at(self.given.scales, offset), e.at(self.given.corrections, offset)
                products = self._products(index, block)
                for m in range(self.rows):
                    integers = e.load(e.at(products, m * TILE_ROW_BYTES), INT32_VECTOR, align=64)
                    value = b.sitofp(integers, FLOAT_VECTOR)
                    if points is not None:
                        value = e.multiply_add(points, e.splat(e.load(e.at(corrections, 4 * m), FLOAT)), value)
                    scale = b.fmul(e.splat(e.load(e.at(scales, 4 * m), FLOAT)), weight_scale)
                    sums[m] = e.multiply_add(value, scale, sums[m])
                    next(asked)
        return sums

    def _unpacked(self, index: Any) -> Any:
        return self.e.at(self.given.scratch, self.e.builder.mul(index, INT64(self.unpacked_bytes)))

    def _products(self, index: Any, block: int) -> Any:
        e = self.e
        offset = e.builder.mul(index, INT64(BLOCKS_PER_RECORD * TILE_BYTES))
        return e.at(e.at(self.products, offset), block * TILE_BYTES)

    def _ask_soon(self, record: Any) -> Iterator[None]:
        """Ask for a record that is unpacked soon, some lines at a time."""
        times, lines = BLOCKS_PER_RECORD * self.rows, self.layout.nbytes // _LINE
        ahead = self.e.at(record, _RECORDS_AHEAD * self.layout.nbytes)
        for time in range(times):
            for line in range(time * lines // times, (time + 1) * lines // times):
                self.e.prefetch(self.e.at(ahead, line * _LINE), 1)
            yield

    def _ask_later(self, begin: Any, number: Any, block: int) -> None:
        """Ask for a part of a record of the next tile.

        The next tile is asked for in quarters side by side: memory delivers more to several streams than to one.
        """
        e, b, size = self.e, self.e.builder, INT64(self.layout.nbytes)
        streams = TILES_TOGETHER.bit_length() - 1
        quarter = b.mul(b.and_(number, INT64(TILES_TOGETHER - 1)), b.lshr(self.given.records, INT64(streams)))
        record = b.add(self.given.records, b.add(quarter, b.lshr(number, INT64(streams))))
        later, lines = e.at(begin, b.mul(record, size)), self.layout.nbytes // _LINE
        for line in range(block * lines // BLOCKS_PER_RECORD, (block + 1) * lines // BLOCKS_PER_RECORD):
            e.prefetch(e.at(later, line * _LINE), 2)

"""Micro-kernel for five to sixteen rows on AMX: the integer product of a block is one or a few tile products.

The results are bit-identical to those of `micro_kernels.IntegerBlocks`: an exact integer product per block, then
float32. A few records of weights at a time go through three stages: their integers are unpacked to bytes, the bytes are
multiplied in tiles, and the products are scaled and added. The output of a stage stays in the first-level cache for the
next stage.

The stages run one after the other because tiles slow down vector instructions. While tile products are in flight, only
one port instead of two multiplies and converts, and tile stores block all other instructions (`tools/tile_ports.py`).
Only tile stores and later tile products overlap. Memory requests must be spread evenly: a burst of requests stalls the
core, and in a pause the memory is idle. So both long stages prefetch data.
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

# Fewer rows are faster without tiles.
MIN_ROWS = 5
# Numbers of rows for which there are micro-kernels.
SHAPES = (TILE_ROWS // 2, TILE_ROWS)

_SUB_BLOCK = 32
_SUB_BLOCK_BYTES = TILE_ROWS * _SUB_BLOCK
CONFIGURATION_BYTES = 64
_LINE = 64
# Records are prefetched into the second-level cache a tile ahead, and into the first-level cache _RECORDS_AHEAD ahead.
_RECORDS_AHEAD = 6
# Bytes of weights that are unpacked at a time. With blocks of 32, their products take twice as much, and the rows must
# also fit in the first-level cache.
_UNPACKED_BYTES = 1 << 12
_BYTES = ir.VectorType(INT8, 4 * LANES)
# Tile registers: products of the two blocks of a record, activations, weights.
_SUMS, _ROWS, _WEIGHTS = (0, 1), (4, 5), (6, 7)


def supported(layout: RecordLayout) -> bool:
    """Return True if the blocks of such records are whole tiles.

    The product of a block is always exact in float32: it is at most 256 * 255 * 127, which is less than 2 ** 24.
    """
    return has_plain_records(layout) and layout.block_size % _SUB_BLOCK == 0


def tile_columns(layout: RecordLayout) -> int:
    """Return the columns of a tile product: a full tile, or a block if it is smaller."""
    return 64 if layout.block_size % 64 == 0 else _SUB_BLOCK


def configurations(layout: RecordLayout) -> NDArray[np.uint8]:
    """Return the tile configurations for 0 to 16 rows: palette 1, uint8 [17, 64] (Intel SDM, LDTILECFG)."""
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
    """Return the bytes of transposed numbers, one per row and block (see `transpose_kernel`)."""
    return -(-blocks // LANES) * LANES * TILE_ROW_BYTES


@once
def transpose_kernel() -> Any:
    """Return a micro-kernel that transposes numbers stored by rows to [blocks][16 rows].

    Arguments: the address of the first row's numbers; the stride; the number of rows, 1 to 16 (the last row is repeated
    up to 16); the number of blocks; the address of the result. Up to fifteen numbers past the end of a row are read.
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
    """Return the number of records that go through the stages at a time, a power of two."""
    return max(1, _UNPACKED_BYTES // (BLOCKS_PER_RECORD * layout.block_size * TILE_ROWS))


def scratch_bytes(layout: RecordLayout) -> int:
    """Return the scratch memory of `tiles_kernel` in bytes: some records' weights as bytes, and their products."""
    return _records_together(layout) * BLOCKS_PER_RECORD * (layout.block_size * TILE_ROWS + TILE_BYTES)


@once
def tiles_kernel(layout: RecordLayout, rows: int) -> Any:
    """Return a micro-kernel that multiplies neighbouring tiles of weights by up to `rows` rows (8 or 16).

    Arguments: the address of the first tile of weights; the number of tiles; the number of records per tile; the
    address and the stride of the rows' integers; transposed scales and corrections; scratch; the address of the sums;
    the number of tiles in a group, whose sums are stored side by side (a power of two); the bytes between rows of sums,
    and between groups. Tiles must be configured for the number of rows.
    """

    def emit(e: Emitter, *values: Any) -> None:
        _Tiles(e, layout, rows, _Given(*values)).emit()

    return micro_kernel(emit)


# Arguments of the micro-kernel; see `tiles_kernel`.
_Given = namedtuple(
    "_Given", "weights tiles records x stride scales corrections scratch out side_by_side row_bytes group_bytes"
)


class _Tiles:
    """Emitter of the code of `tiles_kernel`."""

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
        """Unpack the integers of `count` records into bytes in scratch memory, as rows of tiles."""
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
        """Return signed bytes without the default zero point, or unsigned bytes if blocks have zero points."""
        e, layout = self.e, self.layout
        if layout.bits == 8:
            return integers if layout.zero_points else e.builder.xor(integers, constant(_BYTES, -128))
        # Nibble - 8 is an affine map of bits: the lower three bits stay, and the others are the inverted upper bit.
        sign = 1 << 3 + 4 * half
        rows_of_bits = [1 << bit + 4 * half for bit in range(4)] + [0 if layout.zero_points else sign] * 4
        matrix = ir.Constant(_BYTES, [byte - 256 if byte > 127 else byte for byte in reversed(rows_of_bits)] * 8)
        flipped = INT8(0 if layout.zero_points else 0xF8 - 256)
        return e.call("llvm.x86.vgf2p8affineqb.512", _BYTES, [integers, matrix, flipped])

    def _multiply(self, begin: Any, first: Any, count: Any) -> None:
        """Multiply `count` unpacked records. A record's products are stored while the next record is multiplied.

        Args:
            begin: address of the tile's records.
            first: index of the first of these records.
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
        """Scale the products of `count` records, and add them to the sums."""
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
        """Prefetch a record that will be unpacked soon, a few lines at a time."""
        times, lines = BLOCKS_PER_RECORD * self.rows, self.layout.nbytes // _LINE
        ahead = self.e.at(record, _RECORDS_AHEAD * self.layout.nbytes)
        for time in range(times):
            for line in range(time * lines // times, (time + 1) * lines // times):
                self.e.prefetch(self.e.at(ahead, line * _LINE), 1)
            yield

    def _ask_later(self, begin: Any, number: Any, block: int) -> None:
        """Prefetch a part of a record of the next tile.

        The next tile is prefetched in quarters side by side, because memory delivers more data to several streams than
        to a single stream.
        """
        e, b, size = self.e, self.e.builder, INT64(self.layout.nbytes)
        streams = TILES_TOGETHER.bit_length() - 1
        quarter = b.mul(b.and_(number, INT64(TILES_TOGETHER - 1)), b.lshr(self.given.records, INT64(streams)))
        record = b.add(self.given.records, b.add(quarter, b.lshr(number, INT64(streams))))
        later, lines = e.at(begin, b.mul(record, size)), self.layout.nbytes // _LINE
        for line in range(block * lines // BLOCKS_PER_RECORD, (block + 1) * lines // BLOCKS_PER_RECORD):
            e.prefetch(e.at(later, line * _LINE), 2)

"""Micro-kernel of five to sixteen rows on AMX: the integer product of a block is a tile product, or a few of them.

What is computed is that of `integer_kernel`, to the last bit: per block an exact integer product, then float32. Four
things happen to a record of weights, each while the others happen to its neighbours: its integers become bytes, tiles
multiply them, the products are stored, and their rows are scaled and added. A tile product takes long, and nothing
waits for it.

Time goes by two things. Beside tiles, only one port multiplies and converts: so integers become float32 by an addition
and a subtraction, which another port takes. And requests for memory must come one by one between the rows: a burst of
them holds everything up.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from ...block_matrix import BLOCKS_PER_RECORD, GROUP_BYTES, TILES_TOGETHER, RecordLayout
from ...formats import TILE_ROWS
from ..emit import FLOAT, FLOAT_VECTOR, INT8, INT32, INT32_VECTOR, INT64, LANES, Emitter, constant, micro_kernel
from ..large import huge_array
from ..tiles import TILE_BYTES, TILE_ROW_BYTES
from .integer_kernel import factor
from .tile_ops import add_byte_product, clear_tile, load_tile, store_tile

# Fewer rows take less time without tiles.
MIN_ROWS = 5
# Rows that the micro-kernels are made for.
SHAPES = (TILE_ROWS // 2, TILE_ROWS)

_SUB_BLOCK = 32
_SUB_BLOCK_BYTES = TILE_ROWS * _SUB_BLOCK
CONFIGURATION_BYTES = 64
_LINE = 64
# How far ahead of the unpacking lines are asked for, at least; the second-level cache gets them a tile ahead.
_PREFETCH_BYTES = 1152
_LARGEST_ACTIVATION = 127
# float32 numbers less than 2 ** 22 away from this one are the integers, and their bits count like integers.
_MIDDLE = 1.5 * 2.0**23
_REACH = 1 << 22
_BYTES = ir.VectorType(INT8, 4 * LANES)
# Tile registers: products of the two blocks of a record, activations, weights.
_SUMS, _ROWS, _WEIGHTS = (0, 1), (4, 5), (6, 7)


def supported(layout: RecordLayout) -> bool:
    """Whether the blocks of such records are whole tiles, and their products small enough to become float32."""
    largest = (1 << layout.bits) - 1 if layout.zero_points else 1 << (layout.bits - 1)
    fits = layout.block_size * largest * _LARGEST_ACTIVATION < _REACH
    return layout.block_size % _SUB_BLOCK == 0 and fits


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


def turned_bytes(blocks: int) -> int:
    """Bytes of a number per row and block, by blocks (see `turn_kernel`)."""
    return -(-blocks // LANES) * LANES * TILE_ROW_BYTES


@cache
def turn_kernel() -> Any:
    """Numbers that lie by rows turned, so that those of a block lie side by side: [blocks][16 rows].

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
        with e.loop(count, []) as (index, _, following):
            offset = b.shl(index, INT64(6))
            vectors = _transposed(e, [e.load(e.at(row, offset), INT32_VECTOR) for row in row_at])
            target = e.at(out, b.shl(offset, INT64(4)))
            for place, vector in enumerate(vectors):
                e.store(vector, e.at(target, place * TILE_ROW_BYTES), align=64)
            following()

    return micro_kernel(emit)


def _transposed(e: Emitter, vectors: list[Any]) -> list[Any]:
    """Sixteen vectors of sixteen lanes turned: ever smaller squares beside the diagonal change places."""
    vectors = list(vectors)
    mask = ir.VectorType(INT32, LANES)
    size = LANES // 2
    while size:
        for i in range(LANES):
            if i & size == 0:
                a, c = vectors[i], vectors[i + size]
                upper = [lane if lane & size == 0 else LANES + lane - size for lane in range(LANES)]
                lower = [lane + size if lane & size == 0 else LANES + lane for lane in range(LANES)]
                vectors[i] = e.builder.shuffle_vector(a, c, ir.Constant(mask, upper))
                vectors[i + size] = e.builder.shuffle_vector(a, c, ir.Constant(mask, lower))
        size //= 2
    return vectors


def scratch_bytes(layout: RecordLayout) -> int:
    """Scratch memory of `tiles_kernel`: bytes of weights and products of two blocks."""
    return BLOCKS_PER_RECORD * (layout.block_size * TILE_ROWS + TILE_BYTES)


@cache
def tiles_kernel(layout: RecordLayout, rows: int) -> Any:
    """Products of neighbouring tiles of weights with up to `rows` rows (8 or 16), all columns.

    Its arguments: the address of the first tile of weights; tiles; records per tile; the address of the first row's
    integers, their stride; turned scales and corrections; scratch; the address of the sums; how many tiles' sums lie
    side by side (a power of two), the bytes from a row of sums to the next, those from such a group to the next. Tiles
    must be configured for the number of rows.
    """

    def emit(e: Emitter, *values: Any) -> None:
        _Tiles(e, layout, rows, *values).emit()

    return micro_kernel(emit)


class _Tiles:
    """What `tiles_kernel` emits."""

    def __init__(
        self, e: Emitter, layout: RecordLayout, rows: int, weights: Any, tiles: Any, records: Any, x: Any, stride: Any,
        scales: Any, corrections: Any, scratch: Any, out: Any, side_by_side: Any, row_bytes: Any, group_bytes: Any,
    ) -> None:  # fmt: skip
        self.e, self.layout, self.rows = e, layout, rows
        self.weights, self.tiles, self.records, self.x, self.stride = weights, tiles, records, x, stride
        self.scales, self.corrections, self.scratch, self.out = scales, corrections, scratch, out
        self.side_by_side, self.row_bytes, self.group_bytes = side_by_side, row_bytes, group_bytes
        self.columns = tile_columns(layout)
        self.unpacked_bytes = layout.block_size * TILE_ROWS

    def emit(self) -> None:
        e, b = self.e, self.e.builder
        all_records = b.mul(self.tiles, self.records)
        self.last_record = e.at(self.weights, b.mul(b.sub(all_records, INT64(1)), INT64(self.layout.nbytes)))
        ahead, place = self._prime()
        with e.loop(self.tiles, [self.weights, ahead, place, self.out]) as (tile, state, following_tile):
            record, ahead, place, out = state
            sums = [constant(FLOAT_VECTOR, 0.0)] * self.rows
            with e.loop(self.records, [record, ahead, place, *sums]) as (index, values, following):
                record, ahead, place, *sums = values
                asked = self._ask(record, index, ahead)
                for block in range(BLOCKS_PER_RECORD):
                    self._scale(record, index, block, sums, asked)
                    self._store(block)
                    self._multiply(place, block)
                    self._unpack(ahead, block)
                record, ahead, place = e.at(record, self.layout.nbytes), self._next(ahead), self._next_place(place)
                following(record, ahead, place, *sums)
            for m, total in enumerate(sums):
                e.store(total, e.at(out, b.mul(self.row_bytes, INT64(m))))
            ends = b.and_(b.add(tile, INT64(1)), b.sub(self.side_by_side, INT64(1)))
            beside = b.mul(b.sub(self.side_by_side, INT64(1)), INT64(TILE_ROW_BYTES))
            to_group = b.sub(self.group_bytes, beside)
            moved = b.select(b.icmp_signed("==", ends, INT64(0)), to_group, INT64(TILE_ROW_BYTES))
            following_tile(record, ahead, place, e.at(out, moved))

    def _prime(self) -> tuple[Any, Any]:
        """The first record's products stored, the second one's on the way, the third one's integers unpacked."""
        ahead, place = self.weights, INT64(0)
        for stage in range(2):
            for block in range(BLOCKS_PER_RECORD):
                self._unpack(ahead, block)
                if stage:
                    self._store(block)
                self._multiply(place, block)
            ahead, place = self._next(ahead), self._next_place(place)
        for block in range(BLOCKS_PER_RECORD):
            self._unpack(ahead, block)
        return self._next(ahead), place

    def _next(self, record: Any) -> Any:
        """The address of the next record; the last one is its own."""
        b, moved = self.e.builder, self.e.at(record, self.layout.nbytes)
        return b.select(b.icmp_signed("<", moved, self.last_record), moved, self.last_record)

    def _next_place(self, place: Any) -> Any:
        """The number of the next record in its tile."""
        b, moved = self.e.builder, self.e.at(place, 1)
        return b.select(b.icmp_signed("<", moved, self.records), moved, INT64(0))

    def _unpack(self, record: Any, block: int) -> None:
        """A block's integers as bytes in scratch memory, as rows of tiles."""
        e, layout = self.e, self.layout
        per_vector = 8 // layout.bits
        vectors = _SUB_BLOCK_BYTES // GROUP_BYTES // per_vector
        for sub_block in range(layout.sub_blocks):
            source = e.at(record, block * layout.block_bytes + sub_block * _SUB_BLOCK_BYTES // per_vector)
            target = e.at(self.scratch, block * self.unpacked_bytes + sub_block * _SUB_BLOCK_BYTES)
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

    def _multiply(self, place: Any, block: int) -> None:
        """Products of a block, from scratch memory."""
        e, b = self.e, self.e.builder
        total, rows, weights = _SUMS[block], _ROWS[block], _WEIGHTS[block]
        size = self.layout.block_size
        x = e.at(e.at(self.x, b.mul(place, INT64(BLOCKS_PER_RECORD * size))), block * size)
        clear_tile(e, total)
        for first in range(0, size, self.columns):
            load_tile(e, weights, e.at(self.scratch, block * self.unpacked_bytes + first * TILE_ROWS))
            load_tile(e, rows, e.at(x, first), self.stride)
            add_byte_product(e, total, rows, weights, signed=not self.layout.zero_points)

    def _store(self, block: int) -> None:
        store_tile(self.e, _SUMS[block], self._products(block))

    def _products(self, block: int) -> Any:
        return self.e.at(self.scratch, BLOCKS_PER_RECORD * self.unpacked_bytes + block * TILE_BYTES)

    def _scale(self, record: Any, index: Any, block: int, sums: list[Any], asked: Iterator[None]) -> None:
        """Add a block's products, scaled, to the sums; between rows memory is asked for."""
        e, b, layout = self.e, self.e.builder, self.layout
        products = self._products(block)
        factors = e.at(record, block * layout.factor_bytes)
        weight_scale = factor(e, e.at(factors, layout.scales), layout)
        points = b.fneg(factor(e, e.at(factors, layout.points), layout)) if layout.zero_points else None
        offset = e.at(b.mul(index, INT64(BLOCKS_PER_RECORD * TILE_ROW_BYTES)), block * TILE_ROW_BYTES)
        scales, corrections = e.at(self.scales, offset), e.at(self.corrections, offset)
        for m in range(self.rows):
            value = self._as_float(e.load(e.at(products, m * TILE_ROW_BYTES), INT32_VECTOR, align=64))
            if points is not None:
                value = e.multiply_add(points, e.splat(e.load(e.at(corrections, 4 * m), FLOAT)), value)
            scale = b.fmul(e.splat(e.load(e.at(scales, 4 * m), FLOAT)), weight_scale)
            sums[m] = e.multiply_add(value, scale, sums[m])
            next(asked)

    def _as_float(self, integers: Any) -> Any:
        b, middle = self.e.builder, constant(FLOAT_VECTOR, _MIDDLE)
        moved = b.add(integers, constant(INT32_VECTOR, int(np.float32(_MIDDLE).view(np.int32))))
        return b.fsub(b.bitcast(moved, FLOAT_VECTOR), middle)

    def _ask(self, record: Any, index: Any, ahead: Any) -> Iterator[None]:
        """Ask for a record that is unpacked soon, and for one of the next tile, a few lines at a time.

        The next tile is asked for in quarters side by side: memory delivers more to several streams than to one.
        """
        e, b, size = self.e, self.e.builder, INT64(self.layout.nbytes)
        streams = TILES_TOGETHER.bit_length() - 1
        quarter = b.mul(b.and_(index, INT64(TILES_TOGETHER - 1)), b.lshr(self.records, INT64(streams)))
        next_tile = e.at(b.sub(record, b.mul(index, size)), b.mul(self.records, size))
        later = e.at(next_tile, b.mul(b.add(quarter, b.lshr(index, INT64(streams))), size))
        soon = e.at(ahead, max(_PREFETCH_BYTES, self.layout.nbytes))
        times, lines = BLOCKS_PER_RECORD * self.rows, self.layout.nbytes // _LINE
        for time in range(times):
            for line in range(time * lines // times, (time + 1) * lines // times):
                e.prefetch(e.at(later, line * _LINE), 2)
                e.prefetch(e.at(soon, line * _LINE), 1)
            yield

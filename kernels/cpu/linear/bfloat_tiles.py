"""Weights and activations as bfloat16 tiles, the operands of matmuls with prefill numerics.

A tile of weights holds 32 columns of sixteen rows of the matrix. Row i of the tile holds two columns of each matrix
row. Every four columns are in the order 0, 2, 1, 3, because packed integers split into 16-bit lanes in this order. The
tiles of activations, with sixteen rows of 32 columns, have the same order. A quarter of a tile is eight columns.
Weights are multiplied by a power of two, and results by a factor that reverses this power and the activations' scale.

Every row of activations is divided by the power of two of its largest number, so that tiles never overflow. The row's
products are multiplied by this power again. This is exact, because the only rounding is to bfloat16 (nearest, ties to
even).

Float32 numbers can be split into PARTS bfloat16 numbers whose sum is exact: x = x1 + x2 + x3, where each part is the
rest after the parts before it, rounded or truncated. Six of the nine products of parts are computed; the others are
smaller than 2 ** -22 of the whole product (Henry et al. 2019, "Leveraging the bfloat16 artificial intelligence datatype
for higher-precision computations"). If the weights are bfloat16, there are only three products, and none is left out.
The tiles of the parts are adjacent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from ...weight_layout import GROUP_BYTES, BlockMatrix, RecordLayout
from ..jit.amx import TILE_BYTES, TILE_ROW_BYTES, TILE_ROWS, bfloat_pairs, bfloats
from ..jit.arguments import Address, Arguments, Held
from ..jit.dsl import FLOATS, inline, intrinsic
from ..jit.emit import FLOAT_VECTOR, INT16, INT32, INT32_VECTOR, LANES, Emitter, constant
from ..jit.memory import entry, load_first, store_float32, write_float32
from ..jit.native import NativeOp, native_op
from ..jit.variants import once
from ..jit.vector import maximum, reduce_add, reduce_max, splat_float32
from ..program.calls import Call, Items, Rows, row_at
from ..program.step_table import StepField
from .unpacking import factor, has_plain_records

QUARTERS = 4
# A float32 has 24 bits, and a bfloat16 has 8.
PARTS = 3
# Activations are also multiplied by 2 ** 52. This factor is half-way between the optima for the two kinds of weights,
# so that large sums do not overflow and small products do not vanish (tile products flush denormal numbers to zero).
ROWS_SCALE = 2.0**52

_SHORTS, _HALVES = ir.VectorType(INT16, 2 * LANES), ir.VectorType(ir.HalfType(), 2 * LANES)
_TO_ZERO = INT32(11)  # rounding mode of one instruction: truncate, without exceptions
# Scales are multiplied by 2 ** 7 in float16, so that small scales have no denormal products.
_SHIFT = 7
_SMALLEST_SCALE, _LARGEST_HALF = 2.0**-21, 65504.0


def weights_of(*matrices: BlockMatrix) -> TileWeights:
    """Return the fastest dequantisation that is exact for these matrices, which share one layout."""
    layout = matrices[0].layout
    return HalfWeights(layout) if all(_fit_halves(matrix) for matrix in matrices) else FloatWeights(layout)


def supported(layout: RecordLayout) -> bool:
    """Return True if such records fill tiles: a block is 1, 2, 4 or 8 tiles."""
    return has_plain_records(layout) and layout.block_size in (32, 64, 128, 256)


def _fit_halves(matrix: BlockMatrix) -> bool:
    """Return True if (integer - zero point) * scale * 2 ** 7 neither overflows nor becomes denormal in float16."""
    layout = matrix.layout
    if layout.wide or (layout.zero_points and not matrix.has_whole_points):
        return False
    reach = (1 << layout.bits) - 1 if layout.zero_points else 1 << (layout.bits - 1)
    smallest, largest = matrix.scale_range
    return smallest >= _SMALLEST_SCALE and largest * reach * 2.0**_SHIFT <= _LARGEST_HALF


def quarter_bytes(layout: RecordLayout | DenseLayout) -> int:
    """Return the bytes of the integers that fill a quarter of a tile."""
    return GROUP_BYTES * layout.bits // 4


def _rows(layout: RecordLayout | DenseLayout) -> tuple[int, ...]:
    """Return the tile rows of a quarter, relative to its first row. High nibbles are half a tile further down."""
    return (0, 1, 8, 9) if layout.bits == 4 else (0, 1, 2, 3)


def quarter_stride(layout: RecordLayout | DenseLayout) -> int:
    """Return the bytes between the first rows of consecutive quarters."""
    return TILE_ROW_BYTES * (2 if layout.bits == 4 else 4)


@dataclass(frozen=True)
class HalfWeights:
    """Dequantisation in float16 lanes, equal to exact products rounded to bfloat16 with ties away from zero.

    A truncated float16 product keeps eleven of at most twenty bits, and rounding to nearest with ties away from zero
    depends only on the ninth bit. The bits of a float16, shifted right by three, are the bits of a bfloat16 that is
    2 ** -112 times as large.
    """

    layout: RecordLayout
    parts = 1
    row_parts = 1

    @property
    def name(self) -> str:
        return f"half{self.layout.bits}_{self.layout.block_size}{'_points' * self.layout.zero_points}"

    @property
    def unscale(self) -> float:
        return 2.0 ** (112 - _SHIFT) / ROWS_SCALE

    def factors(self, e: Emitter, scales: Any, points: Any) -> Any:
        scaled = _truncated_product(e, _twice(e, scales), constant(_HALVES, 2.0**_SHIFT))
        if not self.layout.zero_points:
            return scaled, constant(_HALVES, 1024.0 + 128.0)
        point = _twice(e, points)
        if self.layout.bits == 8:
            point = e.builder.fadd(point, constant(_HALVES, 1024.0))
        return scaled, point

    def quarter(self, e: Emitter, source: Any, factors: Any, target: Any) -> Iterator[None]:
        b, (scale, point) = e.builder, factors
        for row, shift, vector in zip(_rows(self.layout), (0, 8, 4, 12), (0, 0, 0, 0), strict=True):
            if self.layout.bits == 8:
                shift, vector = 8 * (row % 2), row // 2
            lanes = e.load(e.at(source, GROUP_BYTES * vector), _SHORTS)
            lanes = b.lshr(lanes, constant(_SHORTS, shift)) if shift else lanes
            product = b.bitcast(_truncated_product(e, self._centred(e, lanes, point), scale), _SHORTS)
            # The high half of 2 * 4096 * bits, rounded, is (bits + 4) >> 3. This spreads the sign to bits 12 to 15.
            shifted = e.call("llvm.x86.avx512.pmul.hr.sw.512", _SHORTS, [product, constant(_SHORTS, 4096)])
            e.store(b.and_(shifted, constant(_SHORTS, 0x8FFF - 65536)), e.at(target, TILE_ROW_BYTES * row), align=64)
            yield

    def _centred(self, e: Emitter, lanes: Any, point: Any) -> Any:
        """Return integer - zero point, which is exact."""
        b = e.builder
        if self.layout.bits == 8:  # 0x6400 is 1024 as float16; with an integer in its mantissa, 1024 + integer
            low = b.and_(lanes, constant(_SHORTS, 0xFF))
            return b.fsub(b.bitcast(b.or_(low, constant(_SHORTS, 0x6400)), _HALVES), point)
        # A permutation of 32 lanes uses five bits of an index, so the table of sixteen is repeated.
        centre = 0 if self.layout.zero_points else 8
        table = [int(np.float16(nibble - centre).view(np.int16)) for nibble in range(16)]
        looked_up = e.call("llvm.x86.avx512.permvar.hi.512", _SHORTS, [ir.Constant(_SHORTS, 2 * table), lanes])
        value = b.bitcast(looked_up, _HALVES)
        return b.fsub(value, point) if self.layout.zero_points else value


def _twice(e: Emitter, address: Any) -> Any:
    """Load sixteen float16 numbers, each into two neighbouring lanes."""
    b = e.builder
    wide = b.zext(e.load(address, ir.VectorType(INT16, LANES)), INT32_VECTOR)
    return b.bitcast(b.or_(wide, b.shl(wide, constant(INT32_VECTOR, 16))), _HALVES)


def _truncated_product(e: Emitter, a: Any, b: Any) -> Any:
    return e.call("llvm.x86.avx512fp16.mul.ph.512", _HALVES, [a, b, _TO_ZERO])


@dataclass(frozen=True)
class FloatWeights:
    """Dequantisation in float32 lanes: (integer - zero point) * scale, rounded to bfloat16, ties to even.

    This dequantisation is correct for all scales.
    """

    layout: RecordLayout
    parts = 1
    row_parts = 1

    @property
    def name(self) -> str:
        return f"float{self.layout.name}"

    @property
    def unscale(self) -> float:
        return 1.0 / ROWS_SCALE

    def factors(self, e: Emitter, scales: Any, points: Any) -> Any:
        default = constant(FLOAT_VECTOR, float(1 << (self.layout.bits - 1)))
        point = factor(e, points, self.layout.offsets) if self.layout.zero_points else default
        return factor(e, scales, self.layout.factors), point

    def quarter(self, e: Emitter, source: Any, factors: Any, target: Any) -> Iterator[None]:
        for number, row in enumerate(_rows(self.layout)):
            # Nibbles: rows 0 and 1 are the low, 8 and 9 the high ones of one vector. Bytes: two rows per vector.
            vector, shift = (0, 4 * (number // 2)) if self.layout.bits == 4 else (number // 2, 0)
            lanes = e.load(e.at(source, GROUP_BYTES * vector), INT32_VECTOR)
            pair = [self._value(e, lanes, shift + 8 * (number % 2 + column), factors) for column in (0, 2)]
            e.store(bfloat_pairs(e, *pair), e.at(target, TILE_ROW_BYTES * row), align=64)
            yield

    def _value(self, e: Emitter, lanes: Any, shift: int, factors: Any) -> Any:
        b, (scale, point) = e.builder, factors
        integer = b.and_(
            b.lshr(lanes, constant(INT32_VECTOR, shift)), constant(INT32_VECTOR, (1 << self.layout.bits) - 1)
        )
        return b.fmul(b.fsub(b.sitofp(integer, FLOAT_VECTOR), point), scale)


@dataclass(frozen=True)
class DenseLayout:
    """Layout of dense weights [column][16 rows], described as records of 64 columns without scales."""

    name: str = "bfloat16"
    bits: int = 16
    block_size: int = 32
    nbytes: int = 2 * TILE_BYTES
    scales: int = 0
    points: int = 0
    factor_bytes: int = 0


@dataclass(frozen=True)
class DenseWeights:
    """Weights that are already bfloat16: only the order of the numbers changes.

    Attributes:
        row_parts: 1 to round activations to bfloat16, PARTS to split them into parts.
    """

    layout: DenseLayout = DenseLayout()
    row_parts: int = 1
    unscale = 1.0 / ROWS_SCALE
    parts = 1

    @property
    def name(self) -> str:
        return f"dense{'_by_parts' * (self.row_parts > 1)}"

    def factors(self, e: Emitter, scales: Any, points: Any) -> Any:
        return None

    def quarter(self, e: Emitter, source: Any, factors: Any, target: Any) -> Iterator[None]:
        in_turn = [lane // 2 + LANES * (lane % 2) for lane in range(2 * LANES)]
        for row, columns in zip(_rows(self.layout), ((0, 2), (1, 3), (4, 6), (5, 7)), strict=True):
            one, two = (e.load(e.at(source, 2 * LANES * column), ir.VectorType(INT16, LANES)) for column in columns)
            e.store(e.shuffle(one, two, in_turn), e.at(target, TILE_ROW_BYTES * row), align=64)
            yield


@dataclass(frozen=True)
class SplitWeights:
    """Weights that are float32, split into bfloat16 parts.

    The parts are truncated, which takes half as many instructions as rounding. The parts of activations are rounded, so
    the products that are left out are as often positive as negative.
    """

    layout: DenseLayout = DenseLayout("float32", 32, nbytes=4 * TILE_BYTES)
    name = "split"
    unscale = 1.0 / ROWS_SCALE
    parts = PARTS
    row_parts = PARTS

    def factors(self, e: Emitter, scales: Any, points: Any) -> Any:
        return None

    def quarter(self, e: Emitter, source: Any, factors: Any, target: Any) -> Iterator[None]:
        b, upper = e.builder, constant(INT32_VECTOR, 0xFFFF0000 - 2**32)

        def rest(bits: Any) -> Any:
            top = b.bitcast(b.and_(bits, upper), FLOAT_VECTOR)
            return b.bitcast(b.fsub(b.bitcast(bits, FLOAT_VECTOR), top), INT32_VECTOR)

        for row, columns in zip(_rows(self.layout), ((0, 2), (1, 3), (4, 6), (5, 7)), strict=True):
            even, odd = (e.load(e.at(source, 4 * LANES * column), INT32_VECTOR) for column in columns)
            for part in range(self.parts):
                pairs = b.or_(b.lshr(even, constant(INT32_VECTOR, 16)), b.and_(odd, upper))
                e.store(pairs, e.at(target, TILE_BYTES * part + TILE_ROW_BYTES * row), align=64)
                if part + 1 < self.parts:
                    even, odd = rest(even), rest(odd)
                yield


# Kinds of dequantisation. `factors` loads the scales and zero points of a block. `quarter` writes a quarter of a tile
# to `target`, and yields after each row and part. `unscale` reverses the powers of two of weights and activations.
# `parts` is the number of bfloat16 numbers that a weight is split into, and `row_parts` the same for an activation.
TileWeights = HalfWeights | FloatWeights | DenseWeights | SplitWeights


# Row tiles are processed in pairs.
PAIR_ROWS = 2 * TILE_ROWS
TILE_COLUMNS = 2 * LANES
_EXPONENT = 0x7F800000
# Rows of smaller numbers are divided by this power: ROWS_SCALE / 2 ** -75 is the largest power of two in float32.
_SMALLEST_POWER = np.float32(2.0**-75)


class RowTiles(Arguments, kw_only=False):
    """Tiles in memory: [tiles of rows, rounded up to pairs][columns / 32][parts][16 rows][32], then a float32 per row.

    Attributes:
        address: address of the first tile.
        powers: address of the factors that the rows' results are multiplied by; NaN for rows with infinities or NaNs.
        columns: columns of a row, a multiple of 64.
        parts: number of bfloat16 numbers per activation.
        counted: field of the context that holds the number of rows.
        first: field of the context that holds the index of the first row in the step.
        held: object that keeps the memory alive.
    """

    address: Address
    powers: Address
    columns: int
    parts: int = 1
    counted: StepField = StepField.PREFILL_ROWS
    first: StepField = StepField.DECODE_ROWS
    held: Held = None


def row_tiles_size(columns: int, max_rows: int, parts: int = 1) -> int:
    """Return the bytes of memory for `max_rows` rows."""
    return _padded(max_rows) * (2 * columns * parts + 4)


def row_tiles_in(memory: NDArray[np.uint8], columns: int, parts: int = 1) -> RowTiles:
    """Return tiles of the step's prefill rows in this memory.

    The memory starts on a cache line, and holds whole pairs of tiles.
    """
    rows = memory.size // (2 * columns * parts + 4) // PAIR_ROWS * PAIR_ROWS
    address = memory.ctypes.data
    return RowTiles(address, address + rows * 2 * columns * parts, columns, parts, held=memory)


def _padded(rows: int) -> int:
    return -(-rows // PAIR_ROWS) * PAIR_ROWS


# The largest power of two in float32.
_LARGEST_POWER = np.float32(2.0**127)


class SplitTarget(Arguments):
    """Row tiles in PARTS parts that a matmul fills with its results.

    A matmul writes a part of a row at a time, so it cannot use the row's largest number. Instead, a row is divided by
    the power of two of a bound: the sum of `offset` and `factor` times the power of the row that is multiplied.

    Attributes:
        tiles: the tiles; an address of 0 means that results are written as float32 rows.
    """

    tiles: RowTiles
    factor: float
    offset: float


NO_TARGET_TILES = SplitTarget(tiles=RowTiles(None, None, 0), factor=0.0, offset=0.0)


@intrinsic("float32", "float32")
def _power_below(e: Emitter, number: Any) -> Any:
    """Return the largest power of two that is not above a positive number. It is 0 for 0 and denormal numbers."""
    return e.builder.bitcast(e.builder.and_(e.builder.bitcast(number, INT32), INT32(_EXPONENT)), number.type)


@inline
def power_of_results(target: SplitTarget, power: float) -> Any:
    """Return the power of two that a row of results is divided by, or NaN if `power` is NaN."""
    bound = min(power * target.factor + target.offset, _LARGEST_POWER)
    return max(_power_below(bound), _SMALLEST_POWER) + power * np.float32(0.0)


@once
def column_writer(parts: int) -> Any:
    """Return a function that stores 32 columns of a row in a tile for each bfloat16 part."""
    order = [4 * (i // 4) + (0, 2, 1, 3)[i % 4] for i in range(2 * LANES)]

    @intrinsic(None, "int64", FLOATS, FLOATS)
    def store_columns(e: Emitter, address: Any, first: Any, second: Any) -> None:
        halves = [first, second]
        for part in range(parts):
            bits = bfloats(e, *halves)
            e.store(e.shuffle(bits, bits, order), e.at(address, TILE_BYTES * part), align=64)
            for half in range(2):
                wide = e.builder.zext(e.shuffle(bits, bits, range(LANES * half, LANES * (half + 1))), INT32_VECTOR)
                number = e.builder.bitcast(e.builder.shl(wide, constant(INT32_VECTOR, 16)), FLOAT_VECTOR)
                halves[half] = e.builder.fsub(halves[half], number)

    return store_columns


class RowTilesArguments(Arguments):
    """Rows, and the tiles that some of them are converted to."""

    x: Rows
    out: RowTiles


@inline
def _write_power(x: int, width: int, power: int) -> Any:
    """Write a row's power of two. Returns the factor by which the row's numbers are multiplied."""
    largest, poison = splat_float32(0.0), splat_float32(0.0)
    for first in range(0, width, LANES):
        values = load_first(x + 4 * first, width - first)
        largest = maximum(largest, maximum(values, splat_float32(0.0) - values))
        poison = poison + values * 0.0  # NaN where a value is infinite or NaN
    exponent = max(_power_below(reduce_max(largest)), _SMALLEST_POWER)
    write_float32(power, exponent + reduce_add(poison))
    return np.float32(ROWS_SCALE) / exponent


@inline
def _clear_row(out: int, tiles: int) -> None:
    for tile in range(tiles):
        store_float32(out + tile * TILE_BYTES, splat_float32(0.0))


@once
def fill_op(parts: int) -> NativeOp:
    """Return the operator that fills tiles of sixteen rows, which are the items.

    The last item also fills its pair with rows of zeros.
    """
    store_columns = column_writer(parts)

    def fill_row_tiles(arguments: RowTilesArguments, context: int, begin: int, end: int, scratch: int) -> int:
        rows, first = entry(context, arguments.out.counted), entry(context, arguments.out.first)
        width, columns = arguments.x.width, arguments.out.columns
        last, tiles = -(-rows // TILE_ROWS), columns // TILE_COLUMNS * parts
        for tile in range(begin, end):
            for row in range(tile * TILE_ROWS, (tile + 1 + (tile + 1 == last)) * TILE_ROWS):
                out = arguments.out.address + (row // TILE_ROWS) * tiles * TILE_BYTES
                out += row % TILE_ROWS * TILE_ROW_BYTES
                if row < rows:
                    x = row_at(arguments.x, first + row)
                    scale = _write_power(x, width, arguments.out.powers + 4 * row)
                    for column in range(0, columns, TILE_COLUMNS):
                        low = load_first(x + 4 * column, width - column) * scale
                        high = load_first(x + 4 * column + 4 * LANES, width - column - LANES) * scale
                        store_columns(out + column // TILE_COLUMNS * parts * TILE_BYTES, low, high)
                elif row < -(-rows // PAIR_ROWS) * PAIR_ROWS:
                    _clear_row(out, tiles)
        return 0

    return native_op(RowTilesArguments, name=f"fill_row_tiles{'_split' * (parts > 1)}")(fill_row_tiles)


def row_tiles_call(x: Rows, out: RowTiles) -> Call:
    """Return a call that makes the tiles of the step's rows [DECODE_ROWS, TOKENS) of x."""
    if x.width > out.columns or x.counted != StepField.TOKENS:
        raise ValueError(f"x is [{x.counted.name}, {x.width}], expected [TOKENS, {out.columns} or fewer]")
    return Call(fill_op(out.parts), RowTilesArguments(x=x, out=out), Items(out.counted, 1, TILE_ROWS))

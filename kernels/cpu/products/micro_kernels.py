"""Micro-kernels: loops of steps along the columns, in which tiles of weights meet rows; a step per kind of weights.

Integer products: 8-bit activations with block-quantised weights. Per block an exact integer product, then float32:
sum = dot * (activation scale * weight scale) + sum, blocks in order.

Float32 products: dense weights, and block-quantised ones with activations as they are. Every weight becomes a float32
lane and meets its activation in one multiply-add. Block-quantised weights are summed per block before the scale is
applied: (integer - zero point) is exact. The order of columns is fixed.

So results are the same to the last bit for any number of rows, threads, and instruction set.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from llvmlite import ir

from ...formats import BLOCKS_PER_RECORD, GROUP_BYTES, GROUP_COLUMNS, RecordLayout
from ..emit import FLOAT, FLOAT_VECTOR, INT16, INT32, INT32_VECTOR, INT64, LANES, Emitter, constant
from .dot import Dot


@dataclass(frozen=True)
class LoopStep:
    """Values of one step of a micro-kernel's loop.

    Attributes:
        index: its number. part: its number within the record.
        records: addresses of the record in each tile.
        rows: addresses of the activations' rows; scales and corrections begin at these offsets in a row.
    """

    index: Any
    part: Any
    records: list[Any]
    rows: list[Any]
    scales: Any
    corrections: Any


@dataclass(frozen=True)
class Blocks:
    """Of block-quantised weights: a step is a block."""

    layout: RecordLayout
    steps_per_record = BLOCKS_PER_RECORD

    @property
    def record_bytes(self) -> int:
        return self.layout.nbytes


def unpacked(e: Emitter, address: Any, layout: RecordLayout) -> list[tuple[Any, int]]:
    """The vectors of a sub-block, four unsigned bytes per lane, and the first of the four columns that each holds."""
    groups = layout.sub_block * layout.bits // 8 // 4
    loaded = [e.load(e.at(address, GROUP_BYTES * g), INT32_VECTOR) for g in range(groups)]
    if layout.bits == 8:
        return [(vector, 4 * g) for g, vector in enumerate(loaded)]
    mask, half = constant(INT32_VECTOR, 0x0F0F0F0F), layout.sub_block // 2
    low = [(e.builder.and_(vector, mask), 4 * g) for g, vector in enumerate(loaded)]
    shifted = [e.builder.lshr(vector, constant(INT32_VECTOR, 4)) for vector in loaded]
    return low + [(e.builder.and_(vector, mask), half + 4 * g) for g, vector in enumerate(shifted)]


def factor(e: Emitter, address: Any, layout: RecordLayout) -> Any:
    """Sixteen scales or zero points as float32."""
    return e.load(address, FLOAT_VECTOR) if layout.wide else e.load_halves(address)


@dataclass(frozen=True)
class IntegerBlocks(Blocks):
    """Products with activations made by `activations.quantize`."""

    dot: Dot
    isa: str

    @property
    def name(self) -> str:
        return f"int{self.layout.name}_{self.isa}"

    def step(self, e: Emitter, step: LoopStep, sums: list[Any]) -> list[Any]:
        """Add the products of a block."""
        b, layout, tiles = e.builder, self.layout, len(step.records)
        place = b.shl(step.index, INT64(2))
        correction_at = [e.at(e.at(row, step.corrections), place) for row in step.rows]
        row_scales = [e.splat(e.load(e.at(e.at(row, step.scales), place), FLOAT)) for row in step.rows]
        totals = self._integer_products(e, step, correction_at)
        factor_offset = b.mul(step.part, INT64(layout.factor_bytes))
        result = list(sums)
        for t, record in enumerate(step.records):
            factors = e.at(record, factor_offset)
            weight_scale = factor(e, e.at(factors, layout.scales), layout)
            if layout.zero_points:
                points = b.fneg(factor(e, e.at(factors, layout.points), layout))
            for m in range(len(step.rows)):
                here = m * tiles + t
                value = b.sitofp(totals[here], FLOAT_VECTOR)
                if layout.zero_points:
                    value = e.multiply_add(points, e.splat(e.load(correction_at[m], FLOAT)), value)
                result[here] = e.multiply_add(value, b.fmul(row_scales[m], weight_scale), sums[here])
        return result

    def _integer_products(self, e: Emitter, step: LoopStep, correction_at: list[Any]) -> list[Any]:
        """Per row and tile the integer product of a block."""
        b, layout, none = e.builder, self.layout, constant(INT32_VECTOR, 0)
        column = b.mul(step.index, INT64(layout.block_size))
        x_at = [e.at(row, column) for row in step.rows]
        first = b.mul(step.part, INT64(layout.block_bytes))
        at = [e.at(record, first) for record in step.records]
        starts = [none if layout.zero_points else e.splat(e.load(address, INT32)) for address in correction_at]
        totals = [start for start in starts for _ in at]
        if layout.sub_blocks == 1:
            return self._sub_block(e, at, x_at, totals)
        size, columns = INT64(layout.block_bytes // layout.sub_blocks), INT64(layout.sub_block)
        with e.loop(INT64(layout.sub_blocks), totals) as (index, totals):
            moved, shifted = b.mul(index, size), b.mul(index, columns)
            totals[:] = self._sub_block(e, [e.at(a, moved) for a in at], [e.at(x, shifted) for x in x_at], totals)
        return totals

    def _sub_block(self, e: Emitter, at: list[Any], x_at: list[Any], totals: list[Any]) -> list[Any]:
        results = list(totals)
        for t, address in enumerate(at):
            weights = unpacked(e, address, self.layout)
            for m, x in enumerate(x_at):
                running = self.dot.start(e, totals[m * len(at) + t])
                for vector, column in weights:
                    running = self.dot.add(e, running, vector, e.load(e.at(x, column), INT32))
                results[m * len(at) + t] = self.dot.total(e, running)
        return results


DenseType = Literal["float32", "float16", "bfloat16"]
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
# Columns of a dense matrix that the micro-kernel unrolls; a row is filled up to a multiple.
DENSE_COLUMNS = 4


def _meet(e: Emitter, weight: Any, tile: int, tiles: int, x_at: list[Any], column: int, sums: list[Any]) -> None:
    """Add the products of a column of one tile with every row."""
    for m, x in enumerate(x_at):
        here = m * tiles + tile
        sums[here] = e.multiply_add(weight, e.splat(e.load(e.at(x, 4 * column), FLOAT)), sums[here])


@dataclass(frozen=True)
class Dense:
    """Products with dense weights [tile][column][16 rows]."""

    type: DenseType
    steps_per_record = 1

    @property
    def name(self) -> str:
        return f"dense_{self.type}"

    @property
    def record_bytes(self) -> int:
        return DENSE_COLUMNS * LANES * ITEM_BYTES[self.type]

    def step(self, e: Emitter, step: LoopStep, sums: list[Any]) -> list[Any]:
        """Add the products of DENSE_COLUMNS columns."""
        result = list(sums)
        x_at = [e.at(row, e.builder.mul(step.index, INT64(4 * DENSE_COLUMNS))) for row in step.rows]
        for column in range(DENSE_COLUMNS):
            for t, record in enumerate(step.records):
                weight = self._weight(e, e.at(record, column * LANES * ITEM_BYTES[self.type]))
                _meet(e, weight, t, len(step.records), x_at, column, result)
        return result

    def _weight(self, e: Emitter, address: Any) -> Any:
        if self.type == "float32":
            return e.load(address, FLOAT_VECTOR)
        if self.type == "float16":
            return e.load_halves(address)
        upper = e.builder.zext(e.load(address, ir.VectorType(INT16, LANES)), INT32_VECTOR)
        return e.builder.bitcast(e.builder.shl(upper, constant(INT32_VECTOR, 16)), FLOAT_VECTOR)


@dataclass(frozen=True)
class FloatBlocks(Blocks):
    """Products of float32 activations with block-quantised weights."""

    @property
    def name(self) -> str:
        return f"float{self.layout.name}"

    def step(self, e: Emitter, step: LoopStep, sums: list[Any]) -> list[Any]:
        """Add the products of a block."""
        b, layout, tiles = e.builder, self.layout, len(step.records)
        column, first = b.mul(step.index, INT64(4 * layout.block_size)), b.mul(step.part, INT64(layout.block_bytes))
        factors = [e.at(record, b.mul(step.part, INT64(layout.factor_bytes))) for record in step.records]
        points = [self._points(e, address) for address in factors]
        groups = layout.sub_block * layout.bits // 8 // GROUP_COLUMNS
        partial = [constant(FLOAT_VECTOR, 0.0)] * len(sums)
        with e.loop(INT64(layout.sub_blocks * groups), partial) as (group, partial):
            # Group g of a sub-block holds columns from 4 g on; with 4 bits, in high nibbles, half a sub-block further.
            sub_block, within = b.udiv(group, INT64(groups)), b.urem(group, INT64(groups))
            moved = b.add(b.mul(sub_block, INT64(4 * layout.sub_block)), b.mul(within, INT64(4 * GROUP_COLUMNS)))
            x_at = [e.at(e.at(row, column), moved) for row in step.rows]
            for t, record in enumerate(step.records):
                address = e.at(e.at(record, first), b.mul(group, INT64(GROUP_BYTES)))
                self._group(e, e.load(address, INT32_VECTOR), points[t], t, tiles, x_at, partial)
        result = list(sums)
        for t, address in enumerate(factors):
            scale = factor(e, e.at(address, layout.scales), layout)
            for m in range(len(step.rows)):
                here = m * tiles + t
                result[here] = e.multiply_add(partial[here], scale, sums[here])
        return result

    def _points(self, e: Emitter, factors: Any) -> Any:
        layout = self.layout
        if layout.zero_points:
            return factor(e, e.at(factors, layout.points), layout)
        return constant(FLOAT_VECTOR, float(1 << (layout.bits - 1)))

    def _group(
        self, e: Emitter, vector: Any, points: Any, tile: int, tiles: int, x_at: list[Any], sums: list[Any]
    ) -> None:
        """Four columns of a tile (eight with 4 bits) with every row."""
        b, bits, half = e.builder, self.layout.bits, self.layout.sub_block // 2
        mask = constant(INT32_VECTOR, (1 << bits) - 1)
        for shift in range(0, 32, bits):
            column = shift // 8 + half * (shift % 8 // 4)
            lane = b.and_(b.lshr(vector, constant(INT32_VECTOR, shift)), mask)
            weight = b.fsub(b.uitofp(lane, FLOAT_VECTOR), points)
            _meet(e, weight, tile, tiles, x_at, column, sums)

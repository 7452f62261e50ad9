"""Micro-kernels of float32 products: dense weights, and block-quantised ones with activations as they are.

Every weight becomes a float32 lane and meets its activation in one multiply-add. Block-quantised weights are summed per
block before the scale is applied: (integer - zero point) is exact. The order of columns is fixed, so results are the
same for any number of rows, threads, and instruction set.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from llvmlite import ir

from ...block_matrix import BLOCKS_PER_RECORD, GROUP_BYTES, GROUP_COLUMNS, RecordLayout
from ..emit import FLOAT, FLOAT_VECTOR, INT16, INT32_VECTOR, INT64, LANES, Emitter, constant
from .integer_kernel import factor
from .steps import Step

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

    @property
    def name(self) -> str:
        return f"dense_{self.type}"

    @property
    def steps_per_record(self) -> int:
        return 1

    @property
    def record_bytes(self) -> int:
        return DENSE_COLUMNS * LANES * ITEM_BYTES[self.type]

    def step(self, e: Emitter, step: Step, sums: list[Any]) -> list[Any]:
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
class FloatBlocks:
    """Products of float32 activations with block-quantised weights."""

    layout: RecordLayout

    @property
    def name(self) -> str:
        return f"float{self.layout.name}"

    @property
    def steps_per_record(self) -> int:
        return BLOCKS_PER_RECORD

    @property
    def record_bytes(self) -> int:
        return self.layout.nbytes

    def step(self, e: Emitter, step: Step, sums: list[Any]) -> list[Any]:
        """Add the products of a block."""
        b, layout, tiles = e.builder, self.layout, len(step.records)
        column, first = b.mul(step.index, INT64(4 * layout.block_size)), b.mul(step.part, INT64(layout.block_bytes))
        factors = [e.at(record, b.mul(step.part, INT64(layout.factor_bytes))) for record in step.records]
        points = [self._points(e, address) for address in factors]
        groups = layout.sub_block * layout.bits // 8 // GROUP_COLUMNS
        partial = [constant(FLOAT_VECTOR, 0.0)] * len(sums)
        with e.loop(INT64(layout.sub_blocks * groups), partial) as (group, running, following):
            partial = list(running)
            # Group g of a sub-block holds columns from 4 g on; with 4 bits, in high nibbles, half a sub-block further.
            sub_block, within = b.udiv(group, INT64(groups)), b.urem(group, INT64(groups))
            moved = b.add(b.mul(sub_block, INT64(4 * layout.sub_block)), b.mul(within, INT64(4 * GROUP_COLUMNS)))
            x_at = [e.at(e.at(row, column), moved) for row in step.rows]
            for t, record in enumerate(step.records):
                address = e.at(e.at(record, first), b.mul(group, INT64(GROUP_BYTES)))
                self._group(e, e.load(address, INT32_VECTOR), points[t], t, tiles, x_at, partial)
            following(*partial)
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

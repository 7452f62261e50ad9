"""Micro-kernel of integer products: 8-bit activations with block-quantised weights.

Per block an exact integer product, then float32: sum = dot * (activation scale * weight scale) + sum, blocks in order.
This is the same to the last bit for any number of rows, threads, and instruction set.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...block_matrix import BLOCKS_PER_RECORD, GROUP_BYTES, RecordLayout
from ..emit import FLOAT, FLOAT_VECTOR, INT32, INT32_VECTOR, INT64, Emitter, constant
from .dot import Dot
from .steps import Step


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
class IntegerBlocks:
    """Products with activations made by `activations.quantize`."""

    layout: RecordLayout
    dot: Dot
    isa: str

    @property
    def name(self) -> str:
        return f"int{self.layout.name}_{self.isa}"

    @property
    def steps_per_record(self) -> int:
        return BLOCKS_PER_RECORD

    @property
    def record_bytes(self) -> int:
        return self.layout.nbytes

    def step(self, e: Emitter, step: Step, sums: list[Any]) -> list[Any]:
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

    def _integer_products(self, e: Emitter, step: Step, correction_at: list[Any]) -> list[Any]:
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
        with e.loop(INT64(layout.sub_blocks), totals) as (index, running, following):
            moved, shifted = b.mul(index, size), b.mul(index, columns)
            totals = self._sub_block(e, [e.at(a, moved) for a in at], [e.at(x, shifted) for x in x_at], running)
            following(*totals)
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

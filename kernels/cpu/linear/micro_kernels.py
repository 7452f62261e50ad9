"""Micro-kernels that multiply tiles of weights by rows in loops along the columns. Each kind of weights defines a step.

Integer products: 8-bit activations with block-quantised weights. Each block is an exact integer product, which is then
added in float32: sum = dot * (activation scale * weight scale) + sum, blocks in order.

Float32 products: dense weights, and block-quantised weights with activations that are not quantised. Every weight
becomes a float32 lane, which is multiplied by its activation in one multiply-add. Block-quantised weights are summed
per block before the scale is applied: (integer - zero point) is exact. The order of columns is fixed.

So results are bit-identical for any number of rows, number of threads, and instruction set.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from llvmlite import ir

from ...weight_layout import GROUP_COLUMNS, RecordLayout, planes
from ..jit.emit import FLOAT, FLOAT_VECTOR, INT16, INT32, INT32_VECTOR, INT64, LANES, Emitter, constant
from .dot import Dot
from .unpacking import factor, load_table, looked_up, looked_up_floats, sub_block_groups, unpacked

# Rows with the addresses r, r + s, r + 2 s and r + 3 s need the registers r, s and 3 s.
_ROWS_PER_REGISTER = 4


@dataclass(frozen=True)
class LoopStep:
    """Values of one step of a micro-kernel's loop.

    Attributes:
        index: index of the step.
        part: index of the step within its record.
        records: addresses of the record in each tile.
        rows: addresses of the rows of activations.
        stride: bytes between consecutive rows, except that the last row may repeat an earlier one.
        scales, corrections: offsets of the scales and corrections in a row of activations.
        grids: grid that `Packing.grid` loaded for each tile.
        ask: function (number, count) that prefetches share `number` of `count` shares of later records.
    """

    index: Any
    part: Any
    records: list[Any]
    rows: list[Any]
    stride: Any
    scales: Any
    corrections: Any
    grids: list[Any]
    ask: Callable[[Any, int], None]

    def rows_at(self, e: Emitter, offset: Any) -> list[Any]:
        """Return the addresses that are `offset` bytes after the starts of the rows.

        Addressing modes reach four rows from one register. LLVM would instead compute each address from the previous
        one, and the chain of additions would take longer than the multiply-adds.
        """
        b, found = e.builder, []
        for first in range(0, len(self.rows) - 1, _ROWS_PER_REGISTER):
            base = e.opaque(e.at(self.rows[first], offset))
            count = min(_ROWS_PER_REGISTER, len(self.rows) - 1 - first)
            found += [e.at(base, b.mul(self.stride, INT64(m))) for m in range(count)]
        return [*found, e.opaque(e.at(self.rows[-1], offset))]


@dataclass(frozen=True)
class Blocks:
    """Block-quantised weights. A step is a block, or a record whose blocks share floats (a group)."""

    layout: RecordLayout
    isa: str

    @property
    def steps_per_record(self) -> int:
        return 1 if self.layout.is_group else self.layout.blocks

    @property
    def asks(self) -> bool:
        """True if a step is long, and therefore prefetches later records itself."""
        return self.layout.is_group

    @property
    def record_bytes(self) -> int:
        return self.layout.nbytes


@dataclass(frozen=True)
class _Factors:
    """Scales, and zero points or offsets, of a block: a float32 vector per tile, or None if there are none."""

    scales: list[Any]
    points: list[Any]


def _factors(e: Emitter, layout: RecordLayout, records: list[Any], part: Any) -> _Factors:
    """Load the factors of block `part` of the records."""
    b = e.builder
    scale_at, point_at = (b.mul(part, INT64(size)) for size in (layout.factor_bytes, layout.offset_bytes))
    scales, points = [], []
    for record in records:
        has_scales = layout.factors != "none"
        at = e.at(e.at(record, scale_at), layout.scales)
        scales.append(factor(e, at, layout.factors) if has_scales else None)
        at = e.at(e.at(record, point_at), layout.points)
        points.append(factor(e, at, layout.offsets, high=True) if layout.zero_points else None)
    return _Factors(scales, points)


def _add_groups(
    e: Emitter, layout: RecordLayout, records: list[Any], rows: int, inner: list[Any], sums: list[Any]
) -> list[Any]:
    """Return sums + group scale * block sums - offset scale * sums of offsets, for each row and tile."""
    b, result = e.builder, list(sums)
    for t, record in enumerate(records):
        scale = factor(e, e.at(record, layout.group_scales), layout.group)
        if layout.zero_points:
            minimum = b.fneg(factor(e, e.at(record, layout.group_scales + layout.group_bytes), layout.group))
        for m in range(rows):
            here = m * len(records) + t
            result[here] = e.multiply_add(inner[here], scale, result[here])
            if layout.zero_points:
                result[here] = e.multiply_add(inner[len(sums) + here], minimum, result[here])
    return result


@dataclass(frozen=True)
class IntegerBlocks(Blocks):
    """Products with the activations that `activations.quantize` returns."""

    dot: Dot

    @property
    def name(self) -> str:
        return f"int{self.layout.name}_{self.isa}"

    def grid(self, e: Emitter, address: Any) -> Any:
        """Load the lookup table, if the layout has a grid."""
        return load_table(e, address) if self.layout.grid else None

    def step(self, e: Emitter, step: LoopStep, sums: list[Any]) -> list[Any]:
        """Add the products of a block, or of all blocks of a group."""
        layout = self.layout
        if not layout.is_group:
            return self._block(e, step, step.index, step.part, sums)
        count = len(sums)
        begin = e.builder.mul(step.index, INT64(layout.blocks))
        zeros = [constant(FLOAT_VECTOR, 0.0)] * (count * (1 + layout.zero_points))
        with e.loop(INT64(layout.blocks), zeros) as (part, inner):
            step.ask(part, layout.blocks)
            inner[:] = self._block(e, step, e.at(begin, part), part, inner)
        return _add_groups(e, layout, step.records, len(step.rows), inner, sums)

    def _block(self, e: Emitter, step: LoopStep, index: Any, part: Any, sums: list[Any]) -> list[Any]:
        """Add the products of block `index` of a row, block `part` of its record. In a group, also add the offsets."""
        b, layout, tiles = e.builder, self.layout, len(step.records)
        count = len(step.rows) * tiles
        offset = b.shl(index, INT64(2))
        correction_at = [e.at(e.at(row, step.corrections), offset) for row in step.rows]
        row_scales = [e.splat(e.load(e.at(e.at(row, step.scales), offset), FLOAT)) for row in step.rows]
        totals = self._integer_products(e, step, index, part, correction_at)
        found = _factors(e, layout, step.records, part)
        result = list(sums)
        for t in range(tiles):
            weight_scale, points = found.scales[t], found.points[t]
            if points is not None and not layout.is_group:
                points = b.fneg(points)
            for m in range(len(step.rows)):
                here = m * tiles + t
                value = b.sitofp(totals[here], FLOAT_VECTOR)
                if points is not None and layout.is_group:
                    sum_of_row = e.splat(e.load(correction_at[m], FLOAT))
                    result[count + here] = e.multiply_add(points, sum_of_row, result[count + here])
                elif points is not None:
                    value = e.multiply_add(points, e.splat(e.load(correction_at[m], FLOAT)), value)
                scale = row_scales[m] if weight_scale is None else b.fmul(row_scales[m], weight_scale)
                result[here] = e.multiply_add(value, scale, result[here])
        return result

    def _integer_products(
        self, e: Emitter, step: LoopStep, index: Any, part: Any, correction_at: list[Any]
    ) -> list[Any]:
        """Return the integer products of a block, for each row and tile."""
        b, layout, none = e.builder, self.layout, constant(INT32_VECTOR, 0)
        column = b.mul(index, INT64(layout.block_size))
        x_at = [e.at(row, column) for row in step.rows]
        first = b.mul(part, INT64(layout.block_bytes))
        at = [e.at(record, first) for record in step.records]
        starts = [none if layout.zero_points else e.splat(e.load(address, INT32)) for address in correction_at]
        totals = [start for start in starts for _ in at]
        if layout.sub_blocks == 1:
            return self._sub_block(e, at, step.grids, x_at, totals)
        size, columns = INT64(layout.block_bytes // layout.sub_blocks), INT64(layout.sub_block)
        with e.loop(INT64(layout.sub_blocks), totals) as (index, totals):
            moved, shifted = b.mul(index, size), b.mul(index, columns)
            totals[:] = self._sub_block(
                e, [e.at(a, moved) for a in at], step.grids, [e.at(x, shifted) for x in x_at], totals
            )
        return totals

    def _sub_block(self, e: Emitter, at: list[Any], grids: list[Any], x_at: list[Any], totals: list[Any]) -> list[Any]:
        tiles, running = len(at), [self.dot.start(e, total) for total in totals]
        if shares_activations(self, len(x_at)):
            for beside in zip(*(self._weights(e, *one) for one in zip(at, grids, strict=True)), strict=True):
                for m, x in enumerate(x_at):
                    value = e.load(e.at(x, beside[0][1]), INT32)
                    for here, (vector, _) in enumerate(beside, start=m * tiles):
                        running[here] = self.dot.add(e, running[here], vector, value)
        else:
            for t, one in enumerate(zip(at, grids, strict=True)):
                weights = self._weights(e, *one)
                for here, x in zip(range(t, len(totals), tiles), x_at, strict=True):
                    for vector, column in weights:
                        running[here] = self.dot.add(e, running[here], vector, e.load(e.at(x, column), INT32))
        return [self.dot.total(e, one) for one in running]

    def _weights(self, e: Emitter, address: Any, grid: Any) -> list[Any]:
        """Return the weights of a tile's sub-block, as vectors with their columns."""
        found = unpacked(e, address, self.layout)
        if self.layout.grid:
            found = [(looked_up(e, grid, vector, self.isa), column) for vector, column in found]
        return found


def shares_activations(kind: Any, rows: int) -> bool:
    """Return True if this number of rows is multiplied by two tiles at a time, so that activations are loaded once.

    With 32 registers of 64 bytes, this saves more than it costs to spill sums: a tenth to a quarter of the time on
    Zen 5. Two-level blocks of 2 and 3 bits have more sums, and sharing makes them slower.
    """
    wide = rows == 8 and isinstance(kind, IntegerBlocks) and kind.isa == "vnni"
    return wide and not (kind.layout.is_group and kind.layout.bits < 4)


DenseType = Literal["float32", "float16", "bfloat16"]
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
# Number of columns of a dense matrix that the micro-kernel unrolls. Rows are padded to a multiple of this number.
DENSE_COLUMNS = 4


def _meet(e: Emitter, weight: Any, tile: int, tiles: int, x_at: list[Any], column: int, sums: list[Any]) -> None:
    """Add the products of a column of one tile and every row."""
    for m, x in enumerate(x_at):
        here = m * tiles + tile
        sums[here] = e.multiply_add(weight, e.splat(e.load(e.at(x, 4 * column), FLOAT)), sums[here])


@dataclass(frozen=True)
class Dense:
    """Products with dense weights [tile][column][16 rows]."""

    type: DenseType
    steps_per_record = 1
    asks = False

    def grid(self, e: Emitter, address: Any) -> None:
        """Return None: dense weights have no grid."""

    @property
    def name(self) -> str:
        return f"dense_{self.type}"

    @property
    def record_bytes(self) -> int:
        return DENSE_COLUMNS * LANES * ITEM_BYTES[self.type]

    def step(self, e: Emitter, step: LoopStep, sums: list[Any]) -> list[Any]:
        """Add the products of DENSE_COLUMNS columns."""
        result = list(sums)
        x_at = step.rows_at(e, e.builder.mul(step.index, INT64(4 * DENSE_COLUMNS)))
        for column in range(DENSE_COLUMNS):
            offset = column * LANES * ITEM_BYTES[self.type]
            weights = [self._weight(e, e.at(record, offset)) for record in step.records]
            for m, x in enumerate(x_at):
                one = e.splat(e.load(e.at(x, 4 * column), FLOAT))
                for here, weight in enumerate(weights, start=m * len(weights)):
                    result[here] = e.multiply_add(weight, one, result[here])
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
        return f"float{self.layout.name}{f'_{self.isa}' * self.layout.grid}"

    def grid(self, e: Emitter, address: Any) -> Any:
        """Load the values of the grid, if the layout has one."""
        return e.load(address, FLOAT_VECTOR) if self.layout.grid else None

    def step(self, e: Emitter, step: LoopStep, sums: list[Any]) -> list[Any]:
        """Add the products of a block, or of all blocks of a group."""
        layout = self.layout
        if not layout.is_group:
            return self._block(e, step, step.index, step.part, sums)
        begin = e.builder.mul(step.index, INT64(layout.blocks))
        zeros = [constant(FLOAT_VECTOR, 0.0)] * (len(sums) * (1 + layout.zero_points))
        with e.loop(INT64(layout.blocks), zeros) as (part, inner):
            step.ask(part, layout.blocks)
            inner[:] = self._block(e, step, e.at(begin, part), part, inner)
        return _add_groups(e, layout, step.records, len(step.rows), inner, sums)

    def _block(self, e: Emitter, step: LoopStep, index: Any, part: Any, sums: list[Any]) -> list[Any]:
        """Add the products of block `index` of a row, block `part` of its record. In a group, also add the offsets."""
        b, layout, tiles, rows = e.builder, self.layout, len(step.records), len(step.rows)
        count, has_sums = rows * tiles, layout.is_group and layout.zero_points
        column, first = b.mul(index, INT64(4 * layout.block_size)), b.mul(part, INT64(layout.block_bytes))
        found = _factors(e, layout, step.records, part)
        points = found.points
        if not layout.zero_points or layout.is_group:
            points = [None if layout.grid else constant(FLOAT_VECTOR, float(layout.zero_point))] * tiles
        partial = [constant(FLOAT_VECTOR, 0.0)] * (count + rows * has_sums)
        size = INT64(layout.block_bytes // layout.sub_blocks)
        with e.loop(INT64(layout.sub_blocks), partial) as (sub_block, partial):
            x_at = [e.at(e.at(row, column), b.mul(sub_block, INT64(4 * layout.sub_block))) for row in step.rows]
            for t, record in enumerate(step.records):
                address = e.at(e.at(record, first), b.mul(sub_block, size))
                self._sub_block(e, address, (points[t], step.grids[t]), (t, tiles), x_at, partial)
            if has_sums:
                for m, x in enumerate(x_at):
                    for number in range(layout.sub_block):
                        one = e.splat(e.load(e.at(x, 4 * number), FLOAT))
                        partial[count + m] = b.fadd(partial[count + m], one)
        result = list(sums)
        for here in range(count):
            scale = found.scales[here % tiles]
            if scale is None:
                result[here] = b.fadd(result[here], partial[here])
            else:
                result[here] = e.multiply_add(partial[here], scale, result[here])
            if has_sums:
                of_row = partial[count + here // tiles]
                result[count + here] = e.multiply_add(found.points[here % tiles], of_row, result[count + here])
        return result

    def _sub_block(
        self, e: Emitter, address: Any, meaning: tuple[Any, Any], tile: tuple[int, int], x_at: list[Any],
        sums: list[Any],
    ) -> None:  # fmt: skip
        """Multiply the columns of a tile's sub-block by every row, in the order of the first plane."""
        b, (points, grid) = e.builder, meaning
        vectors = unpacked(e, address, self.layout)
        beside = sub_block_groups(self.layout) * planes(self.layout.bits)[0] // 8
        byte = constant(INT32_VECTOR, 0xFF)
        for first in range(beside):
            for within in range(GROUP_COLUMNS):
                for vector, column in vectors[first::beside]:
                    lane = b.and_(b.lshr(vector, constant(INT32_VECTOR, 8 * within)), byte)
                    if grid is not None:
                        weight = looked_up_floats(e, grid, lane, self.isa)
                    else:
                        weight = b.fsub(b.uitofp(lane, FLOAT_VECTOR), points)
                    _meet(e, weight, *tile, x_at, column + within, sums)

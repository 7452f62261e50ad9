"""The inner loops of decode attention over a packed page: integer products of queries and keys, and weights and values.

As in `products`, a lane is a token (keys) or a column (values). One instruction multiplies four bytes of each lane by
four bytes of a query, or of the weights (`packing`). Integer products are exact, so only the later steps round: for
each page, the conversion to float32 and the scales, and for values also the sum over pages.
"""

from __future__ import annotations

from typing import Any

from ...cache_layout import PAGE_TOKENS, SCALE_COLUMNS
from ..jit.emit import FLOAT, FLOAT_VECTOR, INT32, INT32_VECTOR, INT64, LANES, Emitter, constant
from ..jit.isa import isa
from ..jit.native import NativeOp
from ..jit.variants import once
from ..linear.dot import add_signed_lanes
from .heads import head_bytes
from .packing import MIDDLE, PACKED_WEIGHTS, WEIGHTS_FACTOR, WEIGHTS_SUM, query_factor_offset
from .pages import ZERO
from .products import SUMS, fetch, operator_of

_VECTOR = 4 * LANES  # bytes of sixteen lanes
_PAGE_VECTORS = PAGE_TOKENS // LANES
_SCALES = 2 * PAGE_TOKENS  # bytes of the scales of a group of columns
_LOW_NIBBLES = 0x0F0F0F0F
_NO_SUM = constant(INT32_VECTOR, 0)
# MIDDLE in each of the four bytes of a lane.
_MIDDLES = INT32(MIDDLE * 0x01010101)


def most_packed_rows() -> int:
    """Return the maximum number of query rows for one pass over a page."""
    return SUMS[isa()] // _PAGE_VECTORS


class _Sums:
    """Sums of products of each row's unsigned bytes with the signed bytes of consecutive vectors."""

    def __init__(self, rows: int, vectors: int) -> None:
        self.rows, self.vectors = rows, vectors
        self.zeros = [_NO_SUM] * (rows * vectors)

    def add(self, e: Emitter, sums: list[Any], lanes: list[Any], address: Any, stride: int) -> None:
        """Add the products of some vectors. The rows' bytes start at `address` and are `stride` bytes apart."""
        for row in range(self.rows):
            four = e.load(e.at(address, row * stride), INT32)
            for vector, lane in enumerate(lanes):
                index = row * self.vectors + vector
                sums[index] = add_signed_lanes(isa(), e, sums[index], four, lane)


@once
def multiply_packed_keys_op(rows: int, head_size: int, bits: int) -> NativeOp:
    """Return op(page, ahead, queries, scores, stride): scores[row, token] = queries[row] . keys[:, token].

    Rows of queries are `head_bytes` apart, as `pack_queries_op` writes them. Rows of scores are `stride` bytes apart.
    The page `ahead` is prefetched in the meantime.
    """
    query_bytes = head_bytes(head_size)
    factor_offset = query_factor_offset(head_size)
    columns = head_size // 2 if bits == 4 else -(-head_size // 4) * 4
    groups = head_size // SCALE_COLUMNS if bits == 4 else 1
    steps, line = columns // 4 // groups, 4 * PAGE_TOKENS
    sums_of = _Sums(rows, _PAGE_VECTORS)

    def add_step(e: Emitter, page: Any, ahead: Any, queries: Any, group: int, step: Any, sums: list[Any]) -> None:
        """Add the products for four bytes of every token."""
        b = e.builder
        offset = b.mul(e.at(step, group * steps), INT64(line))
        fetch(e, e.at(ahead, offset), line)
        found = [e.load(e.at(e.at(page, offset), part * _VECTOR), INT32_VECTOR) for part in range(_PAGE_VECTORS)]
        query = e.at(queries, group * steps * 4 * 8 // bits)
        query = e.at(query, b.mul(step, INT64(4)))
        for half, lanes in enumerate(_halves(e, found, bits)):
            sums_of.add(e, sums, lanes, e.at(query, half * steps * 4), query_bytes)
            for part, lane in enumerate(lanes):
                index = len(sums_of.zeros) + part
                sums[index] = add_signed_lanes(isa(), e, sums[index], _MIDDLES, lane)

    def emit(e: Emitter, page: Any, ahead: Any, queries: Any, scores: Any, stride: Any) -> None:
        b = e.builder
        totals: list[Any] = [None] * (rows * _PAGE_VECTORS)
        fetch(e, e.at(ahead, PAGE_TOKENS * columns), groups * _SCALES)
        for group in range(groups):
            zeros = [*sums_of.zeros, *[_NO_SUM] * _PAGE_VECTORS]
            with e.loop(INT64(steps), zeros, 2 if steps % 2 == 0 else 1) as (step, sums):
                for k in range(2 if steps % 2 == 0 else 1):
                    add_step(e, page, ahead, queries, group, e.at(step, k), sums)
            middle = sums[len(sums_of.zeros) :]
            for part in range(_PAGE_VECTORS):
                address = e.at(page, PAGE_TOKENS * columns + group * _SCALES + part * 2 * LANES)
                scale = e.load_halves(address)
                for row in range(rows):
                    total = b.sitofp(b.sub(sums[row * _PAGE_VECTORS + part], middle[part]), FLOAT_VECTOR)
                    if bits == 4:
                        all_of = e.load(e.at(queries, row * query_bytes + factor_offset + 4 + 4 * group), FLOAT)
                        total = e.fast_multiply_add(e.splat(all_of), constant(FLOAT_VECTOR, -ZERO), total)
                    index = row * _PAGE_VECTORS + part
                    before = totals[index]
                    scaled = b.fmul(total, scale) if before is None else e.fast_multiply_add(total, scale, before)
                    totals[index] = scaled
        for row in range(rows):
            factor = e.splat(e.load(e.at(queries, row * query_bytes + factor_offset), FLOAT))
            for part in range(_PAGE_VECTORS):
                address = e.at(e.at(scores, b.mul(stride, INT64(row))), part * _VECTOR)
                e.store(b.fmul(totals[row * _PAGE_VECTORS + part], factor), address)

    return operator_of(f"multiply_packed_keys_{bits}_{rows}x{head_size}", emit)


@once
def add_packed_values_op(rows: int, width: int, bits: int) -> NativeOp:
    """Return op(page, ahead, -, weights, sums): sums[row] += weights[row, token] * values[token] of a page's tokens.

    The weights have the layout that `pack_weights_op` writes. Rows of sums are whole vectors that hold `width` float32
    numbers. The page `ahead` is prefetched in the meantime.
    """
    vectors = -(-width // LANES)
    columns = width // 2 if bits == 4 else vectors * LANES
    groups = width // SCALE_COLUMNS if bits == 4 else 1
    at_once = max(8 // bits, SUMS[isa()] // rows)
    steps, stride = PAGE_TOKENS // 4, groups * PACKED_WEIGHTS
    in_group = 8 // bits * -(-columns // LANES) // groups  # vectors of columns

    def emit(e: Emitter, page: Any, ahead: Any, unused: Any, weights: Any, sums: Any) -> None:
        b = e.builder
        fetch(e, e.at(ahead, PAGE_TOKENS * columns), groups * _SCALES)
        for group in range(groups):
            for first in range(0, in_group, at_once):
                chosen = range(first, min(first + at_once, in_group), 8 // bits)
                vectors_at = [group * in_group * bits // 8 + vector * bits // 8 for vector in chosen]
                sums_of, own = _Sums(rows, len(vectors_at) * 8 // bits), e.at(weights, group * PACKED_WEIGHTS)
                with e.loop(INT64(steps), sums_of.zeros, 2) as (index, found):
                    for k in range(2):
                        step = e.at(index, k)
                        line = b.mul(step, INT64(4 * columns))
                        at = [e.at(line, vector * _VECTOR) for vector in vectors_at]
                        for offset in at:
                            fetch(e, e.at(ahead, offset), _VECTOR)
                        loaded = [e.load(e.at(page, offset), INT32_VECTOR) for offset in at]
                        lanes = [half for lane in loaded for (half,) in _halves(e, [lane], bits)]
                        sums_of.add(e, found, lanes, e.at(own, b.mul(step, INT64(4))), stride)
                for row in range(rows):
                    factor = e.splat(e.load(e.at(own, row * stride + WEIGHTS_FACTOR), FLOAT))
                    for vector in range(sums_of.vectors):
                        total = b.sitofp(found[row * sums_of.vectors + vector], FLOAT_VECTOR)
                        if bits == 4:
                            all_of = e.splat(e.load(e.at(own, row * stride + WEIGHTS_SUM), FLOAT))
                            total = e.fast_multiply_add(all_of, constant(FLOAT_VECTOR, -ZERO), total)
                        column = row * vectors + group * in_group + first + vector
                        address = e.at(sums, column * _VECTOR)
                        e.store(e.fast_multiply_add(total, factor, e.load(address, FLOAT_VECTOR)), address)

    return operator_of(f"add_packed_values_{bits}_{rows}x{width}", emit)


def _halves(e: Emitter, lanes: list[Any], bits: int) -> list[list[Any]]:
    """Return vectors of four signed bytes per lane: `lanes` for 8 bits, the low and the high nibbles for 4 bits."""
    if bits == 8:
        return [lanes]
    b, mask = e.builder, constant(INT32_VECTOR, _LOW_NIBBLES)
    high = [b.and_(b.lshr(lane, constant(INT32_VECTOR, 4)), mask) for lane in lanes]
    return [[b.and_(lane, mask) for lane in lanes], high]

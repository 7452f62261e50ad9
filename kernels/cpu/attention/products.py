"""The inner loops of attention over a page: products of query rows with the keys, and of weights with the values.

Each loop is a native operator that larger operators call by address, so that the larger operators are compiled once for
all sizes. Each loop is a single intrinsic, emitted for its sizes so that all sums stay in registers. A lane is a token
(keys) or a column (values), so sums never cross lanes and run over head_size or tokens in order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from ...cache_layout import PAGE_TOKENS
from ..jit.dsl import FLOATS, intrinsic
from ..jit.emit import FLOAT, FLOAT_VECTOR, INT1, INT16, INT32, INT64, LANES, Emitter, constant, numbers
from ..jit.isa import isa
from ..jit.native import NativeOp, native_op
from ..jit.variants import once
from .heads import head_bytes

_LINE = 64
_PAGE_VECTORS = PAGE_TOKENS // LANES
# Maximum number of vectors of LANES numbers in a loop. AVX-512 has 32 registers that hold one vector each, and AVX2 has
# 16 registers that hold half a vector each.
SUMS = {"amx": 16, "vnni": 16, "avx2": 6, "portable": 4}
_UNROLLED = 4


def most_rows() -> int:
    """Return the maximum number of query rows for one pass over a page."""
    return SUMS[isa()] // _PAGE_VECTORS


def _load(e: Emitter, address: Any, half: bool, lanes: int = LANES) -> Any:
    """Load a vector of float32 or float16 numbers as float32, with zeros after the first `lanes`."""
    type_ = ir.VectorType(INT16, LANES) if half else FLOAT_VECTOR
    if lanes < LANES:
        mask = ir.Constant(ir.VectorType(INT1, LANES), [int(i < lanes) for i in range(LANES)])
        value = e.load_masked(address, type_, mask)
    else:
        value = e.load(address, type_)
    return e.from_half(value) if half else value


def fetch(e: Emitter, address: Any, size: int) -> None:
    """Prefetch `size` bytes into the second-level cache; the first-level cache can have few requests in flight."""
    for line in range(0, size, _LINE):
        e.prefetch(e.at(address, line), 2)


@once
def multiply_keys_op(rows: int, head_size: int, half: bool, prefetching: bool) -> NativeOp:
    """Return op(page, ahead, queries, scores, stride): scores[row, token] = queries[row] . keys[:, token].

    Rows of queries are `head_bytes` apart, and rows of scores are `stride` bytes apart. The page `ahead` is prefetched
    in the meantime.
    """
    unrolled = next(count for count in (_UNROLLED, 2, 1) if head_size % count == 0)
    query_bytes = head_bytes(head_size)

    item = 2 if half else 4
    line = PAGE_TOKENS * item

    def emit(e: Emitter, page: Any, ahead: Any, queries: Any, scores: Any, stride: Any) -> None:
        b, zeros = e.builder, [constant(FLOAT_VECTOR, 0.0)] * (rows * _PAGE_VECTORS)
        with e.loop(INT64(head_size), zeros, unrolled) as (i, sums):
            offset, column = b.mul(i, INT64(line)), e.at(queries, b.mul(i, INT64(4)))
            for k in range(unrolled):
                if prefetching:
                    fetch(e, e.at(e.at(ahead, offset), k * line), line)
                address = e.at(e.at(page, offset), k * line)
                keys = [_load(e, e.at(address, part * LANES * item), half) for part in range(_PAGE_VECTORS)]
                for row in range(rows):
                    query = e.splat(e.load(e.at(column, row * query_bytes + 4 * k), FLOAT))
                    for part in range(_PAGE_VECTORS):
                        index = row * _PAGE_VECTORS + part
                        sums[index] = e.fast_multiply_add(keys[part], query, sums[index])
        for row in range(rows):
            for part in range(_PAGE_VECTORS):
                address = e.at(e.at(scores, b.mul(stride, INT64(row))), 4 * part * LANES)
                e.store(sums[row * _PAGE_VECTORS + part], address)

    name = f"multiply_keys_{_kind(half)}{'_ahead' if prefetching else ''}_{rows}x{head_size}"
    return operator_of(name, emit)


@once
def add_values_op(rows: int, width: int, half: bool, prefetching: bool, stride: int) -> NativeOp:
    """Return op(page, ahead, count, weights, sums): sums[row] += weights[row, token] * values[token].

    The operator adds the values of `count` >= 1 tokens. Rows of weights are `stride` bytes apart, and rows of sums are
    whole vectors that hold `width` float32 numbers. The part of a page at address `ahead` is prefetched in the
    meantime.
    """
    vectors = -(-width // LANES)
    columns_at_once = max(1, SUMS[isa()] // rows)

    item = 2 if half else 4

    def emit(e: Emitter, page: Any, ahead: Any, count: Any, weights: Any, sums: Any) -> None:
        b = e.builder
        for column in range(0, vectors, columns_at_once):
            columns = range(column, min(column + columns_at_once, vectors))
            addresses = [e.at(sums, 4 * LANES * (row * vectors + j)) for row in range(rows) for j in columns]
            with e.loop(count, [e.load(address, FLOAT_VECTOR) for address in addresses]) as (t, totals):
                offset = b.mul(t, INT64(width * item))
                if prefetching:
                    fetch(e, e.at(e.at(ahead, offset), column * LANES * item), len(columns) * LANES * item)
                at = e.at(page, offset)
                values = [_load(e, e.at(at, j * LANES * item), half, min(LANES, width - j * LANES)) for j in columns]
                for row in range(rows):
                    address = e.at(e.at(weights, row * stride), b.mul(t, INT64(4)))
                    weight = e.splat(e.load(address, FLOAT))
                    for k, value in enumerate(values):
                        index = row * len(columns) + k
                        totals[index] = e.fast_multiply_add(value, weight, totals[index])
            for address, total in zip(addresses, totals, strict=True):
                e.store(total, address)

    name = f"add_values_{_kind(half)}{'_ahead' if prefetching else ''}_{rows}x{width}_{stride}"
    return operator_of(name, emit)


def _kind(half: bool) -> str:
    return "float16" if half else "float32"


def operator_of(name: str, emit: Callable[..., None]) -> NativeOp:
    """Return a native operator that passes its five arguments to emitted LLVM instructions."""
    emitted = intrinsic(None, *["int64"] * 5)(emit)

    def operator(a: int, b: int, c: int, d: int, e: int) -> int:
        emitted(a, b, c, d, e)
        return 0

    return native_op(None, name=name)(operator)


@intrinsic(FLOATS, FLOATS, "int64", "int64", "int64")
def between(e: Emitter, vector: Any, lane: Any, first: Any, last: Any) -> Any:
    """Return the vector with -inf in every lane i for which `lane` + i is outside [first, last)."""
    b, lanes = e.builder, numbers(*range(LANES))
    low, high = (e.splat(b.trunc(b.sub(end, lane), INT32)) for end in (first, last))
    seen = b.and_(b.icmp_signed(">=", lanes, low), b.icmp_signed("<", lanes, high))
    return b.select(seen, vector, constant(vector.type, float("-inf")))


@intrinsic("boolean", FLOATS, "float32")
def any_above(e: Emitter, vector: Any, number: Any) -> Any:
    """Return True if any lane is greater than a number."""
    above = e.builder.fcmp_ordered(">", vector, e.splat(number))
    bits = e.builder.bitcast(above, ir.IntType(LANES))
    return e.builder.icmp_unsigned("!=", bits, bits.type(0))

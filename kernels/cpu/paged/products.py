"""The inner loops of attention: products of a few query rows with the keys, and of weights with the values, of a page.

Each is a native operator that the other operators call by its address, so that these, which are larger, are compiled
once for all sizes. It is one intrinsic, written for its sizes so that all sums stay in registers. A lane is a token
(keys) or a column (values), so sums never cross lanes and run over head_size or tokens in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

from llvmlite import ir

from ...formats import PAGE_TOKENS
from ..half import float_from_half, has_half_instructions
from ..isa import isa
from ..jit import NativeOp, native_op
from ..lazy import cgutils, intrinsic, types
from ..memory import load_masked
from ..vector import FLOAT32, LANES
from .heads import head_bytes

_POINTER, _FLOAT, _INT16 = ir.PointerType(), ir.FloatType(), ir.IntType(16)
_INT32, _INT64 = ir.IntType(32), ir.IntType(64)
_LINE = 64
_PAGE_VECTORS = PAGE_TOKENS // LANES
# Vectors of LANES numbers that a loop may keep: 32 registers hold one each with AVX-512, 16 hold half of one with AVX2.
_SUMS = {"amx": 16, "vnni": 16, "avx2": 6, "portable": 4}
_UNROLLED = 4


def most_rows() -> int:
    """Query rows that one pass over a page can serve."""
    return _SUMS[isa()] // _PAGE_VECTORS


@contextmanager
def loop(builder: Any, begin: Any, end: Any, step: int, carried: Sequence[Any]) -> Iterator[tuple[Any, list[Any]]]:
    """A loop that runs at least once; the body replaces the items of the yielded list by their next values."""
    before = builder.basic_block
    body, after = builder.append_basic_block("loop"), builder.append_basic_block("loop.end")
    builder.branch(body)
    builder.position_at_end(body)
    index = builder.phi(_INT64)
    index.add_incoming(begin, before)
    phis = [builder.phi(value.type) for value in carried]
    values = list(phis)
    yield index, values
    following = builder.add(index, _INT64(step))
    index.add_incoming(following, builder.basic_block)
    for phi, first, last in zip(phis, carried, values, strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(last, builder.basic_block)
    builder.cbranch(builder.icmp_signed("<", following, end), body, after)
    builder.position_at_end(after)


class _Emitter:
    """LLVM IR for memory at addresses, of numbers that are float32 or float16."""

    def __init__(self, context: Any, builder: Any, half: bool = False) -> None:
        self.builder = builder
        self.item = 2 if half else 4
        self._half = half
        self._native = has_half_instructions(context)
        self._vector = ir.VectorType(_FLOAT, LANES)

    def zeros(self, count: int) -> list[Any]:
        return [ir.Constant(self._vector, None)] * count

    def at(self, address: Any, offset: Any) -> Any:
        return self.builder.add(address, _INT64(offset) if isinstance(offset, int) else offset)

    def times(self, index: Any, factor: int) -> Any:
        return self.builder.mul(index, _INT64(factor))

    def load(self, address: Any, lanes: int = LANES) -> Any:
        """A vector of numbers as float32, zeros after the first `lanes`."""
        type_ = ir.VectorType(_INT16 if self._half else _FLOAT, LANES)
        if lanes < LANES:
            mask = ir.Constant(ir.VectorType(ir.IntType(1), LANES), [int(i < lanes) for i in range(LANES)])
            value = load_masked(self.builder, address, type_, mask)
        else:
            value = self.builder.load(self.builder.inttoptr(address, _POINTER), typ=type_, align=1)
        return float_from_half(self.builder, value, self._native) if self._half else value

    def load_sum(self, address: Any) -> Any:
        return self.builder.load(self.builder.inttoptr(address, _POINTER), typ=self._vector, align=1)

    def store(self, value: Any, address: Any) -> None:
        self.builder.store(value, self.builder.inttoptr(address, _POINTER), align=1)

    def repeated(self, address: Any) -> Any:
        """The float32 at an address in every lane."""
        number = self.builder.load(self.builder.inttoptr(address, _POINTER), typ=_FLOAT, align=1)
        first = self.builder.insert_element(ir.Constant(self._vector, ir.Undefined), number, _INT32(0))
        return self.builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(_INT32, LANES), [0] * LANES))

    def multiply_add(self, a: Any, b: Any, c: Any) -> Any:
        function = cgutils.get_or_insert_function(
            self.builder.module, ir.FunctionType(self._vector, [self._vector] * 3), f"llvm.fmuladd.v{LANES}f32"
        )
        return self.builder.call(function, [a, b, c])

    def prefetch(self, address: Any, size: int) -> None:
        """Ask the second-level cache for the lines of `size` bytes; the first has room for few requests at a time."""
        function = cgutils.get_or_insert_function(
            self.builder.module, ir.FunctionType(ir.VoidType(), [_POINTER, _INT32, _INT32, _INT32]), "llvm.prefetch.p0"
        )
        for line in range(0, size, _LINE):
            place = self.builder.inttoptr(self.at(address, line), _POINTER)
            self.builder.call(function, [place, _INT32(0), _INT32(2), _INT32(1)])


@cache
def multiply_keys_op(rows: int, head_size: int, half: bool, prefetching: bool) -> NativeOp:
    """op(page, ahead, queries, scores, stride): scores[row, token] = queries[row] . keys[:, token].

    Rows of queries are `head_bytes` apart, rows of scores `stride` bytes. `ahead` is a page to be fetched meanwhile.
    """
    unrolled = next(count for count in (_UNROLLED, 2, 1) if head_size % count == 0)
    query_bytes = head_bytes(head_size)

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        emit = _Emitter(context, builder, half)
        page, ahead, queries, scores, stride = args
        line = PAGE_TOKENS * emit.item
        sums: list[Any]
        with loop(builder, _INT64(0), _INT64(head_size), unrolled, emit.zeros(rows * _PAGE_VECTORS)) as (i, sums):
            offset, column = emit.times(i, line), emit.at(queries, emit.times(i, 4))
            for k in range(unrolled):
                if prefetching:
                    emit.prefetch(emit.at(emit.at(ahead, offset), k * line), line)
                place = emit.at(emit.at(page, offset), k * line)
                keys = [emit.load(emit.at(place, part * LANES * emit.item)) for part in range(_PAGE_VECTORS)]
                for row in range(rows):
                    query = emit.repeated(emit.at(column, row * query_bytes + 4 * k))
                    for part in range(_PAGE_VECTORS):
                        index = row * _PAGE_VECTORS + part
                        sums[index] = emit.multiply_add(keys[part], query, sums[index])
        for row in range(rows):
            for part in range(_PAGE_VECTORS):
                place = emit.at(emit.at(scores, emit.times(stride, row)), 4 * part * LANES)
                emit.store(sums[row * _PAGE_VECTORS + part], place)
        return context.get_dummy_value()

    name = f"multiply_keys_{_kind(half)}{'_ahead' if prefetching else ''}_{rows}x{head_size}"
    return _operator(name, lower)


@cache
def add_values_op(rows: int, width: int, half: bool, prefetching: bool, stride: int) -> NativeOp:
    """op(page, ahead, count, weights, sums): sums[row] += weights[row, token] * values[token] of `count` >= 1 tokens.

    Rows of weights are `stride` bytes apart, those of sums as many vectors as hold `width` float32. `ahead` is the
    place in a page to be fetched meanwhile.
    """
    vectors = -(-width // LANES)
    columns_at_once = max(1, _SUMS[isa()] // rows)

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        emit = _Emitter(context, builder, half)
        page, ahead, count, weights, sums = args
        for column in range(0, vectors, columns_at_once):
            columns = range(column, min(column + columns_at_once, vectors))
            places = [emit.at(sums, 4 * LANES * (row * vectors + j)) for row in range(rows) for j in columns]
            totals: list[Any]
            with loop(builder, _INT64(0), count, 1, [emit.load_sum(place) for place in places]) as (t, totals):
                offset = emit.times(t, width * emit.item)
                if prefetching:
                    start, size = column * LANES * emit.item, len(columns) * LANES * emit.item
                    emit.prefetch(emit.at(emit.at(ahead, offset), start), size)
                values = [
                    emit.load(emit.at(emit.at(page, offset), j * LANES * emit.item), min(LANES, width - j * LANES))
                    for j in columns
                ]
                for row in range(rows):
                    weight = emit.repeated(emit.at(emit.at(weights, row * stride), emit.times(t, 4)))
                    for k in range(len(columns)):
                        index = row * len(columns) + k
                        totals[index] = emit.multiply_add(values[k], weight, totals[index])
            for place, total in zip(places, totals, strict=True):
                emit.store(total, place)
        return context.get_dummy_value()

    name = f"add_values_{_kind(half)}{'_ahead' if prefetching else ''}_{rows}x{width}_{stride}"
    return _operator(name, lower)


def _kind(half: bool) -> str:
    return "float16" if half else "float32"


def _operator(name: str, lower: Callable[..., Any]) -> NativeOp:
    """A native operator whose five arguments go to LLVM IR."""

    def body(typing_context: Any, a: Any, b: Any, c: Any, d: Any, e: Any) -> Any:
        return types.void(*[types.int64] * 5), lower

    emitted = intrinsic(body)

    def operator(a: int, b: int, c: int, d: int, e: int) -> int:
        emitted(a, b, c, d, e)
        return 0

    operator.__name__ = name
    return native_op(operator)


@intrinsic
def between(typing_context: Any, vector: Any, lane: Any, first: Any, last: Any) -> Any:
    """The vector where lane + its own number is in [first, last), -inf elsewhere."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        vector, lane, first, last = args
        wide = ir.VectorType(_INT32, LANES)
        numbers = ir.Constant(wide, list(range(LANES)))

        def repeated(number: Any) -> Any:
            one = builder.insert_element(ir.Constant(wide, ir.Undefined), builder.trunc(number, _INT32), _INT32(0))
            return builder.shuffle_vector(one, one, ir.Constant(wide, [0] * LANES))

        seen = builder.and_(
            builder.icmp_signed(">=", numbers, repeated(builder.sub(first, lane))),
            builder.icmp_signed("<", numbers, repeated(builder.sub(last, lane))),
        )
        return builder.select(seen, vector, ir.Constant(vector.type, [float("-inf")] * LANES))

    return FLOAT32(FLOAT32, types.int64, types.int64, types.int64), lower


@intrinsic
def any_above(typing_context: Any, vector: Any, number: Any) -> Any:
    """Whether any lane is greater than a number."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        one = builder.insert_element(ir.Constant(args[0].type, ir.Undefined), args[1], _INT32(0))
        mask = ir.Constant(ir.VectorType(_INT32, LANES), [0] * LANES)
        above = builder.fcmp_ordered(">", args[0], builder.shuffle_vector(one, one, mask))
        bits = builder.bitcast(above, ir.IntType(LANES))
        return builder.icmp_unsigned("!=", bits, ir.IntType(LANES)(0))

    return types.boolean(FLOAT32, types.float32), lower

"""Floats become small integers: new keys and values, queries, and the weights of values.

Keys and values are rounded once, when they are stored. Queries and weights are rounded where they are used: a head of a
query to 8 bits of its largest number, the weights of a page to 8 bits of its largest one. All instruction sets get the
same integers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir

from ...cache_layout import PAGE_TOKENS, SCALE_COLUMNS
from ..jit import memory
from ..jit.dsl import FLOATS, inline, intrinsic
from ..jit.emit import LANES, Emitter, constant
from ..jit.native import NativeOp, native_op
from ..jit.variants import once
from ..jit.vector import absolute, maximum, minimum, reduce_add, reduce_max, splat_float32, where_less
from ..jit.vector_math import rounded
from .arguments import AttentionArguments
from .heads import head_stride
from .pages import value_columns

# A page's weights: bytes [PAGE_TOKENS], then a factor, then the sum of the integers.
WEIGHTS_FACTOR = PAGE_TOKENS
WEIGHTS_SUM = WEIGHTS_FACTOR + 4
PACKED_WEIGHTS = 64  # bytes from one to the next
MIDDLE = 128  # what a query's zero becomes, so that no byte is negative
_LARGEST_QUERY, _LARGEST_WEIGHT = 127.0, 255.0
_SMALLEST = np.float32(1e-30)  # what is smaller counts as 0
_HALF = SCALE_COLUMNS // 2


def query_factor_offset(size: int) -> int:
    """Where a packed query's factor lies; behind it the sum of the integers of each group of columns (float32)."""
    return -(-size // LANES) * LANES


_factor_offset = inline(query_factor_offset)


@inline
def pack_stride(arguments: AttentionArguments) -> Any:
    """Bytes from a head's packed weights to the next head's: those of its groups of columns lie between."""
    return arguments.weight_groups * PACKED_WEIGHTS


@intrinsic("boolean", FLOATS)
def all_finite(e: Emitter, vector: Any) -> Any:
    """Whether no lane is infinite or NaN."""
    b = e.builder
    zeros = b.fcmp_ordered("==", b.fmul(vector, constant(vector.type, 0.0)), constant(vector.type, 0.0))
    return b.icmp_unsigned("==", b.bitcast(zeros, ir.IntType(LANES)), ir.IntType(LANES)(-1))


@inline
def _within(x: Any, low: float, high: float) -> Any:
    """NaN becomes `low`."""
    return minimum(maximum(splat_float32(low), x), splat_float32(high))


@inline
def _largest_and_poison(head: int, size: int) -> Any:
    """The largest magnitude, and 0, or NaN if a number is infinite or NaN; zeros follow to a whole vector."""
    largest, poison = splat_float32(0.0), splat_float32(0.0)
    for i in range(0, size, LANES):
        x = memory.load_float32(head + 4 * i)
        largest, poison = maximum(largest, absolute(x)), poison + x * 0.0
    return reduce_max(largest), reduce_add(poison)


@inline
def _write_scale(head: int, size: int, steps: float, address: int) -> Any:
    """The scale with which the largest number is so many steps, as float16; returns its inverse, 0 if there is none."""
    largest, poison = _largest_and_poison(head, size)
    memory.write_half(address, largest / np.float32(steps) + poison)
    scale = memory.read_half(address)
    return np.float32(1.0) / scale if scale > 0 else np.float32(0.0)


@once
def round_head_of(bits: int) -> Any:
    """A helper (head, size, out, scales): float32 numbers, zeros behind them, become bytes as a page holds them.

    The scale of group g goes to scales + g * 2 * PAGE_TOKENS.
    """

    @inline
    def to_bytes(head: int, size: int, out: int, scales: int) -> None:
        inverse = _write_scale(head, size, 127.0, scales)
        for i in range(0, size, LANES):
            x = memory.load_float32(head + 4 * i) * inverse
            memory.store_bytes(out + i, rounded(_within(x, -127.0, 127.0)))

    @inline
    def to_nibbles(head: int, size: int, out: int, scales: int) -> None:
        for group in range(size // SCALE_COLUMNS):
            first = head + 4 * SCALE_COLUMNS * group
            inverse = _write_scale(first, SCALE_COLUMNS, 7.5, scales + 2 * PAGE_TOKENS * group)
            low = memory.load_float32(first) * inverse + 7.5
            high = memory.load_float32(first + 4 * _HALF) * inverse + 7.5
            low, high = rounded(_within(low, 0.0, 15.0)), rounded(_within(high, 0.0, 15.0))
            memory.store_bytes(out + _HALF * group, low + high * 16.0)

    return to_bytes if bits == 8 else to_nibbles


@once
def pack_queries_op(bits: int) -> NativeOp:
    """op(arguments, queries, count, -, -): ready heads become packed ones in place, a head's stride apart.

    Bytes are x / factor + MIDDLE.
    """

    def pack_queries(arguments: AttentionArguments, queries: int, count: int, unused: int, too: int) -> int:
        size, sums = arguments.head_size, queries - head_stride(arguments.head_size)
        stride, factor_offset = head_stride(size), _factor_offset(size)
        for h in range(count):
            head = queries + h * stride
            largest, poison = _largest_and_poison(head, size)
            inverse = np.float32(_LARGEST_QUERY) / largest if largest > _SMALLEST else np.float32(0.0)
            total = splat_float32(0.0)
            for i in range(0, size, LANES):
                x = rounded(_within(memory.load_float32(head + 4 * i) * inverse, -_LARGEST_QUERY, _LARGEST_QUERY))
                if bits == 4:
                    total = total + x if i % SCALE_COLUMNS else x
                    memory.write_float32(sums + 4 * (i // SCALE_COLUMNS), reduce_add(total))
                memory.store_bytes(head + i, x + np.float32(MIDDLE))
            memory.write_float32(head + factor_offset, largest / np.float32(_LARGEST_QUERY) + poison)
            if bits == 4:  # now that all numbers of the head have been read
                for group in range(size // SCALE_COLUMNS):
                    memory.write_float32(head + factor_offset + 4 + 4 * group, memory.read_float32(sums + 4 * group))
        return 0

    return native_op(AttentionArguments, name=f"pack_queries_{bits}")(pack_queries)


@once
def pack_weights_op(bits: int) -> NativeOp:
    """op(arguments, weights, step, page, packed): the weights of a page's tokens, times the scales of their values.

    `weights` are float32 [PAGE_TOKENS] of each query head, `step` bytes apart; each group of columns of each head gets
    PACKED_WEIGHTS bytes. A token of weight 0 has no part, whatever its scale.
    """

    def pack_weights(arguments: AttentionArguments, weights: int, step: int, page: int, packed: int) -> int:
        width, groups = arguments.v_head_size, arguments.weight_groups
        scales, out = page + PAGE_TOKENS * value_columns(bits, width), packed
        for h in range(arguments.group):
            row = weights + h * step
            first, second = memory.load_float32(row), memory.load_float32(row + 4 * LANES)
            for group in range(groups):
                scale = scales + 2 * PAGE_TOKENS * group
                a = where_less(0.0, first, first * memory.load_half(scale), 0.0)
                b = where_less(0.0, second, second * memory.load_half(scale + 2 * LANES), 0.0)
                largest: Any = reduce_max(maximum(a, b))
                if not all_finite(a + b):
                    largest = np.float32(np.nan)
                inverse = np.float32(_LARGEST_WEIGHT) / largest if largest > _SMALLEST else np.float32(0.0)
                a = rounded(maximum(splat_float32(0.0), a * inverse))
                b = rounded(maximum(splat_float32(0.0), b * inverse))
                memory.store_bytes(out, a)
                memory.store_bytes(out + LANES, b)
                memory.write_float32(out + WEIGHTS_FACTOR, largest / np.float32(_LARGEST_WEIGHT))
                if bits == 4:
                    memory.write_float32(out + WEIGHTS_SUM, reduce_add(a + b))
                out += PACKED_WEIGHTS
        return 0

    return native_op(AttentionArguments, name=f"pack_weights_{bits}")(pack_weights)

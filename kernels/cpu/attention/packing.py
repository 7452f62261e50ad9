"""Quantisation of new keys and values, queries, and attention weights to small integers.

Keys and values are quantised once, when they are stored. Queries and weights are quantised when they are used: a query
head to 8 bits, with a scale from its largest number, and the weights of a page to 8 bits, with a scale from the largest
weight. All instruction sets produce the same integers.
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

# The packed weights of a page: PAGE_TOKENS bytes, then a factor, then the sum of the integers.
WEIGHTS_FACTOR = PAGE_TOKENS
WEIGHTS_SUM = WEIGHTS_FACTOR + 4
PACKED_WEIGHTS = 64  # bytes between the weights of consecutive groups of columns
MIDDLE = 128  # integer that stands for 0 in a query, so that no byte is negative
_LARGEST_QUERY, _LARGEST_WEIGHT = 127.0, 255.0
_SMALLEST = np.float32(1e-30)  # smaller numbers count as 0
_HALF = SCALE_COLUMNS // 2


def query_factor_offset(size: int) -> int:
    """Return the offset of a packed query's factor. The sums of each group's integers (float32) follow it."""
    return -(-size // LANES) * LANES


_factor_offset = inline(query_factor_offset)


@inline
def pack_stride(arguments: AttentionArguments) -> Any:
    """Return the bytes between the packed weights of consecutive heads, each with its groups of columns."""
    return arguments.weight_groups * PACKED_WEIGHTS


@intrinsic("boolean", FLOATS)
def all_finite(e: Emitter, vector: Any) -> Any:
    """Return True if no lane is infinite or NaN."""
    b = e.builder
    zeros = b.fcmp_ordered("==", b.fmul(vector, constant(vector.type, 0.0)), constant(vector.type, 0.0))
    return b.icmp_unsigned("==", b.bitcast(zeros, ir.IntType(LANES)), ir.IntType(LANES)(-1))


@inline
def _within(x: Any, low: float, high: float) -> Any:
    """Clamp numbers to [low, high]. NaN becomes `low`."""
    return minimum(maximum(splat_float32(low), x), splat_float32(high))


@inline
def _largest_and_poison(head: int, size: int) -> Any:
    """Return the largest magnitude, and 0 if all numbers are finite, otherwise NaN.

    The head is padded with zeros to whole vectors.
    """
    largest, poison = splat_float32(0.0), splat_float32(0.0)
    for i in range(0, size, LANES):
        x = memory.load_float32(head + 4 * i)
        largest, poison = maximum(largest, absolute(x)), poison + x * 0.0
    return reduce_max(largest), reduce_add(poison)


@inline
def _write_scale(head: int, size: int, steps: float, address: int) -> Any:
    """Write the float16 scale that maps the largest number to `steps` steps. Returns its inverse, or 0 if it is 0."""
    largest, poison = _largest_and_poison(head, size)
    memory.write_half(address, largest / np.float32(steps) + poison)
    scale = memory.read_half(address)
    return np.float32(1.0) / scale if scale > 0 else np.float32(0.0)


@once
def round_head_of(bits: int) -> Any:
    """Return a helper (head, size, out, scales) that quantises float32 numbers, padded with zeros, to a page's bytes.

    The scale of group g is written to scales + g * 2 * PAGE_TOKENS.
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
    """Return op(arguments, queries, count, -, -), which packs `count` prepared heads in place.

    Consecutive heads are `head_bytes` apart. Each packed byte is x / factor + MIDDLE.
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
            if bits == 4:  # written last, because these sums overwrite numbers of the head
                for group in range(size // SCALE_COLUMNS):
                    memory.write_float32(head + factor_offset + 4 + 4 * group, memory.read_float32(sums + 4 * group))
        return 0

    return native_op(AttentionArguments, name=f"pack_queries_{bits}")(pack_queries)


@once
def pack_weights_op(bits: int) -> NativeOp:
    """Return op(arguments, weights, step, page, packed), which packs a page's weights times the scales of its values.

    `weights` are float32 [PAGE_TOKENS] of each query head, `step` bytes apart. Each group of columns of each head gets
    PACKED_WEIGHTS bytes. A token with a weight of 0 does not contribute, whatever its scale is.
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

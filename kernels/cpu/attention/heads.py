"""Preparation of one head of one token: RMS norm, rotary position embedding, and a factor.

The RMS norm (Zhang & Sennrich 2019) applies only if the model has it. The rotary position embedding follows Su et al.
2021. Queries are prepared when they are used, and keys when they are stored, so neither needs intermediate memory.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..jit import memory
from ..jit.dsl import inline
from ..jit.native import native_op
from ..jit.vector import LANES, multiply_add, reduce_add, splat_float32
from ..program.calls import row_at
from ..program.step_table import ErrorCode, StepField
from .arguments import AttentionArguments, position_of, sequence_of
from .hadamard import hadamard_transform


def head_bytes(size: int) -> int:
    """Return the bytes between consecutive prepared heads: float32, with room for a vector that starts anywhere."""
    return 4 * (-(-size // LANES) * LANES + LANES)


# `head_bytes` for use inside operators.
head_stride = inline(head_bytes)


@native_op(AttentionArguments)
def make_heads_ready(arguments: AttentionArguments, context: int, row: int, head: int, out: int) -> int:
    """Prepare a row's query heads for KV head `head`, or its key for KV head h if `head` is -1 - h.

    Other operators call this operator. Heads are written starting at `out`, `head_bytes` apart and padded with zeros.
    The `head_bytes` bytes before `out` are overwritten as scratch.
    """
    size, half = arguments.head_size, arguments.half
    stride = head_stride(size)
    position, cos, sin = position_of(context, row), np.int64(0), np.int64(0)
    if half > 0:
        is_long = arguments.long_cos != 0
        if is_long:
            tables = memory.read_int64(context + 8 * StepField.ROPE_TABLE)
            is_long = memory.read_int32(tables + 4 * sequence_of(context, row)) != 0
        if position < 0 or position >= (arguments.long_positions if is_long else arguments.positions):
            return ErrorCode.ROTARY_POSITION.value
        cos = (arguments.long_cos if is_long else arguments.cos) + 4 * half * position
        sin = (arguments.long_sin if is_long else arguments.sin) + 4 * half * position
    if head < 0:
        source = row_at(arguments.key, row) + 4 * (-1 - head) * size
        count: Any = np.int64(1)
        norm, factor = arguments.k_norm, np.float32(1.0)
    else:
        count, norm, factor = arguments.group, arguments.q_norm, np.float32(arguments.query_factor)
        source = row_at(arguments.query, row) + 4 * head * count * size
    for index in range(count):
        _make_ready(arguments, source + 4 * index * size, norm, factor, cos, sin, out - stride, out + index * stride)
        if arguments.hadamard != 0:
            hadamard_transform(out + index * stride, size)
    return 0


@inline
def _make_ready(
    arguments: AttentionArguments, source: int, norm: int, factor: float, cos: int, sin: int, work: int, out: int
) -> None:
    """Apply the norm (if the address of its weight is not 0), the rotation (if there are tables) and the factor."""
    size, half = arguments.head_size, arguments.half
    for i in range(0, size, LANES):
        memory.store_float32(work + 4 * i, memory.load_first(source + 4 * i, min(size - i, LANES)))
    end = (size + LANES - 1) // LANES * LANES
    memory.store_float32(work + 4 * end, splat_float32(0.0))
    memory.store_float32(out + 4 * (end - LANES), splat_float32(0.0))
    memory.store_float32(out + 4 * end, splat_float32(0.0))
    if norm != 0:
        _normalize(work, norm, size, arguments.epsilon)
    if half > 0:
        if arguments.interleaved != 0:
            _rotate_neighbours(work, cos, sin, half, out)
        else:
            _rotate_halves(work, cos, sin, half, out)
    # The columns without rotation are copied last, because the last rotated vector may write past the rotated columns.
    for i in range(2 * half, size, LANES):
        memory.store_float32(out + 4 * i, memory.load_float32(work + 4 * i))
    for i in range(0, size, LANES):
        memory.store_float32(out + 4 * i, memory.load_float32(out + 4 * i) * factor)


@inline
def _normalize(x: int, weight: int, size: int, epsilon: float) -> None:
    squares = splat_float32(0.0)
    for i in range(0, size, LANES):
        value = memory.load_float32(x + 4 * i)
        squares = multiply_add(value, value, squares)
    inverse = np.float32(1.0) / np.float32(math.sqrt(reduce_add(squares) / np.float32(size) + epsilon))
    for i in range(0, size, LANES):
        normed = memory.load_float32(x + 4 * i) * inverse * memory.load_first(weight + 4 * i, min(size - i, LANES))
        memory.store_float32(x + 4 * i, normed)


@inline
def _rotate_halves(x: int, cos: int, sin: int, half: int, out: int) -> None:
    """Rotate the pairs (0, half), (1, half + 1), ..."""
    for i in range(0, half, LANES):
        count = min(half - i, LANES)
        first, second = memory.load_float32(x + 4 * i), memory.load_float32(x + 4 * (half + i))
        cosine, sine = memory.load_first(cos + 4 * i, count), memory.load_first(sin + 4 * i, count)
        memory.store_float32(out + 4 * i, first * cosine - second * sine)
    # The second halves are written last, because the last vector of the first halves may overwrite some of them.
    for i in range(0, half, LANES):
        count = min(half - i, LANES)
        first, second = memory.load_float32(x + 4 * i), memory.load_float32(x + 4 * (half + i))
        cosine, sine = memory.load_first(cos + 4 * i, count), memory.load_first(sin + 4 * i, count)
        memory.store_float32(out + 4 * (half + i), second * cosine + first * sine)


@inline
def _rotate_neighbours(x: int, cos: int, sin: int, half: int, out: int) -> None:
    """Rotate the pairs (0, 1), (2, 3), ..."""
    for i in range(half):
        first, second = memory.read_float32(x + 8 * i), memory.read_float32(x + 8 * i + 4)
        cosine, sine = memory.read_float32(cos + 4 * i), memory.read_float32(sin + 4 * i)
        memory.write_float32(out + 8 * i, first * cosine - second * sine)
        memory.write_float32(out + 8 * i + 4, second * cosine + first * sine)

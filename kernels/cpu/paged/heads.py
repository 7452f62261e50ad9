"""One head of one token, made ready: RMS norm (Zhang & Sennrich 2019) where the model has it, then rotary position
embedding (Su et al. 2021), then a factor. Queries are turned where they are used and keys where they are stored, so
that neither needs memory of its own.
"""

from __future__ import annotations

import math

import numpy as np

from ..jit import native_op
from ..lazy import inline
from ..memory import (
    float_word,
    load_first,
    load_float32,
    read_float32,
    read_int32,
    read_int64,
    store_float32,
    word,
    write_float32,
)
from ..tape.context import ErrorCode, Word
from ..vector import LANES, multiply_add, reduce_add, splat_float32
from .arguments import (
    COS,
    EPSILON,
    GROUP,
    HALF,
    HEAD_SIZE,
    INTERLEAVED,
    K_NORM,
    KEY,
    KEY_STRIDE,
    LONG_COS,
    LONG_POSITIONS,
    LONG_SIN,
    POSITIONS,
    Q_NORM,
    QUERY,
    QUERY_FACTOR,
    QUERY_STRIDE,
    SIN,
    position_of,
    sequence_of,
)


def head_bytes(size: int) -> int:
    """Bytes from a head that is ready to the next: float32, and room for vectors that begin at any element of it."""
    return 4 * (-(-size // LANES) * LANES + LANES)


# The same inside operators.
head_stride = inline(head_bytes)


@native_op
def make_heads_ready(arguments: int, context: int, row: int, head: int, out: int) -> int:
    """Called by the other operators: the query heads of KV head `head` of a row, or its key if `head` is -1 - KV head.

    Heads are written from `out` on, `head_bytes` apart, zeros behind each; so many bytes before `out` are written too.
    """
    size, half = word(arguments, HEAD_SIZE), word(arguments, HALF)
    stride = head_stride(size)
    position, cos, sin = position_of(context, row), np.int64(0), np.int64(0)
    if half > 0:
        is_long = word(arguments, LONG_COS) != 0
        if is_long:
            is_long = read_int32(read_int64(context + 8 * Word.ROPE_TABLE) + 4 * sequence_of(context, row)) != 0
        if position < 0 or position >= word(arguments, LONG_POSITIONS if is_long else POSITIONS):
            return ErrorCode.ROTARY_POSITION.value
        cos = word(arguments, LONG_COS if is_long else COS) + 4 * half * position
        sin = word(arguments, LONG_SIN if is_long else SIN) + 4 * half * position
    if head < 0:
        source = word(arguments, KEY) + row * word(arguments, KEY_STRIDE) + 4 * (-1 - head) * size
        count, norm, factor = np.int64(1), word(arguments, K_NORM), np.float32(1.0)
    else:
        count, norm, factor = word(arguments, GROUP), word(arguments, Q_NORM), float_word(arguments, QUERY_FACTOR)
        source = word(arguments, QUERY) + row * word(arguments, QUERY_STRIDE) + 4 * head * count * size
    for index in range(count):
        _make_ready(arguments, source + 4 * index * size, norm, factor, cos, sin, out - stride, out + index * stride)
    return 0


@inline
def _make_ready(arguments: int, source: int, norm: int, factor: float, cos: int, sin: int, work: int, out: int) -> None:
    """Norm (if the address of its weight is not 0), rotation (if there are tables) and factor of one head."""
    size, half = word(arguments, HEAD_SIZE), word(arguments, HALF)
    for i in range(0, size, LANES):
        store_float32(work + 4 * i, load_first(source + 4 * i, min(size - i, LANES)))
    end = (size + LANES - 1) // LANES * LANES
    store_float32(work + 4 * end, splat_float32(0.0))
    store_float32(out + 4 * (end - LANES), splat_float32(0.0))
    store_float32(out + 4 * end, splat_float32(0.0))
    if norm != 0:
        _normalize(work, norm, size, float_word(arguments, EPSILON))
    if half > 0:
        if word(arguments, INTERLEAVED) != 0:
            _rotate_neighbours(work, cos, sin, half, out)
        else:
            _rotate_halves(work, cos, sin, half, out)
    # Vectors of the rotation may reach behind it, so that the rest comes after it.
    for i in range(2 * half, size, LANES):
        store_float32(out + 4 * i, load_float32(work + 4 * i))
    for i in range(0, size, LANES):
        store_float32(out + 4 * i, load_float32(out + 4 * i) * factor)


@inline
def _normalize(x: int, weight: int, size: int, epsilon: float) -> None:
    squares = splat_float32(0.0)
    for i in range(0, size, LANES):
        value = load_float32(x + 4 * i)
        squares = multiply_add(value, value, squares)
    inverse = np.float32(1.0) / np.float32(math.sqrt(reduce_add(squares) / np.float32(size) + epsilon))
    for i in range(0, size, LANES):
        normed = load_float32(x + 4 * i) * inverse * load_first(weight + 4 * i, min(size - i, LANES))
        store_float32(x + 4 * i, normed)


@inline
def _rotate_halves(x: int, cos: int, sin: int, half: int, out: int) -> None:
    """Pairs are (0, half), (1, half + 1), ..."""
    for i in range(0, half, LANES):
        count = min(half - i, LANES)
        first, second = load_float32(x + 4 * i), load_float32(x + 4 * (half + i))
        cosine, sine = load_first(cos + 4 * i, count), load_first(sin + 4 * i, count)
        store_float32(out + 4 * i, first * cosine - second * sine)
    # After the first halves, because their last vector may reach into the second ones.
    for i in range(0, half, LANES):
        count = min(half - i, LANES)
        first, second = load_float32(x + 4 * i), load_float32(x + 4 * (half + i))
        cosine, sine = load_first(cos + 4 * i, count), load_first(sin + 4 * i, count)
        store_float32(out + 4 * (half + i), second * cosine + first * sine)


@inline
def _rotate_neighbours(x: int, cos: int, sin: int, half: int, out: int) -> None:
    """Pairs are (0, 1), (2, 3), ..."""
    for i in range(half):
        first, second = read_float32(x + 8 * i), read_float32(x + 8 * i + 4)
        cosine, sine = read_float32(cos + 4 * i), read_float32(sin + 4 * i)
        write_float32(out + 8 * i, first * cosine - second * sine)
        write_float32(out + 8 * i + 4, second * cosine + first * sine)

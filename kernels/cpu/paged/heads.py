"""One head of one token, made ready: RMS norm (Zhang & Sennrich 2019) where the model has it, then rotary position
embedding (Su et al. 2021), then a factor. Queries are turned where they are used and keys where they are stored, so
that neither needs memory of its own.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..functions import inline
from ..memory import load_first, load_float32, read_float32, read_int32, read_int64, store_float32, write_float32
from ..tape.context import Refusal, Word
from ..vector import LANES, multiply_add, reduce_add, splat_float32
from .arguments import (
    COS,
    EPSILON,
    HALF,
    HEAD_SIZE,
    INTERLEAVED,
    LONG_COS,
    LONG_POSITIONS,
    LONG_SIN,
    POSITIONS,
    SIN,
    integer,
    number,
    sequence_of,
)
from .products import padded


def head_floats(size: int) -> int:
    """Floats that a head takes when it is made ready: vectors may be written from any element of it."""
    return padded(size) + LANES


@inline
def _is_long(arguments: int, context: int, row: int) -> Any:
    """Whether the row's sequence uses the long tables."""
    if integer(arguments, LONG_COS) == 0:
        return False
    return read_int32(read_int64(context + 8 * Word.ROPE_TABLE) + 4 * sequence_of(context, row)) != 0


@inline
def check_rotary(arguments: int, context: int, row: int, position: int) -> Any:
    """0, or the reason why a row cannot be rotated."""
    if integer(arguments, HALF) > 0:
        positions = integer(arguments, LONG_POSITIONS if _is_long(arguments, context, row) else POSITIONS)
        if position < 0 or position >= positions:
            return Refusal.ROTARY_POSITION.value
    return 0


@inline
def make_head_ready(
    arguments: int, context: int, row: int, position: int, source: int, norm: int, factor: float, work: int, out: int
) -> None:
    """Norm (if the address of its weight is not 0), rotation and factor, from float32[head_size] at `source`.

    `out` and `work` have head_floats(head_size) floats; behind the head they become zero.
    """
    size = integer(arguments, HEAD_SIZE)
    for i in range(0, size, LANES):
        store_float32(work + 4 * i, load_first(source + 4 * i, min(size - i, LANES)))
    end = (size + LANES - 1) // LANES * LANES
    store_float32(work + 4 * end, splat_float32(0.0))
    store_float32(out + 4 * (end - LANES), splat_float32(0.0))
    store_float32(out + 4 * end, splat_float32(0.0))
    if norm != 0:
        _normalize(work, norm, size, number(arguments, EPSILON))
    half = integer(arguments, HALF)
    if half > 0:
        is_long = _is_long(arguments, context, row)
        cos = integer(arguments, LONG_COS if is_long else COS) + 4 * half * position
        sin = integer(arguments, LONG_SIN if is_long else SIN) + 4 * half * position
        if integer(arguments, INTERLEAVED) != 0:
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
        first, second = load_float32(x + 4 * i), load_float32(x + 4 * (half + i))
        cosine, sine = load_first(cos + 4 * i, min(half - i, LANES)), load_first(sin + 4 * i, min(half - i, LANES))
        store_float32(out + 4 * i, first * cosine - second * sine)
    for i in range(0, half, LANES):
        first, second = load_float32(x + 4 * i), load_float32(x + 4 * (half + i))
        cosine, sine = load_first(cos + 4 * i, min(half - i, LANES)), load_first(sin + 4 * i, min(half - i, LANES))
        store_float32(out + 4 * (half + i), second * cosine + first * sine)


@inline
def _rotate_neighbours(x: int, cos: int, sin: int, half: int, out: int) -> None:
    """Pairs are (0, 1), (2, 3), ..."""
    for i in range(half):
        first, second = read_float32(x + 8 * i), read_float32(x + 8 * i + 4)
        cosine, sine = read_float32(cos + 4 * i), read_float32(sin + 4 * i)
        write_float32(out + 8 * i, first * cosine - second * sine)
        write_float32(out + 8 * i + 4, second * cosine + first * sine)

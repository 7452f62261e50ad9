"""Loads of a page's keys and values as float32 vectors, for every kind of page (`cache_layout.PagedLayer`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...cache_layout import PAGE_TOKENS, SCALE_COLUMNS
from ..jit.dsl import inline
from ..jit.memory import load as load_numbers, load_float32, load_half, load_halves, load_int32, read_half
from ..jit.variants import once
from ..jit.vector import LANES, to_float32

PACKED_BITS = {"int8": 8, "int4": 4}
# Kinds of pages.
PAGE_KINDS = ("float32", "float16", *PACKED_BITS)
ZERO = 7.5  # zero point of 4-bit integers, in the middle of their sixteen values
_LINE = 4 * LANES  # bytes of sixteen lanes
_SCALES = 2 * PAGE_TOKENS  # bytes of the scales of a group of columns
_HALF = SCALE_COLUMNS // 2


def item_bytes(kind: str) -> int:
    """Return the bytes per number in pages of floats."""
    return 2 if kind == "float16" else 4


@inline
def key_columns(bits: int, size: int) -> Any:
    """Return the bytes of a token's packed key."""
    return size // 2 if bits == 4 else (size + 3) // 4 * 4


@inline
def value_columns(bits: int, size: int) -> Any:
    """Return the bytes of a token's packed value."""
    return size // 2 if bits == 4 else (size + LANES - 1) // LANES * LANES


@once
def key_vector_of(kind: str) -> Callable[[int, int, int, int], Any]:
    """Return a helper (size, page, column, part) that loads a column of keys.

    The helper loads tokens [LANES * part, LANES * part + LANES).
    """

    @inline
    def floats(size: int, page: int, column: int, part: int) -> Any:
        return load(page + (column * PAGE_TOKENS + part * LANES) * number)

    @inline
    def of_bytes(size: int, page: int, column: int, part: int) -> Any:
        lanes = load_int32(page + column // 4 * 4 * PAGE_TOKENS + _LINE * part)
        whole = (lanes << (24 - 8 * (column % 4))) >> 24
        return to_float32(whole) * load_half(page + PAGE_TOKENS * key_columns(8, size) + 2 * LANES * part)

    @inline
    def of_nibbles(size: int, page: int, column: int, part: int) -> Any:
        group, within = column // SCALE_COLUMNS, column % SCALE_COLUMNS
        byte = group * _HALF + within % _HALF
        lanes = load_int32(page + byte // 4 * 4 * PAGE_TOKENS + _LINE * part)
        whole = (lanes >> (8 * (byte % 4) + 4 * (within // _HALF))) & 15
        scale = load_half(page + PAGE_TOKENS * key_columns(4, size) + _SCALES * group + 2 * LANES * part)
        return (to_float32(whole) - ZERO) * scale

    load, number = (load_half, 2) if kind == "float16" else (load_float32, 4)
    return {"int8": of_bytes, "int4": of_nibbles}.get(kind, floats)


@once
def value_vector_of(kind: str) -> Callable[[int, int, int, int], Any]:
    """Return a helper (width, page, token, i) that loads columns [i, i + LANES) of a token's value.

    i is a multiple of LANES. Lanes after the last column are zeros, or NaN if the scale of a packed value is NaN.
    """

    @inline
    def floats(width: int, page: int, token: int, i: int) -> Any:
        return load(page + (token * width + i) * number, width - i)

    @inline
    def of_bytes(width: int, page: int, token: int, i: int) -> Any:
        columns = value_columns(8, width)
        lanes = load_int32(page + 4 * (token // 4 * columns + i))
        whole = (lanes << (24 - 8 * (token % 4))) >> 24
        return to_float32(whole) * read_half(page + PAGE_TOKENS * columns + 2 * token)

    @inline
    def of_nibbles(width: int, page: int, token: int, i: int) -> Any:
        columns, group = value_columns(4, width), i // SCALE_COLUMNS
        lanes = load_int32(page + 4 * (token // 4 * columns + group * _HALF))
        whole = (lanes >> (8 * (token % 4) + 4 * (i % SCALE_COLUMNS // _HALF))) & 15
        return (to_float32(whole) - ZERO) * read_half(page + PAGE_TOKENS * columns + _SCALES * group + 2 * token)

    load, number = (load_halves, 2) if kind == "float16" else (load_numbers, 4)
    return {"int8": of_bytes, "int4": of_nibbles}.get(kind, floats)

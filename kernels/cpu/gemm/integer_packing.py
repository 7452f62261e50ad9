"""Packing operands of 8-bit products: four bytes along K to a word, signed on the left, unsigned on the right.

A byte of the other kind is moved by 128, which is flipping its highest bit; zero points move along.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..jit import native_op
from ..large import Arena, huge_array, new_array
from ..memory import load_int32, read_int32, read_uint8, store_int32, word, write_int32
from ..tape.program import Call, Items
from ..tape.replay import Crew
from ..vector import LANES, reduce_add_integers, splat_int32
from .packing import matrix_tables, run_packing
from .tiling import VECTOR_BYTES, Tiling, first_row
from .windows import pack_byte_windows

WORD = 4
_HIGH_BIT, _HIGH_BITS = 0x80, 0x80808080
HALF = 128


@dataclass(frozen=True)
class PackedBytes:
    """A packed constant operand.

    Attributes:
        data: its bytes. lines: rows (left) or columns (right). words: of four along K; terms: K.
        moved: what was added to its values.
        sums: int32 [lines], of the values as they are packed.
    """

    data: NDArray[Any]
    lines: int
    words: int
    terms: int
    moved: int
    sums: NDArray[np.int32]


def pack_right_bytes(crew: Crew, matrix: NDArray[Any], tiling: Tiling, arena: Arena | None = None) -> PackedBytes:
    """[K, N] of int8 or uint8 as panels [panel][words][columns][4]; what lies beyond the last column is unused.

    Args:
        arena: where the panels get their memory; None = on their own.

    Raises:
        ValueError: the matrix spans more than tables of int32 reach.
    """
    terms, lines = matrix.shape
    words, panels = tiling.words(terms), tiling.panels(lines)
    moved = HALF if matrix.dtype == np.int8 else 0
    if lines % LANES or matrix.strides[1] != 1:
        matrix = _with_slack(matrix)
    data = new_array(arena, (panels, words, tiling.columns), np.uint32)
    bases, offsets = matrix_tables(matrix, tiling, words * WORD)
    flip = flip_to_unsigned(matrix.dtype)
    sums = np.empty(panels * tiling.columns, np.int32)
    summing = Call(
        sum_byte_panels, (data.ctypes.data, words, terms, tiling.vectors, sums.ctypes.data), Items(factor=panels)
    )
    packing = pack_byte_windows(tiling)
    run_packing(crew, packing, matrix.ctypes.data, bases, offsets, words, lines, data, flip, (summing,))
    return PackedBytes(data, lines, words, terms, moved, sums[:lines])


# Arguments of `sum_byte_panels`.
PANELS_OF, WORDS_OF, TERMS_OF, VECTORS_OF, SUMS_OF = range(5)


@native_op
def sum_byte_panels(arguments: int, context: int, begin: int, end: int, scratch: int) -> int:
    """What the columns of right panels add up to; items are panels, the places behind the terms are not counted."""
    words, terms, vectors = word(arguments, WORDS_OF), word(arguments, TERMS_OF), word(arguments, VECTORS_OF)
    whole, step = terms // WORD, vectors * VECTOR_BYTES
    rest = (1 << 8 * (terms - whole * WORD)) - 1
    for column in range(begin * vectors, end * vectors):
        panel = column // vectors
        place = (column - panel * vectors) * VECTOR_BYTES
        address = word(arguments, PANELS_OF) + panel * words * step + place
        sums = splat_int32(0)
        for index in range(whole):
            v = load_int32(address + index * step)
            sums = sums + (v & 0xFF) + ((v >> 8) & 0xFF) + ((v >> 16) & 0xFF) + ((v >> 24) & 0xFF)
        if rest:
            v = load_int32(address + whole * step) & rest
            sums = sums + (v & 0xFF) + ((v >> 8) & 0xFF) + ((v >> 16) & 0xFF)
        store_int32(word(arguments, SUMS_OF) + column * VECTOR_BYTES, sums)
    return 0


def _with_slack(matrix: NDArray[Any]) -> NDArray[Any]:
    """A contiguous copy behind whose end a few bytes may be read, as gathering does."""
    memory = np.empty(matrix.size + LANES, matrix.dtype)
    copy = memory[: matrix.size].reshape(matrix.shape)
    copy[...] = matrix
    return copy


def pack_left_bytes(matrix: NDArray[Any], tiling: Tiling) -> PackedBytes:
    """[M, K] of int8 or uint8 as panels of rows, word by word."""
    lines, terms = matrix.shape
    words = tiling.words(terms)
    moved = 0 if matrix.dtype == np.int8 else -HALF
    rows = np.zeros((lines, words * WORD), np.uint8)
    rows[:, :terms] = matrix.view(np.uint8) ^ np.uint8(_HIGH_BIT if moved else 0)
    rows_of_words = rows.view(np.uint32)
    data = huge_array((tiling.left_bytes(lines, words) // WORD,), np.uint32)
    panels = -(-lines // tiling.rows)
    for panel in range(panels):
        row, following = (first_row(index, panels, lines) for index in (panel, panel + 1))
        part = rows_of_words[row:following]
        data[row * words : following * words] = (part if tiling.is_tiled else part.T).reshape(-1)
    sums = matrix.sum(axis=1, dtype=np.int32) + np.int32(moved * terms)
    return PackedBytes(data, lines, words, terms, moved, sums)


# Arguments of `pack_byte_rows`; FLIP: 0, or the highest bit of four bytes; WORDS: of a row, filled up with zeros;
# IS_TILED: rows stay one after the other.
X, X_STRIDE, ROWS, PANELS, TERMS, OUT, SUMS, FLIP, WORDS, IS_TILED = range(10)


def flip_of(dtype: Any) -> int:
    """FLIP for rows of this type: unsigned bytes become signed ones."""
    return _HIGH_BITS - (1 << 32) if dtype == np.uint8 else 0


def flip_to_unsigned(dtype: Any) -> int:
    """FLIP for windows of this type: signed bytes become unsigned ones."""
    return _HIGH_BITS - (1 << 32) if dtype == np.int8 else 0


@native_op
def pack_byte_rows(arguments: int, context: int, begin: int, end: int, scratch: int) -> int:
    """Rows of bytes, each contiguous, as left panels, and the sums of rows; items are panels."""
    stride, rows, panels = word(arguments, X_STRIDE), word(arguments, ROWS), word(arguments, PANELS)
    terms, flip = word(arguments, TERMS), word(arguments, FLIP)
    words, whole, is_tiled = word(arguments, WORDS), terms // WORD, word(arguments, IS_TILED)
    for panel in range(begin, end):
        row = first_row(panel, panels, rows)
        height = first_row(panel + 1, panels, rows) - row
        for m in range(height):
            x = word(arguments, X) + (row + m) * stride
            step = 4 if is_tiled else 4 * height
            out = word(arguments, OUT) + 4 * (row * words + (m * words if is_tiled else m))
            vectors = whole // LANES
            for index in range(vectors * LANES if is_tiled else 0, whole):
                write_int32(out + index * step, read_int32(x + 4 * index) ^ flip)
            for index in range(whole, words):
                write_int32(out + index * step, 0)
            total = 0
            if whole * WORD < terms:
                value = 0
                for place in range(terms - WORD * whole):
                    byte = read_uint8(x + WORD * whole + place) ^ (flip & 0xFF)
                    value += byte << (8 * place)
                    total += byte - 256 if byte >= 128 else byte
                write_int32(out + whole * step, value)
            sums = splat_int32(0)
            for vector in range(vectors):
                v = load_int32(x + 4 * LANES * vector)
                v = v + flip - ((v & flip) << 1)  # exclusive or
                if is_tiled:
                    store_int32(out + 4 * LANES * vector, v)
                sums = sums + ((v << 24) >> 24) + ((v << 16) >> 24) + ((v << 8) >> 24) + (v >> 24)
            total += reduce_add_integers(sums)
            for place in range(vectors * LANES * WORD, whole * WORD):
                byte = read_uint8(x + place) ^ (flip & 0xFF)
                total += byte - 256 if byte >= 128 else byte
            write_int32(word(arguments, SUMS) + 4 * (row + m), total)
    return 0

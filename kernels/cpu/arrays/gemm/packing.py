"""Packed operands. Constants are packed once, and computed rows are packed by operators.

In 8-bit matmuls, four bytes along K form a word, signed on the left and unsigned on the right. A byte of the other
signedness is moved by 128, which flips its highest bit, and its zero point is moved with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.common.host_memory import Arena, huge_array, new_array

from ...jit.arguments import Address, Arguments
from ...jit.emit import INT32_VECTOR, INT64, LANES, Emitter, constant, micro_kernel
from ...jit.memory import load_int32, read_int32, read_uint8, store_int32, write_int32
from ...jit.native import native_op
from ...jit.vector import reduce_add_integers, splat_int32
from ...program.calls import Call, Items, program_of
from ...program.thread_pool import Threads
from .micro import VECTOR_BYTES, WORD_BYTES, Tiling, first_row, floats, integers
from .windows import Tables, pack_byte_windows, pack_windows, windows_call

_NANOSECONDS_PER_BYTE = 0.3
# Number of words whose bytes can be added in pairs in 16 bits: 2 * 128 * 255 < 2 ** 16.
_WORDS_IN_SHORTS = 128
_HIGH_BIT, _HIGH_BITS = 0x80, 0x80808080
HALF = 128


def _emit_transpose(e: Emitter, source: Any, line_step: Any, lines: Any, words: Any, out: Any, word_step: Any) -> None:
    b = e.builder
    last, stored = b.sub(lines, INT64(1)), e.first_lanes(lines)
    line_numbers = [b.select(b.icmp_signed("<", INT64(m), last), INT64(m), last) for m in range(LANES)]
    line_at = [e.at(source, b.mul(line, line_step)) for line in line_numbers]
    with e.loop(b.lshr(b.add(words, INT64(LANES - 1)), INT64(4))) as (index, _):
        first = b.shl(index, INT64(4))
        left = b.sub(words, first)
        loaded = e.first_lanes(left)
        vectors = [e.load_masked(e.at(line, b.shl(first, INT64(2))), INT32_VECTOR, loaded) for line in line_at]
        target, nothing = e.at(out, b.mul(first, word_step)), constant(stored.type, 0)
        for word, vector in enumerate(e.transposed(vectors)):
            mask = b.select(b.icmp_signed("<", INT64(word), left), stored, nothing)
            e.store_masked(vector, e.at(target, b.mul(word_step, INT64(word))), mask)


# Writes word k of line m, at source + m * line_step + 4 * k, to out + k * word_step + 4 * m. Accesses no other memory.
# The arguments, in one tuple: source, line_step, lines (1 to 16), words (at least 1), out, word_step.
transpose_lines = micro_kernel(_emit_transpose)


@dataclass(frozen=True)
class PackedOperand:
    """A packed constant operand.

    Attributes:
        data: packed words.
        lines: number of rows (left) or columns (right).
        words: number of words along K.
        terms: K.
        moved: number that was added to the bytes.
        sums: int32 [lines], sums of the packed bytes.
    """

    data: NDArray[Any]
    lines: int
    words: int
    terms: int
    moved: int = 0
    sums: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))


def zero_point_terms(
    packed: PackedOperand, points: NDArray[Any] | None
) -> tuple[NDArray[np.int32] | None, NDArray[np.int32]]:
    """Return the terms by which the zero points of an 8-bit operand change a product.

    Args:
        points: zero points, either a single one or one per line of the operand; None = 0.

    Returns:
        The factor of the other operand's sums for each line, None if all are 0, and the sum of each line after its
        zero point is subtracted.

    Raises:
        ValueError: the number of zero points is wrong.
    """
    numbers = np.zeros(1, np.int32) if points is None else np.asarray(points).astype(np.int32).reshape(-1)
    if numbers.size not in (1, packed.lines):
        raise ValueError(f"there are {numbers.size} zero points, expected 1 or {packed.lines}")
    moved = np.broadcast_to(numbers + np.int32(packed.moved), (packed.lines,))
    sums = np.asarray(packed.sums - np.int32(packed.terms) * moved, np.int32)
    return (np.ascontiguousarray(-moved, np.int32) if np.any(moved) else None), sums


def pack_weight(threads: Threads, weight: NDArray[np.float32], arena: Arena | None = None) -> PackedOperand:
    """Pack float32 [K, N] with any strides into panels [panel][K][columns]. Columns after the last one are unused.

    Args:
        arena: arena that provides the panels' memory; None = a separate allocation.

    Raises:
        ValueError: the matrix spans more elements than int32 can index.
    """
    tiling, (words, lines) = floats().tiling, weight.shape
    data = new_array(arena, (tiling.panels(lines), words, tiling.columns), weight.dtype)
    tables = matrix_tables(weight, tiling, words)
    _run(threads, data, windows_call(pack_windows(tiling), weight, tables, words, lines, data, len(data)))
    return PackedOperand(data, lines, words, words)


def pack_integer_weight(threads: Threads, weight: NDArray[Any], arena: Arena | None = None) -> PackedOperand:
    """Pack int8 or uint8 [K, N] into panels [panel][words][columns][4]."""
    tiling, (terms, lines) = integers().tiling, weight.shape
    words, panels, flip = tiling.words(terms), tiling.panels(lines), flip_to_unsigned(weight.dtype)
    moved = HALF if weight.dtype == np.int8 else 0
    if lines % LANES or weight.strides[1] != 1:
        weight = _with_slack(weight)
    data = new_array(arena, (panels, words, tiling.columns), np.uint32)
    tables, sums = matrix_tables(weight, tiling, words * WORD_BYTES), np.empty(panels * tiling.columns, np.int32)
    packing = windows_call(pack_byte_windows(tiling), weight, tables, words, lines, data, panels, flip=flip)
    _run(threads, data, packing, sums_call(data, panels, words, terms, tiling, sums))
    return PackedOperand(data, lines, words, terms, moved, sums[:lines])


def unpacked_integer_weight(packed: PackedOperand) -> NDArray[Any]:
    """Return the matrix [K, N] that `pack_integer_weight` packed: int8 if its bytes were moved, else uint8."""
    panels, words, columns = packed.data.shape
    parts = packed.data.view(np.uint8).reshape(panels, words, columns, WORD_BYTES).transpose(1, 3, 0, 2)
    matrix = parts.reshape(words * WORD_BYTES, panels * columns)[: packed.terms, : packed.lines]
    return (matrix ^ np.uint8(_HIGH_BIT)).view(np.int8) if packed.moved else matrix


def sums_call(panels: Any, count: int, words: int, terms: int, tiling: Tiling, sums: Any) -> Call:
    """Return the call that sums the first `terms` bytes of each column of `count` right panels."""
    arguments = PanelSumsArguments(panels=panels, word_count=words, terms=terms, vectors=tiling.vectors, sums=sums)
    return Call(sum_byte_panels, arguments, Items(factor=count))


def _run(threads: Threads, out: NDArray[Any], *calls: Call) -> None:
    threads.run(program_of([[call] for call in calls]), nanoseconds=out.nbytes * _NANOSECONDS_PER_BYTE)


def _with_slack(matrix: NDArray[Any]) -> NDArray[Any]:
    """Return a contiguous copy with a few readable bytes after its end, because gathering reads past it."""
    memory = np.empty(matrix.size + LANES, matrix.dtype)
    copy = memory[: matrix.size].reshape(matrix.shape)
    copy[...] = matrix
    return copy


def matrix_tables(matrix: NDArray[Any], tiling: Tiling, rows: int) -> Tables:
    """Return the offsets of a matrix's rows (padded to `rows`) and of its columns within a row, in elements."""
    steps = [stride // matrix.itemsize for stride in matrix.strides]
    if min(steps) < 0 or sum(step * size for step, size in zip(steps, matrix.shape, strict=True)) >= 1 << 31:
        raise ValueError(
            f"a matrix of shape {list(matrix.shape)} and strides {list(matrix.strides)} cannot be packed: it must span "
            "less than 2 ** 31 elements, with no negative stride"
        )
    bases = np.zeros(rows, np.int32)
    bases[: len(matrix)] = np.arange(len(matrix)) * steps[0]
    offsets = np.zeros(tiling.panels(matrix.shape[1]) * tiling.columns, np.int32)
    offsets[: matrix.shape[1]] = np.arange(matrix.shape[1]) * steps[1]
    return bases, offsets


def pack_kernels(kernels: NDArray[np.float32]) -> PackedOperand:
    """Pack float32 [M, C, kernel ...] into panels of rows, word by word."""
    rows = kernels.reshape(len(kernels), -1)
    return PackedOperand(left_panels(rows, floats().tiling), *rows.shape, rows.shape[1])


def pack_integer_kernels(kernels: NDArray[Any]) -> PackedOperand:
    """Pack int8 or uint8 [M, C, kernel ...] into panels of rows, word by word."""
    matrix, tiling = np.ascontiguousarray(kernels.reshape(len(kernels), -1)), integers().tiling
    lines, terms = matrix.shape
    words, moved = tiling.words(terms), 0 if matrix.dtype == np.int8 else -HALF
    rows = matrix.view(np.uint8)
    if moved or terms != words * WORD_BYTES:
        rows = np.zeros((lines, words * WORD_BYTES), np.uint8)
        np.bitwise_xor(matrix.view(np.uint8), np.uint8(_HIGH_BIT if moved else 0), out=rows[:, :terms])
    sums = matrix.sum(axis=1, dtype=np.int32) + np.int32(moved * terms)
    return PackedOperand(left_panels(rows.view(np.uint32), tiling), lines, words, terms, moved, sums)


def left_panels(rows: NDArray[Any], tiling: Tiling) -> NDArray[Any]:
    """Return rows of words [M, K] as left panels."""
    lines, words = rows.shape
    data = huge_array((tiling.left_bytes(lines, words) // WORD_BYTES,), rows.dtype)
    panels = -(-lines // tiling.rows)
    for panel in range(panels):
        row, following = (first_row(index, panels, lines) for index in (panel, panel + 1))
        part = rows[row:following]
        data[row * words : following * words] = (part if tiling.is_tiled else part.T).reshape(-1)
    return data


class RowsArguments(Arguments):
    """Rows of words, and the panels that they are packed into."""

    x: Address
    x_stride: int
    rows: int
    panels: int
    word_count: int
    out: Address


@native_op(RowsArguments)
def pack_rows(arguments: RowsArguments, context: int, begin: int, end: int, scratch: int) -> int:
    """Pack contiguous rows of words into left panels. Items are panels."""
    stride, rows, panels = arguments.x_stride, arguments.rows, arguments.panels
    words = arguments.word_count
    for panel in range(begin, end):
        row = first_row(panel, panels, rows)
        height = first_row(panel + 1, panels, rows) - row
        x, out = arguments.x + row * stride, arguments.out + 4 * row * words
        transpose_lines((x, stride, height, words, out, 4 * height))
    return 0


class PanelSumsArguments(Arguments):
    """Right panels of `word_count` words (`terms` bytes) along K and `vectors` vectors of columns, and their sums."""

    panels: Address
    word_count: int
    terms: int
    vectors: int
    sums: Address


@native_op(PanelSumsArguments)
def sum_byte_panels(arguments: PanelSumsArguments, context: int, begin: int, end: int, scratch: int) -> int:
    """Sum the columns of right panels. Items are panels; bytes after the first `terms` are not counted."""
    words, terms, vectors = arguments.word_count, arguments.terms, arguments.vectors
    whole, step = terms // WORD_BYTES, vectors * VECTOR_BYTES
    rest = (1 << 8 * (terms - whole * WORD_BYTES)) - 1
    for column in range(begin * vectors, end * vectors):
        panel = column // vectors
        address = arguments.panels + panel * words * step + (column - panel * vectors) * VECTOR_BYTES
        sums = splat_int32(0)
        for first in range(0, whole, _WORDS_IN_SHORTS):
            shorts = splat_int32(0)  # two sums of 16 bits per lane
            for index in range(first, min(first + _WORDS_IN_SHORTS, whole)):
                v = load_int32(address + index * step)
                shorts = shorts + (v & 0x00FF00FF) + ((v >> 8) & 0x00FF00FF)
            sums = sums + (shorts & 0xFFFF) + ((shorts >> 16) & 0xFFFF)
        if rest:
            v = load_int32(address + whole * step) & rest
            sums = sums + (v & 0xFF) + ((v >> 8) & 0xFF) + ((v >> 16) & 0xFF)
        store_int32(arguments.sums + column * VECTOR_BYTES, sums)
    return 0


class ByteRowsArguments(Arguments):
    """Rows of `terms` bytes, and the left panels and int32 sums that are computed from them.

    `flip` is 0, or the highest bit of each of four bytes. `word_count` is the number of words of a row, padded with
    zeros. If `is_tiled`, each row remains contiguous.
    """

    x: Address
    x_stride: int
    rows: int
    panels: int
    terms: int
    out: Address
    sums: Address
    flip: int
    word_count: int
    is_tiled: int


def flip_to_unsigned(dtype: Any) -> int:
    """Return the value of `flip` that makes signed bytes unsigned, for windows of this type."""
    return _HIGH_BITS - (1 << 32) if dtype == np.int8 else 0


@native_op(ByteRowsArguments)
def pack_byte_rows(arguments: ByteRowsArguments, context: int, begin: int, end: int, scratch: int) -> int:
    """Pack contiguous rows of bytes into left panels, and sum the rows. Items are panels."""
    stride, rows, panels = arguments.x_stride, arguments.rows, arguments.panels
    terms, flip = arguments.terms, arguments.flip
    words, whole, is_tiled = arguments.word_count, terms // WORD_BYTES, arguments.is_tiled
    for panel in range(begin, end):
        row = first_row(panel, panels, rows)
        height = first_row(panel + 1, panels, rows) - row
        for m in range(height):
            x = arguments.x + (row + m) * stride
            step = 4 if is_tiled else 4 * height
            out = arguments.out + 4 * (row * words + (m * words if is_tiled else m))
            vectors = whole // LANES
            for index in range(vectors * LANES if is_tiled else 0, whole):
                write_int32(out + index * step, read_int32(x + 4 * index) ^ flip)
            for index in range(whole, words):
                write_int32(out + index * step, 0)
            total = 0
            if whole * WORD_BYTES < terms:
                value = 0
                for tail in range(terms - WORD_BYTES * whole):
                    byte = read_uint8(x + WORD_BYTES * whole + tail) ^ (flip & 0xFF)
                    value += byte << (8 * tail)
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
            for behind in range(vectors * LANES * WORD_BYTES, whole * WORD_BYTES):
                byte = read_uint8(x + behind) ^ (flip & 0xFF)
                total += byte - 256 if byte >= 128 else byte
            write_int32(arguments.sums + 4 * (row + m), total)
    return 0


def byte_rows_call(x: Any, dtype: Any, rows: int, terms: int, tiling: Tiling, out: Any, sums: Any) -> Call:
    """Return the call that packs contiguous rows of bytes into left panels, with their sums."""
    panels, flip = -(-rows // tiling.rows), _HIGH_BITS - (1 << 32) if dtype == np.uint8 else 0
    arguments = ByteRowsArguments(
        x=x, x_stride=terms, rows=rows, panels=panels, terms=terms, out=out, sums=sums, flip=flip,
        word_count=tiling.words(terms), is_tiled=tiling.is_tiled,
    )  # fmt: skip
    return Call(pack_byte_rows, arguments, Items(factor=panels))


def rows_call(x: Any, stride: int, rows: int, words: int, tiling: Tiling, out: Any) -> Call:
    """Return the call that packs rows of words, `stride` bytes apart, into left panels."""
    panels = -(-rows // tiling.rows)
    arguments = RowsArguments(x=x, x_stride=stride, rows=rows, panels=panels, word_count=words, out=out)
    return Call(pack_rows, arguments, Items(factor=panels))

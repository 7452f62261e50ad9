"""The windows of a convolution, packed as right panels (im2col) or as rows of taps for matmuls by BLAS.

Two tables locate the elements: an element is at `base of the tap + offset of the position` from the start of the image.
Positions with consecutive offsets are copied sixteen at a time; the other positions are gathered.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import mul
from typing import Any

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from ...jit.arguments import Address, Arguments
from ...jit.dsl import INTEGERS, inline, intrinsic
from ...jit.emit import INT1, INT32, INT32_VECTOR, LANES, POINTER, Emitter, constant
from ...jit.memory import (
    load_first_bytes,
    load_int32,
    load_uint8,
    read_int32,
    read_int64,
    store_int32,
    write_int32,
    write_int64,
)
from ...jit.native import NativeOp, native_op
from ...jit.variants import once
from ...jit.vector import to_int32
from ...program.bound_program import run_alone
from ...program.calls import Call, Items
from ...program.thread_pool import Threads
from .micro import VECTOR_BYTES, Tiling, floats

_NANOSECONDS_PER_ELEMENT = 0.5
# Location, in elements, of each tap (or row of a matrix) and of each position (or column).
Tables = tuple[NDArray[np.int32], NDArray[np.int32]]
# Number of words along K in an item.
PIECE_WORDS = 64


@dataclass(frozen=True)
class Windows:
    """The windows in a padded image: per spatial axis the kernel's size, stride and dilation, and the window count."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def positions(self) -> int:
        """The number of windows."""
        return math.prod(self.counts)


class WindowsArguments(Arguments):
    """An image, the two tables (`bases` of taps, `offsets` of `positions`), and panels of `word_count` words along K.

    `first_panel` is the first panel that is written to `out`. `flip` holds the bits to flip in every four bytes.
    """

    image: Address
    bases: Address
    offsets: Address
    word_count: int
    positions: int
    out: Address
    first_panel: int = 0
    flip: int = 0


def _gathering(element_bytes: int) -> Any:
    @intrinsic(INTEGERS, "int64", INTEGERS)
    def gather(e: Emitter, address: Any, indices: Any) -> Any:
        """Gather LANES unaligned int32 words, each at the address plus the lane's index in elements."""
        mask = constant(ir.VectorType(INT1, LANES), 1)
        addresses = e.builder.gep(e.pointer(address), [indices], source_etype=ir.IntType(8 * element_bytes))
        addresses.type = ir.VectorType(POINTER, LANES)  # a vector of pointers, which llvmlite mistakes for one pointer
        operands = [addresses, INT32(1), mask, ir.Constant(INT32_VECTOR, None)]
        return e.call("llvm.masked.gather.v16i32.v16p0", INT32_VECTOR, operands)

    return gather


gather_words, gather_at_bytes = _gathering(4), _gathering(1)


def _packing(tiling: Tiling, name: str, copy: Any) -> NativeOp:
    """Return the operator that packs windows. Items are panels times pieces of PIECE_WORDS along K.

    Args:
        copy: function (arguments, offsets, following, first_word, last_word, out, step) that writes a vector of
            positions for each word in [first_word, last_word), `step` bytes apart, from the given offsets. `following`
            is the number of positions in the vector if their offsets are consecutive, else 0.
    """
    vectors, columns = tiling.vectors, tiling.columns
    word_bytes = vectors * VECTOR_BYTES

    def windows(arguments: WindowsArguments, context: int, begin: int, end: int, scratch: int) -> int:
        words, positions = arguments.word_count, arguments.positions
        pieces = -(-words // PIECE_WORDS)
        for item in range(begin, end):
            panel = item // pieces
            first_entry = (item - panel * pieces) * PIECE_WORDS
            last_word = min(words, first_entry + PIECE_WORDS)
            for vector in range(vectors):
                position = (arguments.first_panel + panel) * columns + vector * LANES
                out = arguments.out + panel * words * word_bytes + vector * VECTOR_BYTES
                offsets = arguments.offsets + 4 * position
                count = max(min(LANES, positions - position), 1)  # padding has the offset of the first position
                follow = read_int32(offsets + 4 * (count - 1)) - read_int32(offsets) == count - 1
                copy(arguments, offsets, count if follow else 0, first_entry, last_word, out, word_bytes)
        return 0

    return native_op(WindowsArguments, name=f"{name}_{vectors}")(windows)


@inline
def _copy_floats(
    arguments: WindowsArguments, offsets: int, following: int, first_entry: int, last_word: int, out: int, step: int
) -> None:
    image, bases = arguments.image, arguments.bases
    if following == LANES:
        first = read_int32(offsets)
        for index in range(first_entry, last_word):
            store_int32(out + index * step, load_int32(image + 4 * (read_int32(bases + 4 * index) + first)))
    else:
        where = load_int32(offsets)
        for index in range(first_entry, last_word):
            store_int32(out + index * step, gather_words(image + 4 * read_int32(bases + 4 * index), where))


@once
def pack_windows(tiling: Tiling) -> NativeOp:
    """Return the operator that packs windows of float32."""
    return _packing(tiling, "pack_windows", _copy_floats)


@inline
def _neighbours(address: int) -> Any:
    """Load LANES bytes as int32 lanes."""
    return to_int32(load_uint8(address))


@inline
def _first_neighbours(address: int, count: int) -> Any:
    """Load the first `count` bytes as int32 lanes, and zeros."""
    return to_int32(load_first_bytes(address, count))


@inline
def _copy_bytes(
    arguments: WindowsArguments, offsets: int, following: int, first_entry: int, last_word: int, out: int, step: int
) -> None:
    image, bases, flip = arguments.image, arguments.bases, arguments.flip
    first, where = read_int32(offsets), load_int32(offsets)
    for index in range(first_entry, last_word):
        at = bases + 16 * index
        a, b = image + read_int32(at), image + read_int32(at + 4)
        c, d = image + read_int32(at + 8), image + read_int32(at + 12)
        if following == LANES:
            value = _neighbours(a + first) + (_neighbours(b + first) << 8)
            value = value + (_neighbours(c + first) << 16) + (_neighbours(d + first) << 24)
        elif following > 0:
            value = _first_neighbours(a + first, following) + (_first_neighbours(b + first, following) << 8)
            value = value + (_first_neighbours(c + first, following) << 16)
            value = value + (_first_neighbours(d + first, following) << 24)
        else:
            value = (gather_at_bytes(a, where) & 0xFF) + ((gather_at_bytes(b, where) & 0xFF) << 8)
            value = value + ((gather_at_bytes(c, where) & 0xFF) << 16) + (gather_at_bytes(d, where) << 24)
        value = value + flip - ((value & flip) << 1)  # exclusive or
        store_int32(out + index * step, value)


@once
def pack_byte_windows(tiling: Tiling) -> NativeOp:
    """Return the operator for bytes, with four taps (and bases) per word.

    Unless the positions are consecutive, it reads three bytes past the image's end.
    """
    return _packing(tiling, "pack_byte_windows", _copy_bytes)


def windows_call(
    op: NativeOp, image: Any, tables: Tables, words: int, positions: int, out: Any, panels: int, *, first: int = 0,
    flip: int = 0,
) -> Call:  # fmt: skip
    """Return the call that packs `panels` panels, starting at `first`, with `pack_windows` or `pack_byte_windows`."""
    arguments = WindowsArguments(
        image=image, bases=tables[0], offsets=tables[1], word_count=words, positions=positions, out=out,
        first_panel=first, flip=flip,
    )  # fmt: skip
    return Call(op, arguments, Items(factor=panels * -(-words // PIECE_WORDS)))


def window_tables(extents: tuple[int, ...], windows: Windows, tiling: Tiling) -> Tables:
    """Return the location of each tap and position, in elements. Positions are padded with the first position."""
    steps = [math.prod(extents[axis + 1 :]) for axis in range(len(extents))]
    inside = zip(windows.kernel, map(mul, steps[1:], windows.dilations), strict=True)
    taps = _sums([(extents[0], steps[0]), *inside])
    positions = _sums(list(zip(windows.counts, map(mul, steps[1:], windows.strides), strict=True)))
    offsets = np.zeros(tiling.panels(len(positions)) * tiling.columns, np.int32)
    offsets[: len(positions)] = positions
    return taps.astype(np.int32), offsets


def _sums(axes: Sequence[tuple[int, int]]) -> NDArray[np.int64]:
    """Return the offsets of a grid of (count, step) axes, in order."""
    total = np.zeros(1, np.int64)
    for count, step in axes:
        total = (total[:, None] + np.arange(count, dtype=np.int64) * step).reshape(-1)
    return total


class ColumnsArguments(Arguments):
    """Planes, in which the element for a tap and a position is at base + offset, and [planes][taps][positions]."""

    x: Address
    plane_bytes: int
    bases: Address
    taps: int
    offsets: Address
    positions: int
    out: Address


@inline
def _copy_words(source: int, offsets: int, positions: int, out: int) -> None:
    whole = positions - positions % LANES
    for first in range(0, whole, LANES):
        at = offsets + 4 * first
        if read_int32(at + 4 * (LANES - 1)) - read_int32(at) == LANES - 1:
            store_int32(out + 4 * first, load_int32(source + 4 * read_int32(at)))
        else:
            store_int32(out + 4 * first, gather_words(source, load_int32(at)))
    for index in range(whole, positions):
        write_int32(out + 4 * index, read_int32(source + 4 * read_int32(offsets + 4 * index)))


@inline
def _copy_double_words(source: int, offsets: int, positions: int, out: int) -> None:
    for index in range(positions):
        write_int64(out + 8 * index, read_int64(source + 8 * read_int32(offsets + 4 * index)))


_COPIES: dict[int, Any] = {4: _copy_words, 8: _copy_double_words}


@once
def columns_op(itemsize: int) -> NativeOp:
    """Return the operator that copies windows to rows of taps. Items are the taps of planes."""
    copy = _COPIES[itemsize]

    def columns(arguments: ColumnsArguments, context: int, begin: int, end: int, scratch: int) -> int:
        taps, positions = arguments.taps, arguments.positions
        for item in range(begin, end):
            plane = item // taps
            base = read_int32(arguments.bases + 4 * (item - plane * taps))
            source = arguments.x + plane * arguments.plane_bytes + itemsize * base
            copy(source, arguments.offsets, positions, arguments.out + item * positions * itemsize)
        return 0

    return native_op(ColumnsArguments, name=f"columns_{8 * itemsize}")(columns)


def window_columns(x: NDArray[Any], windows: Windows, threads: Threads | None = None) -> NDArray[Any]:
    """Return [N, C, taps, counts ...] for padded images [N, C, ...].

    Args:
        threads: None = only the calling thread.
    """
    if x.itemsize not in _COPIES:
        raise ValueError(f"x is {x.dtype}, expected a type of 4 or 8 bytes")
    x = np.ascontiguousarray(x)
    out = np.empty((*x.shape[:2], math.prod(windows.kernel), *windows.counts), x.dtype)
    if out.size:
        bases, offsets = _plane_tables(x.shape[2:], windows)
        items, nanoseconds = Items(factor=x.shape[0] * x.shape[1] * len(bases)), out.size * _NANOSECONDS_PER_ELEMENT
        run_alone(
            columns_op(x.itemsize), items, nanoseconds, threads, x=x, plane_bytes=x.strides[1], bases=bases,
            taps=len(bases), offsets=offsets, positions=windows.positions, out=out,
        )  # fmt: skip
    return out


@lru_cache(maxsize=32)
def _plane_tables(extents: tuple[int, ...], windows: Windows) -> Tables:
    return window_tables((1, *extents), windows, floats().tiling)

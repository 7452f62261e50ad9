"""What the windows of a convolution see, packed as right panels (im2col): rows are taps, columns are positions.

Two tables say where everything lies: an element is `base of the tap + offset of the position` from the start of the
image. Positions whose offsets follow each other are copied sixteen at a time, others gathered.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from llvmlite import ir

from ..jit import NativeOp, native_op
from ..lazy import cgutils, inline, intrinsic, types
from ..memory import load_int32, load_uint8, read_int32, store_int32, word
from ..vector import INT32, LANES, to_int32
from .tiling import VECTOR_BYTES, Tiling

# Words along K in an item.
PIECE_WORDS = 64
# Arguments: the image, the two tables, words along K, the first panel and the number of positions, where panels go,
# and for bytes the bits to flip.
IMAGE, BASES, OFFSETS, WORDS, FIRST_PANEL, POSITIONS, OUT, FLIP = range(8)


def _gathering(element_bytes: int) -> Any:
    @intrinsic
    def gather(typing_context: Any, address: Any, indices: Any) -> Any:
        """LANES int32 words at an address plus each lane's index in elements; no alignment is needed."""

        def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            element = ir.IntType(8 * element_bytes)
            words, pointers = ir.VectorType(ir.IntType(32), LANES), ir.VectorType(ir.PointerType(), LANES)
            mask = ir.VectorType(ir.IntType(1), LANES)
            base = builder.inttoptr(args[0], ir.PointerType())
            places = builder.gep(base, [args[1]], source_etype=element)
            places.type = pointers  # of a vector of indices; llvmlite takes it for one pointer
            type_ = ir.FunctionType(words, [pointers, ir.IntType(32), mask, words])
            function = cgutils.get_or_insert_function(builder.module, type_, "llvm.masked.gather.v16i32.v16p0")
            all_lanes = ir.Constant(mask, [1] * LANES)
            return builder.call(function, [places, ir.IntType(32)(1), all_lanes, ir.Constant(words, None)])

        return INT32(types.int64, INT32), lower

    return gather


gather_words, gather_at_bytes = _gathering(4), _gathering(1)


def _packing(tiling: Tiling, name: str, copy: Any) -> NativeOp:
    """Items are panels times pieces of PIECE_WORDS along K.

    Args:
        copy: (arguments, offsets, follow, first_word, last_word, out, step) writes a vector of positions at each of
            these words, `step` bytes apart, from the offsets that it is given; `follow` says that they are consecutive.
    """
    vectors, columns = tiling.vectors, tiling.columns
    word_bytes = vectors * VECTOR_BYTES

    def windows(arguments: int, context: int, begin: int, end: int, scratch: int) -> int:
        words, positions = word(arguments, WORDS), word(arguments, POSITIONS)
        pieces = -(-words // PIECE_WORDS)
        for item in range(begin, end):
            panel = item // pieces
            first_word = (item - panel * pieces) * PIECE_WORDS
            last_word = min(words, first_word + PIECE_WORDS)
            for vector in range(vectors):
                position = (word(arguments, FIRST_PANEL) + panel) * columns + vector * LANES
                out = word(arguments, OUT) + panel * words * word_bytes + vector * VECTOR_BYTES
                offsets = word(arguments, OFFSETS) + 4 * position
                distance = read_int32(offsets + 4 * (LANES - 1)) - read_int32(offsets)
                follow = position + LANES <= positions and distance == LANES - 1
                copy(arguments, offsets, follow, first_word, last_word, out, word_bytes)
        return 0

    windows.__name__ = f"{name}_{vectors}"
    return native_op(windows)


@inline
def _copy_floats(
    arguments: int, offsets: int, follow: bool, first_word: int, last_word: int, out: int, step: int
) -> None:
    image, bases = word(arguments, IMAGE), word(arguments, BASES)
    if follow:
        first = read_int32(offsets)
        for index in range(first_word, last_word):
            store_int32(out + index * step, load_int32(image + 4 * (read_int32(bases + 4 * index) + first)))
    else:
        where = load_int32(offsets)
        for index in range(first_word, last_word):
            store_int32(out + index * step, gather_words(image + 4 * read_int32(bases + 4 * index), where))


@cache
def pack_windows(tiling: Tiling) -> NativeOp:
    """float32 elements."""
    return _packing(tiling, "pack_windows", _copy_floats)


@inline
def _neighbours(address: int) -> Any:
    """LANES bytes as int32 lanes."""
    return to_int32(load_uint8(address))


@inline
def _copy_bytes(
    arguments: int, offsets: int, follow: bool, first_word: int, last_word: int, out: int, step: int
) -> None:
    image, bases, flip = word(arguments, IMAGE), word(arguments, BASES), word(arguments, FLIP)
    first, where = read_int32(offsets), load_int32(offsets)
    for index in range(first_word, last_word):
        at = bases + 16 * index
        a, b = image + read_int32(at), image + read_int32(at + 4)
        c, d = image + read_int32(at + 8), image + read_int32(at + 12)
        if follow:
            value = _neighbours(a + first) + (_neighbours(b + first) << 8)
            value = value + (_neighbours(c + first) << 16) + (_neighbours(d + first) << 24)
        else:
            value = (gather_at_bytes(a, where) & 0xFF) + ((gather_at_bytes(b, where) & 0xFF) << 8)
            value = value + ((gather_at_bytes(c, where) & 0xFF) << 16) + (gather_at_bytes(d, where) << 24)
        value = value + flip - ((value & flip) << 1)  # exclusive or
        store_int32(out + index * step, value)


@cache
def pack_byte_windows(tiling: Tiling) -> NativeOp:
    """The same of bytes, four taps to a word: there are four bases for each. Three bytes behind the image are read."""
    return _packing(tiling, "pack_byte_windows", _copy_bytes)

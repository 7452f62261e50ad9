"""The blocked layout of images: [N, C / 16, rows, columns, 16], so that a vector holds sixteen channels of a pixel.

If C is not a multiple of 16, the last block is padded. Padding channels hold 0 after a conversion; operators may write
any finite numbers to them, because convolutions multiply them by 0.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.common.host_memory import recycled

from ....checks import Float32
from ...jit.arguments import Address, Arguments
from ...jit.memory import load_first, store_first, store_float32
from ...jit.native import native_op
from ...jit.vector import LANES, splat_float32
from ...program.bound_program import first_element, run_alone
from ...program.calls import Items
from ...program.thread_pool import Threads
from ..copying import operand
from ..gemm.packing import transpose_lines

BLOCK = LANES
BLOCK_BYTES = 4 * BLOCK
_NANOSECONDS_PER_ELEMENT = 0.15
# Number of pixels in an item.
_PIECE = 512


def blocks_of(channels: int) -> int:
    """Return the number of blocks of this number of channels."""
    return -(-channels // BLOCK)


def aligned(shape: tuple[int, ...]) -> Float32:
    """Return a float32 array without initial values that starts on a cache line, so that no vector crosses a line."""
    count = math.prod(shape)
    memory = np.empty(count + BLOCK, np.float32)
    skipped = -first_element(memory) % BLOCK_BYTES // 4
    return memory[skipped : skipped + count].reshape(shape)


def new_image(shape: tuple[int, ...]) -> Float32:
    """Return an array as `aligned` does. The memory of large arrays is reused by later images."""
    memory = recycled(4 * math.prod(shape))
    return aligned(shape) if memory is None else memory.view(np.float32).reshape(shape)


class LayoutArguments(Arguments):
    """Images as [images][channels][pixels] and as [images][blocks][pixels][16]; items are pieces of blocks."""

    x: Address
    out: Address
    channels: int
    blocks: int
    pixels: int
    pieces: int


@native_op(LayoutArguments)
def block_channels(arguments: LayoutArguments, context: int, begin: int, end: int, scratch: int) -> int:
    """Convert images to the blocked layout."""
    channels, blocks, pixels, pieces = arguments.channels, arguments.blocks, arguments.pixels, arguments.pieces
    for item in range(begin, end):
        plane, piece = item // pieces, item % pieces
        image, block = plane // blocks, plane % blocks
        first = piece * _PIECE
        count, lines = min(_PIECE, pixels - first), min(LANES, channels - block * LANES)
        x = arguments.x + 4 * ((image * channels + block * LANES) * pixels + first)
        out = arguments.out + BLOCK_BYTES * (plane * pixels + first)
        if lines < LANES:
            for pixel in range(count):
                store_float32(out + BLOCK_BYTES * pixel, splat_float32(0.0))
        transpose_lines((x, 4 * pixels, lines, count, out, BLOCK_BYTES))
    return 0


@native_op(LayoutArguments)
def unblock_channels(arguments: LayoutArguments, context: int, begin: int, end: int, scratch: int) -> int:
    """Convert images from the blocked layout."""
    channels, blocks, pixels, pieces = arguments.channels, arguments.blocks, arguments.pixels, arguments.pieces
    for item in range(begin, end):
        plane, piece = item // pieces, item % pieces
        image, block = plane // blocks, plane % blocks
        words = min(LANES, channels - block * LANES)
        for first in range(piece * _PIECE, min(pixels, (piece + 1) * _PIECE), LANES):
            x = arguments.x + BLOCK_BYTES * (plane * pixels + first)
            out = arguments.out + 4 * ((image * channels + block * LANES) * pixels + first)
            transpose_lines((x, BLOCK_BYTES, min(LANES, pixels - first), words, out, 4 * pixels))
    return 0


def to_blocked(x: Float32, threads: Threads | None = None) -> Float32:
    """Convert [N, C, ...] to [N, blocks, ..., 16]."""
    if x.dtype != np.float32 or x.ndim < 2:
        raise ValueError(f"x is {x.dtype} {list(x.shape)}, expected float32 [N, C, ...]")
    images, channels, *extents = x.shape
    out = new_image((images, blocks_of(channels), *extents, BLOCK))
    _convert(block_channels, operand(x), out, images, channels, math.prod(extents), threads)
    return out


def from_blocked(x: Float32, channels: int, threads: Threads | None = None) -> Float32:
    """Convert [N, blocks, ..., 16] to [N, C, ...]."""
    if x.dtype != np.float32 or x.ndim < 3 or x.shape[1] != blocks_of(channels) or x.shape[-1] != BLOCK:
        raise ValueError(f"x is {x.dtype} {list(x.shape)}, expected float32 blocks of {channels} channels")
    images, _, *extents, _ = x.shape
    pixels = math.prod(extents)
    if pixels == 1:
        return np.ascontiguousarray(x.reshape(images, x.shape[1] * BLOCK)[:, :channels]).reshape(
            images, channels, *extents
        )
    out = np.empty((images, channels, *extents), np.float32)
    _convert(unblock_channels, operand(x), out, images, channels, pixels, threads)
    return out


def _convert(
    op: Any, x: Float32, out: Float32, images: int, channels: int, pixels: int, threads: Threads | None
) -> None:
    if out.size:
        blocks, pieces = blocks_of(channels), -(-pixels // _PIECE)
        run_alone(
            op, Items(factor=images * blocks * pieces), out.size * _NANOSECONDS_PER_ELEMENT, threads, x=x, out=out,
            channels=channels, blocks=blocks, pixels=pixels, pieces=pieces,
        )  # fmt: skip


class PadArguments(Arguments):
    """Images [x_slices][x_rows][x_width], and images [slices][rows][width] that contain them.

    They start at slice `front`, row `top` and number `left`.
    """

    x: Address
    out: Address
    x_slices: int
    x_rows: int
    x_width: int
    slices: int
    rows: int
    width: int
    front: int
    top: int
    left: int


@native_op(PadArguments)
def pad_planes(arguments: PadArguments, context: int, begin: int, end: int, scratch: int) -> int:
    """Copy images and surround them with zeros. Items are rows of the result."""
    rows, width, x_rows, x_width = arguments.rows, arguments.width, arguments.x_rows, arguments.x_width
    slices, x_slices, front, top, start = (
        arguments.slices, arguments.x_slices, arguments.front, arguments.top, arguments.left
    )  # fmt: skip
    for item in range(begin, end):
        plane = item // rows
        image = plane // slices
        row, piece = item - plane * rows - top, plane - image * slices - front
        out = arguments.out + 4 * item * width
        is_inside = 0 <= row < x_rows and 0 <= piece < x_slices
        first, last = (start, start + x_width) if is_inside else (width, width)
        for column in range(0, first, LANES):
            store_first(out + 4 * column, splat_float32(0.0), min(LANES, first - column))
        x = arguments.x + 4 * ((image * x_slices + piece) * x_rows + row) * x_width
        for column in range(0, last - first, LANES):
            left = min(LANES, last - first - column)
            store_first(out + 4 * (first + column), load_first(x + 4 * column, left), left)
        for column in range(last, width, LANES):
            store_first(out + 4 * column, splat_float32(0.0), min(LANES, width - column))
    return 0


class BorderArguments(Arguments):
    """Images [slices][rows][columns] of pixels, and the widths of their borders."""

    out: Address
    slices: int
    rows: int
    columns: int
    front: int
    back: int
    top: int
    bottom: int
    left: int
    right: int


@native_op(BorderArguments)
def clear_borders(arguments: BorderArguments, context: int, begin: int, end: int, scratch: int) -> int:
    """Write zeros to the borders of images. Items are slices of images."""
    rows, columns, top, bottom = arguments.rows, arguments.columns, arguments.top, arguments.bottom
    left, right = arguments.left, arguments.right
    slices, front, back = arguments.slices, arguments.front, arguments.back
    for item in range(begin, end):
        piece = item % slices
        for row in range(rows):
            out = arguments.out + BLOCK_BYTES * (item * rows + row) * columns
            is_inner = top <= row < rows - bottom and front <= piece < slices - back
            for column in range(left if is_inner else columns):
                store_float32(out + BLOCK_BYTES * column, splat_float32(0.0))
            for column in range(columns - right if is_inner else columns, columns):
                store_float32(out + BLOCK_BYTES * column, splat_float32(0.0))
    return 0


def packed_blocks(weight: NDArray[np.float32], inner: int) -> Float32:
    """Pack [M, C, kernel ...] to [blocks of M, blocks of C, taps, inner, 16], with zeros where M or C are padded.

    Args:
        inner: number of channels in a block of C: 16, or 1 for images that are not blocked.
    """
    outputs, channels, taps = weight.shape[0], weight.shape[1], math.prod(weight.shape[2:])
    out_blocks, in_blocks = blocks_of(outputs), -(-channels // inner)
    wide = np.zeros((out_blocks * BLOCK, in_blocks * inner, taps), np.float32)
    wide[:outputs, :channels] = weight.reshape(outputs, channels, taps)
    parts = wide.reshape(out_blocks, BLOCK, in_blocks, inner, taps).transpose(0, 2, 4, 3, 1)
    packed = aligned(parts.shape)
    packed[...] = parts
    return packed

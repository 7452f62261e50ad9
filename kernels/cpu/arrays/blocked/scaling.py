"""Arithmetic with one number for each channel of blocked images (see `layout`)."""

from __future__ import annotations

import math

from ....checks import Float32, check
from ...jit.arguments import Address, Arguments
from ...jit.memory import load_float32, store_float32
from ...jit.native import NativeOp, native_op
from ...jit.variants import once
from ...jit.vector import splat_float32
from ...jit.vector_math import UNARY
from ...program.bound_program import run_alone
from ...program.calls import Items
from ...program.thread_pool import Threads
from ...rowwise.elementwise import check_function
from .layout import BLOCK, BLOCK_BYTES, aligned

_NANOSECONDS_PER_ELEMENT = 0.1
# Number of pixels in an item.
_PIECE = 512


class ScaleArguments(Arguments):
    """Planes [images][blocks][pixels][16]. Items are pieces of planes.

    `scale` and `shift` have a vector for each block; `shift` may be 0. `scale_image` and `shift_image` are the bytes
    between the vectors of two images, or 0. `p` and `q` are the function's parameters.
    """

    x: Address
    scale: Address
    shift: Address
    out: Address
    scale_image: int
    shift_image: int
    blocks: int
    pixels: int
    pieces: int
    p: float
    q: float


@once
def scale_blocks_op(function: str) -> NativeOp:
    """Return the operator that computes function(x * scale + shift)."""
    apply = UNARY[function].function

    def scale(arguments: ScaleArguments, context: int, begin: int, end: int, scratch: int) -> int:
        blocks, pixels, pieces = arguments.blocks, arguments.pixels, arguments.pieces
        p, q = arguments.p, arguments.q
        for item in range(begin, end):
            plane, piece = item // pieces, item % pieces
            image, block = plane // blocks, plane % blocks
            factor = load_float32(arguments.scale + image * arguments.scale_image + BLOCK_BYTES * block)
            term = splat_float32(0.0)
            if arguments.shift != 0:
                term = load_float32(arguments.shift + image * arguments.shift_image + BLOCK_BYTES * block)
            start = BLOCK_BYTES * (plane * pixels + piece * _PIECE)
            x, out = arguments.x + start, arguments.out + start
            for pixel in range(min(_PIECE, pixels - piece * _PIECE)):
                at = BLOCK_BYTES * pixel
                store_float32(out + at, apply(load_float32(x + at) * factor + term, p, q))
        return 0

    return native_op(ScaleArguments, name=f"scale_blocks_{function}")(scale)


def scaled_blocks(
    x: Float32, scale: Float32, shift: Float32 | None = None, function: str = "copy",
    parameters: tuple[float, ...] = (), threads: Threads | None = None,
) -> Float32:  # fmt: skip
    """Return function(x * scale + shift) for images x [N, blocks, extents ..., 16].

    Args:
        scale, shift: float32 [1 or N, blocks, 1 ..., 16].
        function, parameters: key of UNARY, and the function's parameters.

    Raises:
        ValueError: a shape does not match.
    """
    check("x", x, (*[None] * (x.ndim - 1), BLOCK))
    images, blocks = x.shape[:2]
    strides = []
    for name, given in (("scale", scale), ("shift", shift)):
        if given is not None:
            check(name, given, (None, blocks, *[1] * (x.ndim - 3), BLOCK))
            if len(given) not in (1, images):
                raise ValueError(f"{name} has {len(given)} images, expected 1 or {images}")
        strides.append(0 if given is None or len(given) == 1 else blocks * BLOCK_BYTES)
    p, q = check_function(function, parameters)
    out, pixels = aligned(x.shape), math.prod(x.shape[2:-1])
    if out.size:
        pieces = -(-pixels // _PIECE)
        run_alone(
            scale_blocks_op(function), Items(factor=images * blocks * pieces), x.size * _NANOSECONDS_PER_ELEMENT,
            threads, x=x, scale=scale, shift=shift, out=out, scale_image=strides[0], shift_image=strides[1],
            blocks=blocks, pixels=pixels, pieces=pieces, p=p, q=q,
        )  # fmt: skip
    return out

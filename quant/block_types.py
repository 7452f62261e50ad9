"""Arrays of blocks: matrices that are quantised already, as NumPy arrays of records, read without rounding.

The `dtype` of such an array has one field, named after the block's type, of the block's bytes; so rows of a matrix can
be cut, put in another order and joined as those of any array. A type says which weights its blocks become: the one
formula of `kernels.weights`, with its numbers. Those of llama.cpp's files are in `quant.ggml`; `plain_blocks`
makes types for all whose blocks are codes with a float or two.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from genai.common.cores import allowed_processors
from genai.kernels.weights import (
    BLOCKS,
    QuantizationError,
    QuantizedWeight,
    WeightFormat,
    pack_bits,
    uniform_format,
    uniform_grid,
    unpack_bits,
)

from .formats import GRIDS

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
# Weights that are converted at once: 2 MiB of codes.
_CHUNK_WEIGHTS = 1 << 18


# What blocks hold, in the order of QuantizedWeight: codes [..., columns], scales [..., groups] and, where there
# are any, multipliers [..., blocks], offset scales [..., groups], offsets [..., blocks].
Numbers = tuple[NDArray[Any] | None, ...]
# From blocks, uint8 [..., nbytes], to their numbers.
Decoder = Callable[[Bytes], Numbers]


@dataclass(frozen=True)
class BlockType:
    """A quantised type.

    Attributes:
        name: of the type; two of one name are one.
        columns: weights of a block. nbytes: bytes of a block.
        format: what a matrix of such blocks becomes. grid: what its codes stand for.
        decode: from blocks to their numbers.
    """

    name: str
    columns: int
    nbytes: int
    format: WeightFormat
    grid: Floats
    decode: Decoder

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of an array of blocks."""
        return np.dtype([(self.name, np.uint8, (self.nbytes,))])

    @property
    def is_uniform(self) -> bool:
        """Whether its blocks are integers of 4 or 8 bits with a scale, and perhaps a zero point: QMoE's."""
        format = self.format
        if (
            format.bits not in (4, 8)
            or format.multiplier_bits
            or format.group_size != format.block_size
            or not format.block_size
        ):
            return False
        return np.array_equal(self.grid, uniform_grid(format.bits, centred=not format.offset_bits))

    @property
    def bits_per_weight(self) -> float:
        """Of the blocks, as a file has them."""
        return 8 * self.nbytes / self.columns


_BY_NAME: dict[str, BlockType] = {}


def register(kind: BlockType) -> BlockType:
    """Make a type known to `type_of`; returns it."""
    _BY_NAME[kind.name] = kind
    return kind


def type_of(array: NDArray[Any]) -> BlockType | None:
    """The type of an array of blocks; None for any other array."""
    return _BY_NAME.get(array.dtype.names[0]) if array.dtype.names else None


def weight_of(blocks: NDArray[Any]) -> QuantizedWeight:
    """A matrix of blocks [rows, blocks per row] as a weight of ours, without any rounding.

    Raises:
        QuantizationError: the array has no blocks, or a scale among them is infinite or no number.
    """
    kind = type_of(blocks)
    if kind is None or blocks.ndim != 2 or 0 in blocks.shape:
        raise QuantizationError(f"{blocks.dtype} {list(blocks.shape)} is no matrix of blocks")
    format, rows, columns = kind.format, len(blocks), blocks.shape[1] * kind.columns
    data = np.empty((rows, columns * format.bits // 8), np.uint8)
    factors = _empty_factors(format, rows, columns)

    def convert(first: int) -> None:
        part = slice(first, first + step)
        # Overflow is found by what it leaves: a scale that is no number.
        codes, *found = kind.decode(np.ascontiguousarray(blocks[part])[kind.name])
        assert codes is not None
        data[part] = pack_bits(codes.reshape(len(codes), -1), format.bits)
        for target, array in zip(factors, found, strict=False):
            if target is not None and array is not None:
                target[part] = array.reshape(len(array), -1)

    step = max(1, _CHUNK_WEIGHTS // columns)
    with ThreadPoolExecutor(len(allowed_processors())) as pool:
        for _ in pool.map(convert, range(0, rows, step)):
            pass
    scales, _, offset_scales, _ = factors
    for floats in (scales, offset_scales):
        if floats is not None and not np.isfinite(floats).all():
            row = int(np.flatnonzero(~np.isfinite(floats).all(axis=1))[0])
            raise QuantizationError(f"row {row} of {kind.name} blocks has a scale that is infinite or no number")
    return QuantizedWeight(format, rows, columns, data, kind.grid, *factors)


def without_gaps(blocks: NDArray[Any]) -> NDArray[Any]:
    """The same blocks, but those whose scales are infinite or no numbers stand for zeros; itself if there are none."""
    kind = type_of(blocks)
    assert kind is not None
    matrix = blocks.reshape(-1, blocks.shape[-1])
    bad = np.zeros(matrix.shape, np.bool_)
    step = max(1, _CHUNK_WEIGHTS // (matrix.shape[1] * kind.columns))
    for first in range(0, len(matrix), step):
        part = slice(first, first + step)
        numbers = kind.decode(np.ascontiguousarray(matrix[part])[kind.name])
        for floats in numbers[1::2]:  # scales, offset scales
            if floats is not None:
                bad[part] |= ~np.isfinite(floats).all(axis=-1)
    if not bad.any():
        return blocks
    mended = matrix.copy()
    mended[bad] = np.zeros((), kind.dtype)  # of every type a block of zeros stands for zeros
    return mended.reshape(blocks.shape)


def _empty_factors(format: WeightFormat, rows: int, columns: int) -> tuple[Any, Any, Any, Any]:
    """Arrays to fill: scales, multipliers, offset scales, offsets; None = the format has none."""
    groups, blocks = (rows, format.groups(columns)), (rows, format.blocks(columns))
    return (
        np.empty(groups, np.float32),
        np.empty(blocks, np.int16) if format.multiplier_bits else None,
        np.empty(groups, np.float32) if format.offset_bits else None,
        np.empty(blocks, np.uint8) if format.offset_bits else None,
    )


def dequantize(blocks: NDArray[Any]) -> NDArray[np.float32]:
    """Blocks [..., rows, blocks per row] as float32 [..., rows, columns]; raises as `weight_of` does."""
    kind = type_of(blocks)
    if kind is None:
        raise QuantizationError(f"{blocks.dtype} {list(blocks.shape)} holds no blocks")
    matrix = blocks.reshape(-1, blocks.shape[-1])
    values = np.empty((len(matrix), blocks.shape[-1] * kind.columns), np.float32)
    step = max(1, _CHUNK_WEIGHTS // values.shape[1])
    for first in range(0, len(matrix), step):
        values[first : first + step] = weight_of(matrix[first : first + step]).dequantize()
    return values.reshape(*blocks.shape[:-1], -1)


# What blocks have beside a scale: nothing, an integer that stands for 0, or the float that a code of 0 stands for.
Second = Literal["none", "zero point", "least"]


@dataclass(frozen=True)
class PlainType(BlockType):
    """A type of one level: blocks of a float32 scale, perhaps `second`, and codes as rows of bits."""

    second: Second

    def array(self, packed: Bytes, scales: NDArray[Any], second: NDArray[Any] | None = None) -> NDArray[Any]:
        """Blocks [rows, blocks].

        Args:
            packed: codes as rows of bits, uint8 [rows, columns * bits / 8].
            scales: [rows, blocks], any floats. second: [rows, blocks], as the type says.
        """
        rows, count = scales.shape
        made = np.empty((rows, count, self.nbytes), np.uint8)
        made[..., :4] = np.ascontiguousarray(scales, np.float32).view(np.uint8).reshape(rows, count, 4)
        first = self.nbytes - self.columns * self.format.bits // 8
        if second is not None:
            dtype: Any = np.uint8 if self.second == "zero point" else np.float32
            made[..., 4:first] = np.ascontiguousarray(second, dtype).view(np.uint8).reshape(rows, count, -1)
        made[..., first:] = packed.reshape(rows, count, -1)
        return made.view(self.dtype)[..., 0]


@cache
def plain_blocks(bits: int, columns: int, *, grid: str = "int", second: Second = "none") -> PlainType:
    """The type of blocks of so many codes.

    Args:
        bits, columns: as `WeightFormat` has them. grid: "int", or a key of `quant.formats.GRIDS`.
    """
    format = {
        "none": uniform_format(bits, columns),
        "zero point": uniform_format(bits, columns, zero_points=True),
        # Of one level: the least value of a block is a float of its own, so a group is a block.
        "least": WeightFormat(bits, columns, columns, multiplier_bits=2, offset_bits=2),
    }[second]
    values = uniform_grid(bits, centred=second == "none") if grid == "int" else GRIDS[grid]
    first = {"none": 4, "zero point": 5, "least": 8}[second]

    def decode(blocks: Bytes) -> Numbers:
        codes = unpack_bits(np.ascontiguousarray(blocks[..., first:]), bits, columns)
        codes, floats = codes.reshape(*blocks.shape[:-1], columns), np.ascontiguousarray(blocks[..., : first & ~3])
        scales = floats[..., :4].copy().view(np.float32)
        if second == "none":
            return codes, scales
        if second == "zero point":
            return codes, scales, None, scales, blocks[..., 4:5]
        ones = np.ones((*blocks.shape[:-1], 1), np.uint8)
        return codes, scales, ones, -floats[..., 4:].copy().view(np.float32), ones

    name = f"{bits} bits by {columns}" if grid == "int" else f"{grid} by {columns}"
    name += {"none": "", "zero point": " with zero points", "least": " with least values"}[second]
    kind = PlainType(name, columns, first + columns * bits // 8, format, values, decode, second)
    register(kind)
    return kind


def block_of(group: int) -> int | None:
    """The largest block of which a group of so many columns consists; None if there is none."""
    return next((size for size in reversed(BLOCKS) if group % size == 0), None)

"""Arrays of blocks: quantised matrices as NumPy arrays of records, which can be converted without rounding.

The `dtype` of such an array has a single field, which has the name of the block type and holds the block's bytes. Rows
can therefore be sliced, reordered and concatenated as in any array. A block type defines how its blocks are converted
to the formula in `kernels.weights`. The types in llama.cpp's files are in `quant.ggml`; `plain_blocks` creates types
whose blocks are codes with one or two floats.
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
# The number of weights to convert at a time; the codes take 2 MiB.
_CHUNK_WEIGHTS = 1 << 18


# The content of blocks, in the order of QuantizedWeight: codes [..., columns], scales [..., groups] and, if present,
# multipliers [..., blocks], offset scales [..., groups], offsets [..., blocks].
Numbers = tuple[NDArray[Any] | None, ...]
# A function that converts blocks, uint8 [..., nbytes], to their numbers.
Decoder = Callable[[Bytes], Numbers]


@dataclass(frozen=True)
class BlockType:
    """A quantised block type.

    Attributes:
        name: unique name of the type.
        columns: number of weights in a block.
        nbytes: number of bytes in a block.
        format: format of the QuantizedWeight that a matrix of these blocks is converted to.
        grid: values of the codes.
        decode: converts blocks to their numbers.
    """

    name: str
    columns: int
    nbytes: int
    format: WeightFormat
    grid: Floats
    decode: Decoder

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of an array of blocks."""
        return np.dtype([(self.name, np.uint8, (self.nbytes,))])

    @property
    def is_uniform(self) -> bool:
        """True if blocks are integers of 4 or 8 bits with a scale and possibly a zero point, as QMoE requires."""
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
        """The number of bits per weight in a file of such blocks."""
        return 8 * self.nbytes / self.columns


_BY_NAME: dict[str, BlockType] = {}


def register(kind: BlockType) -> BlockType:
    """Register a type so that `type_of` finds it, and return the type."""
    _BY_NAME[kind.name] = kind
    return kind


def type_of(array: NDArray[Any]) -> BlockType | None:
    """Return the type of an array of blocks; None for any other array."""
    return _BY_NAME.get(array.dtype.names[0]) if array.dtype.names else None


def weight_of(blocks: NDArray[Any]) -> QuantizedWeight:
    """Convert a matrix of blocks [rows, blocks per row] to a QuantizedWeight, without rounding.

    Raises:
        QuantizationError: the array contains no blocks, or at least one scale is infinite or NaN.
    """
    kind = type_of(blocks)
    if kind is None or blocks.ndim != 2 or 0 in blocks.shape:
        raise QuantizationError(f"an array of {blocks.dtype} {list(blocks.shape)} is not a matrix of blocks")
    format, rows, columns = kind.format, len(blocks), blocks.shape[1] * kind.columns
    data = np.empty((rows, columns * format.bits // 8), np.uint8)
    factors = _empty_factors(format, rows, columns)

    def convert(first: int) -> None:
        part = slice(first, first + step)
        # Overflow is detected afterwards, because it makes a scale infinite or NaN.
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
            raise QuantizationError(f"row {row} of {kind.name} blocks has a scale that is infinite or NaN")
    return QuantizedWeight(format, rows, columns, data, kind.grid, *factors)


def without_gaps(blocks: NDArray[Any]) -> NDArray[Any]:
    """Replace blocks that have infinite or NaN scales with zeros; return the same array if there are none."""
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
    mended[bad] = np.zeros((), kind.dtype)  # a block of zero bytes represents zeros in every type
    return mended.reshape(blocks.shape)


def _empty_factors(format: WeightFormat, rows: int, columns: int) -> tuple[Any, Any, Any, Any]:
    """Allocate scales, multipliers, offset scales and offsets; None for parts that the format does not have."""
    groups, blocks = (rows, format.groups(columns)), (rows, format.blocks(columns))
    return (
        np.empty(groups, np.float32),
        np.empty(blocks, np.int16) if format.multiplier_bits else None,
        np.empty(groups, np.float32) if format.offset_bits else None,
        np.empty(blocks, np.uint8) if format.offset_bits else None,
    )


def dequantize(blocks: NDArray[Any]) -> NDArray[np.float32]:
    """Convert blocks [..., rows, blocks per row] to float32 [..., rows, columns]; same errors as `weight_of`."""
    kind = type_of(blocks)
    if kind is None:
        raise QuantizationError(f"an array of {blocks.dtype} {list(blocks.shape)} contains no blocks")
    matrix = blocks.reshape(-1, blocks.shape[-1])
    values = np.empty((len(matrix), blocks.shape[-1] * kind.columns), np.float32)
    step = max(1, _CHUNK_WEIGHTS // values.shape[1])
    for first in range(0, len(matrix), step):
        values[first : first + step] = weight_of(matrix[first : first + step]).dequantize()
    return values.reshape(*blocks.shape[:-1], -1)


# The second number of a block: no number, the integer that represents 0 (zero point), or the float that code 0
# represents (minimum).
Second = Literal["none", "zero point", "least"]


@dataclass(frozen=True)
class PlainType(BlockType):
    """A one-level type: each block has a float32 scale, an optional second number, and codes as rows of bits."""

    second: Second

    def array(self, packed: Bytes, scales: NDArray[Any], second: NDArray[Any] | None = None) -> NDArray[Any]:
        """Assemble blocks [rows, blocks].

        Args:
            packed: codes as rows of bits, uint8 [rows, columns * bits / 8].
            scales: [rows, blocks], any float type.
            second: [rows, blocks], zero points or minima, depending on the type.
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
    """Return the type of blocks with codes of the given size and number.

    Args:
        bits, columns: bits per code and block size; see `WeightFormat`.
        grid: "int", or a key of `quant.formats.GRIDS`.
        second: kind of the second number.
    """
    format = {
        "none": uniform_format(bits, columns),
        "zero point": uniform_format(bits, columns, zero_points=True),
        # The type has one level: the minimum belongs to the block, so a group is a single block.
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
    name += {"none": "", "zero point": " with zero points", "least": " with minimum values"}[second]
    kind = PlainType(name, columns, first + columns * bits // 8, format, values, decode, second)
    register(kind)
    return kind


def block_of(group: int) -> int | None:
    """Return the largest block size that divides a group of `group` columns; None if no block size does."""
    return next((size for size in reversed(BLOCKS) if group % size == 0), None)

"""Quantised weights, with one description, one meaning and one bit order for all families of formats.

    value[r, c] = scale[r, c // group] * multiplier[r, c // block] * grid[code[r, c]]
                  - offset_scale[r, c // group] * offset[r, c // block]

Codes are small unsigned integers that index a grid of values. A grid with steps of one is uniform quantisation; any
other grid is non-linear (NF4, IQ4_NL, MXFP4). Scales are floats. If `group_size` is larger than `block_size`, there are
two levels: the blocks of a group share its floats, and each block has integers of a few bits: a multiplier and, if
values are not centred on zero, an offset (the minima of k-quants; a zero point is an offset whose scale is the block's
scale). If a format has no multipliers, they count as 1; if it has no offsets, they count as 0.

Codes, multipliers and offsets are stored in rows of bits: number i of b bits occupies the bits [i * b, (i + 1) * b) of
its row, lowest bit first, and each row is padded to a whole byte. With 2, 4 and 8 bits, this is the order of ONNX's
packed integers.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.common.cores import allowed_processors

# A block or group size that means all columns of a row.
ROW = 0
CODE_BITS = (2, 3, 4, 5, 6, 8)
BLOCKS = (16, 32, 64, 128, 256)
_BLOCK_UNIT = 16
# Numbers of bits that a block's integers may have; 0 = the block has no such integers.
MULTIPLIER_BITS = OFFSET_BITS = (0, 2, 3, 4, 5, 6, 8)
# Types of scales.
FLOAT_TYPES = ("float16", "bfloat16", "float32")
# Rows without blocks are padded to a multiple of this many columns.
_WHOLE = 16
# Number of weights that are packed or dequantised together, small enough to stay in a core's cache.
_CHUNK_WEIGHTS = 1 << 16
# `grid_unit` scales a grid so that its largest magnitude, as a signed byte, lies between these two numbers.
_LARGEST_BYTE, _SMALLEST_REACH = 127, 64


class QuantizationError(ValueError):
    """An invalid weight format, a matrix that cannot be quantised, or arrays that do not match their format."""


@dataclass(frozen=True)
class WeightFormat:
    """The storage format of a quantised matrix [rows, columns].

    Attributes:
        bits: bits of a code: 2, 3, 4, 5, 6 or 8.
        block_size: number of columns that share a multiplier and an offset: a multiple of 16 up to 256, or ROW.
        group_size: number of columns that share a scale (and an offset scale): the block size, a multiple of it, or
            ROW.
        multiplier_bits: bits of a block's multiplier; 0 = none.
        signed: True if 2 ** (multiplier_bits - 1) is added to multipliers for storage, so that multipliers are centred
            on zero.
        offset_bits: bits of a block's offset; 0 = none.

    Raises:
        QuantizationError: no kernel supports the given value.
    """

    bits: int
    block_size: int
    group_size: int
    multiplier_bits: int = 0
    signed: bool = False
    offset_bits: int = 0

    def __post_init__(self) -> None:
        for name, value, known in (
            ("bits", self.bits, CODE_BITS),
            ("multiplier_bits", self.multiplier_bits, MULTIPLIER_BITS),
            ("offset_bits", self.offset_bits, OFFSET_BITS),
        ):
            if value not in known:
                raise QuantizationError(f"{name} is {value}, expected one of {', '.join(map(str, known))}")
        if self.block_size != ROW and self.block_size not in range(_BLOCK_UNIT, BLOCKS[-1] + 1, _BLOCK_UNIT):
            raise QuantizationError(
                f"block_size is {self.block_size}, expected a multiple of {_BLOCK_UNIT} up to {BLOCKS[-1]}, "
                f"or {ROW} for a whole row"
            )
        whole = self.block_size and self.group_size > 0 and self.group_size % self.block_size == 0
        if self.group_size != ROW and not whole:
            raise QuantizationError(
                f"group_size is {self.group_size}, expected a multiple of block_size {self.block_size}, or {ROW} for a "
                f"whole row"
            )
        if self.group_size != self.block_size and not self.multiplier_bits:
            raise QuantizationError(
                f"blocks of {self.block_size} in groups of {self.group_size} need multipliers, but multiplier_bits is 0"
            )

    def __str__(self) -> str:
        """Return a description such as "4 bits by 32, multipliers of 6 bits, groups of 256"."""
        parts = [f"{self.bits} bits by {self.block_size or 'row'}"]
        if self.multiplier_bits:
            parts.append(f"multipliers of {self.multiplier_bits} bits, groups of {self.group_size or 'a row'}")
        if self.offset_bits:
            parts.append(f"offsets of {self.offset_bits} bits")
        return ", ".join(parts)

    @property
    def multiplier_zero(self) -> int:
        """The stored integer that represents a multiplier of 0."""
        return 1 << (self.multiplier_bits - 1) if self.signed else 0

    def padded(self, columns: int) -> int:
        """Return the number of columns including padding, which extends rows to whole groups."""
        unit = self.group_size or self.block_size or _WHOLE
        return -(-columns // unit) * unit

    def blocks(self, columns: int) -> int:
        """Return the number of blocks in a row."""
        return self.padded(columns) // self.block_size if self.block_size else 1

    def groups(self, columns: int) -> int:
        """Return the number of groups in a row."""
        return self.padded(columns) // self.group_size if self.group_size else 1

    def bits_per_weight(self, columns: int, scale_bits: int = 16, *, floats_per_group: int | None = None) -> float:
        """Return the average bits per weight of a row, including scales and padding. The grid is not counted.

        Args:
            floats_per_group: number of floats that a group stores; None = a scale, and an offset scale if there are
                offsets.
        """
        floats = (2 if self.offset_bits else 1) if floats_per_group is None else floats_per_group
        blocks = self.blocks(columns)
        integers = 8 * sum(packed_bytes(blocks, bits) for bits in (self.multiplier_bits, self.offset_bits))
        return float(self.bits * self.padded(columns) + floats * self.groups(columns) * scale_bits + integers) / columns


def uniform_format(bits: int, block_size: int, *, zero_points: bool = False) -> WeightFormat:
    """Return a one-level format with one scale (and, if `zero_points`, one `bits`-bit integer) per block or ROW."""
    return WeightFormat(bits, block_size, block_size, offset_bits=bits if zero_points else 0)


def uniform_grid(bits: int, *, centred: bool = True) -> NDArray[np.float32]:
    """Return the integers of `bits` bits, float32 [2 ** bits]: around zero as in symmetric formats, or from 0 up."""
    return np.arange(1 << bits, dtype=np.float32) - np.float32((1 << (bits - 1)) * centred)


@dataclass(frozen=True)
class QuantizedWeight:
    """A quantised matrix [rows, columns], in the form that quantisation methods produce, files store and devices read.

    Attributes:
        format: the bit widths of the codes, multipliers and offsets, and the sizes of blocks and groups.
        rows, columns: numbers of outputs and inputs of the linear layer.
        data: codes, uint8 [rows, padded columns * bits / 8], packed as rows of bits. The padding is never read.
        grid: float32 [2 ** bits], the value of each code.
        scales: float32 [rows, groups].
        multipliers: int16 [rows, blocks], or None.
        offset_scales: float32 [rows, groups], or None. Zero points are offsets whose scales are `scales`.
        offsets: uint8 [rows, blocks], or None.

    Raises:
        QuantizationError: an array has the wrong type or shape, or contains numbers that do not fit in the format's
            bits.
    """

    format: WeightFormat
    rows: int
    columns: int
    data: NDArray[np.uint8]
    grid: NDArray[np.float32]
    scales: NDArray[np.float32]
    multipliers: NDArray[np.int16] | None = None
    offset_scales: NDArray[np.float32] | None = None
    offsets: NDArray[np.uint8] | None = None

    def __post_init__(self) -> None:
        format, columns = self.format, self.columns
        if self.rows < 1 or columns < 1:
            raise QuantizationError(f"the weight is {self.rows} x {columns}, expected at least one row and one column")
        groups, blocks = (self.rows, format.groups(columns)), (self.rows, format.blocks(columns))
        _check("data", self.data, (self.rows, format.padded(columns) * format.bits // 8), "B")
        _check("grid", self.grid, (1 << format.bits,), "f")
        _check("scales", self.scales, groups, "f")
        for name, wanted, shape, kind in (
            ("multipliers", format.multiplier_bits, blocks, "h"),
            ("offset_scales", format.offset_bits, groups, "f"),
            ("offsets", format.offset_bits, blocks, "B"),
        ):
            array = getattr(self, name)
            if (array is None) == bool(wanted):
                raise QuantizationError(
                    f"{name} is {'absent' if wanted else 'given'}, which does not match the format {format}"
                )
            if array is not None:
                _check(name, array, shape, kind)
        if self.multipliers is not None:
            low = -format.multiplier_zero
            _check_range("multipliers", self.multipliers, low, low + (1 << format.multiplier_bits) - 1)
        if self.offsets is not None:
            _check_range("offsets", self.offsets, 0, (1 << format.offset_bits) - 1)

    @classmethod
    def from_codes(
        cls, format: WeightFormat, codes: NDArray[Any], grid: NDArray[np.float32], scales: NDArray[np.float32],
        multipliers: NDArray[np.int16] | None = None, offset_scales: NDArray[np.float32] | None = None,
        offsets: NDArray[np.uint8] | None = None, columns: int | None = None,
    ) -> QuantizedWeight:  # fmt: skip
        """Pack codes [rows, columns], which are integers below 2 ** bits. The padding of rows becomes 0.

        Args:
            columns: number of columns of the matrix, if the codes include padding.
        """
        if codes.ndim != 2 or 0 in codes.shape or codes.dtype.kind not in "iu":
            raise QuantizationError(f"codes are {codes.dtype} {list(codes.shape)}, expected integers [rows, columns]")
        _check_range("codes", codes, 0, (1 << format.bits) - 1)
        rows, width = codes.shape
        columns = width if columns is None else columns
        data = np.empty((rows, format.padded(columns) * format.bits // 8), np.uint8)

        def pack(part: slice) -> None:
            padded = codes[part]
            if format.padded(columns) > width:
                padded = np.zeros((len(padded), format.padded(columns)), np.uint8)
                padded[:, :width] = codes[part]
            data[part] = pack_bits(padded, format.bits)

        _by_rows(pack, rows, columns)
        return cls(format, rows, columns, data, grid, scales, multipliers, offset_scales, offsets)

    @classmethod
    def from_packed(
        cls, format: WeightFormat, rows: int, columns: int, data: NDArray[Any], grid: NDArray[Any],
        scales: NDArray[Any], multipliers: NDArray[Any] | None, offset_scales: NDArray[Any] | None,
        offsets: NDArray[Any] | None,
    ) -> QuantizedWeight:  # fmt: skip
        """Build a weight from constants as models store them: floats of any type, and packed multipliers and offsets.

        `WeightFormat.multiplier_zero` has been added to the stored multipliers.

        Raises:
            QuantizationError: an array has the wrong type or shape.
        """
        groups, blocks = format.groups(columns), format.blocks(columns)
        integers = [(rows, packed_bytes(blocks, bits)) for bits in (format.multiplier_bits, format.offset_bits)]
        for name, array, shape, kinds in (
            ("codes", data, (rows, format.padded(columns) * format.bits // 8), "u1"),
            ("grid", grid, (1 << format.bits,), "float"),
            ("scales", scales, (rows, groups), "float"),
            ("multipliers", multipliers, integers[0] if format.multiplier_bits else None, "u1"),
            ("offset_scales", offset_scales, (rows, groups) if format.offset_bits else None, "float"),
            ("offsets", offsets, integers[1] if format.offset_bits else None, "u1"),
        ):
            if (array is None) != (shape is None):
                state = "absent" if array is None else "given"
                raise QuantizationError(f"{name} is {state}, which does not match the format {format}")
            if array is None:
                continue
            is_right = array.dtype == np.uint8 if kinds == "u1" else array.dtype.name in FLOAT_TYPES
            if array.shape != shape or not is_right:
                raise QuantizationError(
                    f"{name} is {array.dtype} {list(array.shape)}, expected "
                    f"{'uint8' if kinds == 'u1' else ' or '.join(FLOAT_TYPES)} {list(shape or ())}"
                )

        def floats(array: NDArray[Any] | None) -> Any:
            return None if array is None else np.ascontiguousarray(array, np.float32)

        if multipliers is not None:
            stored = unpack_bits(multipliers, format.multiplier_bits, blocks)
            multipliers = stored.astype(np.int16) - np.int16(format.multiplier_zero)
        if offsets is not None:
            offsets = unpack_bits(offsets, format.offset_bits, blocks)
        return cls(
            format, rows, columns, data, floats(grid), floats(scales), multipliers, floats(offset_scales), offsets
        )

    @property
    def codes(self) -> NDArray[np.uint8]:
        """The unpacked codes, uint8 [rows, columns]."""
        return unpack_bits(self.data, self.format.bits, self.columns)

    def dequantize(self) -> NDArray[np.float32]:
        """Return the weights as float32 [rows, columns], computed in parallel on all processors."""
        values = np.empty((self.rows, self.columns), np.float32)

        def fill(part: slice) -> None:
            values[part] = self.dequantize_rows(part)

        _by_rows(fill, self.rows, self.columns)
        return values

    def dequantise(self) -> NDArray[np.float32]:
        """Call `dequantize`, the current name of this method."""
        warnings.warn("QuantizedWeight.dequantise is now QuantizedWeight.dequantize", DeprecationWarning, stacklevel=2)
        return self.dequantize()

    def dequantize_rows(self, rows: Any, dtype: Any = np.float32) -> NDArray[Any]:
        """Return some rows [.., columns]: (scale * multiplier) * grid[code] - offset scale * offset, in this order.

        Args:
            rows: index of the rows, such as a slice or an array of integers.
            dtype: type of the arithmetic.
        """
        format = self.format
        values = _grid_values(self.data[rows], format.bits, format.padded(self.columns), self.grid.astype(dtype))

        def per_block(factors: NDArray[Any], integers: NDArray[Any] | None) -> NDArray[Any]:
            found: NDArray[Any] = factors[rows].astype(dtype)
            if integers is not None:
                found = repeated(found, integers.shape[1]) * integers[rows].astype(dtype)
            return found

        _combine(np.multiply, values, per_block(self.scales, self.multipliers))
        if self.offset_scales is not None and self.offsets is not None:
            _combine(np.subtract, values, per_block(self.offset_scales, self.offsets))
        result: NDArray[Any] = values[:, : self.columns]
        return result

    @property
    def half_scales(self) -> bool:
        """True if float16 holds all scales exactly, so that they can be stored in 16 bits."""
        return all(_fits_half(array) for array in (self.scales, self.offset_scales) if array is not None)

    @property
    def bits_per_weight(self) -> float:
        """The average bits per stored weight, including scales and padding."""
        floats = 1 if self.offset_scales is None or self.offset_scales is self.scales else 2
        scale_bits = 16 if self.half_scales else 32
        return self.format.bits_per_weight(self.columns, scale_bits, floats_per_group=floats)


def _by_rows(work: Callable[[slice], None], rows: int, columns: int) -> None:
    """Call work(rows) for all rows in parallel, in slices that fit in a core's cache."""
    step = max(1, _CHUNK_WEIGHTS // columns)
    with ThreadPoolExecutor(len(allowed_processors())) as pool:
        for _ in pool.map(work, [slice(first, min(first + step, rows)) for first in range(0, rows, step)]):
            pass


def _fits_half(values: NDArray[np.float32]) -> bool:
    with np.errstate(over="ignore"):
        return bool(np.array_equal(values.astype(np.float16).astype(np.float32), values))


def _check(name: str, array: NDArray[Any], shape: tuple[int, ...], kind: str) -> None:
    if array.shape != shape or array.dtype.char != kind:
        raise QuantizationError(f"{name} is {array.dtype} {list(array.shape)}, expected {np.dtype(kind)} {list(shape)}")


def _check_range(name: str, array: NDArray[Any], low: int, high: int) -> None:
    if array.size and (array.min() < low or array.max() > high):
        raise QuantizationError(f"{name} range from {array.min()} to {array.max()}, expected {low} to {high}")


def num_blocks(columns: int, block_size: int) -> int:
    """Return the number of blocks in a row. The last block may be padded."""
    return -(-columns // block_size)


def packed_bytes(count: int, bits: int) -> int:
    """Return the number of bytes of a row of `count` packed numbers."""
    return -(-count * bits // 8)


def pack_bits(numbers: NDArray[Any], bits: int) -> NDArray[np.uint8]:
    """Pack unsigned integers below 2 ** bits [..., count] into rows of bits, uint8 [..., ceil(count * bits / 8)]."""
    array = np.ascontiguousarray(numbers, np.uint8)
    if 8 % bits == 0 and array.shape[-1] * bits % 8 == 0:
        per_byte = 8 // bits
        if sys.byteorder == "little" and bits < 8:  # a word holds the codes of one byte, and its low byte collects them
            words = array.view(f"u{per_byte}")
            merged = words.copy()
            for index in range(1, per_byte):
                merged |= words >> np.array((8 - bits) * index, words.dtype)
            return merged.astype(np.uint8)
        packed = array[..., ::per_byte].copy()
        for index in range(1, per_byte):
            packed |= array[..., index::per_byte] << np.uint8(bits * index)
        return packed
    if array.shape[-1] % 8 or sys.byteorder != "little":
        single = np.unpackbits(array[..., None], axis=-1, count=bits, bitorder="little")
        return np.packbits(single.reshape(*array.shape[:-1], -1), axis=-1, bitorder="little")
    words = array.view(np.uint64)
    for lane in (8, 16, 32):  # two neighbouring numbers become one number of twice the bits
        width = bits * lane // 8
        low = np.uint64(sum(((1 << width) - 1) << shift for shift in range(0, 64, 2 * lane)))
        words = words & low | words >> np.uint64(lane - width) & low << np.uint64(width)
    return words.view(np.uint8).reshape(*words.shape, 8)[..., :bits].reshape(*array.shape[:-1], -1)


def unpack_bits(packed: NDArray[np.uint8], bits: int, count: int) -> NDArray[np.uint8]:
    """Unpack the first `count` numbers of each row of bits, uint8 [..., count]."""
    if bits == 8:
        return packed[..., :count]
    if 8 % bits == 0:
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        apart = (packed[..., None] >> shifts) & np.uint8((1 << bits) - 1)
        return apart.reshape(*packed.shape[:-1], -1)[..., :count]
    single = np.unpackbits(packed, axis=-1, count=count * bits, bitorder="little")
    numbers = np.packbits(single.reshape(*packed.shape[:-1], count, bits), axis=-1, bitorder="little")
    return numbers[..., 0]


def repeated(factors: NDArray[Any], columns: int) -> NDArray[Any]:
    """Expand numbers of equal blocks or groups [rows, count] to one per column [rows, columns]."""
    return factors[:, np.arange(columns) * factors.shape[1] // columns]


def grid_unit(grid: NDArray[np.float32]) -> float:
    """Return the unit in which the values of a grid are closest to integers of a signed byte."""
    reach = float(np.abs(grid).max())

    def error(unit: float) -> float:
        steps = grid.astype(np.float64) / unit
        return float(np.sum((np.rint(steps) - steps) ** 2)) * unit**2

    def preference(unit: float) -> tuple[float, bool]:
        """Prefer the smallest error, then a power of two, because scaling by a power of two is exact."""
        return error(unit), math.frexp(unit)[0] != 0.5

    return min((reach / top for top in range(_LARGEST_BYTE, _SMALLEST_REACH - 1, -1)), key=preference)


def _combine(operation: np.ufunc, values: NDArray[Any], factors: NDArray[Any]) -> None:
    """Combine values [rows, columns] in place with factors [rows, count], each for columns / count columns."""
    rows, columns = values.shape
    if columns % factors.shape[1] == 0:
        blocks = values.reshape(rows, factors.shape[1], -1)
        operation(blocks, factors[:, :, None], out=blocks)
    else:
        operation(values, repeated(factors, columns), out=values)


def _grid_values(packed: NDArray[np.uint8], bits: int, count: int, grid: NDArray[Any]) -> NDArray[Any]:
    """Return the values of packed codes [..., count], by one lookup per byte if a byte holds whole codes."""
    if 8 % bits or packed.shape[-1] * 8 != count * bits:
        return grid.take(unpack_bits(packed, bits, count))
    bytes_ = unpack_bits(np.arange(256, dtype=np.uint8)[:, None], bits, 8 // bits)
    return grid[bytes_].take(packed, axis=0, mode="clip").reshape(*packed.shape[:-1], -1)

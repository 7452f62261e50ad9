"""What a quantised weight is, whatever its family: one description, one meaning, one order of bits.

    value[r, c] = scale[r, c // group] * multiplier[r, c // block] * grid[code[r, c]]
                  - offset_scale[r, c // group] * offset[r, c // block]

Codes are small unsigned integers that choose a value of a grid. A grid that counts by ones is uniform quantisation;
any other one is non-linear (NF4, IQ4_NL, MXFP4). Scales are floats. Where `group_size` is larger than `block_size`
there are two levels: the blocks of a group share its floats and have integers of a few bits of their own, multipliers
and, where values do not lie around zero, offsets (the minima of k-quants; zero points are offsets whose scale is the
block's). What a format has not is 1 (multipliers) or 0 (offsets).

Codes, multipliers and offsets are stored in rows of bits: number i of b bits has the bits [i * b, (i + 1) * b) of its
row, the lowest bit first, and a row ends with a whole byte. With 2, 4 and 8 bits that is the order of ONNX's packed
integers.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from .ir import FormWeight

# As a block or a group: all columns of a row.
ROW = 0
CODE_BITS = (2, 3, 4, 5, 6, 8)
BLOCKS = (16, 32, 64, 128, 256)
# Bits of the integers of blocks; 0 = there are none.
MULTIPLIER_BITS = OFFSET_BITS = (0, 2, 3, 4, 5, 6, 8)
# Types of scales.
FLOAT_TYPES = ("float16", "bfloat16", "float32")
# Rows of codes are filled up to a multiple of this many columns.
_WHOLE = 16
# The largest value of a grid as a byte, of which the unit is found between these.
_LARGEST_BYTE, _SMALLEST_REACH = 127, 64


class WeightFormatError(ValueError):
    """A form of weights that there is not, or arrays that do not fit one; the message names the values."""


@dataclass(frozen=True)
class WeightFormat:
    """The form of a matrix [rows, columns].

    Attributes:
        bits: of a code: 2, 3, 4, 5, 6 or 8.
        block_size: columns that share a multiplier and an offset: 16, 32, 64, 128, 256, or ROW.
        group_size: columns that share a scale (and an offset scale): the block size, a larger number of columns, or
            ROW.
        multiplier_bits: of a block's multiplier; 0 = none.
        signed: multipliers are stored plus 2 ** (multiplier_bits - 1), and lie around zero.
        offset_bits: of a block's offset; 0 = none.

    Raises:
        WeightFormatError: a value that no kernel reads.
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
            ("block_size", self.block_size, (*BLOCKS, ROW)),
            ("multiplier_bits", self.multiplier_bits, MULTIPLIER_BITS),
            ("offset_bits", self.offset_bits, OFFSET_BITS),
        ):
            if value not in known:
                raise WeightFormatError(f"{name} is {value}, expected one of {', '.join(map(str, known))}")
        whole = self.block_size and self.group_size > 0 and self.group_size % self.block_size == 0
        if self.group_size != ROW and not whole:
            raise WeightFormatError(
                f"group_size is {self.group_size}, expected a multiple of block_size {self.block_size}, or {ROW}: a row"
            )
        if self.group_size != self.block_size and not self.multiplier_bits:
            raise WeightFormatError(
                f"blocks of {self.block_size} in groups of {self.group_size} need multipliers of their own"
            )

    def __str__(self) -> str:
        """Such as "4 bits by 32, multipliers of 6 bits, groups of 256"."""
        parts = [f"{self.bits} bits by {self.block_size or 'row'}"]
        if self.multiplier_bits:
            parts.append(f"multipliers of {self.multiplier_bits} bits, groups of {self.group_size or 'a row'}")
        if self.offset_bits:
            parts.append(f"offsets of {self.offset_bits} bits")
        return ", ".join(parts)

    @property
    def multiplier_zero(self) -> int:
        """What is stored for a multiplier of 0."""
        return 1 << (self.multiplier_bits - 1) if self.signed else 0

    def padded(self, columns: int) -> int:
        """Columns that a row is filled up to: whole groups."""
        unit = self.group_size or self.block_size or _WHOLE
        return -(-columns // unit) * unit

    def blocks(self, columns: int) -> int:
        """Blocks of a row."""
        return self.padded(columns) // self.block_size if self.block_size else 1

    def groups(self, columns: int) -> int:
        """Groups of a row."""
        return self.padded(columns) // self.group_size if self.group_size else 1

    def bits_per_weight(self, columns: int, scale_bits: int = 16, *, floats_per_group: int | None = None) -> float:
        """Bits that a weight takes in such a row, scales and what fills it up included; the grid is not counted.

        Args:
            floats_per_group: None = a scale, and an offset scale where there are offsets.
        """
        floats = (2 if self.offset_bits else 1) if floats_per_group is None else floats_per_group
        blocks = self.blocks(columns)
        integers = 8 * sum(packed_bytes(blocks, bits) for bits in (self.multiplier_bits, self.offset_bits))
        return float(self.bits * self.padded(columns) + floats * self.groups(columns) * scale_bits + integers) / columns


@dataclass(frozen=True)
class WeightArrays:
    """What a weight is made of; see `dequantized`.

    Attributes:
        data: uint8 [rows, padded columns * bits / 8], codes as rows of bits.
        grid: float32 [2 ** bits]. scales, offset_scales: float32 [rows, groups]. multipliers: int16 [rows, blocks],
            offsets: uint8 [rows, blocks]. None = there are none.
    """

    form: WeightFormat
    rows: int
    columns: int
    data: NDArray[np.uint8]
    grid: NDArray[np.float32]
    scales: NDArray[np.float32]
    multipliers: NDArray[np.int16] | None
    offset_scales: NDArray[np.float32] | None
    offsets: NDArray[np.uint8] | None

    def dequantized(self, dtype: Any = np.float32, rows: Any = slice(None)) -> NDArray[Any]:
        """Some rows [.., columns]: (scale * multiplier) * grid[code] - offset scale * offset, in this order.

        Args:
            dtype: of the arithmetic.
        """
        values = _grid_values(self.data[rows], self.form.bits, self.form.padded(self.columns), self.grid.astype(dtype))

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


def from_stored(
    form: WeightFormat, rows: int, columns: int, data: NDArray[Any], grid: NDArray[Any], scales: NDArray[Any],
    multipliers: NDArray[Any] | None, offset_scales: NDArray[Any] | None, offsets: NDArray[Any] | None,
) -> WeightArrays:  # fmt: skip
    """Constants as they are stored: multipliers and offsets as rows of bits, multipliers plus their zero.

    Raises:
        WeightFormatError: an array has another type or shape.
    """
    groups, blocks = form.groups(columns), form.blocks(columns)
    integers = (rows, packed_bytes(blocks, form.multiplier_bits)), (rows, packed_bytes(blocks, form.offset_bits))
    for name, array, shape, kinds in (
        ("codes", data, (rows, form.padded(columns) * form.bits // 8), "u1"),
        ("grid", grid, (1 << form.bits,), "float"),
        ("scales", scales, (rows, groups), "float"),
        ("multipliers", multipliers, integers[0] if form.multiplier_bits else None, "u1"),
        ("offset_scales", offset_scales, (rows, groups) if form.offset_bits else None, "float"),
        ("offsets", offsets, integers[1] if form.offset_bits else None, "u1"),
    ):
        if (array is None) != (shape is None):
            raise WeightFormatError(f"{name} is {'absent' if array is None else 'given'}, which {form} does not expect")
        if array is None:
            continue
        is_right = array.dtype == np.uint8 if kinds == "u1" else array.dtype.name in FLOAT_TYPES
        if array.shape != shape or not is_right:
            raise WeightFormatError(
                f"{name} is {array.dtype} {list(array.shape)}, expected "
                f"{'uint8' if kinds == 'u1' else ' or '.join(FLOAT_TYPES)} {list(shape or ())}"
            )

    def floats(array: NDArray[Any] | None) -> Any:
        return None if array is None else np.ascontiguousarray(array, np.float32)

    if multipliers is not None:
        stored = unpack_bits(multipliers, form.multiplier_bits, blocks)
        multipliers = stored.astype(np.int16) - np.int16(form.multiplier_zero)
    if offsets is not None:
        offsets = unpack_bits(offsets, form.offset_bits, blocks)
    return WeightArrays(
        form, rows, columns, data, floats(grid), floats(scales), multipliers, floats(offset_scales), offsets
    )


def stored_weight(weight: FormWeight, array: Callable[[str], NDArray[Any]]) -> WeightArrays:
    """What an op names, from its constants: `array` gives them by their names.

    Raises:
        WeightFormatError: an array has another type or shape.
    """
    names = (weight.data, weight.scales, weight.multipliers, weight.offset_scales, weight.offsets)
    data, scales, multipliers, offset_scales, offsets = (array(name) if name else None for name in names)
    grid = array(weight.grid) if weight.grid else np.array(weight.values, np.float32)
    assert data is not None and scales is not None
    if weight.high_first:
        rows = (weight.rows, weight.form.padded(weight.columns) * weight.form.bits // 8)
        wanted = weight.rows * weight.form.groups(weight.columns)
        if data.size != rows[0] * rows[1] or data.dtype != np.uint8 or scales.size != wanted:
            raise WeightFormatError(
                f"codes are {data.dtype} {list(data.shape)}, scales {list(scales.shape)}, expected uint8 of "
                f"{rows[0] * rows[1]} bytes, and {wanted} scales"
            )
        data, scales = data.reshape(rows), scales.reshape(weight.rows, -1)
        data = data >> np.uint8(4) | data << np.uint8(4)
    return from_stored(
        weight.form, weight.rows, weight.columns, data, grid, scales, multipliers, offset_scales, offsets
    )


def packed_bytes(count: int, bits: int) -> int:
    """Bytes of a row of so many numbers."""
    return -(-count * bits // 8)


def pack_bits(numbers: NDArray[Any], bits: int) -> NDArray[np.uint8]:
    """Unsigned integers below 2 ** bits [..., count] to rows of bits, uint8 [..., ceil(count * bits / 8)]."""
    array = np.ascontiguousarray(numbers, np.uint8)
    if 8 % bits == 0 and array.shape[-1] * bits % 8 == 0:
        per_byte = 8 // bits
        if sys.byteorder == "little" and bits < 8:  # a word has the codes of a byte, and its lowest one takes all in
            words = array.view(f"u{per_byte}")
            merged = words.copy()
            for place in range(1, per_byte):
                merged |= words >> np.array((8 - bits) * place, words.dtype)
            return merged.astype(np.uint8)
        packed = array[..., ::per_byte].copy()
        for place in range(1, per_byte):
            packed |= array[..., place::per_byte] << np.uint8(bits * place)
        return packed
    if array.shape[-1] % 8 or sys.byteorder != "little":
        single = np.unpackbits(array[..., None], axis=-1, count=bits, bitorder="little")
        return np.packbits(single.reshape(*array.shape[:-1], -1), axis=-1, bitorder="little")
    words = array.view(np.uint64)
    for lane in (8, 16, 32):  # two neighbours become one number of twice the bits
        width = bits * lane // 8
        low = np.uint64(sum(((1 << width) - 1) << place for place in range(0, 64, 2 * lane)))
        words = words & low | words >> np.uint64(lane - width) & low << np.uint64(width)
    return words.view(np.uint8).reshape(*words.shape, 8)[..., :bits].reshape(*array.shape[:-1], -1)


def unpack_bits(packed: NDArray[np.uint8], bits: int, count: int) -> NDArray[np.uint8]:
    """Rows of bits to their first `count` numbers, uint8 [..., count]."""
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
    """Numbers of blocks or groups [rows, count] per column [rows, columns]: each stands for as many columns."""
    return factors[:, np.arange(columns) * factors.shape[1] // columns]


def grid_unit(grid: NDArray[np.float32]) -> float:
    """The unit in which the values of a grid are nearest to whole numbers of a signed byte."""
    reach = float(np.abs(grid).max())

    def error(unit: float) -> float:
        steps = grid.astype(np.float64) / unit
        return float(np.sum((np.rint(steps) - steps) ** 2)) * unit**2

    def preference(unit: float) -> tuple[float, bool]:
        """Of units that fit equally well, a power of two changes no number."""
        return error(unit), math.frexp(unit)[0] != 0.5

    return min((reach / top for top in range(_LARGEST_BYTE, _SMALLEST_REACH - 1, -1)), key=preference)


def _combine(operation: np.ufunc, values: NDArray[Any], factors: NDArray[Any]) -> None:
    """values [rows, columns] with factors [rows, count], each of which stands for as many columns, in place."""
    rows, columns = values.shape
    if columns % factors.shape[1] == 0:
        blocks = values.reshape(rows, factors.shape[1], -1)
        operation(blocks, factors[:, :, None], out=blocks)
    else:
        operation(values, repeated(factors, columns), out=values)


def _grid_values(packed: NDArray[np.uint8], bits: int, count: int, grid: NDArray[Any]) -> NDArray[Any]:
    """What packed codes stand for [..., count]: where bytes hold whole codes, one look gives all of a byte."""
    if 8 % bits or packed.shape[-1] * 8 != count * bits:
        return grid.take(unpack_bits(packed, bits, count))
    bytes_ = unpack_bits(np.arange(256, dtype=np.uint8)[:, None], bits, 8 // bits)
    return grid[bytes_].take(packed, axis=0, mode="clip").reshape(*packed.shape[:-1], -1)

"""The layout of quantised weights for kernels: the arrays that weights become, and the C++ type that reads the arrays.

All formats are expressed by one formula: value = (code's number - zero point) * factor - minimum. The parts of the
formula are derived from the numbers and not from the name of a format. Floats are stored in the fewest bytes that
represent them exactly. Numbers of blocks and numbers of groups are stored separately if this is smaller: as integers of
a byte, or two in a byte, per block, and as floats per group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ..ir import BlockWeight, Constants
from ..weights import QuantizedWeight, grid_unit, unpack_bits

CHUNK = 32
"""The number of columns that a lane processes together."""
# A shift that maps every column to the first number of a row.
_ROW_SHIFT = 30
_TABLE = 16
_HALF = CHUNK // 2
# C++ types of floats, the narrowest first. Powers of two are stored as exponents instead of floats.
_FLOATS: tuple[tuple[str, Any], ...] = (
    ("float8_bits", ml_dtypes.float8_e4m3fn), ("half_bits", np.float16), ("bfloat_bits", ml_dtypes.bfloat16),
)  # fmt: skip
_SAMPLE = 4096


class UnsupportedWeight(ValueError):
    """A weight format that no kernel supports. The message names the format."""


@dataclass(frozen=True)
class BlockReader:
    """The template arguments with which a kernel is compiled.

    Attributes:
        bits: bits of a code.
        halves: 2 if the halves of a chunk have separate numbers; otherwise 1.
        grid: True if codes are indices into a table of values.
        factor: C++ type of the factors; see weights.cuh.
        offset: C++ type of the zero points or minima; see weights.cuh.
    """

    bits: int
    halves: int = 1
    grid: bool = False
    factor: str = "Single<half_bits>"
    offset: str = "Constant"

    @property
    def name(self) -> str:
        """The C++ type of the reader."""
        return f"BlockReader<{self.bits}, {self.halves}, {str(self.grid).lower()}, {self.factor}, {self.offset}>"

    @property
    def has_minimum(self) -> bool:
        """True if a number is subtracted after multiplication by the factors."""
        return self.offset.startswith("Minimum")

    @property
    def words(self) -> tuple[int, int]:
        """The number of 32-bit words of a chunk in each of the two memory planes."""
        first = 4 if self.bits >= 4 else 2
        return first, self.bits - first


@dataclass
class Numbers:
    """Numbers of blocks of columns, [rows, count].

    Attributes:
        array: the numbers.
        columns: number of columns that share a number: a power of two, or 0 for a whole row.
        kind: C++ type of a number.
    """

    array: NDArray[Any]
    columns: int
    kind: str

    def laid(self, chunks: int, unit: int) -> tuple[NDArray[Any], int]:
        """Return the array in its memory layout, and the shift from the index of `unit` columns to their number's."""
        if not self.columns:
            return np.ascontiguousarray(self.array), _ROW_SHIFT
        count = -(-chunks * CHUNK // self.columns)
        array = self.array[:, :count]
        if array.shape[1] < count:
            array = np.pad(array, ((0, 0), (0, count - array.shape[1])))
        return np.ascontiguousarray(array), (self.columns // unit).bit_length() - 1


# --- weights ---------------------------------------------------------------------------------------------------------

# The reader of a matrix; the codes of the matrix, uint8 [rows, bytes], as rows of bits; and the other fields of
# `BlockMatrix`. The fields in ADDRESSES are arrays that are still to be copied.
Layout = tuple[BlockReader, NDArray[np.uint8], dict[str, Any]]
ADDRESSES = ("scales", "multipliers", "offset_scales", "offsets")


def lay_out(weight: BlockWeight, constants: Constants) -> Layout:
    """Convert a quantised weight to the layout that kernels read.

    Raises:
        UnsupportedWeight: if the grid does not fit in a table.
        QuantizationError: if an array has the wrong type or shape.
    """
    return _uniform(weight, constants) if weight.is_uniform else _general(weight, constants)


def _uniform(weight: BlockWeight, constants: Constants) -> Layout:
    """Convert a weight in onnxruntime's block format. Experts form one matrix, with each expert's rows together."""
    rows, size = max(weight.experts, 1) * weight.rows, weight.block_size
    blocks = -(-weight.columns // size)
    scales = constants.array(weight.scales).reshape(rows, -1)
    factor = _floats(scales, size if scales.shape[1] == blocks else 0)
    zero, points = 1 << (weight.bits - 1), None
    if weight.offsets:
        stored = constants.array(weight.offsets).reshape(rows, -1)
        whole = unpack_bits(stored, weight.bits, blocks) if stored.dtype == np.uint8 else stored
        points = _points(whole, size, zero)
    codes = constants.array(weight.data).reshape(rows, -1)
    return _arrays(weight.bits, weight.columns, codes, (factor, None), (points, None), "Point", zero=zero)


def _general(weight: BlockWeight, constants: Constants) -> Layout:
    """Convert a weight of any format."""
    stored = weight.load(constants.array)
    format, zero = stored.format, first_of_uniform(stored.grid)
    table = None if zero is not None else stored.grid
    if table is not None:
        check_grid(table)
    if format.offset_bits and zero is not None and not format.multiplier_bits and _is_in_scales(stored):
        assert stored.offsets is not None
        factor, points = (
            _floats(stored.scales, format.block_size),
            _points(stored.offsets, format.block_size, zero, zero),
        )
        levels: Any = ((factor, None), (points, None), "Point")
    else:
        factors = _levels(stored.scales, stored.multipliers, format.group_size, format.block_size)
        minima: tuple[Numbers | None, Numbers | None] = None, None
        if stored.offset_scales is not None:
            minima = _levels(stored.offset_scales, stored.offsets, format.group_size, format.block_size)
        if minima[0] is not None and zero:  # the codes do not start at 0, so the minimum includes their zero point
            minima = _with_zero(stored, zero)
            factors = (_floats(_per_block(stored.scales, stored.multipliers), format.block_size), None)
        levels = (factors, minima, "Minimum")
    return _arrays(format.bits, weight.columns, stored.data, *levels, zero=zero or 0.0, table=table)


def first_of_uniform(grid: NDArray[np.float32]) -> float | None:
    """Return the code (possibly out of range) that means 0 in a grid of consecutive numbers; None for other grids."""
    first = np.float32(grid[0])
    return -float(first) if np.array_equal(grid, np.arange(len(grid), dtype=np.float32) + first) else None


def check_grid(grid: NDArray[np.float32]) -> None:
    """Raise UnsupportedWeight unless a grid has consecutive numbers or fits in a table."""
    if first_of_uniform(grid) is None and (len(grid) > _TABLE or not np.all(np.isfinite(grid)) or not np.any(grid)):
        raise UnsupportedWeight(f"weights with a grid of {len(grid)} numbers that are not consecutive")


# --- numbers ---------------------------------------------------------------------------------------------------------


def _floats(array: NDArray[Any], columns: int) -> Numbers:
    """Return floats per `columns` columns, in the narrowest type that represents all of them exactly."""
    array, columns = _by_powers(array, columns)
    if array.dtype != np.float16 and array.dtype.name != "bfloat16":
        array = array.astype(np.float32, copy=False)
    exponents = _exponents(array)
    if exponents is not None:
        return Numbers(exponents, columns, "exponent_bits")
    for kind, dtype in _FLOATS:
        if array.dtype == dtype or (_holds(dtype, array.ravel()[:_SAMPLE]) and _holds(dtype, array)):
            return Numbers(array.astype(dtype, copy=False), columns, kind)
    return Numbers(array.astype(np.float32, copy=False), columns, "float")


def _holds(dtype: Any, array: NDArray[Any]) -> bool:
    with np.errstate(over="ignore", invalid="ignore"):
        return np.array_equal(array.astype(dtype).astype(np.float32), array.astype(np.float32))


def _exponents(array: NDArray[Any]) -> NDArray[np.uint8] | None:
    """Return the float32 exponents of powers of two; None unless all are normal float32 powers of two."""
    for part in (array.ravel()[:_SAMPLE], array):
        bits = part.astype(np.float32).view(np.uint32)
        exponents = bits >> 23
        if np.any(bits & 0x7FFFFF) or np.any((exponents == 0) | (exponents >= 255)):  # a sign bit makes it 256 or more
            return None
    return exponents.astype(np.uint8)


def _by_powers(array: NDArray[Any], columns: int) -> tuple[NDArray[Any], int]:
    """Return numbers per power of two of columns, repeated if necessary, and the number of columns of each."""
    if array.shape[1] == 1 or not columns:
        return array[:, :1], 0
    size = columns & -columns
    return (array if size == columns else np.repeat(array, columns // size, axis=1)), size


def _points(points: NDArray[Any], columns: int, default: float | None = None, more: float = 0.0) -> Numbers | None:
    """Return zero points plus `more`, or None if all equal the default. Integers that fit in a byte stay bytes."""
    if more or points.dtype != np.uint8:
        points = points.astype(np.float32) + np.float32(more)
    if np.all(points == default):
        return None
    if points.dtype != np.uint8 and np.all((points == np.rint(points)) & (points >= 0) & (points <= 255)):
        points = points.astype(np.uint8)
    if points.dtype != np.uint8:
        return _floats(points, columns)
    return Numbers(*_by_powers(points, columns), "unsigned char")


def _per_block(floats: NDArray[np.float32], integers: NDArray[Any] | None) -> NDArray[np.float32]:
    """Multiply floats of groups by the integers of their blocks, if there are any."""
    if integers is None:
        return floats
    count = integers.shape[1]
    return floats[:, np.arange(count) * floats.shape[1] // count] * integers.astype(np.float32)


def _levels(
    floats: NDArray[np.float32], integers: NDArray[Any] | None, group: int, block: int
) -> tuple[Numbers, Numbers | None]:
    """Return floats per group and integers per block, or only one level if groups are no larger than blocks."""
    if integers is None:
        return _floats(floats, block), None
    repeated, size = _by_powers(integers, block)
    wide, group_size = _by_powers(floats, group)
    if size == 0 or (group_size and group_size <= size):
        return _floats(_per_block(floats, integers), block), None
    signed = bool(np.any(repeated < 0))
    kind = "signed char" if signed else "unsigned char"
    return _floats(wide, group_size), Numbers(repeated.astype(np.int8 if signed else np.uint8), size, kind)


def _is_in_scales(stored: QuantizedWeight) -> bool:
    assert stored.offset_scales is not None
    return np.array_equal(stored.offset_scales, stored.scales)


def _with_zero(stored: QuantizedWeight, zero: float) -> tuple[Numbers, None]:
    """Return minima per block that include the zero point."""
    assert stored.offset_scales is not None
    factors = _per_block(stored.scales, stored.multipliers)
    minima = _per_block(stored.offset_scales, stored.offsets)
    return _floats(minima + factors * np.float32(zero), stored.format.block_size), None


# --- arrays ----------------------------------------------------------------------------------------------------------

_Levels = tuple[Numbers | None, Numbers | None]
_NAMES = (("scales", "multipliers"), ("offset_scales", "offsets"))


def _arrays(
    bits: int, columns: int, codes: NDArray[np.uint8], factors: _Levels, offsets: _Levels, kind: str, *,
    zero: float, table: NDArray[np.float32] | None = None,
) -> Layout:  # fmt: skip
    """Return all arrays in their memory layout.

    Args:
        bits: bits of a code.
        columns: number of columns of the weight.
        codes: the codes.
        factors: the factors.
        offsets: the zero points or minima.
        kind: the kind of the offsets, if there are any: "Point" or "Minimum".
        zero: zero point of all codes.
        table: values of the codes; None for integers.
    """
    chunks = -(-columns // CHUNK)
    if table is None and offsets[0] is None and not _leaves_bytes(bits, zero):
        offsets, kind = (_points(np.full((len(codes), 1), zero, np.float32), 0), None), "Point"
    numbers = [one for one in (*factors, *offsets) if one is not None]
    halves = 2 if any(one.columns == _HALF for one in numbers) else 1
    factors, offsets = _share_bytes(factors, offsets)
    arrays: dict[str, NDArray[Any]] = {}
    fields: dict[str, Any] = {"chunks": chunks, "zero": zero, "unit": 1.0}
    for names, levels in zip(_NAMES, (factors, offsets), strict=True):
        for name, one in zip(names, levels, strict=True):
            count, shift = 0, 0
            if one is not None and one.kind != "high_nibble":  # high nibbles are read with the factors
                # The halves of a chunk have separate numbers, except for numbers of groups.
                is_group = levels[1] is not None
                arrays[name], shift = one.laid(chunks, CHUNK if is_group and one is levels[0] else CHUNK // halves)
                count = arrays[name].shape[1]
                if is_group and one is levels[1] and halves == 2:  # both numbers of a chunk are read together
                    count, shift = count // 2, 0
            single = name.removesuffix("s")
            fields |= {f"{single}_count": count, f"{single}_shift": shift}
    if table is not None:
        unit = grid_unit(table)
        fields |= {"unit": unit, "grid": np.resize(table, _TABLE)}
        fields["table"] = np.rint(fields["grid"] / np.float32(unit)).astype(np.int8).view(np.int32)
    offset = "Constant" if offsets[0] is None else f"{kind}<{_spelled(offsets, kind)}>"
    reader = BlockReader(bits, halves, table is not None, _spelled(factors), offset)
    return reader, codes, fields | arrays


def _leaves_bytes(bits: int, zero: float) -> bool:
    """Return True if codes minus this zero point fit in int8."""
    return zero == int(zero) and (1 << bits) - 1 - 127 <= zero <= 128


def _share_bytes(factors: _Levels, offsets: _Levels) -> tuple[_Levels, _Levels]:
    """Pack two integers of a block into one byte, if both are below 16."""
    (scale, multiplier), (offset_scale, offset) = factors, offsets
    if multiplier is None or offset is None or multiplier.columns != offset.columns:
        return factors, offsets
    kinds = {multiplier.kind, offset.kind}
    if kinds != {"unsigned char"} or max(multiplier.array.max(), offset.array.max()) > 15:
        return factors, offsets
    both = multiplier.array | offset.array << np.uint8(4)
    low, high = (Numbers(both, offset.columns, f"{name}_nibble") for name in ("low", "high"))
    return (scale, low), (offset_scale, high)


def _spelled(levels: _Levels, kind: str = "") -> str:
    scale, integer = levels
    assert scale is not None
    if integer is not None and integer.kind == "high_nibble":
        return f"Beside<{scale.kind}>"
    if integer is not None:
        return f"Double<{scale.kind}, {integer.kind}>"
    return scale.kind if kind == "Point" else f"Single<{scale.kind}>"

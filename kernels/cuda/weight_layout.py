"""Weights of small integers as kernels read them: which arrays they become, and the C++ type of their reader.

All formats are one, value = (code's number - zero point) * factor - minimum, whose parts are found in the numbers and
not in what a format is called. Floats take the fewest bytes that hold them exactly. Numbers of blocks and groups stay
apart where that is smaller: integers of a byte, or two in a byte, per block, floats per group.
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
"""Columns that a lane takes at once."""
# A shift that leads to the first number of a row, whatever the column.
_ROW_SHIFT = 30
_TABLE = 16
_HALF = CHUNK // 2
# C++ types of floats, the narrowest first; powers of two are narrower still.
_FLOATS: tuple[tuple[str, Any], ...] = (
    ("float8_bits", ml_dtypes.float8_e4m3fn), ("half_bits", np.float16), ("bfloat_bits", ml_dtypes.bfloat16),
)  # fmt: skip
_SAMPLE = 4096


class UnsupportedWeight(ValueError):
    """A weight format that no kernel reads; the message names it."""


@dataclass(frozen=True)
class BlockReader:
    """What a kernel is compiled for.

    Attributes:
        bits: of a code. halves: 2 if halves of a chunk have numbers of their own.
        grid: codes choose values of a table.
        factor, offset: C++ types of the numbers of blocks; see weights.cuh.
    """

    bits: int
    halves: int = 1
    grid: bool = False
    factor: str = "Single<half_bits>"
    offset: str = "Constant"

    @property
    def name(self) -> str:
        """C++ type of the reader."""
        return f"BlockReader<{self.bits}, {self.halves}, {str(self.grid).lower()}, {self.factor}, {self.offset}>"

    @property
    def has_minimum(self) -> bool:
        """Whether a number is subtracted from the products with factors."""
        return self.offset.startswith("Minimum")

    @property
    def words(self) -> tuple[int, int]:
        """32-bit words that a chunk takes in the two planes of memory."""
        first = 4 if self.bits >= 4 else 2
        return first, self.bits - first


@dataclass
class Numbers:
    """Numbers of blocks of columns, [rows, count].

    Attributes:
        columns: that share one; a power of two, or 0: all of a row.
        kind: C++ type of a number.
    """

    array: NDArray[Any]
    columns: int
    kind: str

    def laid(self, chunks: int, unit: int) -> tuple[NDArray[Any], int]:
        """As they lie in memory, for every group of so many columns that kernels ask for; and the shift."""
        if not self.columns:
            return np.ascontiguousarray(self.array), _ROW_SHIFT
        count = -(-chunks * CHUNK // self.columns)
        array = self.array[:, :count]
        if array.shape[1] < count:
            array = np.pad(array, ((0, 0), (0, count - array.shape[1])))
        return np.ascontiguousarray(array), (self.columns // unit).bit_length() - 1


# --- weights ---------------------------------------------------------------------------------------------------------

# The reader of a matrix, its codes, uint8 [rows, bytes], as rows of bits, and the other fields of `BlockMatrix`, those
# of ADDRESSES as arrays that are to be copied.
Layout = tuple[BlockReader, NDArray[np.uint8], dict[str, Any]]
ADDRESSES = ("scales", "multipliers", "offset_scales", "offsets")


def lay_out(weight: BlockWeight, constants: Constants) -> Layout:
    """A quantised weight as kernels read it.

    Raises:
        UnsupportedWeight: no table holds its grid. QuantizationError: an array has another type or shape.
    """
    return _uniform(weight, constants) if weight.is_uniform else _general(weight, constants)


def _uniform(weight: BlockWeight, constants: Constants) -> Layout:
    """A weight of onnxruntime's blocks; that of experts as one matrix, an expert's rows after another's."""
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
    """A weight of any format."""
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
        if minima[0] is not None and zero:  # codes that do not count from 0 on: their zero point is part of the minimum
            minima = _with_zero(stored, zero)
            factors = (_floats(_per_block(stored.scales, stored.multipliers), format.block_size), None)
        levels = (factors, minima, "Minimum")
    return _arrays(format.bits, weight.columns, stored.data, *levels, zero=zero or 0.0, table=table)


def first_of_uniform(grid: NDArray[np.float32]) -> float | None:
    """The code (perhaps none that there is) that stands for 0 in a grid that counts by ones; None for other grids."""
    first = np.float32(grid[0])
    return -float(first) if np.array_equal(grid, np.arange(len(grid), dtype=np.float32) + first) else None


def check_grid(grid: NDArray[np.float32]) -> None:
    """Raise UnsupportedWeight unless a grid counts by ones or fits in a table."""
    if first_of_uniform(grid) is None and (len(grid) > _TABLE or not np.all(np.isfinite(grid)) or not np.any(grid)):
        raise UnsupportedWeight(f"weights with a grid of {len(grid)} numbers that do not count by ones")


# --- numbers ---------------------------------------------------------------------------------------------------------


def _floats(array: NDArray[Any], columns: int) -> Numbers:
    """Floats per so many columns, in the narrowest type that holds them all exactly."""
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
    """The exponents of powers of two as float32 has them, if all are normal numbers of it."""
    for part in (array.ravel()[:_SAMPLE], array):
        bits = part.astype(np.float32).view(np.uint32)
        exponents = bits >> 23
        if np.any(bits & 0x7FFFFF) or np.any((exponents == 0) | (exponents >= 255)):  # signs are above the exponent
            return None
    return exponents.astype(np.uint8)


def _by_powers(array: NDArray[Any], columns: int) -> tuple[NDArray[Any], int]:
    """Numbers per a power of two of columns: others are written several times."""
    if array.shape[1] == 1 or not columns:
        return array[:, :1], 0
    size = columns & -columns
    return (array if size == columns else np.repeat(array, columns // size, axis=1)), size


def _points(points: NDArray[Any], columns: int, default: float | None = None, more: float = 0.0) -> Numbers | None:
    """Zero points, and what is added to them; None where all are the default one. Integers of a byte stay such."""
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
    """Floats of groups times integers of their blocks, where there are any."""
    if integers is None:
        return floats
    count = integers.shape[1]
    return floats[:, np.arange(count) * floats.shape[1] // count] * integers.astype(np.float32)


def _levels(
    floats: NDArray[np.float32], integers: NDArray[Any] | None, group: int, block: int
) -> tuple[Numbers, Numbers | None]:
    """Floats per group and integers per block; one level where groups are no larger than blocks."""
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
    """Minima per block that hold the zero point too."""
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
    """Everything as it lies in memory.

    Args:
        kind: "Point" or "Minimum": what the offsets are, if there are any.
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
            if one is not None and one.kind != "high_nibble":  # those are read with the factors
                # The halves of a chunk have numbers of their own, but for those of groups.
                is_group = levels[1] is not None
                arrays[name], shift = one.laid(chunks, CHUNK if is_group and one is levels[0] else CHUNK // halves)
                count = arrays[name].shape[1]
                if is_group and one is levels[1] and halves == 2:  # both of a chunk are read together
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
    """Whether codes less this zero point are bytes with a sign."""
    return zero == int(zero) and (1 << bits) - 1 - 127 <= zero <= 128


def _share_bytes(factors: _Levels, offsets: _Levels) -> tuple[_Levels, _Levels]:
    """Two integers of a block in one byte, where both are below 16."""
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

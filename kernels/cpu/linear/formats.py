"""Quantised weights of any format (see `kernels.weights`), packed into the records that the kernels read.

The layout depends on the numbers of a weight, not on the name of its format. A grid of consecutive integers becomes
integers with a zero point. Any other grid becomes a table of bytes, in the unit that brings its values closest to whole
numbers. Float scales per row multiply the results. Float scales per group stay floats in the records, and integer
factors per block stay integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.common.host_memory import Arena, new_array

from ... import weight_layout
from ...checks import FormatError
from ...weight_layout import BlockMatrix, FactorType, RecordLayout
from ...weights import ROW, QuantizedWeight, grid_unit, repeated
from ..program.calls import program_of
from ..program.thread_pool import Threads
from .packing import NANOSECONDS_PER_WEIGHT, codes_call, write_factors
from .unpacking import GRID_ENTRIES, GRID_TABLE

# Block sizes of formats with one scale per row: if the scale multiplies the results, and if every block repeats the
# scale.
_ROW_BLOCK, _REPEATED_BLOCK = 64, 128
# Group size of formats that have one group per row. The group's floats are repeated in every record.
_GROUP = 256
_TABLE_ZERO = 128
_EXPONENT_BIAS = 127


@dataclass(frozen=True)
class _Grid:
    """The values that codes represent: integers minus `zero`, or table entries in a unit.

    Attributes:
        unit: value of a 1 in the table.
        zero: code that represents 0; None if codes are looked up.
        values: float32 [16], in multiples of the unit.
        table: uint8 [16], the nearest whole numbers + 128.
    """

    unit: float
    zero: int | None
    values: NDArray[np.float32]
    table: NDArray[np.uint8]

    @property
    def lookup(self) -> NDArray[np.uint8] | None:
        """The lookup table that kernels read (see `unpacking`); None if codes are integers minus `zero`."""
        if self.zero is not None:
            return None
        memory = np.zeros(GRID_TABLE + GRID_ENTRIES, np.uint8)
        memory[:GRID_TABLE].view(np.float32)[:] = self.values
        memory[GRID_TABLE:] = self.table
        return memory


def grid_of(grid: NDArray[np.float32]) -> _Grid:
    """Convert a grid [2 ** bits] to the form that kernels read, in the unit that brings it closest to integers.

    Raises:
        FormatError: the grid is not uniform, and has too many values, an infinite value or only zeros.
    """
    empty = np.zeros(GRID_ENTRIES, np.float32)
    zero = -float(grid[0])
    if np.array_equal(grid, np.arange(len(grid), dtype=np.float32) - np.float32(zero)) and zero == int(zero) >= 0:
        return _Grid(1.0, int(zero), empty, empty.astype(np.uint8))
    reach = float(np.abs(grid).max())
    if len(grid) > GRID_ENTRIES or not np.isfinite(reach) or reach == 0:
        raise FormatError(
            f"the grid has {len(grid)} values up to {reach}, but kernels support at most {GRID_ENTRIES} finite values"
        )
    unit = grid_unit(grid)
    values = np.resize((grid.astype(np.float64) / unit).astype(np.float32), GRID_ENTRIES)
    return _Grid(unit, None, values, (np.rint(values) + _TABLE_ZERO).astype(np.uint8))


@dataclass(frozen=True)
class _Laid:
    """A record layout, and the arrays [rows, count] that its records hold, in the dtype in which they are stored."""

    layout: RecordLayout
    scales: NDArray[Any] | None = None
    offsets: NDArray[Any] | None = None
    group_scales: NDArray[Any] | None = None
    group_offsets: NDArray[Any] | None = None
    row_scales: NDArray[np.float32] | None = None


def pack_weight(weight: QuantizedWeight, *, threads: Threads | None = None, arena: Arena | None = None) -> BlockMatrix:
    """Pack a weight for matmuls and look-ups.

    Raises:
        FormatError: no kernel reads the weight's grid or offsets.
    """
    grid = grid_of(weight.grid)
    laid = _laid_out(weight, grid)
    layout, n, k = laid.layout, weight.rows, weight.columns
    data = new_array(arena, (weight_layout.num_tiles(n), weight_layout.num_records(k, layout), layout.nbytes), np.uint8)
    blocks = -(-k // layout.block_size)
    wanted = blocks * layout.block_size * layout.bits // 8
    codes = weight.data[:, :wanted]
    if codes.shape[1] < wanted:
        codes = np.pad(codes, ((0, 0), (0, wanted - codes.shape[1])))
    call = codes_call(np.ascontiguousarray(codes), layout, data, blocks)
    (threads or Threads(1)).run(program_of([[call]]), nanoseconds=n * k * NANOSECONDS_PER_WEIGHT)
    _write(laid, data)
    row_scales = laid.row_scales
    if grid.unit != 1:
        row_scales = (np.ones(n, np.float32) if row_scales is None else row_scales) * np.float32(grid.unit)
    return BlockMatrix(n, k, layout, data, row_scales, grid.lookup)


def record_layout(weight: QuantizedWeight) -> RecordLayout:
    """Return the layout that `pack_weight` uses for a weight. Raises the same errors, and needs no kernel."""
    return _laid_out(weight, grid_of(weight.grid)).layout


def _write(laid: _Laid, data: NDArray[np.uint8]) -> None:
    layout, scales, offsets = laid.layout, laid.scales, laid.offsets
    if layout.offsets == "nibbles":
        assert scales is not None and offsets is not None
        scales, offsets = scales | offsets << np.uint8(4), None
    for offset, count, array in (
        (layout.scales, layout.blocks, scales),
        (layout.points, layout.blocks, offsets),
        (layout.group_scales, 1, laid.group_scales),
        (layout.group_scales + layout.group_bytes, 1, laid.group_offsets),
    ):
        if array is not None:
            write_factors(data, offset, count, array)


def _laid_out(weight: QuantizedWeight, grid: _Grid) -> _Laid:
    format = weight.format
    if format.offset_bits and grid.zero is None:
        raise FormatError(
            f"{format} has offsets and a grid that is not uniform, but kernels support offsets only with uniform grids"
        )
    if format.multiplier_bits:
        return _two_levels(weight, grid) if format.group_size != ROW or format.offset_bits else _by_rows(weight, grid)
    if format.block_size == ROW and not format.offset_bits and _is_centred(format.bits, grid):
        layout = RecordLayout(format.bits, _ROW_BLOCK, "none", grid=grid.zero is None)
        return _Laid(layout, row_scales=np.ascontiguousarray(weight.scales[:, 0]))
    return _one_level(weight, grid)


def _is_centred(bits: int, grid: _Grid) -> bool:
    """Return True if the code for 0 follows from the layout, so that blocks need no zero points."""
    return grid.zero is None or grid.zero == 1 << (bits - 1)


def _one_level(weight: QuantizedWeight, grid: _Grid) -> _Laid:
    """Lay out floats per block. A row's floats are repeated in each of its blocks."""
    format = weight.format
    block_size = format.block_size or _REPEATED_BLOCK
    blocks = -(-weight.columns // block_size)
    scales, points = weight.scales, _points(weight, grid)
    if format.block_size == ROW:
        scales = repeated(scales, blocks)
        points = None if points is None else repeated(points, blocks)
    factors: FactorType = "half" if fit_half(scales) and (points is None or fit_half(points)) else "float"
    if points is None:
        exponents: NDArray[Any] | None = _exponents(scales)
        if exponents is not None:
            layout = RecordLayout(
                format.bits, block_size, "exponent", "none", weight_layout.BYTE_BLOCKS, grid=grid.zero is None
            )
            return _Laid(layout, exponents)
        return _Laid(RecordLayout(format.bits, block_size, factors, grid=grid.zero is None), floats(scales, factors))
    whole = np.all((points == np.rint(points)) & (points >= 0) & (points <= np.iinfo(np.uint8).max))
    layout = weight_layout.layout_with(format.bits, block_size, factors, True, whole_points=bool(whole))
    offsets = points.astype(np.uint8) if layout.offsets == "unsigned" else floats(points, factors)
    return _Laid(layout, floats(scales, factors), offsets)


def _points(weight: QuantizedWeight, grid: _Grid) -> NDArray[np.float32] | None:
    """Return the zero points [rows, blocks] of a one-level format, in units of the scales; None if all are default."""
    format = weight.format
    if not format.offset_bits:
        if _is_centred(format.bits, grid):
            return None
        return np.full(weight.scales.shape, grid.zero, np.float32)
    assert weight.offset_scales is not None and weight.offsets is not None and grid.zero is not None
    offsets = weight.offsets.astype(np.float32)
    if not np.array_equal(weight.offset_scales, weight.scales):
        offsets = offsets * weight.offset_scales
        if np.any((weight.scales == 0) & (offsets != 0)):
            row, block = np.argwhere((weight.scales == 0) & (offsets != 0))[0]
            raise FormatError(
                f"row {row}, block {block} has a scale of 0 and an offset, which no zero point can represent"
            )
        offsets = np.divide(offsets, weight.scales, out=np.zeros_like(offsets), where=weight.scales != 0)
    return offsets + np.float32(grid.zero)


def _exponents(scales: NDArray[np.float32]) -> NDArray[np.uint8] | None:
    """Return the scales as E8M0 bytes, or None if one of them is not a power of two (zeros and NaNs included)."""
    mantissas, exponents = np.frexp(scales)
    bytes_ = exponents - 1 + _EXPONENT_BIAS
    if not np.all((mantissas == 0.5) & (bytes_ >= 0) & (bytes_ < np.iinfo(np.uint8).max)):
        return None
    return bytes_.astype(np.uint8)


def _by_rows(weight: QuantizedWeight, grid: _Grid) -> _Laid:
    """Lay out integers per block, and a float per row."""
    format = weight.format
    if not _is_centred(format.bits, grid):
        raise FormatError(
            f"{format} has a grid that starts at {-(grid.zero or 0)}, but matmuls need a grid centred on 0"
        )
    block_size = format.block_size or _ROW_BLOCK
    multipliers, kind = _multipliers(weight, -(-weight.columns // block_size))
    layout = RecordLayout(format.bits, block_size, kind, "none", weight_layout.BYTE_BLOCKS, grid=grid.zero is None)
    return _Laid(layout, multipliers, row_scales=np.ascontiguousarray(weight.scales[:, 0]))


def _multipliers(weight: QuantizedWeight, blocks: int) -> tuple[NDArray[Any], FactorType]:
    """Return the multipliers as bytes [rows, blocks], and their type."""
    multipliers = weight.multipliers
    assert multipliers is not None
    multipliers = repeated(multipliers, blocks) if multipliers.shape[1] == 1 else multipliers
    return (
        (multipliers.astype(np.int8), "signed") if weight.format.signed else (multipliers.astype(np.uint8), "unsigned")
    )


def _two_levels(weight: QuantizedWeight, grid: _Grid) -> _Laid:
    """Lay out integers per block and floats per group; a group is one record."""
    format = weight.format
    if (format.offset_bits and grid.zero != 0) or (not format.offset_bits and not _is_centred(format.bits, grid)):
        raise FormatError(
            f"{format} has a grid that starts at {-(grid.zero or 0)}, but matmuls need offsets and a grid that "
            "starts at 0, or a grid centred on 0 without offsets"
        )
    block_size = format.block_size or _REPEATED_BLOCK
    group_size = format.group_size or max(_GROUP, block_size)
    blocks, groups = -(-weight.columns // block_size), -(-weight.columns // group_size)
    multipliers, kind = _multipliers(weight, blocks)
    offsets: NDArray[Any] | None = None
    offset_kind: FactorType = "none"
    if weight.offsets is not None:
        offsets = repeated(weight.offsets, blocks) if weight.offsets.shape[1] == 1 else weight.offsets
        offset_kind = "unsigned"
        if max(format.multiplier_bits, format.offset_bits) <= 4 and not format.signed:
            kind = offset_kind = "nibbles"
    by_group = [
        None if array is None else repeated(array, groups) if format.group_size == ROW else array
        for array in (weight.scales, weight.offset_scales)
    ]
    group: FactorType = "half" if all(array is None or fit_half(array) for array in by_group) else "float"
    layout = RecordLayout(
        format.bits, block_size, kind, offset_kind, group_size // block_size, group, grid.zero is None
    )
    scales, offset_scales = (None if array is None else floats(array, group) for array in by_group)
    return _Laid(layout, multipliers, offsets, scales, offset_scales)


def fit_half(values: NDArray[np.float32]) -> bool:
    """Return True if float16 represents these numbers exactly."""
    with np.errstate(over="ignore"):
        return bool(np.array_equal(values.astype(np.float16).astype(np.float32), values))


def floats(values: NDArray[np.float32], kind: FactorType) -> NDArray[Any]:
    return values.astype(np.float16 if kind == "half" else np.float32)

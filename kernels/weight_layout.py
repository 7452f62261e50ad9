"""How CPU kernels lay block-quantised matrices out in memory, defined once.

Of a matrix sixteen rows (outputs) lie side by side, four columns (inputs) of each in a 32-bit lane: one vector
instruction multiplies sixteen rows by the same four activations, no sum crosses lanes, and the same bytes are a tile of
a matrix unit. All that belongs to two blocks of sixteen rows is one record, so a product reads memory in one direction.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .checks import FormatError

# Rows of a weight matrix that lie side by side in memory. A kernel keeps one output row per SIMD lane, so no sum ever
# crosses lanes: nothing is shuffled, and results do not depend on the width of the machine's vectors.
TILE_ROWS = 16
# A block above 256 could not be summed exactly in float32 (256 * 255 * 127 < 2**24), one that is no multiple of 16
# would end in the middle of the eight bytes that the INT4 kernel sums in 16-bit lanes.
BLOCK_SIZES = range(16, 257, 16)
BLOCKS_PER_RECORD = 2
# Where factors are bytes, so many fill a cache line.
BYTE_BLOCKS = 4
# Columns of four, and the bytes that sixteen rows of them take.
GROUP_COLUMNS = 4
GROUP_BYTES = TILE_ROWS * GROUP_COLUMNS
# Tiles that a kernel works on at once: a matrix is filled up to a multiple.
TILES_TOGETHER = 4


BITS = (2, 3, 4, 5, 6, 8)
# What blocks are multiplied by, as it lies in a record, and its bytes: floats; powers of two as float32 has them
# (value 2 ** (byte - 127), OCP's E8M0); integers, of which "nibbles" shares its byte with the block's offset; nothing.
FactorType = Literal["half", "float", "exponent", "signed", "unsigned", "nibbles", "none"]
FACTOR_BYTES: dict[FactorType, int] = {
    "half": 2, "float": 4, "exponent": 1, "signed": 1, "unsigned": 1, "nibbles": 1, "none": 0,
}  # fmt: skip
_LINE = 64


def check_block_format(bits: int, block_size: int) -> None:
    """Raises FormatError for what cannot be packed."""
    if bits not in BITS:
        raise FormatError(f"bits is {bits}, expected {', '.join(map(str, BITS[:-1]))} or {BITS[-1]}")
    if block_size not in BLOCK_SIZES:
        raise FormatError(f"block_size is {block_size}, expected a multiple of 16 from 16 to 256")


def planes(bits: int) -> tuple[int, ...]:
    """The powers of two that make up so many bits, the largest first; it holds the lowest bits of a number."""
    return tuple(width for width in (8, 4, 2, 1) if bits & width)


@dataclass(frozen=True)
class RecordLayout:
    """Where things lie in a record of `blocks` blocks, one after the other:

    - the integers: per block, per sub-block of 32 columns (16 if a block is no multiple of 32), per plane (see
      `planes`): bits of groups of four columns [16 rows][4 columns], a byte each. A sub-block has eight (or four) such
      groups; a plane of w bits keeps them in as many vectors of 64 bytes as they fill, v of them: group g in vector
      g % v, from bit g // v * w of each byte on. So a byte of 4-bit numbers holds column i in its low nibble and column
      i + half a sub-block in its high one. Where four groups of one bit fill half a vector, rows from 8 on have the
      high nibbles.
    - scales [blocks][16 rows], of a type `factors`.
    - zero points, or in a group offsets, [blocks][16 rows] of a type `offsets`. "nibbles" are the high ones of the
      scales' bytes.
    - of a group (a record whose blocks share floats) scales [16 rows] of the type `group`, then those of its offsets.

    The record ends with a whole cache line. With `grid`, integers choose bytes of a table of the matrix; otherwise, and
    without zero points, they lie around 2 ** (bits - 1).
    """

    bits: int
    block_size: int
    factors: FactorType = "half"
    offsets: FactorType = "none"
    blocks: int = BLOCKS_PER_RECORD
    group: FactorType = "none"
    grid: bool = False

    def __post_init__(self) -> None:
        check_block_format(self.bits, self.block_size)
        if self.grid and (self.bits > 4 or self.zero_points):
            raise FormatError(f"a grid of {self.bits} bits{' with offsets' * self.zero_points}: no kernel looks it up")

    @property
    def name(self) -> str:
        """Short, and different for every layout: part of the names of operators made for it."""
        parts = (self.factors, f"off_{self.offsets}", f"group_{self.group}", "grid" * self.grid)
        usual = ("half", "off_none", "group_none", "")
        more = "".join(f"_{part}" for part, plain in zip(parts, usual, strict=True) if part != plain)
        return f"{self.bits}_{self.block_size}_{self.blocks}{more}"

    @property
    def wide(self) -> bool:
        """Whether scales are float32."""
        return self.factors == "float"

    @property
    def zero_points(self) -> bool:
        """Whether blocks have zero points, or offsets, of their own."""
        return self.offsets != "none"

    @property
    def is_group(self) -> bool:
        """Whether the blocks of a record share floats."""
        return self.group != "none"

    @property
    def zero_point(self) -> int:
        """What stands for 0 in all blocks, as products see it; 0 where blocks have offsets of their own."""
        return 128 if self.grid else 0 if self.zero_points else 1 << (self.bits - 1)

    @property
    def byte_bits(self) -> int:
        """Bits of the bytes that products multiply: those of a grid's table, or of the integers."""
        return 8 if self.grid else self.bits

    @property
    def sub_block(self) -> int:
        """Columns that lie together: 32, or 16."""
        return 32 if self.block_size % 32 == 0 else 16

    @property
    def sub_blocks(self) -> int:
        """Sub-blocks of a block."""
        return self.block_size // self.sub_block

    @property
    def block_bytes(self) -> int:
        """Bytes of a block's integers."""
        return TILE_ROWS * self.block_size * self.bits // 8

    @property
    def factor_bytes(self) -> int:
        """Bytes of sixteen scales (or zero points)."""
        return TILE_ROWS * FACTOR_BYTES[self.factors]

    @property
    def scales(self) -> int:
        """Where the scales begin."""
        return self.blocks * self.block_bytes

    @property
    def offset_bytes(self) -> int:
        """Bytes of sixteen offsets."""
        return TILE_ROWS * FACTOR_BYTES[self.offsets]

    @property
    def points(self) -> int:
        """Where the offsets begin."""
        return self.scales + (self.offsets != "nibbles") * self.blocks * self.factor_bytes

    @property
    def group_scales(self) -> int:
        """Where the scales of a group begin."""
        return self.points + self.blocks * self.offset_bytes

    @property
    def group_bytes(self) -> int:
        """Bytes of sixteen scales of a group."""
        return TILE_ROWS * FACTOR_BYTES[self.group]

    @property
    def nbytes(self) -> int:
        """Bytes of a record, a multiple of a cache line."""
        return -(-(self.group_scales + (1 + self.zero_points) * self.group_bytes) // _LINE) * _LINE


def layout_with(bits: int, block_size: int, factors: FactorType, points: bool, *, whole_points: bool) -> RecordLayout:
    """The layout of blocks with floats; zero points that are whole lie there as bytes, but for 4 and 8 bits."""
    if points and whole_points and bits not in (4, 8):
        return RecordLayout(bits, block_size, factors, "unsigned", BYTE_BLOCKS)
    return RecordLayout(bits, block_size, factors, factors if points else "none")


@dataclass(frozen=True)
class BlockMatrix:
    """A weight matrix [rows, columns] as small integers: value = (integer - zero point) * scale, per row and block.

    Attributes:
        rows, columns: shape of the matrix (outputs N, inputs K).
        layout: of a record.
        data: uint8 [tiles, records, layout.nbytes]; rows and columns beyond the matrix have scale 0.
        row_scales: float32 [16 * tiles], what a row's results are multiplied by; None = 1.
        grid: uint8 [80], for a layout with one: float32 [16], what integers stand for, then uint8 [16], the nearest
            whole numbers + 128. Their unit is part of the scales.
    """

    rows: int
    columns: int
    layout: RecordLayout
    data: NDArray[np.uint8]
    row_scales: NDArray[np.float32] | None = None
    grid: NDArray[np.uint8] | None = None

    def __post_init__(self) -> None:
        shape = (self.tiles, self.records, self.layout.nbytes)
        if self.data.shape != shape or self.data.dtype != np.uint8 or not self.data.flags.c_contiguous:
            raise FormatError(
                f"data is {self.data.dtype} {list(self.data.shape)}, expected contiguous uint8 {list(shape)}"
            )

    @property
    def tiles(self) -> int:
        """Groups of sixteen rows, those that only fill the matrix up included."""
        return num_tiles(self.rows)

    @property
    def blocks(self) -> int:
        """Blocks per row, those that only fill a record included."""
        return self.records * self.layout.blocks

    @property
    def records(self) -> int:
        """Records per tile."""
        return num_records(self.columns, self.layout)

    @property
    def padded_columns(self) -> int:
        """Columns, those that only fill a record included."""
        return self.blocks * self.layout.block_size

    @property
    def nbytes(self) -> int:
        """Bytes that one product reads."""
        return self.data.nbytes

    @cached_property
    def scale_range(self) -> tuple[float, float]:
        """The smallest and the largest magnitude of a scale other than 0; (inf, 0) if there is none, NaN if one is."""
        magnitudes = np.abs(self._factors(self.layout.scales))
        smallest = np.min(magnitudes, where=magnitudes != 0, initial=np.inf)
        return float(smallest), float(np.max(magnitudes, initial=0.0))

    @cached_property
    def has_whole_points(self) -> bool:
        """Whether the zero points, if there are any, are integers that the weights' bits can hold."""
        if not self.layout.zero_points:
            return True
        points = self._factors(self.layout.points)
        return bool(np.all((points == np.rint(points)) & (points >= 0) & (points < 1 << self.layout.bits)))

    def _factors(self, first: int) -> NDArray[np.floating]:
        """Scales (or zero points) as they lie in the records from byte `first` on."""
        part = self.data[:, :, first : first + self.layout.blocks * self.layout.factor_bytes]
        return np.ascontiguousarray(part).view(np.float32 if self.layout.wide else np.float16)


def num_tiles(rows: int) -> int:
    """Tiles that so many rows take."""
    return -(-rows // (TILE_ROWS * TILES_TOGETHER)) * TILES_TOGETHER


def num_records(columns: int, layout: RecordLayout) -> int:
    """Records that a row of so many columns takes."""
    return -(-columns // (layout.block_size * layout.blocks))

"""The memory layout of block-quantised matrices for CPU kernels, defined once.

Sixteen rows (outputs) of a matrix lie side by side, with four columns (inputs) of each row in a 32-bit lane. Therefore
one vector instruction multiplies sixteen rows by the same four activations, no sum crosses lanes, and the same bytes
form a tile of a matrix unit. A record contains all data for two blocks of each of the sixteen rows, so a matmul reads
memory sequentially.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .checks import FormatError

# Rows of a weight matrix that lie side by side in memory. A kernel keeps one output row per SIMD lane, so no sum ever
# crosses lanes. Therefore no lanes are shuffled, and results do not depend on the machine's vector width.
TILE_ROWS = 16
# A block of more than 256 columns could not be summed exactly in float32 (256 * 255 * 127 < 2**24). A block size that
# is not a multiple of 16 would end in the middle of the eight bytes that the INT4 kernel sums in 16-bit lanes.
BLOCK_SIZES = range(16, 257, 16)
BLOCKS_PER_RECORD = 2
# Number of blocks whose factors fill a cache line if each factor is a byte.
BYTE_BLOCKS = 4
# The number of columns in a group, and the number of bytes that sixteen rows of a group occupy.
GROUP_COLUMNS = 4
GROUP_BYTES = TILE_ROWS * GROUP_COLUMNS
# Number of tiles that a kernel processes together. A matrix is padded to a multiple of this number.
TILES_TOGETHER = 4


BITS = (2, 3, 4, 5, 6, 8)
# Types of a block's factors in a record, and their sizes in bytes. "half" and "float" are floats. "exponent" is a power
# of two, stored as a float32's exponent (value 2 ** (byte - 127), OCP's E8M0). "signed", "unsigned" and "nibbles" are
# integers; a "nibbles" factor shares its byte with the block's offset.
FactorType = Literal["half", "float", "exponent", "signed", "unsigned", "nibbles", "none"]
FACTOR_BYTES: dict[FactorType, int] = {
    "half": 2, "float": 4, "exponent": 1, "signed": 1, "unsigned": 1, "nibbles": 1, "none": 0,
}  # fmt: skip
_LINE = 64


def check_block_format(bits: int, block_size: int) -> None:
    """Raise FormatError for a format that cannot be packed."""
    if bits not in BITS:
        raise FormatError(f"bits is {bits}, expected {', '.join(map(str, BITS[:-1]))} or {BITS[-1]}")
    if block_size not in BLOCK_SIZES:
        raise FormatError(f"block_size is {block_size}, expected a multiple of 16 from 16 to 256")


def planes(bits: int) -> tuple[int, ...]:
    """Return the powers of two that add up to `bits`, largest first. The largest plane holds the lowest bits."""
    return tuple(width for width in (8, 4, 2, 1) if bits & width)


@dataclass(frozen=True)
class RecordLayout:
    """The layout of a record of `blocks` blocks. The parts of a record follow one another in this order:

    - the integers, per block, per sub-block of 32 columns (16 if the block size is not a multiple of 32), per plane
      (see `planes`). A sub-block has eight (or four) groups of four columns, [16 rows][4 columns] each, with a byte per
      number. A plane of w bits packs these groups into the v vectors of 64 bytes that they fill: group g is in vector g
      % v and starts at bit g // v * w of each byte. So a byte of 4-bit numbers holds column i in its low nibble and
      column i + half a sub-block in its high nibble. Four groups of one bit fill only half a vector; in this case, the
      rows from row 8 onwards are in the high nibbles.
    - the scales [blocks][16 rows], of type `factors`.
    - the zero points (in a group: the offsets) [blocks][16 rows], of type `offsets`. "nibbles" are the high nibbles of
      the scales' bytes.
    - in a group (a record whose blocks share floats): its scales [16 rows] of type `group`, then the scales of its
      offsets.

    A record ends with a whole cache line. With `grid`, the integers index a table of bytes that belongs to the matrix.
    Without a grid or zero points, the integers are centred on 2 ** (bits - 1).
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
            raise FormatError(f"no kernel supports a grid of {self.bits} bits{' with offsets' * self.zero_points}")

    @property
    def name(self) -> str:
        """A short name that is unique to the layout. The names of the layout's operators contain this name."""
        parts = (self.factors, f"off_{self.offsets}", f"group_{self.group}", "grid" * self.grid)
        usual = ("half", "off_none", "group_none", "")
        more = "".join(f"_{part}" for part, plain in zip(parts, usual, strict=True) if part != plain)
        return f"{self.bits}_{self.block_size}_{self.blocks}{more}"

    @property
    def wide(self) -> bool:
        """True if the scales are float32."""
        return self.factors == "float"

    @property
    def zero_points(self) -> bool:
        """True if each block has a zero point or an offset."""
        return self.offsets != "none"

    @property
    def is_group(self) -> bool:
        """True if the blocks of a record share floats."""
        return self.group != "none"

    @property
    def zero_point(self) -> int:
        """The integer that represents 0 in the bytes to multiply, in every block; 0 if each block has an offset."""
        return 128 if self.grid else 0 if self.zero_points else 1 << (self.bits - 1)

    @property
    def byte_bits(self) -> int:
        """The number of bits used in the bytes to multiply: the bits of a grid's table, or the bits of the integers."""
        return 8 if self.grid else self.bits

    @property
    def sub_block(self) -> int:
        """The number of columns that lie together: 32, or 16."""
        return 32 if self.block_size % 32 == 0 else 16

    @property
    def sub_blocks(self) -> int:
        """The number of sub-blocks in a block."""
        return self.block_size // self.sub_block

    @property
    def block_bytes(self) -> int:
        """The number of bytes of a block's integers."""
        return TILE_ROWS * self.block_size * self.bits // 8

    @property
    def factor_bytes(self) -> int:
        """The number of bytes of sixteen scales."""
        return TILE_ROWS * FACTOR_BYTES[self.factors]

    @property
    def scales(self) -> int:
        """The offset of the scales in a record."""
        return self.blocks * self.block_bytes

    @property
    def offset_bytes(self) -> int:
        """The number of bytes of sixteen zero points or offsets."""
        return TILE_ROWS * FACTOR_BYTES[self.offsets]

    @property
    def points(self) -> int:
        """The offset of the zero points or offsets in a record."""
        return self.scales + (self.offsets != "nibbles") * self.blocks * self.factor_bytes

    @property
    def group_scales(self) -> int:
        """The offset of a group's scales in a record."""
        return self.points + self.blocks * self.offset_bytes

    @property
    def group_bytes(self) -> int:
        """The number of bytes of sixteen scales of a group."""
        return TILE_ROWS * FACTOR_BYTES[self.group]

    @property
    def nbytes(self) -> int:
        """The number of bytes of a record, a multiple of a cache line."""
        return -(-(self.group_scales + (1 + self.zero_points) * self.group_bytes) // _LINE) * _LINE


def layout_with(bits: int, block_size: int, factors: FactorType, points: bool, *, whole_points: bool) -> RecordLayout:
    """Return the layout of blocks with float scales. Whole zero points are stored as bytes, except with 4 or 8 bits."""
    if points and whole_points and bits not in (4, 8):
        return RecordLayout(bits, block_size, factors, "unsigned", BYTE_BLOCKS)
    return RecordLayout(bits, block_size, factors, factors if points else "none")


@dataclass(frozen=True)
class BlockMatrix:
    """A weight matrix [rows, columns] of small integers: value = (integer - zero point) * scale, per row and block.

    Attributes:
        rows, columns: shape of the matrix (outputs N, inputs K).
        layout: layout of a record.
        data: uint8 [tiles, records, layout.nbytes]. Rows and columns outside the matrix have scale 0.
        row_scales: float32 [16 * tiles], factors on the results of the rows; None = 1.
        grid: uint8 [80], for a layout with a grid: float32 [16], the value of each integer, then uint8 [16], the
            nearest whole numbers + 128. The unit of these numbers is part of the scales.
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
        """The number of groups of sixteen rows, including padding."""
        return num_tiles(self.rows)

    @property
    def blocks(self) -> int:
        """The number of blocks per row, including padding."""
        return self.records * self.layout.blocks

    @property
    def records(self) -> int:
        """The number of records per tile."""
        return num_records(self.columns, self.layout)

    @property
    def padded_columns(self) -> int:
        """The number of columns, including padding."""
        return self.blocks * self.layout.block_size

    @property
    def nbytes(self) -> int:
        """The number of bytes that one matmul reads."""
        return self.data.nbytes

    @cached_property
    def scale_range(self) -> tuple[float, float]:
        """The smallest and largest magnitude of the nonzero scales: (inf, 0) if all are zero, NaN if a scale is NaN."""
        magnitudes = np.abs(self._factors(self.layout.scales))
        smallest = np.min(magnitudes, where=magnitudes != 0, initial=np.inf)
        return float(smallest), float(np.max(magnitudes, initial=0.0))

    @cached_property
    def has_whole_points(self) -> bool:
        """True if all zero points are integers that fit in the bits of a weight, or if there are none."""
        if not self.layout.zero_points:
            return True
        points = self._factors(self.layout.points)
        return bool(np.all((points == np.rint(points)) & (points >= 0) & (points < 1 << self.layout.bits)))

    def _factors(self, first: int) -> NDArray[np.floating]:
        """Return the scales (or zero points) that start at byte `first` of the records."""
        part = self.data[:, :, first : first + self.layout.blocks * self.layout.factor_bytes]
        return np.ascontiguousarray(part).view(np.float32 if self.layout.wide else np.float16)


def num_tiles(rows: int) -> int:
    """Return the number of tiles of a matrix with `rows` rows."""
    return -(-rows // (TILE_ROWS * TILES_TOGETHER)) * TILES_TOGETHER


def num_records(columns: int, layout: RecordLayout) -> int:
    """Return the number of records of a row with `columns` columns."""
    return -(-columns // (layout.block_size * layout.blocks))

"""The packed form of a block-quantised weight matrix: what every product reads, whatever the instruction set.

Sixteen rows (outputs) lie side by side, four columns (inputs) of each in a 32-bit lane: one vector instruction
multiplies sixteen rows by the same four activations, no sum crosses lanes, and the same bytes are a tile of a matrix
unit. All that belongs to two blocks of sixteen rows is one record, so a product reads memory in one direction.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from .formats import BLOCK_SIZES, TILE_ROWS, FormatError

BLOCKS_PER_RECORD = 2
# Columns of four, and the bytes that sixteen rows of them take.
GROUP_COLUMNS = 4
GROUP_BYTES = TILE_ROWS * GROUP_COLUMNS
# Tiles that a kernel works on at once: a matrix is filled up to a multiple.
TILES_TOGETHER = 4


def check_block_format(bits: int, block_size: int) -> None:
    """Raises FormatError for what cannot be packed."""
    if bits not in (4, 8):
        raise FormatError(f"bits is {bits}, expected 4 or 8")
    if block_size not in BLOCK_SIZES:
        raise FormatError(f"block_size is {block_size}, expected a multiple of 16 from 16 to 256")


@dataclass(frozen=True)
class RecordLayout:
    """Where things lie in a record. With b blocks of a size s, the record holds, one after the other:

    - the integers: per block, per sub-block of 32 columns (16 if s is no multiple of 32), groups of four columns: 64
      bytes [16 rows][4 columns]. With 4 bits a byte holds column i of the sub-block in its low nibble and column
      i + half a sub-block in its high nibble; with 8 bits, one column.
    - scales [b][16 rows], float16, or float32 if `wide`.
    - zero points [b][16 rows] of the same type, if there are any; otherwise all are 2 ** (bits - 1).
    """

    bits: int
    block_size: int
    wide: bool
    zero_points: bool

    def __post_init__(self) -> None:
        check_block_format(self.bits, self.block_size)

    @property
    def name(self) -> str:
        """Short, and different for every layout: part of the names of operators made for it."""
        return f"{self.bits}_{self.block_size}{'_wide' * self.wide}{'_points' * self.zero_points}"

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
        return TILE_ROWS * (4 if self.wide else 2)

    @property
    def scales(self) -> int:
        """Where the scales begin."""
        return BLOCKS_PER_RECORD * self.block_bytes

    @property
    def points(self) -> int:
        """Where the zero points begin."""
        return self.scales + BLOCKS_PER_RECORD * self.factor_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of a record, a multiple of a cache line."""
        return self.points + self.zero_points * BLOCKS_PER_RECORD * self.factor_bytes


@dataclass(frozen=True)
class BlockMatrix:
    """A weight matrix [rows, columns] as small integers: value = (integer - zero point) * scale, per row and block.

    Attributes:
        rows, columns: shape of the matrix (outputs N, inputs K).
        layout: of a record.
        data: uint8 [tiles, records, layout.nbytes]; rows and columns beyond the matrix have scale 0.
    """

    rows: int
    columns: int
    layout: RecordLayout
    data: NDArray[np.uint8]

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
        return self.records * BLOCKS_PER_RECORD

    @property
    def records(self) -> int:
        """Records per tile."""
        return num_records(self.columns, self.layout.block_size)

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
        part = self.data[:, :, first : first + BLOCKS_PER_RECORD * self.layout.factor_bytes]
        return np.ascontiguousarray(part).view(np.float32 if self.layout.wide else np.float16)


def num_tiles(rows: int) -> int:
    """Tiles that so many rows take."""
    return -(-rows // (TILE_ROWS * TILES_TOGETHER)) * TILES_TOGETHER


def num_records(columns: int, block_size: int) -> int:
    """Records that a row of so many columns takes."""
    return -(-columns // (block_size * BLOCKS_PER_RECORD))


def integers(matrix: BlockMatrix) -> NDArray[np.uint8]:
    """The integers, uint8 [rows, columns]."""
    layout = matrix.layout
    part = matrix.data[:, :, : layout.scales]
    bytes_per_group_run = layout.sub_block * layout.bits // 8 // GROUP_COLUMNS
    groups = part.reshape(
        matrix.tiles, matrix.blocks * layout.sub_blocks, bytes_per_group_run, TILE_ROWS, GROUP_COLUMNS
    )
    halves = (groups & 15, groups >> 4) if layout.bits == 4 else (groups,)
    columns = np.concatenate([half.transpose(0, 3, 1, 2, 4).reshape(-1, groups.shape[1], 1, half.shape[2] * 4)
                              for half in halves], axis=2)  # fmt: skip
    return np.ascontiguousarray(columns.reshape(-1, matrix.padded_columns)[: matrix.rows, : matrix.columns])


def factors(matrix: BlockMatrix, first: int) -> NDArray[np.float32]:
    """Scales (or zero points) from byte `first` of every record on, float32 [rows, blocks]."""
    layout = matrix.layout
    part = np.ascontiguousarray(matrix.data[:, :, first : first + BLOCKS_PER_RECORD * layout.factor_bytes])
    numbers = part.view(np.float32 if layout.wide else np.float16).astype(np.float32)
    rows = numbers.reshape(matrix.tiles, matrix.blocks, TILE_ROWS).transpose(0, 2, 1)
    return np.ascontiguousarray(rows.reshape(-1, matrix.blocks)[: matrix.rows])


def dequantize_matrix(matrix: BlockMatrix) -> NDArray[np.float32]:
    """The matrix as float32 [rows, columns]."""
    layout = matrix.layout
    spread = np.repeat(np.arange(matrix.blocks), layout.block_size)[: matrix.columns]
    points = factors(matrix, layout.points)[:, spread] if layout.zero_points else np.float32(1 << (layout.bits - 1))
    values: NDArray[np.float32] = (integers(matrix).astype(np.float32) - points) * factors(matrix, layout.scales)[
        :, spread
    ]
    return values

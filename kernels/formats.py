"""Memory layouts, defined once: block-quantised matrices as products read them, and keys and values in pages.

Of a matrix sixteen rows (outputs) lie side by side, four columns (inputs) of each in a 32-bit lane: one vector
instruction multiplies sixteen rows by the same four activations, no sum crosses lanes, and the same bytes are a tile of
a matrix unit. All that belongs to two blocks of sixteen rows is one record, so a product reads memory in one direction.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Rows of a weight matrix that lie side by side in memory. A kernel keeps one output row per SIMD lane, so no sum ever
# crosses lanes: nothing is shuffled, and results do not depend on the width of the machine's vectors.
TILE_ROWS = 16
# A block above 256 could not be summed exactly in float32 (256 * 255 * 127 < 2**24), one that is no multiple of 16
# would end in the middle of the eight bytes that the INT4 kernel sums in 16-bit lanes.
BLOCK_SIZES = range(16, 257, 16)
BLOCKS_PER_RECORD = 2
# Columns of four, and the bytes that sixteen rows of them take.
GROUP_COLUMNS = 4
GROUP_BYTES = TILE_ROWS * GROUP_COLUMNS
# Tiles that a kernel works on at once: a matrix is filled up to a multiple.
TILES_TOGETHER = 4
# Tokens in a page of keys and values: two vectors of scores, one step of a product of tiles.
PAGE_TOKENS = 32


class FormatError(ValueError):
    """Arrays that do not fit the layout asked for; the message names the shapes."""


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


@dataclass(frozen=True)
class PagedLayer:
    """Keys and values of one attention layer, in pages of PAGE_TOKENS tokens.

    Attributes:
        keys: float32 or float16 [num_blocks, kv_heads, head_size, PAGE_TOKENS]. Tokens are innermost, so that the
            scores of neighbouring tokens are one vector and no sum crosses its lanes.
        values: the same type, [num_blocks, kv_heads, PAGE_TOKENS, v_head_size].

    Each block is contiguous; between blocks there may be others' memory. A token's place is its slot,
    block * PAGE_TOKENS + offset.
    """

    keys: NDArray[Any]
    values: NDArray[Any]

    def __post_init__(self) -> None:
        for name, array in (("keys", self.keys), ("values", self.values)):
            if array.ndim != 4 or array.dtype not in (np.float32, np.float16) or not array[:1].flags.c_contiguous:
                raise FormatError(
                    f"{name} must be a float32 or float16 array of 4 dimensions, contiguous block by block, "
                    f"got {array.dtype} {list(array.shape)} with strides {list(array.strides)}"
                )
        tokens = self.keys.shape[3], self.values.shape[2]
        if self.keys.shape[:2] != self.values.shape[:2] or self.keys.dtype != self.values.dtype:
            raise FormatError(
                f"keys {self.keys.dtype} {list(self.keys.shape)} and values {self.values.dtype} "
                f"{list(self.values.shape)} must agree in type, blocks and heads"
            )
        if tokens != (PAGE_TOKENS, PAGE_TOKENS):
            raise FormatError(f"pages of keys and values hold {tokens[0]} and {tokens[1]} tokens, not {PAGE_TOKENS}")

    @property
    def num_blocks(self) -> int:
        return int(self.keys.shape[0])

    @property
    def kv_heads(self) -> int:
        return int(self.keys.shape[1])

    @property
    def head_size(self) -> int:
        return int(self.keys.shape[2])

    @property
    def v_head_size(self) -> int:
        return int(self.values.shape[3])

"""The partition of operands (left panels by rows, right panels by columns, blocks along K), and micro-kernels.

The heights of left panels are as equal as possible: 197 rows in panels of at most 14 rows make 2 panels of 14 and 13
panels of 13, so that no work is wasted on rows that do not exist. Row r0 of a panel of h rows starts at word r0 * K,
word k of its rows at r0 * K + k * h.

A micro-kernel adds the products of a block of words to a tile of sums. Every sum is a chain over K in order, whatever
the tile's height and the blocks' size, so that results do not depend on the partition.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...jit.amx import add_byte_product, load_tile, store_tile
from ...jit.arguments import Arguments
from ...jit.dsl import inline
from ...jit.emit import FLOAT, FLOAT_VECTOR, INT32, INT32_VECTOR, INT64, LANES, Emitter, constant, micro_kernel
from ...jit.isa import isa
from ...jit.variants import once
from ...linear.dot import Dot, dot_for

# Prefetch distance in the right panel, which may have to be read from memory.
_PREFETCH_BYTES = 2048
# With this number of rows or fewer, reading the right panel takes longer than multiplying it. The processor prefetches
# one stream of memory by itself, and prefetch instructions would take the time of loads.
_STREAMED_ROWS = 2
WORD_BYTES = 4
VECTOR_BYTES = WORD_BYTES * LANES
TILE_SLACK_ROWS = 32
# Number of words along K that are multiplied at a time. A block of this size of a right panel fits in the first-level
# cache.
BLOCK_WORDS = 256
# Number of rows whose block of words fits in the second-level cache together with all other data.
_GROUP_ROWS = 280
# Maximum number of right panels in an item, and target number of items per thread.
_GROUP_PANELS, _ITEMS_PER_THREAD = 2, 6


@dataclass(frozen=True)
class Tiling:
    """The capacity of an instruction set's registers: `rows` times `vectors` of sums, in addition to the operands.

    If `is_tiled`, the registers are AMX tiles: the rows of a left panel are stored one after the other, words are
    padded to whole tiles, and TILE_SLACK_ROWS rows after the last row may be read.
    """

    rows: int
    vectors: int
    is_tiled: bool = False

    @property
    def columns(self) -> int:
        """The number of columns of a right panel."""
        return self.vectors * LANES

    def words(self, terms: int) -> int:
        """Return the number of words for `terms` bytes along K."""
        words = -(-terms // WORD_BYTES)
        return -(-words // LANES) * LANES if self.is_tiled else words

    def left_bytes(self, rows: int, words: int) -> int:
        """Return the number of bytes of a packed left operand."""
        return (rows + TILE_SLACK_ROWS * self.is_tiled) * words * WORD_BYTES

    def panels(self, columns: int) -> int:
        """Return the number of right panels for `columns` columns."""
        return -(-columns // self.columns)


# Two by two AMX tiles.
TILED = Tiling(32, 2, is_tiled=True)
# For 32 registers of 64 bytes (amx, vnni), 16 of 32 bytes (avx2), and 16 of 16 bytes (portable).
TILINGS = {"amx": Tiling(14, 2), "vnni": Tiling(14, 2), "avx2": Tiling(6, 1), "portable": Tiling(3, 1)}


class Grid(Arguments, kw_only=False):
    """The items of a matmul: groups of left panels times groups of right panels."""

    left_panels: int
    left_group: int
    right_panels: int
    right_group: int

    @property
    def items(self) -> int:
        """The number of items."""
        return -(-self.left_panels // self.left_group) * -(-self.right_panels // self.right_group)

    def scratch_bytes(self, tiling: Tiling) -> int:
        """Return the number of bytes for the sums of an item."""
        return self.left_group * tiling.rows * self.right_group * tiling.vectors * VECTOR_BYTES


def grid(tiling: Tiling, rows: int, right_panels: int, threads: int) -> Grid:
    """Return groups that are large enough to reuse loaded data and small enough to be shared among threads."""
    left_panels = -(-rows // tiling.rows)
    right_group = max(1, min(_GROUP_PANELS, right_panels // (threads * _ITEMS_PER_THREAD)))
    left_group = min(left_panels, _GROUP_ROWS // tiling.rows)
    if threads > 1:
        per_left = -(-right_panels // right_group)
        wanted = -(-threads * _ITEMS_PER_THREAD // per_left)
        left_group = max(1, min(left_group, -(-left_panels // wanted)))
    return Grid(left_panels, left_group, right_panels, right_group)


@inline
def first_row(panel: int, panels: int, rows: int) -> Any:
    """Return the first row of a left panel. For `panel` = `panels`, the result is the number of rows."""
    size = rows // panels
    return panel * size + min(panel, rows - size * panels)


# Operations on words: `spread` prepares a word of a left row for `add`, which multiplies it by a vector of right words
# and adds the products to sums of type `vector`.


@dataclass(frozen=True)
class Floats:
    """Words that are float32 numbers."""

    isa: str
    vector = FLOAT_VECTOR

    @property
    def name(self) -> str:
        return f"float32_{self.isa}"

    @property
    def tiling(self) -> Tiling:
        return TILINGS[self.isa]

    def spread(self, e: Emitter, address: Any) -> Any:
        return e.splat(e.load(address, FLOAT))

    def add(self, e: Emitter, sums: Any, left: Any, right: Any) -> Any:
        # Fused if the machine has fused multiply-add, else two instructions: a library call would be far too slow.
        return e.fast_multiply_add(left, right, sums)


@dataclass(frozen=True)
class Bytes:
    """Words that are four bytes along K, signed on the left and unsigned on the right. Sums are exact."""

    isa: str
    dot: Dot
    vector = INT32_VECTOR

    @property
    def name(self) -> str:
        return f"bytes_{self.isa}"

    @property
    def tiling(self) -> Tiling:
        return TILED if self.isa == "amx" else TILINGS[self.isa]

    def spread(self, e: Emitter, address: Any) -> Any:
        return e.load(address, INT32)

    def add(self, e: Emitter, sums: Any, left: Any, right: Any) -> Any:
        return self.dot.total(e, self.dot.add(e, self.dot.start(e, sums), right, left))


Kind = Floats | Bytes


@once
def floats() -> Floats:
    """Return the kind of float32 matmuls on this machine."""
    return Floats(isa())


@once
def integers() -> Bytes:
    """Return the kind of 8-bit matmuls on this machine."""
    return Bytes(isa(), dot_for(isa(), 8))


@once
def micro(kind: Kind, rows: int) -> Any:
    """Return the micro-kernel for tiles of `rows` rows.

    Its arguments are the addresses of the left and right panel's words; the number of words (at least 1); the address
    of the sums [rows][vectors]; 1 if the sums start at 0, else 0; and the bytes between left rows (for `tiled_micro`).
    """
    vectors = kind.tiling.vectors

    def emit(e: Emitter, left: Any, right: Any, words: Any, sums_at: Any, fresh: Any, stride: Any) -> None:
        b = e.builder
        addresses = [e.at(sums_at, i * VECTOR_BYTES) for i in range(rows * vectors)]
        is_fresh, none = b.icmp_signed("!=", fresh, INT64(0)), constant(kind.vector, 0)
        sums = [b.select(is_fresh, none, e.load(address, kind.vector, align=VECTOR_BYTES)) for address in addresses]
        with e.loop(words, sums) as (index, sums):
            left_at = e.at(left, b.mul(index, INT64(rows * WORD_BYTES)))
            right_at = e.at(right, b.mul(index, INT64(vectors * VECTOR_BYTES)))
            if rows > _STREAMED_ROWS:
                for v in range(vectors):
                    e.prefetch(e.at(right_at, v * VECTOR_BYTES + _PREFETCH_BYTES))
            columns = [
                e.load(e.at(right_at, v * VECTOR_BYTES), kind.vector, align=VECTOR_BYTES) for v in range(vectors)
            ]
            for m in range(rows):
                word = kind.spread(e, e.at(left_at, m * WORD_BYTES))
                for v in range(vectors):
                    sums[m * vectors + v] = kind.add(e, sums[m * vectors + v], word, columns[v])
        for value, address in zip(sums, addresses, strict=True):
            e.store(value, address, align=VECTOR_BYTES)

    return micro_kernel(emit)


@once
def tiled_micro(tile_rows: int) -> Any:
    """Return the AMX micro-kernel for bytes, for one or two tiles of rows.

    The sums never start at 0, and the number of words is a multiple of 16.
    """
    row_bytes = TILED.vectors * VECTOR_BYTES

    def emit(e: Emitter, left: Any, right: Any, words: Any, sums_at: Any, fresh: Any, stride: Any) -> None:
        b, columns = e.builder, TILED.vectors
        totals = {(m, v): m * columns + v for m in range(tile_rows) for v in range(columns)}
        below = b.mul(stride, INT64(LANES))
        lefts, rights = range(4, 4 + tile_rows), range(6, 6 + columns)
        for (m, v), tile in totals.items():
            load_tile(e, tile, e.at(sums_at, m * LANES * row_bytes + v * VECTOR_BYTES), row_bytes)
        with e.loop(b.udiv(words, INT64(LANES))) as (index, _):
            left_at = e.at(left, b.mul(index, INT64(VECTOR_BYTES)))
            right_at = e.at(right, b.mul(index, INT64(LANES * row_bytes)))
            for line in range(LANES * columns):
                e.prefetch(e.at(right_at, line * VECTOR_BYTES + _PREFETCH_BYTES))
            for v, tile in enumerate(rights):
                load_tile(e, tile, e.at(right_at, v * VECTOR_BYTES), row_bytes)
            for m, tile in enumerate(lefts):
                load_tile(e, tile, left_at if m == 0 else e.at(left_at, below), stride)
                for v, other in enumerate(rights):
                    add_byte_product(e, totals[m, v], tile, other, signed=False)
        for (m, v), tile in totals.items():
            store_tile(e, tile, e.at(sums_at, m * LANES * row_bytes + v * VECTOR_BYTES), row_bytes)

    return micro_kernel(emit)

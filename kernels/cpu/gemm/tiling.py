"""How operands are cut: panels of the left one by rows, of the right one by columns, blocks along K.

Left panels are as equal as they can be: 197 rows in panels of at most 14 are 2 of 14 and 13 of 13, so that no work is
wasted on rows that do not exist. Row r0 of a panel of h rows lies at word r0 * K, word k of its rows at r0 * K + k * h.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..emit import LANES
from ..lazy import inline

WORD_BYTES = 4
VECTOR_BYTES = WORD_BYTES * LANES
TILE_SLACK_ROWS = 32
# Words along K that are multiplied at a time: a right panel's block of them stays in the first cache.
BLOCK_WORDS = 256
# Rows whose block of words stays in the second cache beside everything else.
_GROUP_ROWS = 280
# Right panels that an item works on, at most, and items per thread that there should be.
_GROUP_PANELS, _ITEMS_PER_THREAD = 2, 6


@dataclass(frozen=True)
class Tiling:
    """What an instruction set's registers hold: `rows` times `vectors` of sums, beside the operands.

    With `is_tiled` they are AMX's: rows of a left panel lie one after the other, words are filled up to whole tiles,
    and TILE_SLACK_ROWS behind the last row may be read.
    """

    rows: int
    vectors: int
    is_tiled: bool = False

    @property
    def columns(self) -> int:
        """Columns of a right panel."""
        return self.vectors * LANES

    def words(self, terms: int) -> int:
        """Words of so many bytes along K."""
        words = -(-terms // WORD_BYTES)
        return -(-words // LANES) * LANES if self.is_tiled else words

    def left_bytes(self, rows: int, words: int) -> int:
        """What a packed left operand takes."""
        return (rows + TILE_SLACK_ROWS * self.is_tiled) * words * WORD_BYTES

    def panels(self, columns: int) -> int:
        """Right panels of so many columns."""
        return -(-columns // self.columns)


# Two by two of AMX's tiles.
TILED = Tiling(32, 2, is_tiled=True)
# 32 registers of 64 bytes; 16 of 32 bytes; 16 of 16 bytes.
TILINGS = {"amx": Tiling(14, 2), "vnni": Tiling(14, 2), "avx2": Tiling(6, 1), "portable": Tiling(3, 1)}


@dataclass(frozen=True)
class Grid:
    """The items of a product: groups of left panels times groups of right panels."""

    left_panels: int
    left_group: int
    right_panels: int
    right_group: int

    @property
    def items(self) -> int:
        """Groups times groups."""
        return -(-self.left_panels // self.left_group) * -(-self.right_panels // self.right_group)

    def scratch_bytes(self, tiling: Tiling) -> int:
        """The sums of an item."""
        return self.left_group * tiling.rows * self.right_group * tiling.vectors * VECTOR_BYTES


def grid(tiling: Tiling, rows: int, right_panels: int, threads: int) -> Grid:
    """Groups large enough to reuse what was read, small enough to share out among threads."""
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
    """The first row of a left panel; that of panel number `panels` is the number of rows."""
    size = rows // panels
    return panel * size + min(panel, rows - size * panels)

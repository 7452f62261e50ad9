"""How rows are shared out as items, and checks of operands before their addresses go into a tape."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..tape.context import Word
from ..tape.program import Items, Rows

# Numbers in one item of work where a row can be cut. It is fixed, so that no result depends on the threads.
PIECE = 4096


def pieces_of(width: int) -> int:
    """How many pieces a row is cut into."""
    return max(1, -(-width // PIECE))


def piece_items(rows: Rows) -> Items:
    """Pieces of rows as items: number row * pieces + piece."""
    return Items(rows.counted, factor=pieces_of(rows.width), grain=_grain(rows.width))


def group_items(rows: Rows, groups: int = 1) -> Items:
    """Groups of rows as items, row * groups + group; each is computed as a whole."""
    return Items(rows.counted, factor=groups, grain=_grain(rows.width // groups))


def _grain(numbers: int) -> int:
    """So many items are worth a thread's while."""
    return max(1, PIECE // max(1, numbers))


def check_rows(name: str, rows: Rows, counted: Word, width: int) -> None:
    """These rows have this width, and there is one per unit of `counted`.

    Raises:
        ValueError: they have not.
    """
    if rows.width != width or rows.counted != counted:
        raise ValueError(f"{name} is [{rows.counted.name}, {rows.width}], expected [{Word(counted).name}, {width}]")


def check_vector(name: str, vector: NDArray[Any], sizes: tuple[int, ...]) -> None:
    """A contiguous float32 vector of one of these sizes.

    Raises:
        ValueError: it is something else.
    """
    if vector.dtype != np.float32 or vector.ndim != 1 or vector.size not in sizes or not vector.flags.c_contiguous:
        wanted = " or ".join(str([size]) for size in dict.fromkeys(sizes))
        raise ValueError(f"{name} is {vector.dtype} {list(vector.shape)}, expected contiguous float32 {wanted}")


def group_size(name: str, rows: Rows, groups: int) -> int:
    """Numbers in each of the equal groups of a row.

    Raises:
        ValueError: the row cannot be cut so.
    """
    if groups < 1 or rows.width < groups or rows.width % groups:
        raise ValueError(f"{name} is [{rows.counted.name}, {rows.width}], which has no {groups} equal groups")
    return rows.width // groups

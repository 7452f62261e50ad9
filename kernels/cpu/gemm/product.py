"""The operator that multiplies packed operands; a finished tile is handed to another operator (see `finish`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from ..jit import NativeOp, native_op
from ..lazy import inline
from ..memory import store_int32, word
from ..tape.driver import call_operator
from ..tape.program import Call, Items
from ..tiles import configure_tiles, release_tiles, tile_config
from ..vector import LANES, splat_int32
from .micro import Kind, micro, tiled_micro
from .tiling import BLOCK_WORDS, TILED, VECTOR_BYTES, WORD_BYTES, first_row, grid

# Arguments of the operator; those of what finishes its tiles come after them.
LEFT, ROWS, LEFT_PANELS, LEFT_GROUP, RIGHT, RIGHT_PANELS, RIGHT_GROUP, WORDS, FINISH, TILE_CONFIG = range(10)
FINISH_ARGUMENTS = 10


def _dispatcher(kind: Kind) -> Any:
    """Calls the micro-kernel for a tile's height: a chain of inlined functions, tallest first."""
    if kind.tiling.is_tiled:
        return _tiled()
    chosen: Any = None
    for rows in range(1, kind.tiling.rows + 1):
        chosen = _either(rows, micro(kind, rows), chosen)
    return chosen


def _tiled() -> Any:
    one, two = tiled_micro(1), tiled_micro(2)
    vectors = TILED.rows * TILED.vectors

    @inline
    def chosen(height: int, operands: Any) -> None:
        sums, fresh = operands[3], operands[4]
        if fresh != 0:
            for index in range(vectors):
                store_int32(sums + index * VECTOR_BYTES, splat_int32(0))
        if height <= LANES:
            one(operands)
        else:
            two(operands)

    return chosen


def _either(rows: int, kernel: Any, other: Any) -> Any:
    if other is None:

        @inline
        def smallest(height: int, operands: Any) -> None:
            kernel(operands)

        return smallest

    @inline
    def chosen(height: int, operands: Any) -> None:
        if height == rows:
            kernel(operands)
        else:
            other(height, operands)

    return chosen


@cache
def product_op(kind: Kind) -> NativeOp:
    """Items are groups of left panels, for each group of right panels (see `tiling.Grid`)."""
    multiply = _dispatcher(kind)
    tile_rows, tile_vectors = kind.tiling.rows, kind.tiling.vectors
    tile_bytes = tile_rows * tile_vectors * VECTOR_BYTES
    right_word_bytes = tile_vectors * VECTOR_BYTES
    tile_columns, is_tiled = kind.tiling.columns, kind.tiling.is_tiled

    def product(arguments: int, context: int, begin: int, end: int, scratch: int) -> int:
        rows, left_panels = word(arguments, ROWS), word(arguments, LEFT_PANELS)
        right_panels = word(arguments, RIGHT_PANELS)
        left_group, right_group = word(arguments, LEFT_GROUP), word(arguments, RIGHT_GROUP)
        words, finish = word(arguments, WORDS), word(arguments, FINISH)
        left_groups = -(-left_panels // left_group)
        if is_tiled:
            configure_tiles(word(arguments, TILE_CONFIG))
        for item in range(begin, end):
            right_item = item // left_groups
            left_first = (item - right_item * left_groups) * left_group
            left_last = min(left_panels, left_first + left_group)
            right_first = right_item * right_group
            right_last = min(right_panels, right_first + right_group)
            for block in range(0, words, BLOCK_WORDS):
                count = min(BLOCK_WORDS, words - block)
                fresh = 1 if block == 0 else 0
                sums = scratch
                for right_panel in range(right_first, right_last):
                    right = word(arguments, RIGHT) + (right_panel * words + block) * right_word_bytes
                    for left_panel in range(left_first, left_last):
                        row = first_row(left_panel, left_panels, rows)
                        height = first_row(left_panel + 1, left_panels, rows) - row
                        skipped = block if is_tiled else block * height
                        left = word(arguments, LEFT) + (row * words + skipped) * WORD_BYTES
                        multiply(height, (left, right, count, sums, fresh, words * WORD_BYTES))
                        if block + count == words:
                            column = right_panel * tile_columns
                            call_operator(finish, arguments + 8 * FINISH_ARGUMENTS, sums, row, column, height)
                        sums += tile_bytes
        if is_tiled:
            release_tiles()
        return 0

    product.__name__ = f"product_{kind.name}"
    return native_op(product)


def product_call(
    kind: Kind,
    left: Any,
    rows: int,
    right: Any,
    right_panels: int,
    words: int,
    finish: NativeOp,
    finish_arguments: Sequence[Any],
    *,
    threads: int,
    held: Sequence[Any] = (),
) -> Call:
    """Multiply `rows` packed rows (an address or a hole) with packed columns, and finish every tile.

    Args:
        finish_arguments: what `finish` reads. held: what must live as long as the call.
    """
    cut = grid(kind.tiling, rows, right_panels, threads)
    config = tile_config() if kind.tiling.is_tiled else None
    arguments = (
        left, rows, cut.left_panels, cut.left_group, right, right_panels, cut.right_group, words, finish,
        0 if config is None else config.ctypes.data, *finish_arguments,
    )  # fmt: skip
    scratch = cut.scratch_bytes(kind.tiling)
    return Call(product_op(kind), arguments, Items(factor=cut.items), scratch, (*held, config))

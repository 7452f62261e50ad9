"""Products of many rows: long chunks of a prompt, where the time is that of the arithmetic.

Tiles of bfloat16: weights are dequantised on the way, a row's activations are rounded once (see `tile_rows`), sums are
float32 in the order of columns. Items are pairs of tiles: two of a matrix, or one each of a gate and what it gates.
Rows are taken in blocks of 128, wide matrices in spans of columns, so that a block's row tiles stay in the second-level
cache while all pairs meet them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from ..jit import NativeOp, native_op
from ..lazy import inline
from ..memory import load_first, load_float32, read_float32, store_first, word
from ..rowwise.unary import UNARY
from ..tiles import TILE_BYTES, TILE_ROW_BYTES, TILE_ROWS, configure_tiles, release_tiles
from .many_kernel import (
    CHUNK_STEPS,
    PANEL_BYTES,
    ROW_PAIRS,
    STEP_BYTES,
    STEP_TILES,
    SUMS_BYTES,
    dequantise_kernel,
    span_kernel,
    store_sums_kernel,
)
from .tile_rows import PAIR_ROWS
from .tile_weights import Weights

BLOCK_ROWS = ROW_PAIRS * PAIR_ROWS
# Columns of a span: 128 rows of them take half a megabyte.
SPAN_STEPS = 32
# Pairs whose sums wait, when columns come in spans.
_WAITING_PAIRS = 16
# Scratch: two panels, sums of a block for each waiting pair, and a place for sums that nobody wants.
_PAIR_SUMS = ROW_PAIRS * SUMS_BYTES
_SUMS = 2 * PANEL_BYTES
_NOWHERE = _SUMS + _WAITING_PAIRS * _PAIR_SUMS
SCRATCH_BYTES = _NOWHERE + SUMS_BYTES
# The table: what tiles are configured with, then zeros.
TABLE_ZEROS = 64

(
    ROWS_WORD, FIRST_WORD, FIRST, SECOND, PAIR_BYTES, STEPS, SPAN, ROWS, POWERS, OUT, OUT_STRIDE, WIDTH, BIAS,
    SECOND_BIAS, ADDEND, ADDEND_STRIDE, TABLE,
) = range(17)  # fmt: skip


def span_steps(steps: int) -> int:
    """Steps of a span: the columns shared out evenly, in whole chunks."""
    spans = -(-steps // SPAN_STEPS)
    return -(-steps // (spans * CHUNK_STEPS)) * CHUNK_STEPS


@inline
def _scaled(sums: int, unscale: float, power: float, bias: int, column: int, left: int) -> Any:
    value = load_float32(sums) * unscale * power
    return value + load_first(bias + 4 * column, left) if bias != 0 else value


def _plain_writer(unscale: Any) -> Any:
    @inline
    def write(arguments: int, row: int, sums: int, power: float, pair: int) -> None:
        """out = sums + bias + addend, for columns that exist."""
        for tile in range(2):
            column = (2 * pair + tile) * TILE_ROWS
            left = word(arguments, WIDTH) - column
            if left > 0:
                value = _scaled(sums + tile * TILE_BYTES, unscale, power, word(arguments, BIAS), column, left)
                if word(arguments, ADDEND) != 0:
                    there = word(arguments, ADDEND) + row * word(arguments, ADDEND_STRIDE)
                    value = value + load_first(there + 4 * column, left)
                store_first(word(arguments, OUT) + row * word(arguments, OUT_STRIDE) + 4 * column, value, left)

    return write


def _gated_writer(unscale: Any, activate: Any) -> Any:
    @inline
    def write(arguments: int, row: int, sums: int, power: float, pair: int) -> None:
        """out = activation(gate) * gated."""
        column = pair * TILE_ROWS
        left = word(arguments, WIDTH) - column
        gate = _scaled(sums, unscale, power, word(arguments, BIAS), column, left)
        gated = _scaled(sums + TILE_BYTES, unscale, power, word(arguments, SECOND_BIAS), column, left)
        there = word(arguments, OUT) + row * word(arguments, OUT_STRIDE)
        store_first(there + 4 * column, activate(gate, 0.0, 0.0) * gated, left)

    return write


@cache
def many_op(weights: Weights, gate: str) -> NativeOp:
    """The operator for a kind of weights: items are pairs of tiles. A gate is a key of UNARY, or ""."""
    one, two, four = (span_kernel(weights, pairs) for pairs in (1, 2, 4))
    dequantise, store_sums = dequantise_kernel(weights), store_sums_kernel()
    unscale = np.float32(weights.unscale)
    write = _gated_writer(unscale, UNARY[gate].function) if gate else _plain_writer(unscale)

    @inline
    def write_block(arguments: int, context: int, row: int, rows: int, sums: int, pair: int) -> None:
        first = word(context, word(arguments, FIRST_WORD)) + row
        powers = word(arguments, POWERS) + 4 * row
        for index in range(rows):
            tile = index // TILE_ROWS  # sums: [pair of row tiles][row tile][weight tile]
            place = sums + tile * 2 * TILE_BYTES + index % TILE_ROWS * TILE_ROW_BYTES
            write(arguments, first + index, place, read_float32(powers + 4 * index), pair)

    @inline
    def multiply_block(arguments: int, context: int, row: int, rows: int, begin: int, end: int, scratch: int) -> None:
        """Pairs [begin, end) with a block of rows, all columns."""
        all_steps, span, table = word(arguments, STEPS), word(arguments, SPAN), word(arguments, TABLE)
        row_tile = all_steps * STEP_TILES * TILE_BYTES
        row_pairs = -(-rows // PAIR_ROWS)
        block = word(arguments, ROWS) + row // TILE_ROWS * row_tile
        block_end = block + 2 * row_pairs * row_tile
        more = min(word(context, word(arguments, ROWS_WORD)) - row - rows, BLOCK_ROWS)
        following = -(-more // PAIR_ROWS) * 2 * row_tile
        out_stride = word(arguments, OUT_STRIDE)
        first_out = word(arguments, OUT) + (word(context, word(arguments, FIRST_WORD)) + row) * out_stride
        out_columns = 2 * TILE_ROW_BYTES if gate == "" else TILE_ROW_BYTES
        panel, other = scratch, scratch + PANEL_BYTES
        first = word(arguments, FIRST) + begin * word(arguments, PAIR_BYTES)
        second = word(arguments, SECOND) + begin * word(arguments, PAIR_BYTES)
        dequantise((first, second, 0, panel, 0, min(CHUNK_STEPS, all_steps)))
        previous = scratch + _NOWHERE
        waiting = -1  # the pair whose sums are complete but not written
        for step in range(0, all_steps, span):
            steps = min(span, all_steps - step)
            for pair in range(begin, end):
                place = pair - begin if span < all_steps else (pair - begin) & 1
                sums = scratch + _SUMS + place * _PAIR_SUMS
                first = word(arguments, FIRST) + pair * word(arguments, PAIR_BYTES)
                second = word(arguments, SECOND) + pair * word(arguments, PAIR_BYTES)
                next_pair, next_step = pair + 1, step
                if next_pair == end:
                    next_pair, next_step = begin, (step + steps) % all_steps
                next_first = word(arguments, FIRST) + next_pair * word(arguments, PAIR_BYTES)
                next_second = word(arguments, SECOND) + next_pair * word(arguments, PAIR_BYTES)
                is_last = step + steps == all_steps
                out = first_out + pair * out_columns
                zeros = table + TABLE_ZEROS
                # The next block's row tiles are asked for during the last pairs, results during the last span.
                ahead = ahead_end = zeros
                share = row_pairs * steps * 2 * TILE_ROW_BYTES
                left = (following + share - 1) // share - (end - pair)
                if is_last and following > 0 and left >= 0:
                    ahead = block_end + left * share
                    ahead_end = min(ahead + share, block_end + following) - 2 * TILE_ROW_BYTES
                out_end = out + rows * out_stride
                if not is_last:
                    out = out_end = zeros
                values = (
                    block + step * STEP_BYTES, row_tile, steps, row_pairs, panel, other, first, second, step,
                    next_first, next_second, next_step, all_steps - 1, sums, 1 if step == 0 else 0,
                    zeros, previous, out, out_stride, out_end, ahead, ahead_end,
                )  # fmt: skip
                if row_pairs == ROW_PAIRS:
                    four(values)
                elif row_pairs > 1:
                    two(values)
                else:
                    one(values)
                chunks = -(-steps // CHUNK_STEPS)
                if chunks & 1:
                    panel, other = other, panel
                # A short chunk has dequantised less of the next one than that needs.
                done = steps - (chunks - 1) * CHUNK_STEPS
                wanted = min(CHUNK_STEPS, all_steps - next_step)
                if done < wanted:
                    dequantise((next_first, next_second, next_step, panel, done, wanted))
                previous = sums + (row_pairs - 1) * SUMS_BYTES
                if waiting >= 0:
                    place = waiting - begin if span < all_steps else (waiting - begin) & 1
                    write_block(arguments, context, row, rows, scratch + _SUMS + place * _PAIR_SUMS, waiting)
                if is_last:
                    waiting = pair
        store_sums((previous,))
        place = waiting - begin if span < all_steps else (waiting - begin) & 1
        write_block(arguments, context, row, rows, scratch + _SUMS + place * _PAIR_SUMS, waiting)

    def many(arguments: int, context: int, begin: int, end: int, scratch: int) -> int:
        rows = word(context, word(arguments, ROWS_WORD))
        configure_tiles(word(arguments, TABLE))
        together = _WAITING_PAIRS if word(arguments, SPAN) < word(arguments, STEPS) else end - begin
        for first in range(begin, end, together):
            last = min(end, first + together)
            for row in range(0, rows, BLOCK_ROWS):
                multiply_block(arguments, context, row, min(BLOCK_ROWS, rows - row), first, last, scratch)
        release_tiles()
        return 0

    many.__name__ = f"many_{weights.name}{'_' * bool(gate)}{gate}"
    return native_op(many)

"""Matmuls with prefill numerics, for long prompts. They take as long as the arithmetic.

Products are computed in tiles of bfloat16. Weights are dequantised on the fly, the activations of a row are rounded
once (see `bfloat_tiles`), and sums are float32 in the order of columns. Float32 weights and their activations are split
into bfloat16 parts instead, and their products are as accurate as with float32 multiply-adds. If float32 weights are
bfloat16 numbers, only the activations are split.

Rows are processed in blocks of 128, and wide matrices in spans of columns, so that a block's row tiles stay in the
second-level cache while all pairs are multiplied by them. A pair is two weight tiles: two of one matrix, or one each of
a gate and the matrix that it gates. An item is a pair with all rows. For float32 weights, whose row tiles are larger
than the weights, an item is a pair with one block of rows, and the threads divide the rows: otherwise, each thread
would read all row tiles, and a part of them several times.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..jit.amx import TILE_BYTES, TILE_ROW_BYTES, TILE_ROWS, configure_tiles, release_tiles
from ..jit.arguments import Address, Arguments
from ..jit.dsl import inline
from ..jit.memory import entry, load_first, load_float32, read_float32, store_first, write_float32
from ..jit.native import NativeOp, native_op
from ..jit.variants import once
from ..jit.vector import splat_float32
from ..jit.vector_math import UNARY
from ..program.calls import Rows, row_at
from .bfloat_tiles import (
    NO_TARGET_TILES,
    PAIR_ROWS,
    PARTS,
    ROWS_SCALE,
    TILE_COLUMNS,
    RowTiles,
    SplitTarget,
    TileWeights,
    column_writer,
    power_of_results,
)
from .epilogue import TermsArguments, addend_of, scaled, with_terms
from .lora import with_adapters
from .prefill_kernel import (
    PANEL_BYTES,
    ROW_PAIRS,
    SUMS_BYTES,
    dequantise_kernel,
    span_kernel,
    step_sizes,
    store_sums_kernel,
)

BLOCK_ROWS = ROW_PAIRS * PAIR_ROWS
# Maximum bytes of a span: the columns of its steps, for a block of rows.
_SPAN_BYTES = 1 << 19
# Maximum number of pairs that are processed together, with their sums in memory, if columns are processed in spans.
WAITING_PAIRS = 16
# Scratch: two panels, the sums of a block for each of these pairs, and a panel for sums that are discarded.
_PAIR_SUMS = ROW_PAIRS * SUMS_BYTES
_SUMS = 2 * PANEL_BYTES
_NOWHERE = _SUMS + WAITING_PAIRS * _PAIR_SUMS
SCRATCH_BYTES = _NOWHERE + SUMS_BYTES
# The table holds the tile configuration, and zeros starting at this offset.
TABLE_ZEROS = 64


class PrefillArguments(Arguments):
    """Row tiles, pairs of weight tiles, and the terms that are added to their products.

    Attributes:
        pair_bytes: bytes between consecutive pairs.
        pairs: number of pairs.
        blocks, together: maximum numbers of blocks of rows and of pairs that are multiplied while both are in a cache.
        steps: number of steps along all columns.
        span: number of steps along the columns that are computed for a pair before the next pair.
        split: tiles that receive the results instead of `out`, only for operators with `splits_results`.
        table: tile configuration, then zeros; see TABLE_ZEROS.
    """

    x: RowTiles
    first: Address
    second: Address
    pair_bytes: int
    pairs: int
    blocks: int
    together: int
    steps: int
    span: int
    out: Rows
    terms: TermsArguments
    gated_terms: TermsArguments
    split: SplitTarget = NO_TARGET_TILES
    table: Address


def span_steps(steps: int, weights: TileWeights) -> int:
    """Return the number of steps of a span: the columns divided evenly, in whole chunks."""
    sizes = step_sizes(weights)
    spans = -(-steps * sizes.row_bytes * BLOCK_ROWS // TILE_ROWS // _SPAN_BYTES)
    return -(-steps // (spans * sizes.chunk)) * sizes.chunk


def _writer(unscale: Any, gate: str) -> Any:
    activate, tiles = UNARY[gate or "copy"].function, 1 if gate else 2

    @inline
    def write(arguments: PrefillArguments, context: int, row: int, sums: int, power: float, pair: int) -> None:
        """Write out = sums, or activation(gate) * gated, with the terms of each, for columns that exist."""
        terms, gated_terms = arguments.terms, arguments.gated_terms
        for tile in range(tiles):
            column = (tiles * pair + tile) * TILE_ROWS
            left = arguments.out.width - column
            if left > 0:
                value = load_float32(sums + tile * TILE_BYTES) * unscale * power
                value = scaled(value, terms.scale, column, left)
                value = with_adapters(value, terms.target, context, row, column)
                value = with_terms(value, terms.bias, addend_of(terms, row), column, left)
                if tiles == 1:
                    gated = load_float32(sums + TILE_BYTES) * unscale * power
                    gated = scaled(gated, gated_terms.scale, column, left)
                    gated = with_adapters(gated, gated_terms.target, context, row, column)
                    gated = with_terms(gated, gated_terms.bias, addend_of(gated_terms, row), column, left)
                    value = activate(value, 0.0, 0.0) * gated
                store_first(row_at(arguments.out, row) + 4 * column, value, left)

    return write


def _block_writer(write: Any) -> Any:
    """Return a function that writes the results of a block of rows and a pair."""

    @inline
    def write_block(arguments: PrefillArguments, context: int, row: int, rows: int, sums: int, pair: int) -> None:
        first = entry(context, arguments.x.first) + row
        powers = arguments.x.powers + 4 * row
        for index in range(rows):
            tile = index // TILE_ROWS  # sums: [pair of row tiles][row tile][weight tile]
            target = sums + tile * 2 * TILE_BYTES + index % TILE_ROWS * TILE_ROW_BYTES
            write(arguments, context, first + index, target, read_float32(powers + 4 * index), pair)

    return write_block


def _plain_block_writer(unscale: Any, gate: str, activation: str) -> Any:
    """Return a function that does the same for weights without scales and adapters.

    Branches that do not depend on the row are hoisted out of the loop, and a row's results are written together.
    Otherwise, writing would take longer than the products of short rows.
    """
    activate, is_gated = UNARY[gate or activation or "copy"].function, gate != ""

    @inline
    def write_block(arguments: PrefillArguments, context: int, row: int, rows: int, sums: int, pair: int) -> None:
        terms, others = arguments.terms, arguments.gated_terms if is_gated else arguments.terms
        column = pair * TILE_ROWS if is_gated else 2 * pair * TILE_ROWS
        next_column = column if is_gated else column + TILE_ROWS
        left, next_left = arguments.out.width - column, arguments.out.width - next_column
        first, powers = entry(context, arguments.x.first) + row, arguments.x.powers + 4 * row
        out, source = row_at(arguments.out, first), sums
        bias, next_bias = _bias_of(terms, column, left), _bias_of(others, next_column, next_left)
        addend, next_addend = addend_of(terms, first), addend_of(others, first)
        for index in range(rows):
            power = read_float32(powers + 4 * index)
            value = load_float32(source) * unscale * power + bias
            other = load_float32(source + TILE_BYTES) * unscale * power + next_bias
            if addend != 0:
                value = value + load_first(addend + 4 * column, left)
                addend += terms.addend.stride
            if next_addend != 0:
                other = other + load_first(next_addend + 4 * next_column, next_left)
                next_addend += others.addend.stride
            if is_gated:
                store_first(out + 4 * column, activate(value, 0.0, 0.0) * other, left)
            else:
                store_first(out + 4 * column, activate(value, 0.0, 0.0), left)
                store_first(out + 4 * next_column, activate(other, 0.0, 0.0), next_left)
            out += arguments.out.stride
            # sums: [pair of row tiles][row tile][weight tile]
            source += TILE_ROW_BYTES if (index + 1) % TILE_ROWS else TILE_BYTES + TILE_ROW_BYTES

    return write_block


def _split_block_writer(unscale: Any, activation: str) -> Any:
    """Return a function that writes activations as the row tiles of the next matmul, split into parts.

    The 32 columns of a pair are a row of a tile, so no other pass over the results is needed.
    """
    activate, store_columns = UNARY[activation].function, column_writer(PARTS)

    @inline
    def write_block(arguments: PrefillArguments, context: int, row: int, rows: int, sums: int, pair: int) -> None:
        terms, split, column = arguments.terms, arguments.split, 2 * pair * TILE_ROWS
        tiles, source = split.tiles, sums
        row_tile = tiles.columns // TILE_COLUMNS * PARTS * TILE_BYTES
        out = tiles.address + row // TILE_ROWS * row_tile + pair * PARTS * TILE_BYTES
        bias = _bias_of(terms, column, np.int64(TILE_ROWS))
        next_bias = _bias_of(terms, column + TILE_ROWS, np.int64(TILE_ROWS))
        for index in range(rows):
            power = read_float32(arguments.x.powers + 4 * (row + index))
            value = activate(load_float32(source) * unscale * power + bias, 0.0, 0.0)
            other = activate(load_float32(source + TILE_BYTES) * unscale * power + next_bias, 0.0, 0.0)
            new = power_of_results(split, power)
            if pair == 0:
                write_float32(tiles.powers + 4 * (row + index), new)
            scale = np.float32(ROWS_SCALE) / new
            store_columns(out, value * scale, other * scale)
            ends = (index + 1) % TILE_ROWS == 0
            source += TILE_BYTES + TILE_ROW_BYTES if ends else TILE_ROW_BYTES
            out += row_tile - (TILE_ROWS - 1) * TILE_ROW_BYTES if ends else TILE_ROW_BYTES

    return write_block


@inline
def _bias_of(terms: TermsArguments, column: int, left: int) -> Any:
    return load_first(terms.bias + 4 * column, left) if terms.bias != 0 else splat_float32(0.0)


@inline
def _address_of_sums(arguments: PrefillArguments, scratch: int, number: int) -> Any:
    """Return the address of a pair's sums. With spans, each pair has a buffer; otherwise two buffers alternate."""
    return scratch + _SUMS + (number if arguments.span < arguments.steps else number & 1) * _PAIR_SUMS


@inline
def _share_of_next_block(first: int, size: int, share: int, pairs_left: int) -> Any:
    """Return the part [begin, end) of the next block's row tiles to prefetch; (0, 0) before the last pairs."""
    left = (size + share - 1) // share - pairs_left
    if size <= 0 or left < 0:
        return 0, 0
    begin = first + left * share
    return begin, min(begin + share, first + size) - 2 * TILE_ROW_BYTES


def _span_multiplier(weights: TileWeights) -> Any:
    """Return a function that selects the micro-kernel by the number of rows."""
    one, two, four = (span_kernel(weights, pairs) for pairs in (1, 2, 4))
    # The products of parts take so long that up to sixteen rows, such as a query, are worth a separate kernel.
    few = span_kernel(weights, 1, single=True) if weights.row_parts > 1 else one

    @inline
    def multiply(rows: int, values: Any) -> None:
        row_pairs = -(-rows // PAIR_ROWS)
        if rows <= TILE_ROWS:
            few(values)
        elif row_pairs == ROW_PAIRS:
            four(values)
        elif row_pairs > 1:
            two(values)
        else:
            one(values)

    return multiply


def _block_multiplier(weights: TileWeights, out_columns: int, write_block: Any) -> Any:
    """Return a function that multiplies pairs of weight tiles by a block of rows, over all columns.

    Args:
        out_columns: bytes that a pair's results occupy in a row.
    """
    multiply, dequantise, store_sums = _span_multiplier(weights), dequantise_kernel(weights), store_sums_kernel()
    _, step_bytes, chunk_steps, _, step_ahead = step_sizes(weights)

    @inline
    def multiply_block(
        arguments: PrefillArguments, context: int, row: int, rows: int, begin: int, end: int, scratch: int
    ) -> None:
        all_steps, span, pair_bytes = arguments.steps, arguments.span, arguments.pair_bytes
        row_tile, row_pairs = all_steps * step_bytes, -(-rows // PAIR_ROWS)
        block = arguments.x.address + row // TILE_ROWS * row_tile
        block_end = block + 2 * row_pairs * row_tile
        more = min(entry(context, arguments.x.counted) - row - rows, BLOCK_ROWS)
        following = -(-more // PAIR_ROWS) * 2 * row_tile
        out_stride = arguments.out.stride
        first_out = row_at(arguments.out, entry(context, arguments.x.first) + row)
        zeros, panel, other = arguments.table + TABLE_ZEROS, scratch, scratch + PANEL_BYTES
        first, second = arguments.first + begin * pair_bytes, arguments.second + begin * pair_bytes
        dequantise((first, second, 0, panel, 0, min(chunk_steps, all_steps)))
        previous = scratch + _NOWHERE
        waiting = -1  # the pair whose sums are complete but not yet written
        for step in range(0, all_steps, span):
            steps = min(span, all_steps - step)
            is_last = step + steps == all_steps
            for pair in range(begin, end):
                sums = _address_of_sums(arguments, scratch, pair - begin)
                first, second = arguments.first + pair * pair_bytes, arguments.second + pair * pair_bytes
                next_pair, next_step = pair + 1, step
                if next_pair == end:
                    next_pair, next_step = begin, (step + steps) % all_steps
                next_first = arguments.first + next_pair * pair_bytes
                next_second = arguments.second + next_pair * pair_bytes
                # Results and the next block's row tiles are prefetched during the last span.
                out, out_end, ahead, ahead_end = zeros, zeros, np.int64(0), np.int64(0)
                if is_last:
                    if arguments.out.address != 0:
                        out = first_out + pair * out_columns
                        out_end = out + rows * out_stride
                    share = row_pairs * steps * step_ahead
                    ahead, ahead_end = _share_of_next_block(block_end, following, share, end - pair)
                if ahead == 0:
                    ahead = ahead_end = zeros
                multiply(rows, (
                    block + step * step_bytes, row_tile, steps, row_pairs, panel, other, first, second, step,
                    next_first, next_second, next_step, all_steps - 1, sums, 1 if step == 0 else 0,
                    zeros, previous, out, out_stride, out_end, ahead, ahead_end,
                ))  # fmt: skip
                chunks = -(-steps // chunk_steps)
                if chunks & 1:
                    panel, other = other, panel
                # During a short chunk, fewer steps of the next chunk are dequantised than that chunk has.
                done, wanted = steps - (chunks - 1) * chunk_steps, min(chunk_steps, all_steps - next_step)
                if done < wanted:
                    dequantise((next_first, next_second, next_step, panel, done, wanted))
                previous = sums + (row_pairs - 1) * SUMS_BYTES
                if waiting >= 0:
                    there = _address_of_sums(arguments, scratch, waiting - begin)
                    write_block(arguments, context, row, rows, there, waiting)
                if is_last:
                    waiting = pair
        store_sums((previous,))
        write_block(arguments, context, row, rows, _address_of_sums(arguments, scratch, waiting - begin), waiting)

    return multiply_block


@once
def prefill_op(weights: TileWeights, gate: str, activation: str, *, splits_results: bool = False) -> NativeOp:
    """Return the operator for a kind of weights. Items are pairs of tiles.

    A gate, or an activation without a gate, is a key of UNARY, or "". Only activations in parts can have an activation.

    Args:
        splits_results: True to write the results of an activation as row tiles; see PrefillArguments.split.
    """
    unscale = np.float32(weights.unscale)
    is_plain = weights.row_parts > 1
    if activation and (gate or not is_plain):
        raise ValueError(f"weights of the kind {weights.name} with the gate {gate!r} have no activation {activation!r}")
    if splits_results:
        write = _split_block_writer(unscale, activation)
    elif is_plain:
        write = _plain_block_writer(unscale, gate, activation)
    else:
        write = _block_writer(_writer(unscale, gate))
    multiply_block = _block_multiplier(weights, TILE_ROW_BYTES * (1 if gate else 2), write)

    def prefill_rows(arguments: PrefillArguments, context: int, begin: int, end: int, scratch: int) -> int:
        rows, pairs, together = entry(context, arguments.x.counted), arguments.pairs, arguments.together
        configure_tiles(arguments.table)
        while begin < end:
            block, first = begin // pairs, begin % pairs
            blocks = max(min((end - begin) // pairs, arguments.blocks) if first == 0 else 0, 1)
            last = min(pairs, first + end - begin)
            for pair in range(first, last, together):
                for row in range(block * BLOCK_ROWS, (block + blocks) * BLOCK_ROWS, BLOCK_ROWS):
                    count = min(BLOCK_ROWS, rows - row)
                    multiply_block(arguments, context, row, count, pair, min(pair + together, last), scratch)
            begin += (blocks - 1) * pairs + last - first
        release_tiles()
        return 0

    def prefill(arguments: PrefillArguments, context: int, begin: int, end: int, scratch: int) -> int:
        rows = entry(context, arguments.x.counted)
        configure_tiles(arguments.table)
        together = WAITING_PAIRS if arguments.span < arguments.steps else end - begin
        for first in range(begin, end, together):
            last = min(end, first + together)
            for row in range(0, rows, BLOCK_ROWS):
                multiply_block(arguments, context, row, min(BLOCK_ROWS, rows - row), first, last, scratch)
        release_tiles()
        return 0

    parts = ("prefill", weights.name, gate, activation and f"then_{activation}", "split" * splits_results)
    name = "_".join(filter(None, parts))
    return native_op(PrefillArguments, name=name)(prefill_rows if is_plain else prefill)

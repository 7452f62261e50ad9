"""How the rows of a step are cut into work for attention: NumPy over positions, once per step for all layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..tape.context import ContextTable, Word
from .few import PIECE_TOKENS, SPLIT_WORDS
from .few import partial_floats as partial_floats
from .many import BLOCK_WORDS
from .panels import BLOCK_TOKENS

Int32: TypeAlias = NDArray[np.int32]
Int64: TypeAlias = NDArray[np.int64]


def max_splits(rows: int, context_length: int) -> int:
    """The greatest FEW_SPLITS that so many FEW rows of sequences no longer than that can have."""
    return rows * -(-context_length // PIECE_TOKENS)


def few_splits(positions: Int64) -> Int32:
    """The pieces that the contexts of these rows are cut into, whatever a layer's window.

    Args:
        positions: int64 [FEW].

    Returns:
        int32 [FEW_SPLITS, 2]: row, and number of the piece in the row's context. Pieces of a row follow each other.
    """
    pieces = np.maximum(positions // PIECE_TOKENS, 0) + 1  # a bad position has one too, which refuses it
    splits = np.empty((int(pieces.sum()), SPLIT_WORDS), np.int32)
    splits[:, 0] = np.repeat(np.arange(len(positions)), pieces)
    splits[:, 1] = np.arange(len(splits)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    return splits


def row_blocks(positions: Int64, query_start: Int32, few_sequences: int) -> Int32:
    """The blocks of neighbouring tokens that the MANY rows are cut into; those with the longest context come first.

    Args:
        positions: int64 [T]. query_start: int32 [S + 1].

    Returns:
        int32 [MANY_BLOCKS, 3]: sequence, first row, number of rows.
    """
    if few_sequences == len(query_start) - 1:
        return np.empty((0, BLOCK_WORDS), np.int32)
    starts = query_start[few_sequences:].astype(np.int64)
    blocks = -(-np.diff(starts) // BLOCK_TOKENS)
    sequences = np.repeat(np.arange(len(blocks)), blocks)
    numbers = np.arange(len(sequences)) - np.repeat(np.cumsum(blocks) - blocks, blocks)
    first = starts[sequences] + numbers * BLOCK_TOKENS
    result = np.empty((len(sequences), BLOCK_WORDS), np.int32)
    result[:, 0] = sequences + few_sequences
    result[:, 1] = first
    result[:, 2] = np.minimum(starts[sequences + 1] - first, BLOCK_TOKENS)
    return result[np.argsort(-positions[first], kind="stable")]


def prepare_context(
    table: ContextTable,
    *,
    positions: Int64,
    query_start: Int32,
    few_sequences: int,
    room: Callable[[int], NDArray[np.float32]],
    floats_per_split: int,
) -> None:
    """Set the words that attention needs beside the step's own arrays: SPLITS, ROW_BLOCKS, their counts, and PARTIALS.

    Args:
        table: its other words are the caller's, among them QUERY_START, POSITIONS, SEQUENCE_OF_ROW and CONTEXT_LENGTHS.
        positions: int64 [T]. query_start: int32 [S + 1]; the first `few_sequences` sequences own the FEW rows.
        room: gives memory for so many numbers, until the next step: PARTIALS takes `floats_per_split` (the greatest
            `partial_floats` of all layers) per piece.
    """
    splits = few_splits(positions[: query_start[few_sequences]])
    blocks = row_blocks(positions, query_start, few_sequences)
    table.count(Word.FEW_SPLITS, len(splits))
    table.count(Word.MANY_BLOCKS, len(blocks))
    table.array(Word.SPLITS, splits)
    table.array(Word.ROW_BLOCKS, blocks)
    table.array(Word.PARTIALS, room(len(splits) * floats_per_split))

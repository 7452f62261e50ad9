"""How a step's rows are cut into work."""

from __future__ import annotations

import numpy as np

from genai.kernels.cpu.paged.few import PIECE_TOKENS
from genai.kernels.cpu.paged.panels import BLOCK_TOKENS
from genai.kernels.cpu.paged.steps import few_splits, max_splits, partial_floats, prepare_context, row_blocks
from genai.kernels.cpu.tape.context import ContextTable, Word


def test_pieces_of_a_row_follow_each_other() -> None:
    splits = few_splits(np.array([0, 2 * PIECE_TOKENS, PIECE_TOKENS - 1, PIECE_TOKENS]))
    assert splits.tolist() == [[0, 0], [1, 0], [1, 1], [1, 2], [2, 0], [3, 0], [3, 1]]
    assert splits.dtype == np.int32 and splits.flags.c_contiguous
    assert few_splits(np.zeros(0, np.int64)).shape == (0, 2)


def test_a_bad_position_has_a_piece_that_refuses_it() -> None:
    assert few_splits(np.array([-5])).tolist() == [[0, 0]]


def test_no_step_has_more_pieces_than_it_can_have() -> None:
    for length in (1, PIECE_TOKENS, PIECE_TOKENS + 1, 5000):
        assert len(few_splits(np.full(7, length - 1))) == max_splits(7, length)


def test_memory_for_partial_results_is_whole_vectors() -> None:
    assert partial_floats(1, 1) == 16 + 16
    assert partial_floats(32, 64) == 32 * (16 + 64)
    assert partial_floats(6, 50) == 6 * (16 + 64)


def test_blocks_of_rows() -> None:
    counts = [1, 3, BLOCK_TOKENS + 1, 40]
    positions = np.concatenate([np.arange(7, 8), np.arange(3), np.arange(BLOCK_TOKENS + 1), np.arange(100, 140)])
    query_start = np.cumsum([0, *counts]).astype(np.int32)
    blocks = row_blocks(positions, query_start, 2)
    assert blocks.dtype == np.int32 and blocks.flags.c_contiguous
    first = int(query_start[2])
    expected = [[2, first, BLOCK_TOKENS], [2, first + BLOCK_TOKENS, 1], [3, int(query_start[3]), 40]]
    assert sorted(blocks.tolist()) == expected
    # The longest contexts, which take longest, come first.
    starts = positions[blocks[:, 1]].tolist()
    assert starts == sorted(starts, reverse=True)
    assert row_blocks(positions, query_start, 4).shape == (0, 3)


def test_memory_for_partial_results_is_asked_for_once() -> None:
    asked: list[int] = []

    def room(count: int) -> np.ndarray:
        asked.append(count)
        return np.zeros(count, np.float32)

    table = ContextTable()
    positions = np.array([2 * PIECE_TOKENS, 0, 1, 2], np.int64)
    query_start = np.array([0, 1, 4], np.int32)
    prepare_context(
        table, positions=positions, query_start=query_start, few_sequences=1, room=room, floats_per_split=100
    )
    assert asked == [300] and table.words[Word.FEW_SPLITS] == 3 and table.words[Word.MANY_BLOCKS] == 1

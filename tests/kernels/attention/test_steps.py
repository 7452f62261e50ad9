"""The division of a step's rows into work."""

from __future__ import annotations

import numpy as np

from genai.kernels.cpu.attention.decode import SPLIT_TOKENS, partial_floats
from genai.kernels.cpu.attention.panels import BLOCK_TOKENS
from genai.kernels.cpu.attention.phases import fill_table, kv_splits, row_blocks
from genai.kernels.cpu.program.step_table import ContextTable, StepField
from genai.kernels.device import PageTables, StepContext


def test_splits_of_a_row_follow_each_other() -> None:
    splits = kv_splits(np.array([0, 2 * SPLIT_TOKENS, SPLIT_TOKENS - 1, SPLIT_TOKENS]))
    assert splits.tolist() == [[0, 0], [1, 0], [1, 1], [1, 2], [2, 0], [3, 0], [3, 1]]
    assert splits.dtype == np.int32 and splits.flags.c_contiguous
    assert kv_splits(np.zeros(0, np.int64)).shape == (0, 2)


def test_a_bad_position_has_a_split_that_refuses_it() -> None:
    assert kv_splits(np.array([-5])).tolist() == [[0, 0]]


def test_memory_for_partial_results_is_whole_vectors() -> None:
    assert partial_floats(1, 1) == 16 + 16
    assert partial_floats(32, 64) == 32 * (16 + 64)
    assert partial_floats(6, 50) == 6 * (16 + 64)


def test_blocks_of_rows() -> None:
    counts = [1, 3, BLOCK_TOKENS + 1, 40]
    positions = np.concatenate([np.arange(7, 8), np.arange(3), np.arange(BLOCK_TOKENS + 1), np.arange(100, 140)])
    cu_seqlens_q = np.cumsum([0, *counts]).astype(np.int32)
    blocks = row_blocks(positions, cu_seqlens_q, 2)
    assert blocks.dtype == np.int32 and blocks.flags.c_contiguous
    first = int(cu_seqlens_q[2])
    expected = [[2, first, BLOCK_TOKENS], [2, first + BLOCK_TOKENS, 1], [3, int(cu_seqlens_q[3]), 40]]
    assert sorted(blocks.tolist()) == expected
    # The longest contexts, which take longest, come first.
    starts = positions[blocks[:, 1]].tolist()
    assert starts == sorted(starts, reverse=True)
    assert row_blocks(positions, cu_seqlens_q, 4).shape == (0, 3)


def test_a_table_has_memory_for_partial_results() -> None:
    table = ContextTable()
    step = StepContext(
        tokens=np.zeros(4, np.int64),
        positions=np.array([2 * SPLIT_TOKENS, 0, 1, 2], np.int64),
        cu_seqlens_q=np.array([0, 1, 4], np.int32),
        context_lens=np.array([2 * SPLIT_TOKENS + 1, 3], np.int32),
        groups=(PageTables(np.zeros((2, 40), np.int32), np.zeros(4, np.int64)),),
        num_decode_sequences=1,
        logits_indices=np.zeros(1, np.int64),
        rope_table=np.zeros(2, np.int32),
    )
    fill_table(table, step, floats_per_split=100)
    assert table.values[StepField.KV_SPLITS] == 3 and table.values[StepField.PREFILL_BLOCKS] == 1
    partials = table.room(StepField.PARTIALS, 300, np.float32)
    assert table.values[StepField.PARTIALS] == partials.ctypes.data and len(partials) >= 300
    fill_table(table, step, floats_per_split=100)
    assert table.room(StepField.PARTIALS, 300, np.float32) is partials
    # Numbers of any layout are copied to the address that the field has, and more of them to a new one.
    for columns in (1, 40):
        table.array(StepField.POSITIONS, np.arange(8 * columns).reshape(2, 4, -1).transpose(1, 0, 2))
        found = table.room(StepField.POSITIONS, 8 * columns, np.int64)
        assert table.values[StepField.POSITIONS] == found.ctypes.data
        assert found[: 2 * columns].tolist() == [*range(columns), *range(4 * columns, 5 * columns)]

"""Attention on arrays, as the Python loop over a graph calls it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from genai.kernels.cpu.paged.eager import paged_attention
from genai.kernels.step import StepContext

MakeStep = Callable[..., Any]


def step_context(step: Any, order: list[int], team: Any = None) -> tuple[StepContext, np.ndarray]:
    """The step with its sequences in another order, and which row each of its rows is."""
    starts = step.query_start
    rows = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in order]).astype(np.int64)
    context = StepContext(
        positions=step.positions[rows],
        query_start=np.cumsum([0, *step.counts[order]]).astype(np.int32),
        context_lengths=step.context_lengths[order],
        block_tables=step.block_tables[order],
        slots=step.slots[rows],
        few_sequences=int((step.counts < 32).sum()),
        wanted_rows=np.zeros(0, np.int64),
        rope_table=step.rope_table[order],
        layers=(),
        team=team,
    )
    return context, rows


def test_equals_the_tape(make_step: MakeStep, team: Any) -> None:
    step = make_step([(1, 70), (3, 600), (40, 40), (90, 200)])
    expected = step.run(window=100)
    context, rows = step_context(step, [1, 0, 3, 2], team)
    flat = [x[rows].reshape(len(rows), -1) for x in (step.query, step.key, step.value)]
    out = paged_attention(*flat, step.layer, context, heads=4, window=100)
    np.testing.assert_array_equal(out, expected[rows].reshape(len(rows), -1))


def test_columns_of_a_packed_projection(make_step: MakeStep) -> None:
    step = make_step([(1, 70), (40, 40)])
    expected = step.run()
    context, _ = step_context(step, [0, 1])
    packed = np.concatenate([x.reshape(41, -1) for x in (step.query, step.key, step.value)], axis=1)
    out = paged_attention(*np.split(packed, [128, 192], axis=1), step.layer, context, heads=4)
    np.testing.assert_array_equal(out, expected.reshape(41, -1))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"positions": np.array([3])}, IndexError, "position outside its sequence"),
        ({"slots": np.array([-1])}, IndexError, "slot outside the cache"),
        ({"block_tables": np.array([[9]], np.int32)}, IndexError, "block table entry outside the cache"),
        ({"block_tables": np.zeros((1, 0), np.int32)}, IndexError, "context longer than its block table"),
        ({"positions": np.array([0, 1])}, ValueError, "positions is int64"),
        ({"slots": np.array([0], np.int32)}, ValueError, "slots is int32"),
        ({"query_start": np.array([0, 2], np.int32)}, ValueError, "query_start is"),
        ({"query_start": np.array([0, 1], np.int64)}, ValueError, "query_start is int64"),
        ({"rope_table": np.array([0, 1], np.int32)}, ValueError, "rope_table is int32"),
    ],
)
def test_refuses(make_step: MakeStep, change: dict[str, Any], error: type[Exception], message: str) -> None:
    step = make_step([(1, 3)])
    context, _ = step_context(step, [0])
    flat = [x.reshape(1, -1) for x in (step.query, step.key, step.value)]
    with pytest.raises(error, match=message):
        paged_attention(*flat, step.layer, replace(context, **change), heads=4)


def test_refuses_rows_that_are_not_contiguous(make_step: MakeStep) -> None:
    step = make_step([(1, 3)])
    context, _ = step_context(step, [0])
    query, key, value = (x.reshape(1, -1) for x in (step.query, step.key, step.value))
    with pytest.raises(ValueError, match="query is float64"):
        paged_attention(query.astype(np.float64), key, value, step.layer, context, heads=4)
    with pytest.raises(ValueError, match="key is float32"):
        paged_attention(query, np.repeat(key, 2, axis=1)[:, ::2], value, step.layer, context, heads=4)

"""One attention layer on arrays, at once: what a Python loop over a graph's nodes calls. A tape does without this."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...formats import PagedLayer
from ...step import StepContext
from ..checks import Float32, check, check_rows
from ..tape.context import ContextTable, Word
from ..tape.eager import run_calls
from ..tape.program import Rows
from .phases import attention_phases
from .steps import partial_floats, prepare_context

_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)
_NANOSECONDS_PER_SCORE_ELEMENT = 0.03


def paged_attention(
    query: Float32,
    key: Float32,
    value: Float32,
    layer: PagedLayer,
    step: StepContext,
    *,
    heads: int,
    **options: Any,
) -> Float32:
    """Store a step's keys and values, and attend.

    Args:
        query: float32 [T, heads * head_size]; key: float32 [T, kv_heads * head_size]; value: float32
            [T, kv_heads * v_head_size]; columns of a packed projection will do.
        options: as in `phases.attention_phases`.

    Returns:
        float32 [T, heads * v_head_size].

    Raises:
        ValueError: a shape or type does not fit.
        IndexError: a slot, position or page leads outside the cache, or a position outside the rotary tables.
    """
    tokens = len(query)
    for name, given in (("query", query), ("key", key), ("value", value)):
        check_rows(name, given, (tokens, None))
    out = np.empty((tokens, heads * layer.v_head_size), np.float32)
    check("query_start", step.query_start, (len(step.context_lengths) + 1,), _INT32)
    counts = np.diff(step.query_start)
    if step.query_start[0] != 0 or step.query_start[-1] != tokens or counts.min(initial=0) < 0:
        raise ValueError(f"query_start is {step.query_start.tolist()}, expected to rise from 0 to {tokens}")
    _attend(query, key, value, out, layer, step, heads, options)
    return out


def _attend(
    query: Float32,
    key: Float32,
    value: Float32,
    out: Float32,
    layer: PagedLayer,
    step: StepContext,
    heads: int,
    options: dict[str, Any],
) -> None:
    table = _context(step, partial_floats(heads, layer.v_head_size))
    given = Rows.of(query), Rows.of(key), Rows.of(value), Rows.of(out)
    phases = attention_phases(*given, layer, heads=heads, **options)
    longest = int(step.block_tables.shape[1])
    work = len(query) * longest * heads * layer.head_size * _NANOSECONDS_PER_SCORE_ELEMENT
    run_calls(phases, table, team=step.team, work=work)


def _context(step: StepContext, floats_per_split: int) -> ContextTable:
    """The step as operators see it."""
    tokens, sequences = len(step.positions), len(step.context_lengths)
    check("positions", step.positions, (int(step.query_start[-1]),), _INT64)
    check("context_lengths", step.context_lengths, (sequences,), _INT32)
    check("block_tables", step.block_tables, (sequences, None), _INT32)
    check("slots", step.slots, (tokens,), _INT64)
    check("rope_table", step.rope_table, (sequences,), _INT32)
    counts = np.diff(step.query_start)
    table = ContextTable()
    table.count(Word.TOKENS, tokens)
    table.count(Word.TABLE_WIDTH, step.block_tables.shape[1])
    table.array(Word.POSITIONS, step.positions)
    table.array(Word.CONTEXT_LENGTHS, step.context_lengths)
    table.array(Word.BLOCK_TABLES, step.block_tables)
    table.array(Word.SLOTS, step.slots)
    table.array(Word.ROPE_TABLE, step.rope_table)
    table.array(Word.SEQUENCE_OF_ROW, np.repeat(np.arange(sequences, dtype=np.int32), counts))
    prepare_context(
        table,
        positions=step.positions,
        query_start=step.query_start,
        few_sequences=step.few_sequences,
        room=lambda count: np.empty(count, np.float32),
        floats_per_split=floats_per_split,
    )
    return table

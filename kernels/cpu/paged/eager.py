"""One attention layer on arrays, at once: what a Python loop over a graph's nodes calls. A tape does without this."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...formats import PagedLayer
from ...step import StepContext
from ..checks import Float32, check, check_rows
from ..jit import kernel
from ..tape.context import ContextTable, ErrorCode, Word
from ..tape.driver import call_operator
from ..tape.program import Call, Rows, argument_word
from ..team import run
from .phases import attention_phases
from .steps import MANY_TOKENS, few_splits, partial_floats, prepare_context

_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)
_LINE = 64
_NANOSECONDS_PER_SCORE_ELEMENT = 0.03


_REFUSALS = {
    ErrorCode.SLOT: "slot outside the cache",
    ErrorCode.POSITION: "position outside its sequence",
    ErrorCode.PAGE: "context longer than its block table, or block table entry outside the cache",
    ErrorCode.ROTARY_POSITION: "position outside the rotary tables",
}


@kernel("void(int64, int64, int64, int64, int64[::1], int64, int64)", allocates=True)
def run_items(
    operator: int, arguments: int, context: int, scratch_bytes: int, refusal: Any, begin: int, end: int
) -> None:
    """Items [begin, end) of a native operator, with scratch of their own; its error code goes to refusal[0]."""
    scratch = np.empty(scratch_bytes + _LINE, np.uint8)
    address = scratch.ctypes.data
    status = call_operator(operator, arguments, context, begin, end, address + -address % _LINE)
    if status != 0:
        refusal[0] = status


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
    order = _order(step, tokens)
    if order is None:
        _attend(query, key, value, out, layer, step, step.query_start, heads, options)
        return out
    rows, sequences, query_start = order
    _attend(
        query[rows], key[rows], value[rows], out, layer, _reordered(step, rows, sequences), query_start, heads, options
    )
    result = np.empty_like(out)
    result[rows] = out
    return result


def _order(step: StepContext, tokens: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]] | None:
    """Rows and sequences with the FEW first, and where sequences then begin; None if they are so already."""
    sequences = len(step.context_lengths)
    check("query_start", step.query_start, (sequences + 1,), _INT32)
    counts = np.diff(step.query_start)
    if step.query_start[0] != 0 or step.query_start[-1] != tokens or counts.min(initial=0) < 0:
        raise ValueError(f"query_start is {step.query_start.tolist()}, expected to rise from 0 to {tokens}")
    is_many = counts >= MANY_TOKENS
    if not np.any(is_many[:-1] & ~is_many[1:]):
        return None
    order = np.argsort(is_many, kind="stable")
    rows = np.concatenate([np.arange(step.query_start[i], step.query_start[i + 1], dtype=np.int64) for i in order])
    return rows, order, np.concatenate([[0], np.cumsum(counts[order])]).astype(np.int32)


def _reordered(step: StepContext, rows: NDArray[np.int64], sequences: NDArray[np.int64]) -> StepContext:
    return StepContext(
        positions=step.positions[rows],
        query_start=step.query_start,
        context_lengths=step.context_lengths[sequences],
        block_tables=step.block_tables[sequences],
        slots=step.slots[rows],
        wanted_rows=step.wanted_rows,
        rope_table=step.rope_table[sequences],
        layers=step.layers,
        team=step.team,
    )


def _attend(
    query: Float32,
    key: Float32,
    value: Float32,
    out: Float32,
    layer: PagedLayer,
    step: StepContext,
    query_start: NDArray[np.int32],
    heads: int,
    options: dict[str, Any],
) -> None:
    table = _context(step, query_start, partial_floats(heads, layer.v_head_size))
    given = Rows.of(query), Rows.of(key), Rows.of(value), Rows.of(out)
    phases = attention_phases(*given, layer, heads=heads, **options)
    longest = int(step.block_tables.shape[1])
    work = len(query) * longest * heads * layer.head_size * _NANOSECONDS_PER_SCORE_ELEMENT
    for phase in phases:
        for call in phase:
            _run(call, table, work, step)


def _run(call: Call, table: ContextTable, work: float, step: StepContext) -> None:
    arguments = np.array([argument_word(value) for value in call.arguments], np.int64)
    items = int(table.words[call.items.counted]) * call.items.factor
    if items:
        refusal = np.zeros(1, np.int64)
        given = (call.op.address, arguments.ctypes.data, table.address, call.scratch, refusal)
        run(step.team, run_items, given, items, work=work)
        if refusal[0]:
            raise IndexError(_REFUSALS[ErrorCode(refusal[0])])


def _context(step: StepContext, query_start: NDArray[np.int32], floats_per_split: int) -> ContextTable:
    """The step as operators see it."""
    tokens, sequences = len(step.positions), len(step.context_lengths)
    check("positions", step.positions, (int(query_start[-1]),), _INT64)
    check("context_lengths", step.context_lengths, (sequences,), _INT32)
    check("block_tables", step.block_tables, (sequences, None), _INT32)
    check("slots", step.slots, (tokens,), _INT64)
    check("rope_table", step.rope_table, (sequences,), _INT32)
    counts = np.diff(query_start)
    few_sequences = int((counts < MANY_TOKENS).sum())
    table = ContextTable()
    table.count(Word.TOKENS, tokens)
    table.count(Word.TABLE_WIDTH, step.block_tables.shape[1])
    table.array(Word.POSITIONS, step.positions)
    table.array(Word.CONTEXT_LENGTHS, step.context_lengths)
    table.array(Word.BLOCK_TABLES, step.block_tables)
    table.array(Word.SLOTS, step.slots)
    table.array(Word.ROPE_TABLE, step.rope_table)
    table.array(Word.SEQUENCE_OF_ROW, np.repeat(np.arange(sequences, dtype=np.int32), counts))
    few = few_splits(step.positions[: query_start[few_sequences]])
    prepare_context(
        table,
        positions=step.positions,
        query_start=query_start,
        few_sequences=few_sequences,
        partials=np.empty(len(few) * floats_per_split, np.float32),
        floats_per_split=floats_per_split,
    )
    return table

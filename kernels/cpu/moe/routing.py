"""Routing: selection of each token's experts, sorting of tokens by expert, and the weighted sum of results.

A pair is a token and one of its selected experts. Pairs are sorted by expert, and by token within an expert. So the
rows of an expert are side by side, at the positions of its pairs.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..jit import memory
from ..jit.arguments import Address, Arguments, Binding
from ..jit.dsl import inline
from ..jit.native import native_op
from ..jit.vector import LANES, reduce_add, splat_float32
from ..jit.vector_math import exp
from ..program.calls import Call, Items, Rows, row_at
from ..program.step_table import StepField

# A slot describes an expert that tokens are routed to: its number of rows, its index and its first row, all int64.
SLOT_BYTES = 24
_EXPERTS = int(StepField.EXPERTS)
# Number of columns in an item. Wide rows are split into several items.
_PIECE = 1024


class RouteArguments(Arguments):
    """Scores of all experts per row, and memory for the best experts of each row and their weights.

    Of equal scores, the first is better, and a NaN is worse than all numbers. The weights are a softmax over the scores
    of the selected experts if `normalized`, otherwise over all scores. The weights are NaN if these scores include a
    NaN or +infinity.

    Attributes:
        chosen: destination for the experts, int32 [T, per_token], in order of their indices.
        weights: destination for the experts' weights, float32 of the same shape.
    """

    scores: Rows
    per_token: int
    normalized: int
    chosen: Address
    weights: Address


@inline
def _before(a: float, b: float) -> bool:
    """Return True if score a is better than score b of a preceding expert."""
    return a > b or (b != b and a == a)


@inline
def _choose(scores: int, experts: int, chosen: int, best: int, k: int) -> None:
    """Find the k best scores and their experts, best first, in one pass that keeps them sorted."""
    for expert in range(experts):
        score = memory.read_float32(scores + 4 * expert)
        if expert < k:
            position = expert
        elif _before(score, memory.read_float32(best + 4 * (k - 1))):
            position = k - 1
        else:
            continue
        while position > 0 and _before(score, memory.read_float32(best + 4 * (position - 1))):
            memory.write_float32(best + 4 * position, memory.read_float32(best + 4 * (position - 1)))
            memory.write_int32(chosen + 4 * position, memory.read_int32(chosen + 4 * (position - 1)))
            position -= 1
        memory.write_float32(best + 4 * position, score)
        memory.write_int32(chosen + 4 * position, expert)


@inline
def _total(scores: int, count: int, largest: float) -> Any:
    """Return the sum of e ** (score - largest)."""
    total = splat_float32(0.0)
    for first in range(0, count, LANES):
        left = count - first
        total = total + memory.keep_first(exp(memory.load(scores + 4 * first, left) - largest), left, 0.0)
    return reduce_add(total)


@inline
def _sort_by_number(chosen: int, weights: int, k: int) -> None:
    for index in range(1, k):
        expert, weight, position = (
            memory.read_int32(chosen + 4 * index),
            memory.read_float32(weights + 4 * index),
            index,
        )
        while position > 0 and memory.read_int32(chosen + 4 * (position - 1)) > expert:
            memory.write_int32(chosen + 4 * position, memory.read_int32(chosen + 4 * (position - 1)))
            memory.write_float32(weights + 4 * position, memory.read_float32(weights + 4 * (position - 1)))
            position -= 1
        memory.write_int32(chosen + 4 * position, expert)
        memory.write_float32(weights + 4 * position, weight)


@native_op(RouteArguments)
def route(arguments: RouteArguments, context: int, begin: int, end: int, scratch: int) -> int:
    """Select experts and compute their weights. Items are rows. Weights overwrite the best scores."""
    experts, k = arguments.scores.width, arguments.per_token
    for row in range(begin, end):
        scores = row_at(arguments.scores, row)
        chosen, weights = arguments.chosen + 4 * k * row, arguments.weights + 4 * k * row
        _choose(scores, experts, chosen, weights, k)
        largest = np.float32(memory.read_float32(weights))
        total = _total(weights, k, largest) if arguments.normalized else _total(scores, experts, largest)
        for first in range(0, k, LANES):
            left = k - first
            memory.store(weights + 4 * first, exp(memory.load(weights + 4 * first, left) - largest) / total, left)
        _sort_by_number(chosen, weights, k)
    return 0


class OrderArguments(Arguments):
    """Pairs to sort. The number of experts with pairs is written to context[EXPERTS].

    Attributes:
        rows_field: field of the context that holds the number of tokens.
        chosen: int32 [context[rows_field], per_token], indices below `experts`.
        slots: destination for SLOT_BYTES for each expert with pairs, in order of the experts' indices.
        sources: destination for the token of the pair at each position, int32 [T * per_token].
        positions: destination for the position of each pair, int32 [T, per_token].
    """

    rows_field: int
    chosen: Address
    per_token: int
    experts: int
    slots: Address
    sources: Address
    positions: Address


@native_op(OrderArguments)
def order_pairs(arguments: OrderArguments, context: int, begin: int, end: int, scratch: int) -> int:
    """Sort pairs with a counting sort. There is one item, so a single thread sorts."""
    chosen, k, experts = arguments.chosen, arguments.per_token, arguments.experts
    pairs = memory.entry(context, arguments.rows_field) * k
    for expert in range(experts):
        memory.write_int64(scratch + 8 * expert, 0)
    for pair in range(pairs):
        counter = scratch + 8 * memory.read_int32(chosen + 4 * pair)
        memory.write_int64(counter, memory.read_int64(counter) + 1)
    slot, first = arguments.slots, 0
    for expert in range(experts):
        rows = memory.read_int64(scratch + 8 * expert)
        memory.write_int64(scratch + 8 * expert, first)
        if rows > 0:
            memory.write_int64(slot, rows)
            memory.write_int64(slot + 8, expert)
            memory.write_int64(slot + 16, first)
            slot += SLOT_BYTES
            first += rows
    for pair in range(pairs):
        counter = scratch + 8 * memory.read_int32(chosen + 4 * pair)
        position = memory.read_int64(counter)
        memory.write_int64(counter, position + 1)
        memory.write_int32(arguments.sources + 4 * position, pair // k)
        memory.write_int32(arguments.positions + 4 * pair, position)
    memory.write_int64(context + 8 * _EXPERTS, (slot - arguments.slots) // SLOT_BYTES)
    return 0


class CombineArguments(Arguments):
    """Rows, the int32 positions and float32 weights of each token's `per_token` rows, and the pieces of a row."""

    x: Rows
    positions: Address
    weights: Address
    per_token: int
    out: Rows
    pieces: int


def combine_call(x: Rows, positions: int | Binding, weights: int | Binding, out: Rows, *, per_token: int) -> Call:
    """Return a call that computes out[t] = the sum of weights[t, i] * x[positions[t, i]], i ascending.

    Args:
        positions: int32 [T, per_token].
        weights: float32 of the same shape.
    """
    pieces = -(-out.width // _PIECE)
    arguments = CombineArguments(x=x, positions=positions, weights=weights, per_token=per_token, out=out, pieces=pieces)
    return Call(combine, arguments, Items(out.counted, pieces))


@native_op(CombineArguments)
def combine(arguments: CombineArguments, context: int, begin: int, end: int, scratch: int) -> int:
    """Add up the results of tokens. Items are pieces of rows."""
    k, pieces = arguments.per_token, arguments.pieces
    for item in range(begin, end):
        token, piece = item // pieces, item % pieces
        positions, weights = arguments.positions + 4 * k * token, arguments.weights + 4 * k * token
        out = row_at(arguments.out, token)
        last = min(arguments.out.width, (piece + 1) * _PIECE)
        for first in range(piece * _PIECE, last, LANES):
            total = splat_float32(0.0)
            for index in range(k):
                row = row_at(arguments.x, memory.read_int32(positions + 4 * index))
                total = total + memory.load(row + 4 * first, last - first) * memory.read_float32(weights + 4 * index)
            memory.store(out + 4 * first, total, last - first)
    return 0

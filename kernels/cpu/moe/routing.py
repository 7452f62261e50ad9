"""Which experts each token is sent to, the tokens in the order of their experts, and the weighted sum of their results.

A pair is a token and one of the experts chosen for it. Pairs are sorted by expert, and by token among those of one
expert; so the rows of an expert lie side by side, in the positions of its pairs.
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

# What is known of each expert that any token is sent to: how many rows it has, its number, its first row; all int64.
SLOT_BYTES = 24
_EXPERTS = int(StepField.EXPERTS)
# Columns in an item of work: a wide row is shared out.
_PIECE = 1024


class RouteArguments(Arguments):
    """Scores of all experts per row, and where the best of each row go, of equal scores the first, and their weights.

    A NaN comes behind all numbers. The weights are by softmax, over the scores of the chosen ones if `normalized`,
    otherwise over all; they are NaN where that is: where it includes a NaN or +infinity.

    `chosen`: gets int32 [T, per_token], in order of the experts' numbers. `weights`: float32 of the same shape.
    """

    scores: Rows
    per_token: int
    normalized: int
    chosen: Address
    weights: Address


@inline
def _before(a: float, b: float) -> bool:
    """Whether a is better than b, which stands to the left of it."""
    return a > b or (b != b and a == a)


@inline
def _choose(scores: int, experts: int, chosen: int, best: int, k: int) -> None:
    """The k best scores and their experts, best first: kept in order while all are looked at."""
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
    """The sum of e ** (score - largest)."""
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
    """Items are rows. Weights are computed where the best scores were kept."""
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
    """Pairs to be sorted; how many experts have any is written to context[EXPERTS].

    `chosen`: int32 [context[rows_field], per_token], numbers below `experts`. `slots`: gets SLOT_BYTES for each expert
    with pairs, in order of their numbers. `sources`: gets int32 [T * per_token], the token of the pair at each
    position. `positions`: gets int32 [T, per_token], the position of each pair.
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
    """A counting sort, by one thread: there is one item."""
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
    """Rows, the int32 positions of each token's `per_token` rows, their float32 weights; `pieces` of a row."""

    x: Rows
    positions: Address
    weights: Address
    per_token: int
    out: Rows
    pieces: int


def combine_call(x: Rows, positions: int | Binding, weights: int | Binding, out: Rows, *, per_token: int) -> Call:
    """out[t] = the sum of weights[t, i] * x[positions[t, i]], i ascending.

    Args:
        positions: int32 [T, per_token]. weights: float32 of the same shape.
    """
    pieces = -(-out.width // _PIECE)
    arguments = CombineArguments(x=x, positions=positions, weights=weights, per_token=per_token, out=out, pieces=pieces)
    return Call(combine, arguments, Items(out.counted, pieces))


@native_op(CombineArguments)
def combine(arguments: CombineArguments, context: int, begin: int, end: int, scratch: int) -> int:
    """Items are pieces of rows."""
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

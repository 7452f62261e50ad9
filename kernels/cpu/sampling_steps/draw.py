"""The last step: one token of those in play, by inverse-transform sampling in the order of their ids."""

from __future__ import annotations

import math
from typing import Any

from ..lazy import helper
from .passes import BLOCK, num_blocks, scan, total_weight
from .row import ALL_MASKED, COUNT, MAXIMA, MAXIMUM, OPEN, STATUS, SUMS, TEMPERATURE, TOKENS, WEIGHTS, Row, current
from .selection import weigh


@helper
def most_likely(row: Row) -> Any:
    """The token of an open row with the largest logit, among equals the lowest id."""
    scan(row)
    logits = current(row)
    for block in range(num_blocks(row)):
        if row.blocks[MAXIMA, block] == row.state[MAXIMUM]:
            for token in range(block * BLOCK, min((block + 1) * BLOCK, row.given.shape[0])):
                if logits[token] == row.state[MAXIMUM]:
                    return token
    row.flags[STATUS] = ALL_MASKED
    return -1


@helper
def draw(row: Row, uniform: float) -> Any:
    """A token, and its probability among those in play.

    Args:
        uniform: in [0, 1): the token at which the probabilities, added up, exceed it.
    """
    return _draw_open(row, uniform) if row.flags[OPEN] else _draw_candidate(row, uniform)


@helper
def _draw_candidate(row: Row, uniform: float) -> Any:
    total = weigh(row)
    weights = row.numbers[WEIGHTS]
    chosen, reached = -1, 0.0
    for i in range(row.flags[COUNT]):
        if weights[i] > 0:
            chosen = i
            reached += weights[i]
            if reached > uniform * total:
                break
    if chosen < 0:
        row.flags[STATUS] = ALL_MASKED
        return -1, 0.0
    return row.ids[TOKENS, chosen], weights[chosen] / total


@helper
def _draw_open(row: Row, uniform: float) -> Any:
    total, _ = total_weight(row)
    if row.flags[STATUS]:
        return -1, 0.0
    sums = row.blocks[SUMS]
    target = uniform * total
    chosen, reached = 0, 0.0
    for block in range(num_blocks(row)):
        if sums[block] > 0:
            chosen = block
            if reached + sums[block] > target:
                break
            reached += sums[block]
    return _draw_in_block(row, chosen, target - reached, total)


@helper
def _draw_in_block(row: Row, block: int, target: float, total: float) -> Any:
    logits, highest, temperature = current(row), row.state[MAXIMUM], row.state[TEMPERATURE]
    chosen, reached, weight = -1, 0.0, 0.0
    for token in range(block * BLOCK, min((block + 1) * BLOCK, row.given.shape[0])):
        one = math.exp((logits[token] - highest) / temperature)
        if one > 0:
            chosen, weight = token, one
            reached += one
            if reached > target:
                break
    return chosen, weight / total

"""The last step: draw one of the tokens in play, by inverse-transform sampling in the order of their ids.

Random numbers come from Philox4x64-10, a counter-based generator (Salmon et al. 2011). Each (seed, row, position) has a
fixed number, whatever the order: that of `numpy.random.Philox(key=[seed, row], counter=[position, 0, 0, 0])`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...sampling import ALL_MASKED
from ..jit.dsl import helper
from .passes import num_blocks, scan, total_weight
from .row import BLOCK, COUNT, MAXIMA, MAXIMUM, OPEN, STATUS, SUMS, TEMPERATURE, TOKENS, VALUES, WEIGHTS, Row, current
from .selection import weigh

_ROUNDS = 10
_MULTIPLIER_0, _MULTIPLIER_1 = np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157)
_WEYL_0, _WEYL_1 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBB67AE8584CAA73B)
_HALF, _LOW_HALF = np.uint64(32), np.uint64(0xFFFFFFFF)
_ZERO, _ONE, _SPARE_BITS = np.uint64(0), np.uint64(1), np.uint64(11)


@helper
def most_likely(row: Row) -> Any:
    """Return the token with the largest logit (among equals, the lowest id). Candidates are in order of their ids."""
    if not row.flags[OPEN]:
        return _most_likely_candidate(row)
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
def _most_likely_candidate(row: Row) -> Any:
    values, best = row.numbers[VALUES], -1
    for i in range(row.flags[COUNT]):
        if best < 0 or values[i] > values[best]:
            best = i
    if best < 0 or values[best] == -math.inf:
        row.flags[STATUS] = ALL_MASKED
        return -1
    return row.ids[TOKENS, best]


@helper
def draw(row: Row, uniform: float) -> Any:
    """Return a token, and its probability among the tokens in play.

    Args:
        uniform: number in [0, 1). The result is the token at which the cumulative probability exceeds this number.
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
    total = total_weight(row)
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


@helper
def uniforms(seed: Any, row: Any, position: Any) -> Any:
    """Return two independent numbers in [0, 1). The arguments are uint64."""
    # NumPy's generator increments the counter before it draws.
    a, b, c, d = position + _ONE, _ZERO, _ZERO, _ZERO
    key_0, key_1 = seed, row
    for round_ in range(_ROUNDS):
        if round_:
            key_0, key_1 = key_0 + _WEYL_0, key_1 + _WEYL_1
        high_0, low_0 = _high_product(_MULTIPLIER_0, a), _MULTIPLIER_0 * a
        high_1, low_1 = _high_product(_MULTIPLIER_1, c), _MULTIPLIER_1 * c
        a, b, c, d = high_1 ^ b ^ key_0, low_1, high_0 ^ d ^ key_1, low_0
    return np.float64(a >> _SPARE_BITS) * 2.0**-53, np.float64(b >> _SPARE_BITS) * 2.0**-53


@helper
def _high_product(x: Any, y: Any) -> Any:
    """Return the upper 64 of the 128 bits of x * y."""
    x_low, x_high, y_low, y_high = x & _LOW_HALF, x >> _HALF, y & _LOW_HALF, y >> _HALF
    middle = x_high * y_low + ((x_low * y_low) >> _HALF)
    other = x_low * y_high + (middle & _LOW_HALF)
    return x_high * y_high + (middle >> _HALF) + (other >> _HALF)

"""Passes over all logits of an open row, in vectors and blocks. Block maxima let later passes skip most of the row."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...sampling import ALL_MASKED, HAS_INFINITY, HAS_NAN
from ..jit.dsl import FLOATS, helper, inline, intrinsic
from ..jit.emit import Emitter
from ..jit.vector import LANES, load, maximum, minimum, reduce_add, reduce_max, splat_float32, store
from ..jit.vector_math import exp
from .row import (
    BLOCK,
    COUNT,
    MASKED,
    MAXIMA,
    MAXIMUM,
    NOWHERE,
    OPEN,
    SCANNED,
    STATUS,
    SUMMED_AT,
    SUMS,
    TEMPERATURE,
    TOKENS,
    TOTAL,
    VALUES,
    Row,
    current,
    writable,
)

# Weights below e to the power of this number (1.6e-38) are left out. They belong to masked tokens, or are denormal
# numbers, which take processors a hundred times as long.
_LOWEST_EXPONENT = -87.0
# A temperature of 1 / this number already separates all float32 logits that a smaller temperature would separate.
_LARGEST_SCALE = 1e30
NO_CENTRE = np.float32(np.nan)
_LOWEST_FLOAT = np.float32(-3.4028235e38)
_SMALLEST_FLOAT = np.float32(1e-45)


@intrinsic(FLOATS, FLOATS, FLOATS, FLOATS, FLOATS)
def choose(e: Emitter, key: Any, bound: Any, value: Any, other: Any) -> Any:
    """Return value where key >= bound, else other: float32 vectors, lane by lane."""
    return e.builder.select(e.builder.fcmp_ordered(">=", key, bound), value, other)


@helper
def num_blocks(row: Row) -> Any:
    """Return the number of blocks of the row, including an incomplete last block."""
    return -(-row.given.shape[0] // BLOCK)


@helper
def scan(row: Row) -> None:
    """Find the maxima of the blocks and of the row, and check whether the row can be sampled at all."""
    if row.flags[SCANNED]:
        return
    logits, size = current(row), row.given.shape[0]
    whole = size // BLOCK
    sums, best = splat_float32(0.0), splat_float32(MASKED)
    for block in range(whole):
        one, other = load(logits, block * BLOCK), load(logits, block * BLOCK + LANES)
        larger = maximum(one, other)
        row.blocks[MAXIMA, block] = reduce_max(larger)
        best = maximum(best, larger)
        sums = sums + (one + other)
    highest = reduce_max(best)
    if whole * BLOCK < size:
        peak = MASKED
        for token in range(whole * BLOCK, size):
            peak = max(peak, logits[token])
        row.blocks[MAXIMA, whole] = peak
        highest = max(highest, peak)
    row.state[MAXIMUM] = highest
    row.flags[SCANNED], row.state[SUMMED_AT] = 1, NOWHERE
    # A NaN never disappears from a sum, but infinities of both signs also produce one.
    has_nan = False
    for token in range(0 if math.isnan(reduce_add(sums)) else whole * BLOCK, size):
        has_nan = has_nan or math.isnan(logits[token])
    if has_nan:
        row.flags[STATUS] = HAS_NAN
    elif highest == math.inf:
        row.flags[STATUS] = HAS_INFINITY
    elif highest == -math.inf:
        row.flags[STATUS] = ALL_MASKED


@helper
def total_weight(row: Row) -> Any:
    """Return the sum of w over all tokens, where w = e ** d and d = (logit - maximum) / temperature.

    Weights are float32, added up block by block (SUMS) and then in float64.
    """
    return _weights(row, False)[0]


@helper
def weight_and_moment(row: Row) -> Any:
    """Return the sum of w and the sum of w * d, where w and d are defined as in `total_weight`."""
    return _weights(row, True)


@inline  # so that each of the two variants is compiled separately
def _weights(row: Row, with_moment: bool) -> Any:
    scan(row)
    if row.state[SUMMED_AT] == row.state[TEMPERATURE] and not with_moment:
        return row.state[TOTAL], 0.0
    logits, size = current(row), row.given.shape[0]
    highest, temperature = np.float32(row.state[MAXIMUM]), row.state[TEMPERATURE]
    scale = np.float32(min(1.0 / temperature, _LARGEST_SCALE))
    zero, lowest = splat_float32(0.0), splat_float32(_LOWEST_EXPONENT)
    total = moment = 0.0
    whole = size // BLOCK
    for block in range(whole):
        row.blocks[SUMS, block] = 0.0
        if (row.blocks[MAXIMA, block] - highest) * scale >= _LOWEST_EXPONENT:
            weights = weighted = zero
            for first in range(block * BLOCK, (block + 1) * BLOCK, LANES):
                distance = (load(logits, first) - highest) * scale
                bounded = maximum(distance, _LOWEST_EXPONENT)
                weight = choose(distance, lowest, exp(bounded), zero)
                weights = weights + weight
                if with_moment:
                    weighted = weighted + weight * bounded
            row.blocks[SUMS, block] = reduce_add(weights)
            total += np.float64(row.blocks[SUMS, block])
            if with_moment:
                moment += np.float64(reduce_add(weighted))
    if whole * BLOCK < size:
        rest = 0.0
        for token in range(whole * BLOCK, size):
            distance = (logits[token] - row.state[MAXIMUM]) / temperature
            if distance >= _LOWEST_EXPONENT:
                rest += math.exp(distance)
                moment += math.exp(distance) * distance
        row.blocks[SUMS, whole] = rest
        total += rest
    row.state[TOTAL], row.state[SUMMED_AT] = total, temperature
    return total, moment


@helper
def standard_deviation(row: Row) -> Any:
    """Return the standard deviation of all logits that are not masked (divided by their number, not by one less)."""
    scan(row)
    distances, count = _sum(row, np.float32(row.state[MAXIMUM]), False)
    mean = np.float32(row.state[MAXIMUM] + distances / count)
    return math.sqrt(_sum(row, mean, True)[0] / count)


@helper
def _sum(row: Row, centre: Any, squared: bool) -> Any:
    """Return the sum of (logit - centre), or of its square, over the unmasked tokens, and their number."""
    logits, size = current(row), row.given.shape[0]
    whole = size // BLOCK
    zero, one, lowest = splat_float32(0.0), splat_float32(1.0), splat_float32(_LOWEST_FLOAT)
    total, counts = 0.0, zero
    for block in range(whole):
        sums = zero
        for first in range(block * BLOCK, (block + 1) * BLOCK, LANES):
            logit = load(logits, first)
            distance = logit - centre
            sums = sums + choose(logit, lowest, distance * distance if squared else distance, zero)
            counts = counts + choose(logit, lowest, one, zero)
        total += np.float64(reduce_add(sums))
    count = int(reduce_add(counts))  # exact up to 2 ** 24 tokens
    for token in range(whole * BLOCK, size):
        if logits[token] > MASKED:
            rest = np.float64(logits[token] - centre)
            total += rest * rest if squared else rest
            count += 1
    return total, count


@helper
def key_of(logit: Any, centre: Any) -> Any:
    """Return a token's key in an order: its logit (NO_CENTRE), or minus the distance of its logit from a centre."""
    return logit if math.isnan(centre) else -abs(logit - centre)


@helper
def measure(row: Row, centre: Any, floor: float) -> Any:
    """Return the weight (see `total_weight`) and number of tokens with key_of(logit, centre) >= floor, in float32."""
    scan(row)
    logits, size = current(row), row.given.shape[0]
    highest, temperature = np.float32(row.state[MAXIMUM]), row.state[TEMPERATURE]
    scale = np.float32(min(1.0 / temperature, _LARGEST_SCALE))
    by_distance = not math.isnan(centre)
    least = max(np.float32(floor), _LOWEST_FLOAT)  # so that masked tokens are not counted
    bound, zero, one = splat_float32(least), splat_float32(0.0), splat_float32(1.0)
    lowest_maximum = centre + least if by_distance else least
    total, counts = 0.0, zero
    whole = size // BLOCK
    for block in range(whole):
        if row.blocks[MAXIMA, block] >= lowest_maximum:
            weights = zero
            for first in range(block * BLOCK, (block + 1) * BLOCK, LANES):
                logit = load(logits, first)
                key = logit
                if by_distance:
                    key = logit - centre
                    key = minimum(key, 0.0 - key)
                weight = exp(maximum((logit - highest) * scale, _LOWEST_EXPONENT))
                weights = weights + choose(key, bound, weight, zero)
                counts = counts + choose(key, bound, one, zero)
            total += np.float64(reduce_add(weights))
    count = int(reduce_add(counts))  # exact up to 2 ** 24 tokens
    for token in range(whole * BLOCK, size):
        if key_of(logits[token], centre) >= least:
            total += math.exp((logits[token] - row.state[MAXIMUM]) / temperature)
            count += 1
    return total, count


@helper
def gather(row: Row, floor: float) -> None:
    """Make candidates of all tokens whose logit is at least `floor` and not masked."""
    scan(row)
    logits, size = current(row), row.given.shape[0]
    count = 0
    for block in range(num_blocks(row)):
        if row.blocks[MAXIMA, block] >= floor:
            for token in range(block * BLOCK, min((block + 1) * BLOCK, size)):
                if logits[token] >= floor and logits[token] > MASKED:
                    row.numbers[VALUES, count] = logits[token]
                    row.ids[TOKENS, count] = token
                    count += 1
    row.flags[COUNT] = count


@helper
def close(row: Row, floor: float) -> None:
    """Keep only tokens with at least this logit in play, as candidates."""
    gather(row, floor)
    row.flags[OPEN] = 0


@helper
def next_above(x: Any) -> Any:
    """Return the next larger float32. Infinity and NaN are returned unchanged."""
    if x == 0:
        return _SMALLEST_FLOAT
    if not x < np.inf:
        return x
    bits = x.view(np.int32)
    return np.int32(bits + 1 if x > 0 else bits - 1).view(np.float32)


@helper
def mask(row: Row, centre: Any, floor: Any, last: int) -> None:
    """Mask all tokens except those with a key larger than `floor` (float32), or equal to it and an id up to `last`."""
    logits, size = writable(row), row.given.shape[0]
    by_distance = not math.isnan(centre)
    masked, bound = splat_float32(MASKED), splat_float32(floor)
    behind_last = splat_float32(next_above(floor))
    for first in range(0, size, LANES):
        if first + LANES <= size and not first <= last < first + LANES:
            logit = load(logits, first)
            key = logit
            if by_distance:
                key = logit - centre
                key = minimum(key, 0.0 - key)
            store(logits, first, choose(key, bound if first <= last else behind_last, logit, masked))
        else:
            for token in range(first, min(first + LANES, size)):
                scalar_key = key_of(logits[token], centre)
                if scalar_key < floor or (scalar_key == floor and token > last):
                    logits[token] = MASKED


@helper
def below(value: float) -> Any:
    """Return a number slightly below value: a floor that rounding cannot lift above the requested value."""
    return value - 1e-5 * (1.0 + abs(value))

"""Steps that remove unlikely tokens (top-k, top-p, min-p, typical-p, top-n-sigma and Mirostat's truncation), and XTC,
which removes likely tokens.

On an open row, each step first finds a floor below which no token can be kept. If few tokens are above the floor, the
exact rule is applied to a short list. Otherwise the floor itself (in float32 arithmetic) is the rule.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..jit.dsl import helper
from .passes import (
    NO_CENTRE,
    below,
    close,
    gather,
    measure,
    num_blocks,
    scan,
    standard_deviation,
    total_weight,
    weight_and_moment,
)
from .row import COUNT, KEYS, MASKED, MAXIMA, MAXIMUM, OPEN, TEMPERATURE, TOKENS, VALUES, WEIGHTS, Row, writable
from .selection import LONGEST_LIST, keep_above, keep_at_least, keep_first, narrow, weigh

# Number of halvings after which an interval of floats cannot shrink by a relevant amount.
_MOST_HALVINGS = 40


@helper
def top_k(row: Row, k: int) -> None:
    """Keep the k likeliest tokens (Fan et al. 2018)."""
    if row.flags[OPEN]:
        scan(row)
        floor = _floor_of_top_k(row, k)
        if measure(row, NO_CENTRE, floor)[1] <= LONGEST_LIST:
            close(row, floor)
        elif not narrow(row, NO_CENTRE, True, float(k)):
            return
    if row.flags[COUNT] > k:
        for i in range(row.flags[COUNT]):
            row.numbers[WEIGHTS, i] = 1.0
        keep_first(row, row.numbers[VALUES], float(k))


@helper
def _floor_of_top_k(row: Row, k: int) -> Any:
    """Return a floor that at least k block maxima reach, but few more, so that at least k tokens reach the floor."""
    blocks = num_blocks(row)
    low, high = row.state[MAXIMUM], row.state[MAXIMUM]
    in_play = 0
    for block in range(blocks):
        if row.blocks[MAXIMA, block] > MASKED:
            low = min(low, row.blocks[MAXIMA, block])
            in_play += 1
    if k > in_play:
        return -math.inf
    for _ in range(_MOST_HALVINGS):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        count = 0
        for block in range(blocks):
            count += row.blocks[MAXIMA, block] >= middle
        if count >= k:
            low = middle
            if count <= k + k // 8:
                break
        else:
            high = middle
    return low


@helper
def top_p(row: Row, p: float) -> None:
    """Keep the fewest tokens, likeliest first, whose probability reaches p: the nucleus (Holtzman et al. 2019)."""
    if row.flags[OPEN]:
        target = p * total_weight(row)
        if not narrow(row, NO_CENTRE, False, target):
            return
        weigh(row)
    else:
        target = p * weigh(row)
    keep_first(row, row.numbers[VALUES], target)


@helper
def min_p(row: Row, p: float) -> None:
    """Keep tokens that are at least p times as likely as the likeliest token (Nguyen et al. 2024)."""
    if row.flags[OPEN]:
        scan(row)
        if not keep_above(row, row.state[MAXIMUM] + math.log(p) * row.state[TEMPERATURE]):
            return
    weigh(row)
    keep_at_least(row, row.numbers[WEIGHTS], p)


@helper
def typical_p(row: Row, p: float) -> None:
    """Keep the fewest tokens that reach p, in order of |surprise - entropy| (Meister et al. 2022).

    Surprise and entropy differ by the distance of a logit from a centre, divided by the temperature. The centre is the
    mean of the logits, weighted by their probabilities.
    """
    if row.flags[OPEN]:
        total, moment = weight_and_moment(row)
        centre = row.state[MAXIMUM] + moment / total * row.state[TEMPERATURE]
        if not narrow(row, np.float32(centre), False, p * total):
            return
        weigh(row)
    else:
        total = weigh(row)
        centre = row.state[MAXIMUM]
        for i in range(row.flags[COUNT]):
            centre += row.numbers[WEIGHTS, i] * (row.numbers[VALUES, i] - row.state[MAXIMUM]) / total
    for i in range(row.flags[COUNT]):
        row.numbers[KEYS, i] = -abs(row.numbers[VALUES, i] - centre)
    keep_first(row, row.numbers[KEYS], p * total)


@helper
def top_n_sigma(row: Row, n: float) -> None:
    """Keep tokens whose logit is within n standard deviations (of the logits) of the largest (Tang et al. 2024)."""
    if row.flags[OPEN]:
        deviation = standard_deviation(row)
        if not keep_above(row, row.state[MAXIMUM] - n * deviation):
            return
    else:
        weigh(row)
        deviation = _deviation_of_candidates(row)
    keep_at_least(row, row.numbers[VALUES], row.state[MAXIMUM] - n * deviation)


@helper
def _deviation_of_candidates(row: Row) -> Any:
    mean = squares = 0.0
    for i in range(row.flags[COUNT]):
        mean += row.numbers[VALUES, i] / row.flags[COUNT]
    for i in range(row.flags[COUNT]):
        squares += (row.numbers[VALUES, i] - mean) ** 2 / row.flags[COUNT]
    return math.sqrt(squares)


@helper
def mirostat(row: Row, limit: float) -> None:
    """Keep tokens with a surprise of at most `limit` bits, or the likeliest token (Mirostat 2.0: Basu et al. 2020)."""
    total = total_weight(row) if row.flags[OPEN] else weigh(row)
    least = total * 2.0**-limit
    if least > 1.0:
        top_k(row, 1)
        return
    if row.flags[OPEN]:
        if not keep_above(row, row.state[MAXIMUM] + math.log(least) * row.state[TEMPERATURE]):
            return
        weigh(row)
    keep_at_least(row, row.numbers[WEIGHTS], least)


@helper
def xtc(row: Row, threshold: float) -> None:
    """Remove all tokens with at least this probability, except the least likely (among equals, the highest id).

    "Exclude top choices", published by p-e-w as text-generation-webui pull request 6335 (2024).
    """
    if row.flags[OPEN]:
        least = threshold * total_weight(row)
        if least > 1.0:
            return
        gather(row, below(row.state[MAXIMUM] + math.log(least) * row.state[TEMPERATURE]))
        weigh(row)
    else:
        least = threshold * weigh(row)
    survivor = _least_likely(row, least)
    weights, kept = row.numbers[WEIGHTS], row.numbers[KEYS]
    for i in range(row.flags[COUNT]):
        kept[i] = 0.0 if weights[i] >= least and i != survivor else 1.0
        if row.flags[OPEN] and not kept[i]:
            writable(row)[row.ids[TOKENS, i]] = MASKED
    if not row.flags[OPEN]:
        keep_at_least(row, kept, 1.0)


@helper
def _least_likely(row: Row, least: float) -> Any:
    """Return the candidate with the smallest weight among those that reach `least`."""
    found, smallest = -1, math.inf
    for i in range(row.flags[COUNT]):
        if least <= row.numbers[WEIGHTS, i] <= smallest:
            found, smallest = i, row.numbers[WEIGHTS, i]
    return found

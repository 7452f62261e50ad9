"""Selection, without sorting, of the first tokens of an order that together reach a weight."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..jit.dsl import helper
from ..jit.memory import stack_array
from .passes import NO_CENTRE, below, close, key_of, mask, measure
from .row import COUNT, KEYS, MASKED, MAXIMUM, ORDER, TEMPERATURE, TOKENS, VALUES, WEIGHTS, Row, current

# Maximum length of a list of candidates. A row with more candidates stays open.
LONGEST_LIST = 2048
# Distances from the top, in units of temperature, at which the search for enough weight starts and ends.
_FIRST_DISTANCE, _LAST_DISTANCE = 4.0, 100.0
# Maximum number of entries that are sorted.
_SMALL = 32
_nine = stack_array("float64", 9)


@helper
def weigh(row: Row) -> Any:
    """Compute the weights of the candidates relative to the largest weight, and return their sum."""
    values, weights, count = row.numbers[VALUES], row.numbers[WEIGHTS], row.flags[COUNT]
    highest = -math.inf
    for i in range(count):
        highest = max(highest, values[i])
    row.state[MAXIMUM] = highest
    total = 0.0
    for i in range(count):
        weights[i] = math.exp((values[i] - highest) / row.state[TEMPERATURE])
        total += weights[i]
    return total


@helper
def keep_at_least(row: Row, numbers: Any, least: float) -> None:
    """Keep the candidates whose entry in `numbers` is at least `least`."""
    values, tokens = row.numbers[VALUES], row.ids[TOKENS]
    kept = 0
    for i in range(row.flags[COUNT]):
        if numbers[i] >= least:
            values[kept], tokens[kept] = values[i], tokens[i]
            kept += 1
    row.flags[COUNT] = kept


@helper
def keep_first(row: Row, keys: Any, target: float) -> None:
    """Keep the fewest candidates whose weights reach `target`: larger keys first, and among equals, lower ids first."""
    if row.flags[COUNT] == 0:
        return
    last = find_last(keys, row.numbers[WEIGHTS], row.ids[ORDER], row.flags[COUNT], target)
    key = keys[last]
    values, tokens = row.numbers[VALUES], row.ids[TOKENS]
    kept = 0
    for i in range(row.flags[COUNT]):
        if keys[i] > key or (keys[i] == key and i <= last):
            values[kept], tokens[kept] = values[i], tokens[i]
            kept += 1
    row.flags[COUNT] = kept


@helper
def narrow(row: Row, centre: Any, by_number: bool, target: float) -> Any:
    """Reduce an open row to the first tokens, in order of `key_of(logit, centre)`, that reach `target`.

    Either the row becomes a short list that contains all of these tokens (and more: the caller applies the exact rule),
    or, if there are too many for a list, all other tokens are masked.

    Args:
        by_number: True if the number of tokens must reach `target`, False if their weight must.

    Returns:
        True if the row was closed.
    """
    low, high, count, above, reached = _enclose(row, centre, by_number, target)
    if count <= LONGEST_LIST:
        close(row, below(low if math.isnan(centre) else centre + low))
        return True
    if reached:  # otherwise all tokens together miss the target, and all tokens are kept
        _gather_between(row, centre, by_number, low, high)
        last = find_last(row.numbers[KEYS], row.numbers[WEIGHTS], row.ids[ORDER], row.flags[COUNT], target - above)
        mask(row, centre, np.float32(row.numbers[KEYS, last]), np.int64(row.ids[TOKENS, last]))
    return False


@helper
def _enclose(row: Row, centre: Any, by_number: bool, target: float) -> Any:
    """Find two floors that enclose the last token to keep: first from the top down, then closer and closer.

    Returns:
        The lower and the higher floor; the number of tokens that reach the lower floor; the share of the target of the
        tokens that reach the higher floor; and True if the tokens that reach the lower floor reach the target.
    """
    top = row.state[MAXIMUM] if math.isnan(centre) else 0.0
    high, above, num_above = math.inf, 0.0, 0
    distance = _FIRST_DISTANCE
    while True:
        low = -math.inf
        if distance < _LAST_DISTANCE:
            low = np.float64(np.float32(top - distance * row.state[TEMPERATURE]))
        found, count = _found(row, centre, by_number, low)
        if found >= target or low == -math.inf:
            break
        high, above, num_above = low, found, count
        distance *= 2
    reached = found >= target
    while reached and count > LONGEST_LIST and count - num_above > LONGEST_LIST:
        middle = np.float64(np.float32((low + min(high, top)) / 2))
        if not low < middle < high:
            break
        found, number = _found(row, centre, by_number, middle)
        if found >= target:
            low, count = middle, number
        else:
            high, above, num_above = middle, found, number
    return low, high, count, above, reached


@helper
def _found(row: Row, centre: Any, by_number: bool, floor: float) -> Any:
    """Return the amount that tokens that reach a floor contribute to a target, and the number of these tokens."""
    weight, count = measure(row, centre, floor)
    return np.float64(count) if by_number else weight, count


@helper
def _gather_between(row: Row, centre: Any, by_number: bool, low: float, high: float) -> None:
    """Make candidates of the tokens with low <= key < high, with their keys and weights."""
    logits = current(row)
    count = 0
    for token in range(row.given.shape[0]):
        key = key_of(logits[token], centre)
        if (low <= key) & (key < high) & (logits[token] > MASKED):
            row.ids[TOKENS, count] = token
            row.numbers[KEYS, count] = key
            distance = (logits[token] - row.state[MAXIMUM]) / row.state[TEMPERATURE]
            row.numbers[WEIGHTS, count] = 1.0 if by_number else math.exp(distance)
            count += 1
    row.flags[COUNT] = count


@helper
def keep_above(row: Row, floor: float) -> Any:
    """Reduce an open row to tokens whose logit is at least `floor` (a short list may contain a few more).

    Returns:
        True if the row was closed.
    """
    low = below(floor)
    if measure(row, NO_CENTRE, low)[1] <= LONGEST_LIST:
        close(row, low)
        return True
    mask(row, NO_CENTRE, np.float32(floor), row.given.shape[0])
    return False


@helper
def find_last(keys: Any, weights: Any, order: Any, count: int, target: float) -> Any:
    """Return the position of the last entry of the shortest prefix of an order whose weight reaches `target`.

    Quickselect (Hoare 1961) by weight: only the side that contains the result is processed further.

    Args:
        keys, weights: float64 [>= count]; larger keys come first, and among equals, lower positions come first.
        order: int32 [>= count], overwritten.
        target: weight to reach; if all weights together do not reach it, the result is the last entry.
    """
    for i in range(count):
        order[i] = i
    low, high = 0, count
    before = 0.0
    while high - low > _SMALL:
        pivot = _pivot(keys, order, low, high)
        first_equal, first_smaller = _partition(keys, order, low, high, pivot)
        larger, equal = _sum(weights, order, low, first_equal), _sum(weights, order, first_equal, first_smaller)
        if before + larger >= target:
            high = first_equal
        elif before + larger + equal >= target or first_smaller == high:
            return _last_equal(keys, weights, count, pivot, target - before - larger)
        else:
            before += larger + equal
            low = first_smaller
    sort(keys, order, low, high)
    for i in range(low, high):
        before += weights[order[i]]
        if before >= target:
            return order[i]
    return order[high - 1]


@helper
def _pivot(keys: Any, order: Any, low: int, high: int) -> Any:
    """Return the median of nine keys as a balanced pivot."""
    sample = _nine()
    for i in range(9):
        key = keys[order[low + i * ((high - low) // 9)]]
        j = i
        while j > 0 and sample[j - 1] > key:
            sample[j] = sample[j - 1]
            j -= 1
        sample[j] = key
    return sample[4]


@helper
def _partition(keys: Any, order: Any, low: int, high: int, pivot: float) -> Any:
    """Partition into larger, equal and smaller keys (Dijkstra's flag). Return where equal and smaller keys begin."""
    larger, here, smaller = low, low, high
    while here < smaller:
        moved = order[here]
        if keys[moved] > pivot:
            order[here] = order[larger]
            order[larger] = moved
            larger += 1
            here += 1
        elif keys[moved] < pivot:
            smaller -= 1
            order[here] = order[smaller]
            order[smaller] = moved
        else:
            here += 1
    return larger, smaller


@helper
def _sum(weights: Any, order: Any, low: int, high: int) -> Any:
    total = 0.0
    for i in range(low, high):
        total += weights[order[i]]
    return total


@helper
def _last_equal(keys: Any, weights: Any, count: int, key: float, target: float) -> Any:
    """Return the position, among the entries with this key, at which their weights reach `target`, or the last one."""
    total, last = 0.0, 0
    for i in range(count):
        if keys[i] == key:
            total += weights[i]
            last = i
            if total >= target:
                break
    return last


@helper
def sort(keys: Any, order: Any, low: int, high: int) -> None:
    """Sort by insertion: larger keys first, and among equals, lower positions first."""
    for i in range(low + 1, high):
        moved = order[i]
        j = i
        while j > low and (
            keys[order[j - 1]] < keys[moved] or (keys[order[j - 1]] == keys[moved] and order[j - 1] > moved)
        ):
            order[j] = order[j - 1]
            j -= 1
        order[j] = moved

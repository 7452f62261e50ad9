"""One row of logits on its way to a token.

A row is **open** at first: the logits themselves say which tokens are in play (masked ones are -inf). A step that
leaves few of them **closes** it: the few become a list of candidates in order of their ids, and later steps look at
nothing else. Whoever changes logits of an open row first takes a copy (`writable`), so the caller's never change.

Order among tokens, wherever one is needed: the larger logit first, among equals the lower id.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..lazy import helper


class Row(NamedTuple):
    """The arrays that belong to a row while it is worked on.

    Attributes:
        given: float32 [V], the caller's logits; read only.
        own: float32 [V], the copy, where flags[OWNED].
        blocks: float32 [2, blocks]: largest logit (MAXIMA) and sum of the weights (SUMS) of each block of tokens.
        numbers: float64 [3, V], of each candidate: logit (VALUES), weight (WEIGHTS: e to the distance from the
            maximum over the temperature), and another order (KEYS).
        ids: int32 [3, V]: token of each candidate (TOKENS), room for sorting (ORDER), and, per token and zero between
            uses, what the history says of it (MARKS).
        state: float64 [2]: the largest logit in play (MAXIMUM), what logits were divided by so far (TEMPERATURE).
        flags: int64 [5], see OPEN to STATUS.
    """

    given: Any
    own: Any
    blocks: Any
    numbers: Any
    ids: Any
    state: Any
    flags: Any


MAXIMA, SUMS = 0, 1
VALUES, WEIGHTS, KEYS = 0, 1, 2
TOKENS, ORDER, MARKS = 0, 1, 2
MAXIMUM, TEMPERATURE = 0, 1
# Is the row open? Is `own` in use? Are maxima up to date? How many candidates are there? What went wrong?
OPEN, OWNED, SCANNED, COUNT, STATUS = 0, 1, 2, 3, 4
NUM_STATES, NUM_FLAGS = 2, 5

# Of a row, in `flags[STATUS]` and to the caller.
FINE, HAS_NAN, HAS_INFINITY, ALL_MASKED = 0, 1, 2, 3

MASKED = np.float32(-np.inf)


@helper
def reset(row: Row) -> None:
    """Begin with untouched logits, all of them in play."""
    row.flags[OPEN] = 1
    row.flags[OWNED] = row.flags[SCANNED] = row.flags[COUNT] = row.flags[STATUS] = 0
    row.state[TEMPERATURE] = 1.0


@helper
def current(row: Row) -> Any:
    """The logits of an open row, float32 [V]."""
    return row.own if row.flags[OWNED] else row.given


@helper
def writable(row: Row) -> Any:
    """The logits of an open row, to be changed: a copy, of which nothing is known any more."""
    if not row.flags[OWNED]:
        for token in range(row.given.shape[0]):
            row.own[token] = row.given[token]
        row.flags[OWNED] = 1
    row.flags[SCANNED] = 0
    return row.own

"""XTC, "exclude top choices": now and then removes the likely tokens and leaves the least likely of them.

Published by p-e-w as text-generation-webui pull request 6335 (2024).
"""

from __future__ import annotations

import math
from typing import Any

from ..lazy import helper
from .passes import below, gather, total_weight
from .row import COUNT, KEYS, MASKED, MAXIMUM, OPEN, TEMPERATURE, TOKENS, WEIGHTS, Row, writable
from .selection import keep_at_least, weigh


@helper
def xtc(row: Row, threshold: float) -> None:
    """Of all tokens with at least this probability, only the least likely stays (among equals the highest id)."""
    if row.flags[OPEN]:
        least = threshold * total_weight(row)[0]
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
    """The candidate with the smallest weight of those that reach `least`."""
    found, smallest = -1, math.inf
    for i in range(row.flags[COUNT]):
        if least <= row.numbers[WEIGHTS, i] <= smallest:
            found, smallest = i, row.numbers[WEIGHTS, i]
    return found

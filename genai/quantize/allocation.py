"""Allocation of bits to matrices: a knapsack over measured divergences.

Each matrix has a few candidates of different sizes. The loss of a candidate is the measured mean divergence of the
model in which only that matrix is stored in that way. Divergences of small errors are nearly additive because errors of
different matrices are hardly correlated, so finding the best allocation is a multiple-choice knapsack problem. The
problem is solved by dynamic programming (Kellerer, Pferschy & Pisinger 2004, chapter 11), exactly up to the size of the
cells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

# Number of cells into which the bytes of all matrices are divided.
_CELLS = 20_000


@dataclass(frozen=True)
class Candidate:
    """One way to store one matrix.

    Attributes:
        label: label of the format.
        nbytes: size in bytes.
        loss: mean divergence that the candidate causes.
    """

    label: str
    nbytes: int
    loss: float


Candidates = Mapping[str, Sequence[Candidate]]


def cheapest(candidates: Candidates, most_bytes: int) -> dict[str, Candidate] | None:
    """Return one candidate per matrix with the smallest total loss within `most_bytes`; None if nothing fits."""
    least = {name: min(candidate.nbytes for candidate in alternatives) for name, alternatives in candidates.items()}
    room = most_bytes - sum(least.values())
    if room < 0:
        return None
    largest = sum(
        max(candidate.nbytes for candidate in alternatives) - least[name] for name, alternatives in candidates.items()
    )
    cell = max(1, -(-min(room, largest) // _CELLS))
    cells = min(room, largest) // cell
    best = np.zeros(cells + 1)
    chosen: list[np.ndarray] = []
    for name, alternatives in candidates.items():
        options = []
        for candidate in alternatives:
            extra = -(-(candidate.nbytes - least[name]) // cell)
            shifted = np.full(cells + 1, np.inf)
            if extra <= cells:
                shifted[extra:] = best[: cells + 1 - extra] + candidate.loss
            options.append(shifted)
        stacked = np.stack(options)
        chosen.append(stacked.argmin(axis=0))
        best = stacked.min(axis=0)
    budget, result = int(best.argmin()), {}
    for (name, alternatives), index in zip(reversed(list(candidates.items())), reversed(chosen), strict=True):
        candidate = alternatives[int(index[budget])]
        result[name] = candidate
        budget -= -(-(candidate.nbytes - least[name]) // cell)
    return {name: result[name] for name in candidates}


def smallest(candidates: Candidates, most_loss: float) -> dict[str, Candidate] | None:
    """Return one candidate per matrix with the smallest total size within `most_loss`; None if nothing fits."""
    best_of = {name: min(alternatives, key=lambda each: each.loss) for name, alternatives in candidates.items()}
    if total_loss(best_of) > most_loss:
        return None
    low = sum(min(candidate.nbytes for candidate in alternatives) for alternatives in candidates.values())
    high = sum(max(candidate.nbytes for candidate in alternatives) for alternatives in candidates.values())
    best = cheapest(candidates, high)
    while best is not None and high - low > max(1, high // _CELLS):
        middle = (low + high) // 2
        allocation = cheapest(candidates, middle)
        if allocation is not None and total_loss(allocation) <= most_loss:
            best, high = allocation, middle
        else:
            low = middle
    return best


def total_loss(chosen: Mapping[str, Candidate]) -> float:
    """Return the total loss of the chosen candidates."""
    return sum(candidate.loss for candidate in chosen.values())


def total_bytes(chosen: Mapping[str, Candidate]) -> int:
    """Return the total size of the chosen candidates in bytes."""
    return sum(candidate.nbytes for candidate in chosen.values())

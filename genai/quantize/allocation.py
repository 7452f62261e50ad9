"""Bits where they buy the most: a knapsack over measured divergences.

Each matrix has a few candidates, of different sizes; what each costs is measured, as the mean divergence of the model
in which that matrix alone is stored so. Divergences of small errors add up nearly (errors of different matrices hardly
go together), so the best choice of all is a multiple-choice knapsack. It is solved exactly up to the size of its cells
by dynamic programming (Kellerer, Pferschy & Pisinger 2004, chapter 11).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

# Cells that the bytes of all matrices are counted in.
_CELLS = 20_000


@dataclass(frozen=True)
class Candidate:
    """One way to store one matrix.

    Attributes:
        label: of it. nbytes: that it takes. loss: mean divergence that it costs.
    """

    label: str
    nbytes: int
    loss: float


Candidates = Mapping[str, Sequence[Candidate]]


def cheapest(candidates: Candidates, most_bytes: int) -> dict[str, Candidate] | None:
    """Per matrix the candidate, so that the losses' sum is least within so many bytes; None if nothing fits."""
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
    """Per matrix the candidate, so that the bytes are least and the losses' sum within a limit; None if nothing is."""
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
    """What choices cost together."""
    return sum(candidate.loss for candidate in chosen.values())


def total_bytes(chosen: Mapping[str, Candidate]) -> int:
    """What choices take together."""
    return sum(candidate.nbytes for candidate in chosen.values())

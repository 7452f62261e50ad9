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
    least = {name: min(one.nbytes for one in some) for name, some in candidates.items()}
    room = most_bytes - sum(least.values())
    if room < 0:
        return None
    largest = sum(max(one.nbytes for one in some) - least[name] for name, some in candidates.items())
    cell = max(1, -(-min(room, largest) // _CELLS))
    cells = min(room, largest) // cell
    best = np.zeros(cells + 1)
    chosen: list[np.ndarray] = []
    for name, some in candidates.items():
        options = []
        for one in some:
            taken = -(-(one.nbytes - least[name]) // cell)
            shifted = np.full(cells + 1, np.inf)
            if taken <= cells:
                shifted[taken:] = best[: cells + 1 - taken] + one.loss
            options.append(shifted)
        stacked = np.stack(options)
        chosen.append(stacked.argmin(axis=0))
        best = stacked.min(axis=0)
    place, result = int(best.argmin()), {}
    for (name, some), index in zip(reversed(list(candidates.items())), reversed(chosen), strict=True):
        one = some[int(index[place])]
        result[name] = one
        place -= -(-(one.nbytes - least[name]) // cell)
    return {name: result[name] for name in candidates}


def smallest(candidates: Candidates, most_loss: float) -> dict[str, Candidate] | None:
    """Per matrix the candidate, so that the bytes are least and the losses' sum within a limit; None if nothing is."""
    if total_loss({name: min(some, key=lambda one: one.loss) for name, some in candidates.items()}) > most_loss:
        return None
    low = sum(min(one.nbytes for one in some) for some in candidates.values())
    high = sum(max(one.nbytes for one in some) for some in candidates.values())
    best = cheapest(candidates, high)
    while best is not None and high - low > max(1, high // _CELLS):
        middle = (low + high) // 2
        found = cheapest(candidates, middle)
        if found is not None and total_loss(found) <= most_loss:
            best, high = found, middle
        else:
            low = middle
    return best


def total_loss(chosen: Mapping[str, Candidate]) -> float:
    """What choices cost together."""
    return sum(one.loss for one in chosen.values())


def total_bytes(chosen: Mapping[str, Candidate]) -> int:
    """What choices take together."""
    return sum(one.nbytes for one in chosen.values())

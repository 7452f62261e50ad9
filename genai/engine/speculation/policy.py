"""How many tokens to propose: what a step costs by its rows, how often proposals are kept, and what follows from both.

Pure arithmetic over what was measured. The idea of pricing proposals with a measured curve is llama.cpp's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

# What one more row adds to a step, as a part of it, until that was measured.
_FIRST_SLOPE = 0.1
# A cost is the median of so many steps, and is forgotten when none of so many was like it.
_STEPS_REMEMBERED, _STEPS_GOOD = 9, 512
# How many proposals a belief from elsewhere is worth, and what is left of experience after each step.
_PRIOR_WEIGHT, _MEMORY = 3.0, 0.98
# Proposals must promise so much more speed, or they are left out.
_LEAST_GAIN = 0.02
# Part of the time that may be lost to guesses that turn out wrong, and how many steps' worth may be saved up for it.
_LOSS_SHARE, _MOST_CREDIT = 0.01, 2.0


class StepCosts:
    """Seconds of a step by its rows, learnt from the steps that were computed.

    The first step of so many rows does not count: it also loads kernels and takes memory.
    """

    def __init__(self) -> None:
        self._steps: dict[int, deque[float]] = {}
        self._medians: dict[int, float] = {}
        self._noted: set[int] = set()
        self._count = 0

    def note(self, rows: int, seconds: float) -> None:
        """A step of so many rows took so long."""
        steps = self._steps.get(rows)
        if steps is None:
            self._steps[rows] = deque(maxlen=_STEPS_REMEMBERED)
        else:
            steps.append(seconds)
            self._medians[rows] = sorted(steps)[len(steps) // 2]
            self._noted.add(rows)
        self._count += 1
        if self._count % _STEPS_GOOD == 0:
            self._medians = {rows: seconds for rows, seconds in self._medians.items() if rows in self._noted}
            self._steps = {rows: steps for rows, steps in self._steps.items() if rows in self._noted or not steps}
            self._noted.clear()

    def knows(self, rows: int) -> bool:
        """Whether a step of exactly so many rows was measured."""
        return rows in self._medians

    @property
    def knows_any(self) -> bool:
        """Whether any step was measured."""
        return bool(self._medians)

    def seconds(self, rows: int) -> float:
        """What a step of so many rows takes: measured, or on a line through what was. More rows never take less.

        Raises:
            ValueError: no step was measured.
        """
        known = sorted(self._medians)
        below = [one for one in known if one <= rows]
        if not below:
            return self._medians[known[0]] if known else _raise_unknown()
        low = max(self._medians[one] for one in below)
        if below[-1] == rows:
            return low
        if len(below) < len(known):
            nearest = known[len(below)]
            rise = max(self._medians[nearest] - low, 0.0)
            return low + rise * (rows - below[-1]) / (nearest - below[-1])
        first = self._medians[known[0]]
        slope = (low - first) / (below[-1] - known[0]) if len(known) > 1 else _FIRST_SLOPE * first
        return low + slope * (rows - below[-1])


def _raise_unknown() -> float:
    raise ValueError("no step was measured yet")


class Acceptance:
    """How often proposals are kept, by what kind they are; recent ones count more.

    Args:
        elsewhere: what to believe before there is experience: an Acceptance of all requests, or chances by kind (and
            step).
    """

    def __init__(self, elsewhere: Acceptance | Callable[[str, int], float]) -> None:
        self._elsewhere = elsewhere.chance if isinstance(elsewhere, Acceptance) else elsewhere
        self._seen: dict[str, tuple[int, float, float]] = {}  # in which step last, how many until then, of these kept

    def note(self, kind: str, step: int, kept: int, rejected: bool) -> None:
        """In a step so many proposals were kept, and then one was not."""
        tested, before = self._counts(kind, step)
        self._seen[kind] = step, tested + kept + rejected, before + kept

    def chance(self, kind: str, step: int) -> float:
        """The probability that a proposal is kept, if those before it were."""
        tested, kept = self._counts(kind, step)
        return (kept + _PRIOR_WEIGHT * self._elsewhere(kind, step)) / (tested + _PRIOR_WEIGHT)

    def _counts(self, kind: str, step: int) -> tuple[float, float]:
        """With every step, what was seen before counts a little less: so what has failed is tried again one day."""
        if kind not in self._seen:
            return 0.0, 0.0
        last, tested, kept = self._seen[kind]
        share = _MEMORY ** (step - last)
        return share * tested, share * kept


class Prospect(NamedTuple):
    """What could be proposed to one sequence.

    Attributes:
        most: at most so many tokens.
        chance: that each of them is kept, if those before it are.
        drafted: whether a draft model has to compute them, one step for each token of all sequences.
    """

    most: int
    chance: float
    drafted: bool = False


def choose_depths(
    candidates: Sequence[Prospect],
    most_rows: int,
    seconds: Callable[[int], float],
    draft_seconds: Callable[[int], float] = lambda _: 0.0,
) -> list[int]:
    """How many tokens to propose to each sequence: those with which tokens per second are expected to be the most.

    Args:
        candidates: one per sequence of the step.
        most_rows: of the step, all sequences together.
        seconds: of a step of so many rows. draft_seconds: of a step of the draft model.
    """
    count = len(candidates)
    drafted = sum(one.drafted for one in candidates)
    offers = sorted(
        (-(one.chance**depth), index, depth)
        for index, one in enumerate(candidates)
        for depth in range(1, one.most + 1)
        if one.chance > 0
    )
    depths, best = [0] * count, [0] * count
    tokens, rate, drafts, deepest = float(count), (1 + _LEAST_GAIN) * count / seconds(count), 0.0, 0
    for rows, (gain, index, depth) in enumerate(offers[: max(most_rows - count, 0)], count + 1):
        depths[index] = depth
        tokens -= gain
        if candidates[index].drafted and depth > deepest:
            deepest, drafts = depth, drafts + draft_seconds(drafted)
        found = tokens / (seconds(rows) + drafts)
        if found > rate:
            rate, best = found, depths.copy()
    return best


class Account:
    """Keeps what is lost to wrong guesses below a small part of the time, whatever was expected of them.

    A step pays in a hundredth of what it takes without proposals, and what they saved; what they cost is taken out.
    While it is overdrawn nothing is proposed.
    """

    def __init__(self) -> None:
        self._credit = 0.0

    @property
    def is_open(self) -> bool:
        """Whether something may be tried."""
        return self._credit >= 0

    def settle(self, plain: float, saved: float) -> None:
        """A step is over.

        Args:
            plain: seconds that it takes without proposals. saved: by them, in seconds; negative where they cost time.
        """
        self._credit = min(self._credit + _LOSS_SHARE * plain + saved, _MOST_CREDIT * plain)

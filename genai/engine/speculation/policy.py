"""How many tokens to propose: what a step costs by its rows, how often proposals are kept, and what follows from both.

Pure arithmetic over what was measured. The idea of pricing proposals with a measured curve is llama.cpp's.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

# What a row more adds to a step, as a part of it, until that was measured.
_FIRST_SHARE = 0.1
# What is known is the median of so many steps.
_STEPS_REMEMBERED = 9
# A step without proposals is measured again after so many; what rows add is forgotten if it was not seen in so many.
_PLAIN_GOOD, _ROWS_GOOD = 48, 128
# How many proposals a belief from elsewhere is worth, and what is left of experience after each step.
_PRIOR_WEIGHT, _MEMORY = 3.0, 0.98
# Proposals must promise so much more speed, or they are left out.
_LEAST_GAIN = 0.02
# Part of the time that may be lost to guesses that turn out wrong, and how many steps' worth may be saved up for it.
_LOSS_SHARE, _MOST_CREDIT, _LONGEST_PAUSE = 0.01, 2.0, 64


class _Recent:
    """The median of the last few numbers, and at which step the last of them came."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=_STEPS_REMEMBERED)
        self.median, self.step = 0.0, 0

    def note(self, value: float, step: int) -> None:
        self._values.append(value)
        self.median, self.step = sorted(self._values)[len(self._values) // 2], step


class StepCosts:
    """Seconds of a step, learnt from those that were computed: without proposals, by how many sequences it has; and
    what each row more adds, by how many more there are (1, 2 to 3, 4 to 7, …).

    The first step of so many rows does not count: it also loads kernels and takes memory.
    """

    def __init__(self) -> None:
        self._plain: dict[int, _Recent] = {}
        self._per_row: dict[int, _Recent] = {}
        self._seen: set[int] = set()
        self._step = 0

    def note(self, sequences: int, rows: int, seconds: float) -> None:
        """A step of so many sequences, and so many rows in all, took so long."""
        self._step += 1
        if rows not in self._seen:
            self._seen.add(rows)
        elif rows == sequences:
            self._plain.setdefault(sequences, _Recent()).note(seconds, self._step)
        elif sequences in self._plain:
            more = rows - sequences
            added = max(seconds - self._plain[sequences].median, 0.0) / more
            self._per_row.setdefault(more.bit_length(), _Recent()).note(added, self._step)

    def knows(self, sequences: int) -> bool:
        """Whether a step of so many sequences without proposals was measured of late."""
        return sequences in self._plain and self._step - self._plain[sequences].step < _PLAIN_GOOD

    def plain(self, sequences: int) -> float:
        """A step of so many sequences without proposals; or of a number near to it. 0 if none was measured."""
        if not self._plain:
            return 0.0
        return self._plain[min(self._plain, key=lambda known: abs(known - sequences))].median

    def seconds(self, sequences: int, rows: int) -> float:
        """What a step takes."""
        plain, more = self.plain(sequences), rows - sequences
        return plain + more * self._added(more.bit_length(), _FIRST_SHARE * plain) if more else plain

    def _added(self, size: int, unknown: float) -> float:
        """What each row adds where there are so many more: measured, or as for the next size that was."""
        good = [one for one, known in self._per_row.items() if self._step - known.step < _ROWS_GOOD]
        return self._per_row[min(good, key=lambda one: abs(one - size))].median if good else unknown


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
    prospects: Sequence[Prospect],
    most_rows: int,
    seconds: Callable[[int, int], float],
    draft_seconds: Callable[[int], float] = lambda _: 0.0,
) -> list[int]:
    """How many tokens to propose to each sequence: those with which tokens per second are expected to be the most.

    Args:
        prospects: one per sequence of the step.
        most_rows: of the step, all sequences together.
        seconds: of a step of so many sequences and rows. draft_seconds: of a step of the draft model.
    """
    count = len(prospects)
    drafted = sum(one.drafted for one in prospects)
    offers = sorted(
        (-(one.chance**depth), index, depth)
        for index, one in enumerate(prospects)
        for depth in range(1, one.most + 1)
        if one.chance > 0
    )
    depths, best = [0] * count, [0] * count
    tokens, rate, drafts, deepest = float(count), (1 + _LEAST_GAIN) * count / seconds(count, count), 0.0, 0
    for rows, (gain, index, depth) in enumerate(offers[: max(most_rows - count, 0)], count + 1):
        depths[index] = depth
        tokens -= gain
        if prospects[index].drafted and depth > deepest:
            deepest, drafts = depth, drafts + draft_seconds(drafted)
        found = tokens / (seconds(count, rows) + drafts)
        if found > rate:
            rate, best = found, depths.copy()
    return best


class Account:
    """Keeps what is lost to wrong guesses below a small part of the time, whatever was expected of them.

    A step pays in a hundredth of what it takes without proposals, and what they saved; what they cost is taken out.
    While it is overdrawn nothing is looked for.
    """

    def __init__(self) -> None:
        self._credit = 0.0

    def settle(self, plain: float, saved: float) -> None:
        """A step is over.

        Args:
            plain: seconds that it takes without proposals. saved: by them, in seconds; negative where they cost time.
        """
        self._credit = min(self._credit + _LOSS_SHARE * plain + saved, _MOST_CREDIT * plain)

    def wait(self, plain: float) -> int:
        """How many steps to let pass before something is tried again, which is taken as done: 0 if there is credit."""
        if self._credit >= 0:
            return 0
        steps = min(math.ceil(-self._credit / (_LOSS_SHARE * plain)), _LONGEST_PAUSE)
        self._credit += steps * _LOSS_SHARE * plain
        return steps

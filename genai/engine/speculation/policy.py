"""The policy of speculative decoding: it derives the number of draft tokens from step costs and acceptance rates.

Pure arithmetic on measurements. The use of a measured cost curve to price draft tokens is an idea from llama.cpp.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

# The assumed cost of an additional row, relative to a step, until the cost is measured.
_FIRST_SHARE = 0.1
# Costs are medians of this number of steps.
_STEPS_REMEMBERED = 9
# A step without draft tokens is measured again after the first number of steps. The cost of additional rows expires if
# it was not measured during the second number of steps.
_PLAIN_GOOD, _ROWS_GOOD = 48, 128
# The weight of the prior acceptance rate, in draft tokens, and the factor by which experience decays per step.
_PRIOR_WEIGHT, _MEMORY = 3.0, 0.98
# Draft tokens are proposed only if the expected speedup is at least this share.
_LEAST_GAIN = 0.02
# The share of time that rejected draft tokens may cost; the maximum credit for it, in steps; and the longest pause.
_LOSS_SHARE, _MOST_CREDIT, _LONGEST_PAUSE = 0.01, 2.0, 64


class _Recent:
    """The median of the most recent values, and the step of the last value."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=_STEPS_REMEMBERED)
        self.median, self.step = 0.0, 0

    def note(self, value: float, step: int) -> None:
        self._values.append(value)
        self.median, self.step = sorted(self._values)[len(self._values) // 2], step


class StepCosts:
    """Measured durations of steps.

    The durations of steps without draft tokens are stored by the number of sequences. The cost per additional row is
    stored by the number of additional rows (1, 2 to 3, 4 to 7, …). The first step with a given number of rows does not
    count, because it also loads kernels and allocates memory.
    """

    def __init__(self) -> None:
        self._plain: dict[int, _Recent] = {}
        self._per_row: dict[int, _Recent] = {}
        self._seen: set[int] = set()
        self._step = 0

    def note(self, sequences: int, rows: int, seconds: float) -> None:
        """Record the duration of a step.

        Args:
            sequences: number of sequences.
            rows: number of rows, including draft tokens.
            seconds: duration of the step.
        """
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
        """Return True if a step of `sequences` sequences without draft tokens was measured recently."""
        return sequences in self._plain and self._step - self._plain[sequences].step < _PLAIN_GOOD

    def plain(self, sequences: int) -> float:
        """Return the seconds of a step without draft tokens, for the nearest measured number of sequences; else 0."""
        if not self._plain:
            return 0.0
        return self._plain[min(self._plain, key=lambda known: abs(known - sequences))].median

    def seconds(self, sequences: int, rows: int) -> float:
        """Return the estimated seconds of a step."""
        plain, more = self.plain(sequences), rows - sequences
        return plain + more * self._added(more.bit_length(), _FIRST_SHARE * plain) if more else plain

    def _added(self, size: int, unknown: float) -> float:
        """Return the cost per additional row, measured for a size class or else for the nearest measured class."""
        good = [one for one, known in self._per_row.items() if self._step - known.step < _ROWS_GOOD]
        return self._per_row[min(good, key=lambda one: abs(one - size))].median if good else unknown


class Acceptance:
    """The acceptance rate of draft tokens by kind; recent draft tokens have a higher weight.

    Args:
        elsewhere: the prior, which is an Acceptance over all requests, or a function of the kind and the step.
    """

    def __init__(self, elsewhere: Acceptance | Callable[[str, int], float]) -> None:
        self._elsewhere = elsewhere.chance if isinstance(elsewhere, Acceptance) else elsewhere
        self._seen: dict[str, tuple[int, float, float]] = {}  # last step; tested and accepted draft tokens so far

    def note(self, kind: str, step: int, kept: int, rejected: bool) -> None:
        """Record that a step accepted `kept` draft tokens, and whether it rejected the following draft token."""
        tested, before = self._counts(kind, step)
        self._seen[kind] = step, tested + kept + rejected, before + kept

    def chance(self, kind: str, step: int) -> float:
        """Return the probability that a draft token is accepted, given that all preceding draft tokens are."""
        tested, kept = self._counts(kind, step)
        return (kept + _PRIOR_WEIGHT * self._elsewhere(kind, step)) / (tested + _PRIOR_WEIGHT)

    def _counts(self, kind: str, step: int) -> tuple[float, float]:
        """Return the decayed counts. Older experience counts less, so that a failed kind is eventually tried again."""
        if kind not in self._seen:
            return 0.0, 0.0
        last, tested, kept = self._seen[kind]
        share = _MEMORY ** (step - last)
        return share * tested, share * kept


class Prospect(NamedTuple):
    """The draft tokens that could be proposed to one sequence.

    Attributes:
        most: maximum number of tokens.
        chance: probability that each token is accepted, given that the preceding tokens are.
        drafted: True if a draft model has to compute the tokens, in one step per token for all sequences together.
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
    """Choose the number of draft tokens per sequence, so as to maximise the expected tokens per second.

    Args:
        prospects: one per sequence of the step.
        most_rows: maximum number of rows in the step, over all sequences.
        seconds: returns the duration of a step with a given number of sequences and rows.
        draft_seconds: returns the duration of a draft-model step with a given number of sequences.
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
    """A limit on the share of time lost to rejected draft tokens, regardless of the benefit that was expected.

    Each step adds to the balance a hundredth of its duration without draft tokens, and the time that draft tokens
    saved; the time that they cost is deducted. While the balance is negative, no tokens are proposed.
    """

    def __init__(self) -> None:
        self._credit = 0.0

    def settle(self, plain: float, saved: float) -> None:
        """Update the balance after a step.

        Args:
            plain: duration of the step without draft tokens, in seconds.
            saved: seconds saved by draft tokens; negative if they cost time.
        """
        self._credit = min(self._credit + _LOSS_SHARE * plain + saved, _MOST_CREDIT * plain)

    def wait(self, plain: float) -> int:
        """Return the number of steps to pause proposals for; they are credited in advance. 0 = no pause is needed."""
        if self._credit >= 0:
            return 0
        steps = min(math.ceil(-self._credit / (_LOSS_SHARE * plain)), _LONGEST_PAUSE)
        self._credit += steps * _LOSS_SHARE * plain
        return steps

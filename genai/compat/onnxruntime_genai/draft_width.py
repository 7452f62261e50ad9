"""The number of draft tokens per round, as onnxruntime-genai chooses it: adaptive width, and pauses."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...engine.speculation.options import MOST_WIDTH

# The weight of a new observation.
_WEIGHT = 0.25
# Acceptance rates below the first lower the width; rates from the second on raise it.
_LOW, _HIGH = 0.5, 0.75
# A tried width is retained at this share of the former speed, and given up at once below the second share.
_RETAINED, _FAILED = 0.97, 0.8
# Observations before a decision, and rounds to wait after a tried width was retained or given up.
_OBSERVATIONS, _AFTER_SUCCESS, _AFTER_FAILURE = 2, 1, 6
# Completed rounds without an accepted token that lead to a pause.
_FAILURES = 3


@dataclass
class _Estimate:
    """Smoothed tokens, milliseconds and acceptance rate of rounds of one width."""

    tokens: float = 0.0
    milliseconds: float = 0.0
    acceptance: float = 0.0
    count: int = 0

    def add(self, tokens: float, milliseconds: float, acceptance: float) -> None:
        weight = _WEIGHT if self.count else 1.0
        self.tokens += weight * (tokens - self.tokens)
        self.milliseconds += weight * (milliseconds - self.milliseconds)
        self.acceptance += weight * (acceptance - self.acceptance)
        self.count += 1

    @property
    def speed(self) -> float:
        """Tokens per millisecond; 0 before the first observation."""
        return self.tokens / self.milliseconds if self.milliseconds else 0.0


class DraftWidth:
    """The maximum number of draft tokens of the next round.

    The width is fixed, or starts at a least width and follows the measured speed: it tries an adjacent width for two
    rounds, and retains that width if it is not slower.

    Args:
        fixed: the width if it does not adapt.
        least: the first and least width, up to MOST_WIDTH; 0 = the width does not adapt.

    Attributes:
        current: the width now.
        increases, decreases, observations, probes: counters of changes, of rounds that counted, and of tries.
    """

    def __init__(self, fixed: int, least: int) -> None:
        self._adapts = least > 0
        self.least, self._most = (least, MOST_WIDTH) if least else (fixed, fixed)
        self.increases = self.decreases = self.observations = self.probes = 0
        self.reset()

    def reset(self) -> None:
        """Forget all observations. The counters remain."""
        self.current = self.least
        self._estimates: dict[int, _Estimate] = {}
        self._origin = 0  # the width before the current try; 0 = no try
        self._tried = self._stable = self._wait = 0

    @property
    def speed(self) -> float:
        """Estimated tokens per millisecond at the current width, or else at the width before a try; 0 = unknown."""
        for width in (self.current, self._origin):
            if width in self._estimates:
                return self._estimates[width].speed
        return 0.0

    def note(self, width: int, *, evaluated: int, accepted: int, tokens: int, milliseconds: float) -> None:
        """Record a completed round whose proposals filled the width."""
        if not self._adapts or width != self.current or not evaluated or not tokens:
            return
        if not 0 < milliseconds < math.inf:
            return
        estimate = self._estimates.setdefault(width, _Estimate())
        estimate.add(tokens, milliseconds, accepted / evaluated)
        self.observations += 1
        if self._origin:
            self._judge(estimate)
        else:
            self._consider(estimate)

    def _judge(self, estimate: _Estimate) -> None:
        """End the current try if there is enough evidence."""
        self._tried += 1
        before = self._estimates[self._origin].speed if self._origin in self._estimates else 0.0
        if before and estimate.speed < _FAILED * before:
            self._finish(retained=False)
        elif self._tried >= _OBSERVATIONS:
            is_accepted = self.current < self._origin or estimate.acceptance >= _HIGH
            self._finish(retained=is_accepted and (not before or estimate.speed >= _RETAINED * before))

    def _consider(self, estimate: _Estimate) -> None:
        """Try an adjacent width if the acceptance rate suggests one."""
        self._stable += 1
        if self._wait:
            self._wait -= 1
        elif estimate.count >= _OBSERVATIONS:
            if estimate.acceptance < _LOW and self.current > self.least:
                self._try(self.current - 1)
            elif estimate.acceptance >= _HIGH and self.current < self._most and self._stable >= _OBSERVATIONS:
                self._try(self.current + 1)

    def _try(self, width: int) -> None:
        self._origin, self._tried, self._stable = self.current, 0, 0
        self.probes += 1
        self._move(width)

    def _finish(self, *, retained: bool) -> None:
        if not retained:
            self._move(self._origin)
        self._origin = self._tried = self._stable = 0
        self._wait = _AFTER_SUCCESS if retained else _AFTER_FAILURE

    def _move(self, width: int) -> None:
        self.increases += width > self.current
        self.decreases += width < self.current
        self.current = width


class Cooldown:
    """A pause of one step after three rounds in a row, at the least width, in which no token was accepted.

    Args:
        enabled: False if there are no pauses.

    Attributes:
        remaining: number of steps to pause for.
        entries, steps: counters of pauses, and of their steps.
    """

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self.entries = self.steps = 0
        self.reset()

    def reset(self) -> None:
        """End the pause. The counters remain."""
        self._failures = self.remaining = 0

    def note(self, *, is_least: bool, evaluated: int, accepted: int) -> None:
        """Record a completed round; `is_least` is True if it had the least width."""
        if not self._enabled or not evaluated:
            return
        self._failures = 0 if accepted or not is_least else self._failures + 1
        if self._failures == _FAILURES:
            self._failures, self.remaining = 0, 1
            self.entries += 1

    def complete_step(self) -> None:
        """Record a step of the pause."""
        self.remaining -= 1
        self.steps += 1

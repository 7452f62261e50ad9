"""How much of the prompts a step reads while somebody watches tokens come.

A step that reads part of a prompt takes longer, and who watches a reply sees it pause. Such steps are therefore kept
apart by so many steps without a prompt that fewer than five in a hundred tokens come late, and they are only so long
that prompts get a third of the time. Where many prompts wait beside few watched replies, they get more of it: the
steps come closer together, and stay as long. Nobody watches a batch, so that its prompts are read at once.
"""

from __future__ import annotations

import sys
from collections import deque

# Prompts get at least this part of the time.
_LEAST_SHARE = 1 / 3
# With that share, 21 steps without a prompt for one with: the 95th percentile of the time between two tokens is that of
# a step without.
_QUIET_STEPS = 21
# A step with prompts takes as long as so many without.
_LONGER = _QUIET_STEPS * _LEAST_SHARE / (1 - _LEAST_SHARE)
# Where nothing is known yet; and at least, so that prompts are read in the end.
_FIRST_TOKENS, _LEAST_TOKENS = 32, 8
# The fastest of the last few steps count: others held kernels being compiled, or another program's work.
_REMEMBERED = 8


class PrefillBudget:
    """Learns from the steps what a prompt's token takes, and says how many of them the next step may compute."""

    def __init__(self) -> None:
        self._steps = _QUIET_STEPS  # without a prompt since the last one with
        self._quiet: deque[float] = deque(maxlen=_QUIET_STEPS)
        self._per_token: deque[float] = deque(maxlen=_REMEMBERED)

    def prefill_budget(self, *, reading: int, watched: int) -> int:
        """Most tokens of prompts in the next step.

        Args:
            reading: sequences whose prompt is being read. watched: those that generate while somebody watches.
        """
        if not watched or not reading:
            return sys.maxsize
        share = max(_LEAST_SHARE, (reading - 1) / (reading - 1 + watched))
        if self._steps < _LONGER * (1 - share) / share:
            return 0
        if not self._per_token or not self._quiet:
            return _FIRST_TOKENS
        return max(_LEAST_TOKENS, int(_LONGER * self._quiet_seconds / min(self._per_token)))

    def note(self, prefill_tokens: int, seconds: float) -> None:
        """A step was computed, with so many tokens of prompts."""
        if not prefill_tokens:
            self._steps += 1
            self._quiet.append(seconds)
            return
        self._per_token.append(max(seconds - self._quiet_seconds, seconds / 2) / prefill_tokens)
        self._steps = 0

    @property
    def _quiet_seconds(self) -> float:
        return sum(self._quiet) / max(len(self._quiet), 1)

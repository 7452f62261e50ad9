"""A search for the smallest model within a target for the divergence.

The sum of the matrices' separately measured losses predicts the divergence of the whole model, up to a factor that
changes slowly with the sum. Each model that is quantised and measured gives the factor at its own sum. The search
interpolates between the largest model that missed the target and the smallest model that met it, in logarithms, and
ends when both have almost the same size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from .allocation import Candidate, Candidates, smallest, total_bytes, total_loss

# Part of the target to aim at, and the part of the target that is close enough to end the search. In the neighbourhood
# of 4 bits, a hundredth of the divergence takes about a sixth of a percent of the size.
_AIM, _ENOUGH = 0.995, 0.99
# Relative difference of two sizes that ends the search.
_CLOSE = 0.002
# The next model lies at least this part of the distance away from both models that enclose it.
_MARGIN = 0.2
# Minimum loss, for logarithms.
_LEAST = 1e-12


@dataclass(frozen=True)
class Trial:
    """A measured model.

    Attributes:
        labels: the candidate of each matrix.
        nbytes: size of all matrices in bytes.
        loss: sum of the matrices' losses.
        divergence: measured divergence of the whole model.
    """

    labels: Mapping[str, str]
    nbytes: int
    loss: float
    divergence: float


@dataclass
class TargetSearch:
    """A search over models that are measured one after the other.

    Args:
        candidates: the candidates of each matrix.
        target: maximum divergence.
    """

    candidates: Candidates
    target: float
    _trials: list[Trial] = field(default_factory=list)

    def add(self, chosen: Mapping[str, Candidate], divergence: float) -> None:
        """Add a measured model."""
        self._trials.append(Trial(_labels(chosen), total_bytes(chosen), total_loss(chosen), divergence))

    def next(self) -> dict[str, Candidate] | None:
        """Return the model to measure next, or None if the search is complete."""
        met, missed = self._around()
        if not self._trials:
            return smallest(self.candidates, self.target)
        if met is not None and (met.divergence >= _ENOUGH * self.target or _is_close(met, missed)):
            return None
        middle = 0.0 if met is None or missed is None else 0.5 * (_log(met.loss) + _log(missed.loss))
        for at in (self._interpolated(met, missed), middle):
            chosen = smallest(self.candidates, min(max(math.exp(at), self._bounds[0]), self._bounds[1]))
            if chosen is not None and all(trial.labels != _labels(chosen) for trial in self._trials):
                return chosen
            if met is None or missed is None:
                break
        return None

    @property
    def _bounds(self) -> tuple[float, float]:
        """The sums of losses of the most accurate and of the least accurate model."""
        some = [[candidate.loss for candidate in alternatives] for alternatives in self.candidates.values()]
        return sum(map(min, some)), sum(map(max, some))

    def _around(self) -> tuple[Trial | None, Trial | None]:
        """Return the smallest model that met the target, and the largest smaller model that missed it."""
        met = min((one for one in self._trials if one.divergence <= self.target), key=_nbytes, default=None)
        missed = [one for one in self._trials if one.divergence > self.target]
        below = [one for one in missed if met is None or one.nbytes < met.nbytes]
        return met, max(below, key=_nbytes, default=None)

    def _interpolated(self, met: Trial | None, missed: Trial | None) -> float:
        """Return the logarithm of the sum of losses at which the target is expected."""
        aim = _log(_AIM * self.target)
        if met is None or missed is None:
            known = met or missed
            assert known is not None
            return _log(known.loss) + aim - _log(known.divergence)
        low, high = _log(met.loss), _log(missed.loss)
        share = (aim - _log(met.divergence)) / (_log(missed.divergence) - _log(met.divergence))
        return low + (high - low) * min(max(share, _MARGIN), 1 - _MARGIN)


def _nbytes(trial: Trial) -> int:
    return trial.nbytes


def _is_close(met: Trial, missed: Trial | None) -> bool:
    return missed is not None and met.nbytes - missed.nbytes <= _CLOSE * met.nbytes


def _labels(chosen: Mapping[str, Candidate]) -> dict[str, str]:
    return {name: candidate.label for name, candidate in chosen.items()}


def _log(value: float) -> float:
    return math.log(max(value, _LEAST))

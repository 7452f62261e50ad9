"""Ranges of activations from values that come piece by piece, in memory that does not grow with them.

Nothing is kept of the values but their extremes or a histogram, whose reach doubles when a value lies outside: pairs of
bins become one, so that no value is looked at twice.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from genai.kernels.weights import QuantizationError

BINS = 4096
# What a bin counts for that has values and no level: the divergence would be infinite.
_LEAST_SHARE = 1e-4


class RangeObserver(Protocol):
    """What is shown arrays and then says a range."""

    def observe(self, values: NDArray[Any]) -> None:
        """Take finite values into account."""

    def range(self) -> tuple[float, float]:
        """Least and largest value that the integers are to hold. Raises QuantizationError: nothing was observed."""


class Extremes:
    """The least and the largest value (MinMax); with a constant, the moving averages of those of each array.

    Args:
        averaging_constant: how much the extremes of the next array weigh; None = the extremes of all.
    """

    def __init__(self, averaging_constant: float | None = None) -> None:
        self._constant = averaging_constant
        self._low: float | None = None
        self._high = 0.0

    def observe(self, values: NDArray[Any]) -> None:
        """Take values into account."""
        if not values.size:
            return
        low, high = float(values.min()), float(values.max())
        if self._low is None:
            self._low, self._high = low, high
        elif self._constant is None:
            self._low, self._high = min(self._low, low), max(self._high, high)
        else:
            self._low += self._constant * (low - self._low)
            self._high += self._constant * (high - self._high)

    def range(self) -> tuple[float, float]:
        """The extremes."""
        if self._low is None:
            raise QuantizationError("no values were observed")
        return self._low, self._high


class Histogram:
    """How often values lie where, from -reach to reach.

    Args:
        bins: a multiple of 4.

    Attributes:
        counts: int64 [bins].
        reach: 0 until a value other than 0 came.
    """

    def __init__(self, bins: int = BINS) -> None:
        if bins < 4 or bins % 4:
            raise QuantizationError(f"a histogram of {bins} bins: the number must be a multiple of 4")
        self.counts = np.zeros(bins, np.int64)
        self.reach = 0.0
        self.extremes = Extremes()

    def observe(self, values: NDArray[Any]) -> None:
        """Take values into account."""
        if not values.size:
            return
        self.extremes.observe(values)
        low, high = self.extremes.range()
        bins, largest = len(self.counts), max(-low, high)
        if largest == 0.0:
            self.counts[bins // 2] += values.size
            return
        if self.reach == 0.0:
            self.reach = largest
        while self.reach < largest:
            pairs = self.counts.reshape(bins // 2, 2).sum(axis=1)
            self.counts[:] = 0
            self.counts[bins // 4 : 3 * bins // 4] = pairs
            self.reach *= 2
        self.counts += np.histogram(values, bins, (-self.reach, self.reach))[0]

    @property
    def edges(self) -> NDArray[np.float64]:
        """float64 [bins + 1]."""
        return np.linspace(-self.reach, self.reach, len(self.counts) + 1)


class PercentileRange(Histogram):
    """The range that holds this part of the values; the rest is cut off, half of it on either side.

    Args:
        percentile: above 0, at most 100.
        symmetric: cut by magnitude instead, so that the range is the same on both sides of 0.
    """

    def __init__(self, percentile: float = 99.999, *, symmetric: bool = False, bins: int = BINS) -> None:
        super().__init__(bins)
        if not 0 < percentile <= 100:
            raise QuantizationError(f"the percentile is {percentile}, expected more than 0 and at most 100")
        self._kept, self._symmetric = percentile / 100, symmetric

    def range(self) -> tuple[float, float]:
        """Edges of bins, within the extremes."""
        low, high = self.extremes.range()
        if self.reach == 0.0:
            return 0.0, 0.0
        edges, half = self.edges, len(self.counts) // 2
        if self._symmetric:
            folded = self.counts[half:] + self.counts[:half][::-1]
            limit = min(edges[half + 1 + _first_reaching(folded, self._kept)], max(-low, high))
            return -float(limit), float(limit)
        side = (1 + self._kept) / 2
        top = edges[1 + _first_reaching(self.counts, side)]
        bottom = edges[len(self.counts) - 1 - _first_reaching(self.counts[::-1], side)]
        return max(low, float(bottom)), min(high, float(top))


def _first_reaching(counts: NDArray[np.int64], share: float) -> int:
    """The first bin at which so large a share of all is at or before it."""
    sums = np.cumsum(counts)
    return int(np.searchsorted(sums, share * sums[-1] * (1 - 1e-12)))


class EntropyRange(Histogram):
    """The range, within [-limit, limit], whose quantised distribution is the nearest to that of the values.

    Nearest by Kullback-Leibler divergence, as in S. Migacz, "8-bit inference with TensorRT" (GTC 2017): for each limit,
    what lies outside is counted in the outermost bins, the bins inside are joined into as many levels as there are
    integers, and each level is spread evenly over those of its bins that are not empty. That measure hardly minds how
    far away is what it cuts off. So here a limit must not make the mean square of the errors larger than the extremes
    do.

    Args:
        levels: how many integers there are.
    """

    def __init__(self, levels: int = 256, *, symmetric: bool = False, bins: int = BINS) -> None:
        super().__init__(bins)
        self._levels, self._symmetric = levels, symmetric

    def range(self) -> tuple[float, float]:
        """The best of the limits; the extremes where those are the best."""
        low, high = self.extremes.range()
        if self.reach == 0.0:
            return 0.0, 0.0
        edges, bins = self.edges, len(self.counts)
        half, filled = bins // 2, np.flatnonzero(self.counts)
        outermost = max(half - filled[0], filled[-1] + 1 - half)
        best, limit = np.inf, float(edges[bins])
        most = self._squared_error(max(-low, high))
        # Limits below the levels lose nothing by rounding, and say nothing. Steps of 1 in 64 are finer than it matters.
        for reach in range(min(self._levels // 2, outermost), outermost + 1, max(1, outermost // 64)):
            first = half if low >= 0 else half - reach
            end = half if high <= 0 else half + reach
            if self._squared_error(float(edges[half + reach])) > most * (1 + 1e-9):
                continue
            found = _divergence(self.counts, first, end, self._levels)
            if found <= best:
                best, limit = found, float(edges[half + reach])
        limit = min(limit, max(-low, high))
        return (-limit, limit) if self._symmetric else (max(low, -limit), min(high, limit))

    def _squared_error(self, limit: float) -> float:
        """Sum of squares of what rounding and cutting off at a limit leave."""
        low, high = self.extremes.range()
        width = limit * 2 if self._symmetric else min(high, limit) - max(low, -limit)
        centres, step = (self.edges[:-1] + self.edges[1:]) / 2, width / (self._levels - 1)
        stored = np.clip(np.rint(centres / step) * step, -limit, limit)
        return float(self.counts @ (stored - centres) ** 2)


def _divergence(counts: NDArray[np.int64], first: int, end: int, levels: int) -> float:
    """KL divergence of the counts, those outside put into the first and last bin, from their quantised form."""
    inside = counts[first:end].astype(np.float64)
    reference = inside.copy()
    reference[0] += counts[:first].sum()
    reference[-1] += counts[end:].sum()
    level = np.arange(len(inside)) * levels // len(inside)
    filled = inside > 0
    totals = np.bincount(level, inside, levels)
    spread = totals[level] / np.maximum(np.bincount(level, filled, levels), 1)[level]
    spread[~filled] = 0
    if not spread.any():
        return float(np.inf)
    p, q = reference / reference.sum(), spread / spread.sum()
    used = p > 0
    return float(np.sum(p[used] * np.log(p[used] / np.maximum(q[used], _LEAST_SHARE))))

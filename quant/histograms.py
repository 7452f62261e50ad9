"""Observers of activation ranges, for values that arrive in pieces; they use constant memory.

Only the extremes or a histogram of the values are stored. If a value is outside the histogram's range, the range is
doubled by merging pairs of bins, so every value is processed only once.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from genai.kernels.weights import QuantizationError

BINS = 4096
# The assumed share of a bin that has values but no level; without it the divergence would be infinite.
_LEAST_SHARE = 1e-4


class RangeObserver(Protocol):
    """An observer of arrays that returns a range for their quantisation."""

    def observe(self, values: NDArray[Any]) -> None:
        """Process finite values."""

    def range(self) -> tuple[float, float]:
        """Return the minimum and maximum value to represent. Raises QuantizationError if no values were observed."""


class Extremes:
    """The minimum and maximum of all values (MinMax), or moving averages of the arrays' extremes.

    Args:
        averaging_constant: weight of the extremes of each new array; None = use the extremes of all values.
    """

    def __init__(self, averaging_constant: float | None = None) -> None:
        self._constant = averaging_constant
        self._low: float | None = None
        self._high = 0.0

    def observe(self, values: NDArray[Any]) -> None:
        """Process values."""
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
        """Return the extremes."""
        if self._low is None:
            raise QuantizationError("no values were observed")
        return self._low, self._high


class Histogram:
    """A histogram of values from -reach to reach.

    Args:
        bins: number of bins, a multiple of 4.

    Attributes:
        counts: int64 [bins].
        reach: upper limit of the range; 0 until a value other than 0 was observed.
    """

    def __init__(self, bins: int = BINS) -> None:
        if bins < 4 or bins % 4:
            raise QuantizationError(f"the histogram has {bins} bins, but the number must be a multiple of 4")
        self.counts = np.zeros(bins, np.int64)
        self.reach = 0.0
        self.extremes = Extremes()

    def observe(self, values: NDArray[Any]) -> None:
        """Process values."""
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
        """The edges of the bins, float64 [bins + 1]."""
        return np.linspace(-self.reach, self.reach, len(self.counts) + 1)


class PercentileRange(Histogram):
    """The range that includes a given percentage of the values; half of the other values are cut off on either side.

    Args:
        percentile: percentage, above 0 and at most 100.
        symmetric: True to cut off values by magnitude instead, so that the range is symmetric around 0.
        bins: number of bins.
    """

    def __init__(self, percentile: float = 99.999, *, symmetric: bool = False, bins: int = BINS) -> None:
        super().__init__(bins)
        if not 0 < percentile <= 100:
            raise QuantizationError(f"the percentile is {percentile}, but must be more than 0 and at most 100")
        self._kept, self._symmetric = percentile / 100, symmetric

    def range(self) -> tuple[float, float]:
        """Return the edges of bins, limited to the extremes."""
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
    """Return the first bin at which the cumulative counts reach the given share of the total."""
    sums = np.cumsum(counts)
    return int(np.searchsorted(sums, share * sums[-1] * (1 - 1e-12)))


class EntropyRange(Histogram):
    """The range, within [-limit, limit], whose quantised distribution is closest to the distribution of the values.

    Closeness is measured by the Kullback-Leibler divergence, as in S. Migacz, "8-bit inference with TensorRT" (GTC
    2017). For each limit, values outside the limit are counted in the outermost bins, the bins inside are merged into
    as many levels as there are integers, and each level is spread evenly over its non-empty bins. The divergence hardly
    depends on how far the cut-off values lie outside. Therefore a limit is considered here only if its mean squared
    error is not larger than that of the extremes.

    Args:
        levels: number of integers.
        symmetric: True for a range symmetric around 0.
        bins: number of bins.
    """

    def __init__(self, levels: int = 256, *, symmetric: bool = False, bins: int = BINS) -> None:
        super().__init__(bins)
        self._levels, self._symmetric = levels, symmetric

    def range(self) -> tuple[float, float]:
        """Return the best range, or the extremes if no limit is better."""
        low, high = self.extremes.range()
        if self.reach == 0.0:
            return 0.0, 0.0
        edges, bins = self.edges, len(self.counts)
        half, filled = bins // 2, np.flatnonzero(self.counts)
        outermost = max(half - filled[0], filled[-1] + 1 - half)
        best, limit = np.inf, float(edges[bins])
        most = self._squared_error(max(-low, high))
        # If a limit spans fewer bins than half the levels, it has no rounding error, so it is not comparable. Steps
        # finer than 1/64 make no difference.
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
        """Return the sum of squared errors that result from rounding and from cutting off at a limit."""
        low, high = self.extremes.range()
        width = limit * 2 if self._symmetric else min(high, limit) - max(low, -limit)
        centres, step = (self.edges[:-1] + self.edges[1:]) / 2, width / (self._levels - 1)
        stored = np.clip(np.rint(centres / step) * step, -limit, limit)
        return float(self.counts @ (stored - centres) ** 2)


def _divergence(counts: NDArray[np.int64], first: int, end: int, levels: int) -> float:
    """Return the KL divergence of the counts, with outside counts added to the end bins, from their quantised form."""
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

"""Ranges from values that arrive in parts, against NumPy on all values at once."""

from __future__ import annotations

import numpy as np
import pytest

from genai.kernels.weights import QuantizationError
from genai.quant.histograms import BINS, EntropyRange, Extremes, Histogram, PercentileRange


def values(count: int = 20000, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


def shown(observer, *parts):
    for part in parts:
        observer.observe(part)
    return observer


def test_extremes():
    everything = values()
    assert shown(Extremes(), *np.split(everything, 10)).range() == (everything.min(), everything.max())
    moving = shown(Extremes(0.25), np.asarray([-1.0, 2.0]), np.asarray([-3.0, 10.0]), np.asarray([]))
    assert moving.range() == (-1.5, 4.0)


def test_a_histogram_grows_by_doubling():
    parts = [values(1000, seed) * 4.0**seed for seed in range(6)]
    found = shown(Histogram(), *parts)
    everything = np.concatenate(parts)
    assert found.counts.sum() == everything.size
    assert len(found.counts) == BINS
    assert found.reach >= np.abs(everything).max() > found.reach / 2.0001
    # Each count is right to within the bin that a value of an edge may fall into.
    expected = np.histogram(everything, found.edges)[0]
    assert np.abs(np.cumsum(found.counts) - np.cumsum(expected)).max() <= 3


def test_order_of_parts_does_not_matter_to_the_reach():
    parts = [values(100, seed) * (seed + 1) for seed in range(4)]
    one, other = shown(Histogram(), *parts), shown(Histogram(), *parts[::-1])
    assert one.extremes.range() == other.extremes.range()


@pytest.mark.parametrize("percentile", [50.0, 90.0, 99.0, 99.9, 100.0])
def test_percentiles(percentile):
    everything = values() ** 3
    low, high = shown(PercentileRange(percentile), *np.split(everything, 5)).range()
    side = (100 - percentile) / 2
    width = 4 * float(np.abs(everything).max()) / BINS
    assert low == pytest.approx(np.percentile(everything, side), abs=2 * width)
    assert high == pytest.approx(np.percentile(everything, 100 - side), abs=2 * width)
    low, high = shown(PercentileRange(percentile, symmetric=True), everything).range()
    assert low == -high == pytest.approx(-np.percentile(np.abs(everything), percentile), abs=2 * width)


def test_percentiles_stay_within_the_extremes():
    everything = np.abs(values()) + 1
    assert shown(PercentileRange(100.0), everything).range() == (everything.min(), everything.max())


def test_entropy_keeps_what_is_even_and_cuts_what_is_rare():
    even = np.linspace(-1, 1, 20001, dtype=np.float32)
    assert shown(EntropyRange(), even).range() == (-1, 1)
    normal = values(400_000)
    low, high = shown(EntropyRange(), *np.split(normal, 4)).range()
    assert 2.5 < high < normal.max() and -2.5 > low > normal.min()


@pytest.mark.parametrize("power", [1, 3])
def test_entropy_never_makes_the_squared_error_larger(power):
    everything = values(50_000) ** power
    low, high = shown(EntropyRange(), everything).range()

    def error(low: float, high: float) -> float:
        step = (high - low) / 255
        return float(np.mean((np.clip(np.rint(everything / step) * step, low, high) - everything) ** 2))

    assert error(low, high) <= 1.02 * error(everything.min(), everything.max())


@pytest.mark.parametrize("make", [Extremes, Histogram, PercentileRange, EntropyRange])
def test_nothing_but_zeros(make):
    observer = shown(make(), np.zeros(5))
    if make is not Histogram:
        assert observer.range() == (0, 0)


def test_nothing_was_seen():
    for make in (Extremes, PercentileRange, EntropyRange):
        with pytest.raises(QuantizationError, match="no values"):
            shown(make(), np.zeros(0)).range()


def test_options_that_make_no_sense():
    with pytest.raises(QuantizationError, match="multiple of 4"):
        Histogram(6)
    with pytest.raises(QuantizationError, match="percentile"):
        PercentileRange(0)

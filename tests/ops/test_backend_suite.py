"""ONNX's backend suite: what fails is exactly what is known to fail, each with its reason."""

from __future__ import annotations

import importlib.util
import zlib

import pytest

from tools.conformance import KNOWN_FAILURES, run_suite

NUM_CASES = 2033
SAMPLED = 10
HAS_PILLOW = importlib.util.find_spec("PIL") is not None


def unexpected(outcomes):
    needs_pillow = set() if HAS_PILLOW else {name for name in outcomes if "image_decoder" in name}
    return {
        name: why for name, why in outcomes.items() if why and name not in KNOWN_FAILURES and name not in needs_pillow
    }


def test_a_sample():
    outcomes = run_suite(lambda name: zlib.crc32(name.encode()) % SAMPLED == 0)
    assert len(outcomes) >= NUM_CASES / SAMPLED / 1.5
    assert not unexpected(outcomes)


@pytest.mark.slow
def test_all_of_it():
    outcomes = run_suite()
    assert len(outcomes) >= NUM_CASES
    assert not unexpected(outcomes)
    assert set(KNOWN_FAILURES) <= set(outcomes)
    repaired = [name for name in KNOWN_FAILURES if not outcomes[name]]
    # A random case passes by chance now and then.
    assert all("bernoulli" in name for name in repaired)

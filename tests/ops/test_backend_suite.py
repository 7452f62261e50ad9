"""All of ONNX's backend suite, in one go: what fails is exactly what is known to fail, each with its reason."""

from __future__ import annotations

import importlib.util

import pytest

from tools.conformance import KNOWN_FAILURES, run_suite

NUM_CASES = 2033
HAS_PILLOW = importlib.util.find_spec("PIL") is not None


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    return run_suite()


def test_nothing_else_fails(outcomes):
    needs_pillow = set() if HAS_PILLOW else {name for name in outcomes if "image_decoder" in name}
    unexpected = {
        name: why for name, why in outcomes.items() if why and name not in KNOWN_FAILURES and name not in needs_pillow
    }
    assert not unexpected


def test_known_failures_still_fail(outcomes):
    repaired = [name for name in KNOWN_FAILURES if name in outcomes and not outcomes[name]]
    # A random case passes by chance now and then.
    assert all("bernoulli" in name for name in repaired)


def test_the_suite_is_whole(outcomes):
    assert len(outcomes) >= NUM_CASES
    assert set(KNOWN_FAILURES) <= set(outcomes)

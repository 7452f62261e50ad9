"""ONNX's backend suite: exactly the cases of a list fail, each for a known reason."""

from __future__ import annotations

import importlib.util
import warnings
import zlib

import pytest
from onnx.backend.test.loader import load_model_tests

from genai.compat.onnxruntime.inference_session import InferenceSession
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
def test_all_of_it(draw):
    """Run all known failures, and a third of the other cases, drawn by the commit; no case may be missing."""
    names = set()
    run_suite(lambda name: bool(names.add(name)))
    assert len(names) >= NUM_CASES
    assert set(KNOWN_FAILURES) <= names
    wanted = draw.part(names, 3) | set(KNOWN_FAILURES)
    outcomes = run_suite(wanted.__contains__)
    assert set(outcomes) == wanted
    assert not unexpected(outcomes)
    repaired = [name for name in KNOWN_FAILURES if not outcomes[name]]
    # A random case passes by chance now and then, and the last bits of halves depend on the processor.
    assert all("bernoulli" in name or "fp16" in name for name in repaired)


def test_the_case_that_the_suite_cannot_compare():
    (case,) = (case for case in _node_cases() if case.name == "test_loop16_seq_none")
    session = InferenceSession(case.model)
    feed = dict(zip((item.name for item in session.get_inputs()), case.data_sets[0][0], strict=True))
    (result,) = session.run(None, feed)
    (expected,) = case.data_sets[0][1]
    assert [value.tolist() for value in result] == [value.tolist() for value in expected]


def _node_cases():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Making some node cases divides by zero.
        return load_model_tests(kind="node")

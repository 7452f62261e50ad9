"""The basic rewrites preserve the results of every model of the backend suite."""

from __future__ import annotations

import random

import onnx
import pytest

from genai.onnx.reader import read_model
from genai.onnx.writer import to_proto
from genai.optimize.base import Level, run_rewrites
from genai.optimize.constant_folding import fold_constants
from genai.optimize.shapes import infer_shapes
from genai.optimize.simplify import remove_dead_code, remove_identities
from tests.integrity import check_graph

RULES = (remove_identities, fold_constants, remove_dead_code)
SAMPLE_SIZE = 100


def test_a_sample_of_rewritten_models_computes_the_same(suite, run_reference, same_values):
    changed = [case for case in suite if 1 < len(case.model.graph.node) < 60]
    cases = random.Random(4).sample(changed, SAMPLE_SIZE)
    num_run, num_changed = _compare(cases, run_reference, same_values)
    assert num_run > SAMPLE_SIZE * 0.8
    assert num_changed > SAMPLE_SIZE * 0.5


@pytest.mark.slow
def test_drawn_rewritten_models_compute_the_same(drawn_cases, run_reference, same_values):
    num_run, num_changed = _compare(drawn_cases, run_reference, same_values)
    assert num_run > len(drawn_cases) * 0.85
    assert num_changed > len(drawn_cases) * 0.1


def _compare(cases, run_reference, same_values) -> tuple[int, int]:
    num_run, num_changed, wrong = 0, 0, []
    for case in cases:
        if case.is_random:
            continue
        model = read_model(case.model)
        infer_shapes(model)
        num_changed += bool(run_rewrites(model, RULES, Level.BASIC))
        check_graph(model.graph)
        rewritten = to_proto(model)
        if _checks(case.model) and not _checks(rewritten):
            wrong.append(("checker", case.name))
        try:
            expected = run_reference(case.model, case.inputs())
        except Exception:  # The reference evaluator lacks some operators and packages.
            continue
        num_run += 1
        if not same_values(run_reference(rewritten, case.inputs()), expected):
            wrong.append(("outputs", case.name))
    assert wrong == []
    return num_run, num_changed


def _checks(model: onnx.ModelProto) -> bool:
    try:
        onnx.checker.check_model(model)
    except onnx.checker.ValidationError:
        return False
    return True

"""Every model of ONNX's backend suite survives read -> write -> check -> run."""

from __future__ import annotations

import random

import onnx
import pytest

from genai.onnx.ir import OnnxModel
from genai.onnx.reader import read_model
from genai.onnx.writer import to_proto
from tests.integrity import check_graph

SAMPLE_SIZE = 150


def test_every_model_is_written_back_field_by_field(suite, normalised):
    different = [case.name for case in suite if normalised(to_proto(read_model(case.model))) != normalised(case.model)]
    assert different == []


def test_every_model_survives_a_copy(suite, normalised):
    different = []
    for case in suite:
        model = read_model(case.model)
        check_graph(model.graph)
        if normalised(to_proto(model.copy())) != normalised(case.model):
            different.append(case.name)
    assert different == []


def test_written_models_pass_the_checker_where_the_originals_do(suite):
    passing = [case for case in suite if _checks(case.model)]
    assert len(passing) > 1700
    assert [case.name for case in passing if not _checks(to_proto(read_model(case.model)))] == []


def test_reading_does_not_change_the_source(suite):
    for case in random.Random(1).sample(suite, SAMPLE_SIZE):
        before = case.model.SerializeToString(deterministic=True)
        assert isinstance(read_model(case.model), OnnxModel)
        assert case.model.SerializeToString(deterministic=True) == before


def test_a_sample_gives_the_same_outputs(suite, run_reference, same_values):
    num_run = _compare_outputs(random.Random(2).sample(suite, SAMPLE_SIZE), run_reference, same_values)
    assert num_run > SAMPLE_SIZE * 0.9


@pytest.mark.slow
def test_drawn_ones_give_the_same_outputs(drawn_cases, run_reference, same_values):
    assert _compare_outputs(drawn_cases, run_reference, same_values) > len(drawn_cases) * 0.9


def _checks(model: onnx.ModelProto) -> bool:
    try:
        onnx.checker.check_model(model)
    except onnx.checker.ValidationError:
        return False
    return True


def _compare_outputs(cases, run_reference, same_values) -> int:
    """Run originals and rewritten models; returns how many originals the reference evaluator can run."""
    num_run, different = 0, []
    for case in cases:
        if case.is_random:
            continue
        try:
            expected = run_reference(case.model, case.inputs())
        except Exception:  # The reference evaluator lacks some operators and packages.
            continue
        num_run += 1
        if not same_values(run_reference(to_proto(read_model(case.model)), case.inputs()), expected):
            different.append(case.name)
    assert different == []
    return num_run

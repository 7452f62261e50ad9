"""The table of operators whose results have shapes that are known from their inputs."""

from __future__ import annotations

import pytest

from genai.ops import dependence
from genai.ops.registry import entries


@pytest.fixture(scope="module")
def operators():
    return {entry.op_type for entry in entries()}


def test_every_operator_exists(operators):
    assert set(dependence._SHAPE_INPUTS) <= operators
    assert set(dependence._SHAPE_INPUTS) >= dependence._NATIVE | dependence._OF_SHAPES
    assert dependence._IF_PACKED <= dependence._NATIVE


@pytest.mark.parametrize(
    "op_type",
    ["If", "Loop", "NonZero", "RandomNormal", "Bernoulli", "NonMaxSuppression", "Unique", "Compress", "SequenceAt"],
)
def test_other_operators_are_unknown(op_type, operators):
    assert op_type in operators and dependence.shape_inputs(op_type) is None

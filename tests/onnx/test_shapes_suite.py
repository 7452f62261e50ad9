"""Inferred types, compared with the results of the backend suite's models."""

from __future__ import annotations

import random

import numpy as np
import pytest

from genai.onnx.ir import OnnxModel
from genai.onnx.reader import read_model
from genai.onnx.types import DataType, TensorType
from genai.optimize.shapes import infer_shapes

SAMPLE_SIZE = 150


def test_nearly_every_value_gets_a_type(suite):
    num_values, unknown = 0, []
    for case in suite:
        model = read_model(case.model)
        infer_shapes(model)
        for graph in model.graphs():
            for node in graph.nodes:
                for name in filter(None, node.outputs):
                    num_values += 1
                    if graph.type_of(name) is None:
                        unknown.append((case.name, node.op_type))
    assert num_values > 10_000
    assert len(unknown) < num_values / 200, unknown


def test_a_sample_of_inferred_types_is_true(suite, run_reference):
    assert _check_types(random.Random(3).sample(suite, SAMPLE_SIZE), run_reference) > SAMPLE_SIZE * 0.7


@pytest.mark.slow
def test_drawn_inferred_types_are_true(drawn_cases, run_reference):
    assert _check_types(drawn_cases, run_reference) > len(drawn_cases) * 0.7


def _check_types(cases, run_reference) -> int:
    """Infer the outputs' types from scratch and compare with a run; returns how many cases could be compared."""
    num_compared, wrong = 0, []
    for case in cases:
        model = read_model(case.model)
        expected = _declared_away(model)
        infer_shapes(model)
        try:
            outputs = run_reference(case.model, case.inputs())
        except Exception:  # The reference evaluator lacks some operators and packages.
            continue
        for value, declared, output in zip(model.graph.outputs, expected, outputs, strict=True):
            known = value.type
            if isinstance(known, TensorType) and isinstance(output, np.ndarray) and isinstance(declared, TensorType):
                num_compared += 1
                if not _agrees(known, output, declared.dtype):
                    wrong.append((case.name, value.name, known, output.dtype, output.shape))
    assert wrong == []
    return num_compared


def _declared_away(model: OnnxModel) -> list[object]:
    declared = [value.type for value in model.graph.outputs]
    for value in model.graph.outputs:
        value.type = None
    model.graph.values.clear()
    return declared


def _agrees(known: TensorType, output: np.ndarray, declared: DataType) -> bool:
    dtype_agrees = known.dtype in (declared, DataType.UNDEFINED)
    if known.shape is None:
        return dtype_agrees
    extents = zip(known.shape, output.shape, strict=False)
    return (
        dtype_agrees
        and len(known.shape) == output.ndim
        and all(not isinstance(dim, int) or dim == extent for dim, extent in extents)
    )

"""Small models exported by torch.onnx and skl2onnx give what onnxruntime gave (tools/session_goldens.py)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import genai as ort

MODELS = sorted((Path(__file__).parent / "models").glob("*.onnx"))
LEVELS = list(ort.GraphOptimizationLevel)


def test_there_are_models():
    assert len(MODELS) >= 16


@pytest.mark.filterwarnings("ignore:output 'label' has shape")  # LightGBM's converter declares one row
@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name)
def test_equals_what_onnxruntime_gave(path, level):
    with np.load(path.with_suffix(".npz")) as arrays:
        feed = {name.removeprefix("input "): arrays[name] for name in arrays.files if name.startswith("input ")}
        expected = {name.removeprefix("output "): arrays[name] for name in arrays.files if name.startswith("output ")}
    options = ort.SessionOptions()
    options.graph_optimization_level = level
    session = ort.InferenceSession(path, options)
    results = [session.run(list(expected), feed) for _ in range(3)]  # the third run uses a faster form of the plan
    for first, third in zip(results[0], results[2], strict=True):
        np.testing.assert_array_equal(third, first)
    for name, value in zip(expected, results[2], strict=True):
        assert value.dtype == expected[name].dtype
        np.testing.assert_allclose(value, expected[name], rtol=1e-3, atol=1e-5)

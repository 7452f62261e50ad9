"""Means of no elements are NaN, without NumPy's warnings."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import genai

EMPTY = np.zeros((2, 3, 0, 4), np.float32)
CASES = {
    "GlobalAveragePool": ({"x": EMPTY}, {}, (2, 3, 1, 1)),
    "ReduceMean": ({"x": EMPTY}, {"axes": [2], "keepdims": 0}, (2, 3, 4)),
    "InstanceNormalization": ({"x": EMPTY, "s": np.ones(3, np.float32), "b": np.ones(3, np.float32)}, {}, (2, 3, 0, 4)),
    "LayerNormalization": (
        {"x": EMPTY.transpose(0, 1, 3, 2), "s": np.ones(0, np.float32), "b": np.ones(0, np.float32)},
        {"axis": -1},
        (2, 3, 4, 0),
    ),
    "MeanVarianceNormalization": ({"x": EMPTY}, {}, (2, 3, 0, 4)),
    "BatchNormalization": (
        {"x": EMPTY, **{name: np.ones(3, np.float32) for name in "sbmv"}},
        {"training_mode": 1, "num_outputs": 3},
        (2, 3, 0, 4),
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("level", ["ORT_DISABLE_ALL", "ORT_ENABLE_ALL"])
def test_no_warning_reaches_the_user(name, level, one_node):
    inputs, attributes, shape = CASES[name]
    model = one_node(name, inputs, version=17, **attributes)
    options = genai.SessionOptions()
    options.graph_optimization_level = getattr(genai.GraphOptimizationLevel, level)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = genai.InferenceSession(model, options).run(None, inputs)
    assert found[0].shape == shape
    if name == "GlobalAveragePool":
        assert np.isnan(found[0]).all()
    if name == "BatchNormalization":
        assert np.isnan(found[1]).all() and np.isnan(found[2]).all()

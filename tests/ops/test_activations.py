"""Compiled activations of sessions against float64, for every float type, layout and special value."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper

from genai.session.config import SessionConfig
from genai.session.session import Session


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


CASES = {
    "Sigmoid": ({}, _sigmoid),
    "LeakyRelu": ({"alpha": 0.3}, lambda x: np.where(x < 0, 0.3 * x, x)),
    "HardSigmoid": ({"alpha": 0.3, "beta": 0.4}, lambda x: np.clip(0.3 * x + 0.4, 0, 1)),
    "HardSwish": ({}, lambda x: x * np.clip(x / 6 + 0.5, 0, 1)),
    "Relu": ({}, lambda x: np.maximum(x, 0)),
    "Exp": ({}, np.exp),
    "Tanh": ({}, np.tanh),
}


def _model(op, dtype, shape, constants=(), **attributes):
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    ends = [helper.make_tensor_value_info(name, kind, shape) for name in "xy"]
    names = [f"k{index}" for index in range(len(constants))]
    given = [helper.make_tensor(name, kind, [], [value]) for name, value in zip(names, constants, strict=True)]
    nodes = [helper.make_node(op, ["x", *names], ["y"], **attributes)]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], given)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10)


@pytest.mark.parametrize("op", CASES)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_values(op, dtype, rng):
    attributes, expected = CASES[op]
    x = (rng.standard_normal((3, 5, 7)) * 4).astype(dtype)
    x[0, 0, :4] = 0.0, np.inf, -np.inf, np.nan
    session = Session(_model(op, dtype, [3, 5, 7], **attributes))
    with np.errstate(all="ignore"):
        wanted = expected(x.astype(np.float64)).astype(dtype)
    for given in (x, np.asfortranarray(x)):
        found = session.run({"x": given})["y"]
        assert found.dtype == dtype and found.shape == x.shape
        wanted_here = np.where(np.isinf(x) & np.isnan(wanted), found, wanted)  # 0 * infinity
        np.testing.assert_allclose(found, wanted_here, rtol=2e-3 if dtype == np.float16 else 1e-6, atol=1e-7)


@pytest.mark.parametrize("limits", [(-1.0, 2.0), (3.0, 1.0), (float("nan"), 1.0), (-1.0, float("inf"))])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_clip(limits, dtype, rng):
    x = (rng.standard_normal(50) * 3).astype(dtype)
    x[0] = np.nan
    found = Session(_model("Clip", dtype, [50], limits)).run({"x": x})["y"]
    np.testing.assert_array_equal(found, np.minimum(np.maximum(x, dtype(limits[0])), dtype(limits[1])))


def test_bits_do_not_depend_on_threads_or_rows(rng):
    x = rng.standard_normal((300, 500)).astype(np.float32)
    model = _model("Sigmoid", np.float32, ["N", 500])
    one, two = (Session(model, SessionConfig(threads=count)) for count in (1, 2))
    whole = one.run({"x": x})["y"]
    np.testing.assert_array_equal(whole, two.run({"x": x})["y"])
    np.testing.assert_array_equal(whole[7:8], one.run({"x": x[7:8]})["y"])

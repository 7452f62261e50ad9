"""LSTM and GRU layers: kernels give the results of the steps in NumPy, which other options use."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper

from genai.ops.recurrent import _Recurrent
from genai.session.config import SessionConfig
from genai.session.session import Session

GATES = {"LSTM": 4, "GRU": 3}


def run(kind, hidden, threads, rng, *, constant=True, lengths=None, batch=3, **attributes):
    count = 2 if attributes.get("direction") == "bidirectional" else 1
    shapes = {
        "x": (6, batch, 5), "w": (count, GATES[kind] * hidden, 5), "r": (count, GATES[kind] * hidden, hidden),
        "b": (count, 2 * GATES[kind] * hidden), "h": (count, batch, hidden), "c": (count, batch, hidden),
    }  # fmt: skip
    if kind == "GRU":
        del shapes["c"]
    arrays = {name: (rng.standard_normal(shape) / 2).astype(np.float32) for name, shape in shapes.items()}
    fixed = set("wrb") if constant else set()
    given = [helper.make_tensor_value_info(name, 1, shapes[name]) for name in shapes if name not in fixed]
    constants = [helper.make_tensor(name, 1, shapes[name], arrays[name].reshape(-1)) for name in fixed]
    feed = {name: value for name, value in arrays.items() if name not in fixed}
    if lengths is not None:
        given.append(helper.make_tensor_value_info("n", 6, [3]))
        feed["n"] = np.array(lengths, np.int32)
    results = ["y", "y_h", "y_c"][: 2 + (kind == "LSTM")]
    names = ["x", "w", "r", "b", "n" if lengths is not None else "", "h", *(["c"] if kind == "LSTM" else [])]
    node = helper.make_node(kind, names, results, hidden_size=hidden, **attributes)
    outputs = [helper.make_tensor_value_info(name, 1, None) for name in results]
    graph = helper.make_graph([node], "g", given, outputs, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    session = Session(model, SessionConfig(threads=threads))
    session.run(feed)
    return session.run(feed)


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize(
    "options",
    [
        {}, {"direction": "bidirectional"}, {"direction": "reverse"}, {"constant": False}, {"lengths": [6, 6, 6]},
        {"lengths": [6, 2, 0]}, {"clip": 0.3}, {"batch": 6},
    ],
    ids=str,
)  # fmt: skip
def test_kernels_equal_steps_in_numpy(kind, options, monkeypatch):
    if kind == "GRU":
        options = {**options, "linear_before_reset": 1}
    calls = []
    compiled = _Recurrent._compiled
    monkeypatch.setattr(_Recurrent, "_compiled", lambda *given: calls.append(1) or compiled(*given))
    for hidden in (16, 80):
        found = [run(kind, hidden, threads, np.random.default_rng(0), **options) for threads in (1, 2)]
        assert bool(calls) == ("clip" not in options and options.get("lengths") != [6, 2, 0])
        with monkeypatch.context() as patch:
            patch.setattr(_Recurrent, "_fits", lambda *_: False)
            expected = run(kind, hidden, 1, np.random.default_rng(0), **options)
        for name, value in expected.items():
            np.testing.assert_allclose(found[0][name], value, rtol=1e-4, atol=1e-5)
            np.testing.assert_array_equal(found[0][name], found[1][name])


def test_a_hidden_size_without_a_kernel():
    found = run("LSTM", 10, 1, np.random.default_rng(0))
    assert found["y"].shape == (6, 1, 3, 10)

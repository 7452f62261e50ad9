"""LSTM, GRU and RNN layers: kernels give the results of the steps in NumPy, which other types use."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper

from genai import GenaiError
from genai.kernels.cpu.arrays import recurrent as kernels
from genai.ops.recurrent import _FUNCTIONS, _Recurrent
from genai.session.config import SessionConfig
from genai.session.session import Session

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
FUNCTIONS = {"LSTM": 3, "GRU": 2, "RNN": 1}
STEPS, INPUTS = 6, 5
LAST_RUN = 5


class Layer:
    """A model of one layer with random values. `lengths` and `peepholes` add these inputs."""

    def __init__(self, kind, hidden, *, constant=True, lengths=False, peepholes=False, batch=3, **attributes):
        self.rng = np.random.default_rng(0)
        count = 2 if attributes.get("direction") == "bidirectional" else 1
        self.batch, width = batch, GATES[kind] * hidden
        is_first = bool(attributes.get("layout"))
        state = (batch, count, hidden) if is_first else (count, batch, hidden)
        self.shapes = {
            "x": (batch, STEPS, INPUTS) if is_first else (STEPS, batch, INPUTS), "w": (count, width, INPUTS),
            "r": (count, width, hidden), "b": (count, 2 * width), "h": state, "c": state, "p": (count, 3 * hidden),
        }  # fmt: skip
        for name, is_used in (("c", kind == "LSTM"), ("p", peepholes)):
            if not is_used:
                del self.shapes[name]
        self.fixed = set("wrb") if constant else set()
        given = [helper.make_tensor_value_info(name, 1, self.shapes[name]) for name in self.shapes.keys() - self.fixed]
        constants = [helper.make_tensor(name, 1, self.shapes[name], self.random(name).ravel()) for name in self.fixed]
        self.lengths = lengths
        if lengths:
            given.append(helper.make_tensor_value_info("n", 6, [batch]))
        self.results = ["y", "y_h", "y_c"][: 2 + (kind == "LSTM")]
        names = ["x", "w", "r", "b", "n" if lengths else "", "h"]
        names += ["c", "p" if peepholes else ""] if kind == "LSTM" else []
        node = helper.make_node(kind, names, self.results, hidden_size=hidden, **attributes)
        outputs = [helper.make_tensor_value_info(name, 1, None) for name in self.results]
        graph = helper.make_graph([node], "g", given, outputs, constants)
        self.model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)

    def random(self, name):
        # Larger recurrences amplify the differences between roundings from step to step.
        scale = self.shapes[name][-1] ** -0.5 if name == "r" else 0.5
        return (self.rng.standard_normal(self.shapes[name]) * scale).astype(np.float32)

    def feed(self):
        feed = {name: self.random(name) for name in self.shapes.keys() - self.fixed}
        if self.lengths:
            feed["n"] = self.rng.integers(0, STEPS + 1, self.batch).astype(np.int32)
        return feed

    def session(self, threads=1):
        return Session(self.model, SessionConfig(threads=threads))


OPTIONS = [
    {}, {"direction": "bidirectional"}, {"direction": "reverse"}, {"constant": False}, {"lengths": True},
    {"lengths": True, "direction": "bidirectional"}, {"clip": 0.3}, {"batch": 6}, {"batch": 9, "lengths": True},
    {"layout": 1, "direction": "bidirectional", "lengths": True},
]  # fmt: skip
LSTM_OPTIONS = [
    {"peepholes": True}, {"input_forget": 1},
    {"peepholes": True, "constant": False, "clip": 0.5, "direction": "bidirectional"},
]  # fmt: skip


@pytest.mark.parametrize("hidden", [1, 16, 23, 80])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, options) for kind in GATES for options in OPTIONS),
        *(("GRU", {**options, "linear_before_reset": 1}) for options in OPTIONS),
        *(("LSTM", options) for options in LSTM_OPTIONS),
    ],
    ids=str,
)
def test_kernels_equal_steps_in_numpy(kind, options, hidden, monkeypatch):
    layer = Layer(kind, hidden, **options)
    feeds = [layer.feed() for _ in range(LAST_RUN + 1)]  # later runs are recorded programs
    with monkeypatch.context() as patch:
        patch.setattr(_Recurrent, "_walk", None)
        sessions = [layer.session(threads) for threads in (1, 2)]
        found = [[session.run(feed) for feed in feeds] for session in sessions]
    monkeypatch.setattr(_Recurrent, "_has_kernels", lambda *_: False)
    session = layer.session()
    for feed, *results in zip(feeds, *found, strict=True):
        for name, value in session.run(feed).items():
            np.testing.assert_allclose(results[0][name], value, rtol=1e-4, atol=1e-5)
            np.testing.assert_array_equal(results[0][name], results[1][name])


@pytest.mark.parametrize("name", _FUNCTIONS)
def test_kernels_of_all_activations(name, monkeypatch):
    layer = Layer("RNN", 23, activations=[name], activation_alpha=[0.3], activation_beta=[0.4])
    feed = layer.feed()
    found = layer.session().run(feed)
    monkeypatch.setattr(_Recurrent, "_has_kernels", lambda *_: False)
    for key, value in layer.session().run(feed).items():
        np.testing.assert_allclose(found[key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", GATES)
def test_other_activations_of_each_direction(kind, monkeypatch):
    names = ["Relu", "Softsign", "HardSigmoid"][: FUNCTIONS[kind]] + ["Elu", "Affine", "Tanh"][: FUNCTIONS[kind]]
    layer = Layer(kind, 23, direction="bidirectional", activations=names, lengths=True, clip=1.0)
    feed = layer.feed()
    found = layer.session().run(feed)
    monkeypatch.setattr(_Recurrent, "_has_kernels", lambda *_: False)
    for key, value in layer.session().run(feed).items():
        np.testing.assert_allclose(found[key], value, rtol=1e-4, atol=1e-5)


def test_a_length_outside_the_steps_in_a_repeated_run():
    layer = Layer("LSTM", 16, lengths=True)
    session = layer.session()
    for _ in range(LAST_RUN):
        session.run(layer.feed())
    for length in (-1, STEPS + 1):
        with pytest.raises(GenaiError, match="sequence_lens must have one length from 0 to 6 per sequence"):
            session.run({**layer.feed(), "n": np.array([1, length, 2], np.int32)})
    session.run(layer.feed())


def test_arrays_that_do_not_fit_the_kernel():
    kind = kernels.Steps("RNN", ("tanh",))
    recurrence = kernels.packed(np.zeros((3, 3), np.float32), 1)
    direction = kernels.Direction(kind, recurrence, None, None, False, np.inf, (0.0, 0.0))
    arrays = kernels.States(np.empty((2, 1, 4, 3), np.float32), np.empty((1, 4, 3), np.float32), None)
    with pytest.raises(ValueError, match=r"x is float32 \[2, 4, 3\], expected C-contiguous float32 \[2, 4, 16\]"):
        kernels.run_steps([direction], [np.zeros((2, 4, 3), np.float32)], arrays, batch_first=False)

"""DynamicQuantizeLSTM, compared with onnxruntime on one thread: with more, it quantises the states of each thread."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from genai import SessionOptions
from genai.compat.onnxruntime.inference_session import InferenceSession
from genai.kernels.cpu.arrays.quantized_recurrent import QuantizedLstmSteps
from tests.ops.test_contrib_operators import MS, types_of

pytestmark = pytest.mark.oracle
STEPS, BATCH, WIDTH, HIDDEN = 4, 3, 5, 4
INPUTS = ["X", "W", "R", "B", "lengths", "h", "c", "P", "Ws", "Wz", "Rs", "Rz"]
WEIGHTS = ("W", "R", "Ws", "Wz", "Rs", "Rz")


def given(directions: int = 1, dtype: Any = np.int8, zero: int = 0, per_channel: bool = False, **other: Any) -> Any:
    rng = np.random.default_rng(3)
    low, high = (-127, 128) if dtype == np.int8 else (0, 256)
    shape = (directions, 4 * HIDDEN) if per_channel else (directions,)
    values = {
        "X": rng.standard_normal((STEPS, BATCH, WIDTH)).astype(np.float32),
        "W": rng.integers(low, high, (directions, WIDTH, 4 * HIDDEN)).astype(dtype),
        "R": rng.integers(low, high, (directions, HIDDEN, 4 * HIDDEN)).astype(dtype),
        "B": rng.standard_normal((directions, 8 * HIDDEN)).astype(np.float32),
    }
    for name in "WR":
        values[f"{name}s"] = rng.uniform(0.001, 0.01, shape).astype(np.float32)
        values[f"{name}z"] = np.full(shape, zero, dtype)
    return values | other


def model(values: dict[str, Any], constants: tuple[str, ...] = WEIGHTS, **attributes: Any) -> onnx.ModelProto:
    names = [name if values.get(name) is not None else "" for name in INPUTS]
    attributes = {"hidden_size": HIDDEN} | attributes
    node = helper.make_node("DynamicQuantizeLSTM", names, ["Y", "Y_h", "Y_c"], domain=MS, **attributes)
    infos = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        for name, value in values.items()
        if name not in constants and value is not None
    ]
    weights = [numpy_helper.from_array(values[name], name) for name in constants if values[name] is not None]
    outputs = [onnx.ValueInfoProto(name=name) for name in ("Y", "Y_h", "Y_c")]
    graph = helper.make_graph([node], "graph", infos, outputs, weights)
    imports = [helper.make_opsetid("", 17), helper.make_opsetid(MS, 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


def on_one_thread(proto: onnx.ModelProto, feed: dict[str, Any]) -> list[Any]:
    ort = pytest.importorskip("onnxruntime")
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    return list(ort.InferenceSession(proto.SerializeToString(), options).run(None, feed))


def assert_agree(values: dict[str, Any], constants: tuple[str, ...] = WEIGHTS, **attributes: Any) -> None:
    proto = model(values, constants, **attributes)
    feed = {name: value for name, value in values.items() if name not in constants and value is not None}
    theirs = on_one_thread(proto, feed)
    ours = InferenceSession(proto).run(None, feed)
    # The states of finished sequences affect the range of a step's states, and onnxruntime continues to update them.
    tolerance = 2e-6 if values.get("lengths") is None else 5e-4
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == other.dtype
        np.testing.assert_allclose(mine, other, rtol=0, atol=tolerance)


STATES = {
    "h": np.linspace(-1, 1, BATCH * HIDDEN, dtype=np.float32).reshape(1, BATCH, HIDDEN),
    "c": np.linspace(2, -2, BATCH * HIDDEN, dtype=np.float32).reshape(1, BATCH, HIDDEN),
}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "int8": ({}, {}),
    "int8 with a zero point": ({"zero": 3}, {}),
    "uint8": ({"dtype": np.uint8, "zero": 120}, {}),
    "scale per column": ({"per_channel": True}, {}),
    "uint8 with a scale per column": ({"dtype": np.uint8, "zero": 128, "per_channel": True}, {}),
    "bidirectional": ({"directions": 2, "per_channel": True}, {"direction": "bidirectional"}),
    "reverse": ({}, {"direction": "reverse"}),
    "without a bias": ({"B": None}, {}),
    "states": (STATES, {}),
    "lengths": ({"lengths": np.array([1, 4, 0], np.int32)}, {}),
    "reversed lengths": ({"lengths": np.array([1, 4, 2], np.int32)}, {"direction": "reverse"}),
    "peepholes": ({"P": np.linspace(-1, 1, 3 * HIDDEN, dtype=np.float32)[None]}, {}),
    "clip": ({}, {"clip": 0.3}),
    "input_forget": ({}, {"input_forget": 1}),
    "activations": ({}, {"activations": ["HardSigmoid", "Relu", "Softsign"]}),
    "one sequence": ({"X": np.ones((3, 1, WIDTH), np.float32)}, {}),
}


@pytest.mark.parametrize("constants", [WEIGHTS, ("W", "R"), ()], ids=["constant", "constant matrices", "computed"])
@pytest.mark.parametrize(("values", "attributes"), CASES.values(), ids=CASES)
def test_values(values, attributes, constants):
    assert_agree(given(**values), constants, **attributes)


def test_many_terms():
    """Sums of more than 256 products are exact, too."""
    rng = np.random.default_rng(0)
    values = given(X=rng.standard_normal((2, 1, 700)).astype(np.float32))
    values["W"] = rng.integers(-127, 128, (1, 700, 4 * HIDDEN)).astype(np.int8)
    values["Ws"] = np.array([1e-4], np.float32)
    for constants in (WEIGHTS, ()):
        assert_agree(values, constants)


WIDE = 48
ODD: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "int8": ({}, {}),
    "uint8": ({"dtype": np.uint8, "zero": 120, "per_channel": True}, {}),
    "both directions": ({"directions": 2}, {"direction": "bidirectional"}),
    "reverse": ({"per_channel": True}, {"direction": "reverse"}),
    "more rows than a tile": ({"X": np.sin(np.arange(2 * 33 * WIDTH, dtype=np.float32)).reshape(2, 33, WIDTH)}, {}),
    "states": ({"h": np.linspace(-3, 2, BATCH * WIDE, dtype=np.float32).reshape(1, BATCH, WIDE)}, {}),
}


@pytest.mark.parametrize(("values", "attributes"), ODD.values(), ids=ODD)
def test_compiled_steps(monkeypatch, values, attributes):
    """Hidden sizes of whole vectors have a kernel, whose results do not depend on the number of threads."""
    monkeypatch.setattr(sys.modules[__name__], "HIDDEN", WIDE)
    made, made_of = [], QuantizedLstmSteps._made
    monkeypatch.setattr(QuantizedLstmSteps, "_made", lambda *given: made.append(given) or made_of(*given))
    values = given(**values)
    assert_agree(values, hidden_size=WIDE, **attributes)
    proto = model(values, hidden_size=WIDE, **attributes)
    feed = {name: value for name, value in values.items() if name not in WEIGHTS}
    found = []
    for threads in (1, 2):
        options = SessionOptions()
        options.intra_op_num_threads = threads
        found.append([array.tobytes() for array in InferenceSession(proto, options).run(None, feed)])
    assert found[0] == found[1]
    assert len(made) == 3 * len(values["W"])


@pytest.mark.parametrize("odd", [np.nan, np.inf])
def test_odd_states(monkeypatch, odd):
    """A state that is not finite has no range: all states of the batch become NaN. Computed weights use NumPy."""
    monkeypatch.setattr(sys.modules[__name__], "HIDDEN", WIDE)
    state = np.zeros((1, BATCH, WIDE), np.float32)
    state[0, 1, 40] = odd
    values = given(h=state)
    compiled, plain = (
        InferenceSession(model(values, constants, hidden_size=WIDE)).run(
            None, {name: value for name, value in values.items() if name not in constants}
        )
        for constants in (WEIGHTS, ())
    )
    for mine, other in zip(compiled, plain, strict=True):
        assert np.isnan(mine).all()
        assert np.isnan(other).all()


def test_inputs_of_width_0():
    """The result equals that of inputs that are 0; onnxruntime returns uninitialised memory."""
    empty = given(X=np.zeros((STEPS, BATCH, 0), np.float32), W=np.zeros((1, 0, 4 * HIDDEN), np.int8))
    zero = given(X=np.zeros((STEPS, BATCH, WIDTH), np.float32))
    (*ours,), (*expected,) = (InferenceSession(model(x)).run(None, {n: x[n] for n in "XB"}) for x in (empty, zero))
    for mine, other in zip(ours, expected, strict=True):
        np.testing.assert_allclose(mine, other, rtol=0, atol=1e-7)


BAD: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "zero points differ": ({"Wz": np.arange(16, dtype=np.int8)[None]}, {}, "zero points of W differ"),
    "scales of another shape": ({"Rs": np.ones(4, np.float32)}, {}, r"R_scale has shape \[4\], expected \[1\] or"),
    "zero points of another shape": ({"Rz": np.zeros((1, 1), np.int8)}, {}, r"R_zero_point has shape \[1, 1\]"),
    "zero points of another type": ({"Rz": np.zeros(1, np.uint8)}, {}, "R is int8, and its zero point is uint8"),
    "transposed": ({"W": np.ones((1, 16, WIDTH), np.int8)}, {}, "W has shape"),
    "a matrix": ({"R": np.ones((HIDDEN, 16), np.int8)}, {}, r"R has shape \[4, 16\], not 3 axes"),
    "another hidden size": ({}, {"hidden_size": 5}, "has shape"),
    "too long": ({"lengths": np.array([5, 1, 1], np.int32)}, {}, "sequence_lens"),
    "no scale": ({"Ws": None}, {}, "the scale or the zero point of W is missing"),
    "no zero point": ({"Rz": None}, {}, "the scale or the zero point of R is missing"),
}


@pytest.mark.parametrize("constants", [WEIGHTS, ()], ids=["constant", "computed"])
@pytest.mark.parametrize(("values", "attributes", "message"), BAD.values(), ids=BAD)
def test_refused(values, attributes, message, constants):
    values = given(**values)
    proto = model(values, constants, **attributes)
    feed = {name: value for name, value in values.items() if name not in constants and value is not None}
    with pytest.raises(Exception, match=message):
        InferenceSession(proto).run(None, feed)
    with pytest.raises(Exception, match=r"."):
        on_one_thread(proto, feed)


def test_needs_hidden_size():
    proto = model(given())
    del proto.graph.node[0].attribute[:]
    with pytest.raises(Exception, match="needs the attribute 'hidden_size'"):
        InferenceSession(proto)


def test_shapes():
    directions = {"direction": "bidirectional"}
    values = given(directions=2)
    state = ("FLOAT", (2, BATCH, HIDDEN))
    assert types_of(model(values, **directions)) == [("FLOAT", (STEPS, 2, BATCH, HIDDEN)), state, state]


def test_quantize_dynamic_of_an_lstm(tmp_path: Path) -> None:
    """onnxruntime's quantiser writes the operator for an LSTM."""
    quantization = pytest.importorskip("onnxruntime.quantization")
    rng = np.random.default_rng(0)
    shapes = {"w": (2, 4 * HIDDEN, WIDTH), "r": (2, 4 * HIDDEN, HIDDEN), "b": (2, 8 * HIDDEN)}
    weights = [numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), n) for n, shape in shapes.items()]
    node = helper.make_node("LSTM", ["x", *shapes], ["y"], hidden_size=HIDDEN, direction="bidirectional")
    info = [helper.make_tensor_value_info(name, 1, shape) for name, shape in (("x", ["t", "n", WIDTH]), ("y", None))]
    graph = helper.make_graph([node], "graph", info[:1], info[1:], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "a.onnx")
    for kind in (quantization.QuantType.QInt8, quantization.QuantType.QUInt8):
        for per_channel in (False, True):
            quantization.quantize_dynamic(
                tmp_path / "a.onnx", tmp_path / "b.onnx", weight_type=kind, per_channel=per_channel
            )
            proto = onnx.load(tmp_path / "b.onnx")
            assert [node.op_type for node in proto.graph.node] == ["DynamicQuantizeLSTM"]
            feed = {"x": rng.standard_normal((6, 2, WIDTH)).astype(np.float32)}
            np.testing.assert_allclose(
                InferenceSession(proto).run(None, feed)[0], on_one_thread(proto, feed)[0], rtol=0, atol=2e-6
            )

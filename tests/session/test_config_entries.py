"""Entries of onnxruntime's configuration are obeyed, or have no effect by their nature, or are refused."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import genai
from genai.compat.onnxruntime.options import (
    _REFUSED,
    _WITHOUT_EFFECT,
    KEEPS_QDQ,
    RECORDS_ASSIGNMENT,
    WEIGHTS_FILE,
    WEIGHTS_FOLDER,
    WEIGHTS_LEAST_BYTES,
)

WEIGHT = np.arange(64, dtype=np.float32)


def with_entries(**entries: str) -> genai.SessionOptions:
    options = genai.SessionOptions()
    for key, value in entries.items():
        options.add_session_config_entry(key, value)
    return options


def external(location: str, name: str = "w") -> TensorProto:
    tensor = TensorProto(name=name, data_type=1, dims=[64], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", location), ("offset", "0"), ("length", "256")):
        tensor.external_data.add(key=key, value=value)
    return tensor


@pytest.fixture
def external_model(make_model):
    model = make_model([helper.make_node("Add", ["x", "w"], ["y"])], {"x": (1, [64])}, {"y": (1, [64])})
    model.graph.initializer.append(external("weights.bin"))
    return model


@pytest.mark.parametrize("key", sorted(_REFUSED))
def test_refused_entries(key, add_model):
    for value in ("", *_REFUSED[key][0]):
        genai.InferenceSession(add_model, with_entries(**{key: value}))
    with pytest.raises(genai.GenaiError, match=key) as caught:
        genai.InferenceSession(add_model, with_entries(**{key: "something"}))
    assert caught.value.why == _REFUSED[key][1]


def test_entries_without_effect(add_model, recwarn):
    options = with_entries(**dict.fromkeys((*_WITHOUT_EFFECT, "session.intra_op.allow_spinning", "mlas.anything"), "1"))
    genai.InferenceSession(add_model, options)
    assert not recwarn.list


def test_unknown_entries_are_warned_about(add_model):
    options = with_entries(**{"session.save_model_formt": "ORT"})
    assert options.get_session_config_entry("session.save_model_formt") == "ORT"
    with pytest.warns(UserWarning, match=r"did you mean 'session\.save_model_format'"):
        genai.InferenceSession(add_model, options)


@pytest.mark.parametrize(("key", "value"), [
    ("session.max_value_bytes", "-1"), (WEIGHTS_LEAST_BYTES, "few"), (KEEPS_QDQ, "yes"), (RECORDS_ASSIGNMENT, "on"),
    (WEIGHTS_FOLDER, "/no/such"),
])  # fmt: skip
def test_impossible_values(key, value, add_model):
    with pytest.raises(genai.GenaiError, match=key) as caught:
        genai.InferenceSession(add_model, with_entries(**{key: value}))
    assert caught.value.fix


@pytest.mark.parametrize(("least", "is_external"), [("0", True), ("256", True), ("257", False)])
def test_weights_of_the_optimised_model(least, is_external, make_model, tmp_path):
    model = make_model([helper.make_node("Add", ["x", "w"], ["y"])], {"x": (1, [64])}, {"y": (1, [64])}, {"w": WEIGHT})
    options = with_entries(**{WEIGHTS_FILE: "weights.bin", WEIGHTS_LEAST_BYTES: least})
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    genai.InferenceSession(model, options)
    assert (tmp_path / "weights.bin").stat().st_size == (256 if is_external else 0)
    session = genai.InferenceSession(tmp_path / "optimised.onnx")
    assert session.run(None, {"x": np.zeros(64, np.float32)})[0].tolist() == WEIGHT.tolist()


def test_folder_of_the_weights(external_model, tmp_path):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "weights.bin").write_bytes(WEIGHT.tobytes())
    options = with_entries(**{WEIGHTS_FOLDER: str(folder)})
    x = np.ones(64, np.float32)
    for source in (external_model, external_model.SerializeToString()):
        assert genai.InferenceSession(source, options).run(None, {"x": x})[0].tolist() == (WEIGHT + 1).tolist()
    external_model.graph.initializer[0].CopyFrom(external("../weights.bin"))
    with pytest.raises(genai.Fail, match="outside the model folder"):
        genai.InferenceSession(external_model, options)


def test_values_instead_of_absent_files(external_model, tmp_path):
    path = tmp_path / "model.onnx"
    path.write_bytes(external_model.SerializeToString())
    value = genai.OrtValue.ortvalue_from_numpy(WEIGHT)
    options = genai.SessionOptions()
    options.add_external_initializers(["w"], [value])
    x = np.ones(64, np.float32)
    for source in (path, external_model):
        assert genai.InferenceSession(source, options).run(None, {"x": x})[0].tolist() == (WEIGHT + 1).tolist()
    with pytest.raises(genai.Fail, match=r"weights\.bin"):
        genai.InferenceSession(path)
    other = genai.SessionOptions()
    other.add_external_initializers(["w"], [genai.OrtValue.ortvalue_from_numpy(WEIGHT[:3])])
    with pytest.raises(genai.InvalidArgument, match=r"'w' is float\[64\]"):
        genai.InferenceSession(path, other)


def test_a_value_stands_for_one_tensor_only(external_model):
    """A tensor of the same name in a subgraph is another one; its file is needed."""
    branch = helper.make_graph(
        [helper.make_node("Identity", ["w"], ["z"])],
        "branch",
        [],
        [helper.make_tensor_value_info("z", 1, [64])],
        [external("weights.bin")],
    )
    node = helper.make_node("If", ["c"], ["z"], then_branch=branch, else_branch=branch)
    external_model.graph.node.append(node)
    external_model.graph.input.append(helper.make_tensor_value_info("c", TensorProto.BOOL, []))
    external_model.graph.output.append(helper.make_tensor_value_info("z", 1, [64]))
    options = genai.SessionOptions()
    options.add_external_initializers(["w"], [genai.OrtValue.ortvalue_from_numpy(WEIGHT)])
    with pytest.raises(genai.GenaiError):
        genai.InferenceSession(external_model, options)


def test_quantised_operators_stay_apart_when_asked(make_model):
    """Between DequantizeLinear and QuantizeLinear numbers are float32, as the model says."""
    weight = numpy_helper.to_array(
        numpy_helper.from_array(np.random.default_rng(0).integers(-9, 9, (64, 128)).astype(np.int8))
    )
    constants = {"w": weight, "s": np.float32(0.05), "z": np.uint8(128), "zw": np.int8(0), "so": np.float32(0.11)}
    nodes = [
        helper.make_node("DequantizeLinear", ["x", "s", "z"], ["xf"]),
        helper.make_node("DequantizeLinear", ["w", "s", "zw"], ["wf"]),
        helper.make_node("MatMul", ["xf", "wf"], ["yf"]),
        helper.make_node("QuantizeLinear", ["yf", "so", "z"], ["y"]),
    ]
    model = make_model(nodes, {"x": (2, [8, 64])}, {"y": (2, [8, 128])}, constants)
    kinds = []
    for value in ("0", "1"):
        session = genai.InferenceSession(model, with_entries(**{KEEPS_QDQ: value}))
        kinds.append({step.op_type for step in session._session.plan.calls})
    assert "QLinearMatMul" in kinds[0]
    assert "QLinearMatMul" not in kinds[1]

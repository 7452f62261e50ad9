"""Negative sizes in declared shapes, as older exporters write them, are unknown sizes, as in onnxruntime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import genai
from genai.onnx.reader import read_model
from genai.session.arrays import random_feed
from genai.session.session import Session


def model(nodes: list[Any], inputs: list[Any], outputs: list[Any], between: list[Any] | None = None) -> bytes:
    graph = helper.make_graph(nodes, "g", inputs, outputs, value_info=between or [])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return bytes(proto.SerializeToString())


def floats(name: str, *shape: Any) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, 1, shape)


X = np.arange(6, dtype=np.float32).reshape(2, 3)
RELU = [helper.make_node("Relu", ["x"], ["y"])]
CASES: dict[str, tuple[bytes, dict[str, Any]]] = {
    "-1": (model(RELU, [floats("x", -1, 3)], [floats("y", -1, 3)]), {"x": X}),
    "-2": (model(RELU, [floats("x", -2, 3)], [floats("y", -2, 3)]), {"x": X}),
    "smallest": (model(RELU, [floats("x", -(2**63), 3)], [floats("y", -1, 3)]), {"x": X}),
    "all": (model(RELU, [floats("x", -1, -1)], [floats("y", -1, -1)]), {"x": X}),
    "with a symbol": (model(RELU, [floats("x", "N", -1)], [floats("y", "N", -1)]), {"x": X}),
    "different sizes": (
        model(
            [helper.make_node("Add", ["x", "z"], ["y"])],
            [floats("x", -1, 3), floats("z", -1, 3)],
            [floats("y", -1, 3)],
        ),
        {"x": X, "z": X[:1]},
    ),
    "between nodes": (
        model(
            [helper.make_node("Relu", ["x"], ["t"]), helper.make_node("Flatten", ["t"], ["y"])],
            [floats("x", -1, 3, -1)],
            [floats("y", -1, -1)],
            [floats("t", -1, 3, -1)],
        ),
        {"x": X.reshape(2, 3, 1)},
    ),
    "the shape of it": (
        model(
            [helper.make_node("Shape", ["x"], ["y"])],
            [floats("x", -1, 3)],
            [helper.make_tensor_value_info("y", 7, [-1])],
        ),
        {"x": X},
    ),
}  # fmt: skip


@pytest.mark.oracle
@pytest.mark.parametrize(("source", "feed"), CASES.values(), ids=CASES)
def test_as_onnxruntime(source: bytes, feed: dict[str, Any], recwarn: pytest.WarningsRecorder) -> None:
    ort = pytest.importorskip("onnxruntime")
    ours, theirs = genai.InferenceSession(source), ort.InferenceSession(source)
    assert [value.shape for value in ours.get_inputs()] == [value.shape for value in theirs.get_inputs()]
    for mine, other in zip(ours.run(None, feed), theirs.run(None, feed), strict=True):
        np.testing.assert_array_equal(mine, other)
    assert not recwarn.list  # no output contradicts its declared shape


@pytest.mark.parametrize("size", [1, 4])
def test_random_inputs(size: int) -> None:
    """Random values have one element along an unknown axis, and given values any number."""
    session = Session(CASES["-1"][0])
    assert [value.type.shape for value in session.inputs] == [(None, 3)]
    feed = random_feed(session.inputs, {})
    assert feed["x"].shape == (1, 3)
    assert session.run({"x": np.repeat(feed["x"], size, axis=0)})["y"].shape == (size, 3)


def test_known_sizes_are_checked() -> None:
    session = genai.InferenceSession(CASES["-1"][0])
    with pytest.raises(Exception, match="index: 1 Got: 4 Expected: 3"):
        session.run(None, {"x": np.ones((2, 4), np.float32)})


def test_types_in_containers() -> None:
    sequence = helper.make_tensor_sequence_value_info("x", 1, [-1, 3])
    index = helper.make_tensor_value_info("i", 7, [])
    source = model([helper.make_node("SequenceAt", ["x", "i"], ["y"])], [sequence, index], [floats("y", -1, 3)])
    (y,) = genai.InferenceSession(source).run(None, {"x": [X], "i": np.array(0)})
    np.testing.assert_array_equal(y, X)
    known: Any = read_model(source).graph.inputs[0].type
    assert known.element.shape == (None, 3)

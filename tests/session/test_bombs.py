"""Small models that ask for absurd amounts of work or memory end soon, in a typed error."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import genai
from genai.session import preparing

FLOAT, INT64, STRING, BOOL = 1, 7, 8, 9
SIDE = 1 << 17
COLUMN, ROW = np.ones((SIDE, 1), np.float32), np.ones((1, SIDE), np.float32)
LIMIT = 1 << 24


def doubling_functions(depth: int) -> onnx.ModelProto:
    """Functions of which each calls the one before twice."""
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("d", 1)]
    functions = [helper.make_function("d", "f0", ["a"], ["b"], [helper.make_node("Neg", ["a"], ["b"])], imports)]
    for level in range(1, depth):
        calls = [helper.make_node(f"f{level - 1}", [a], [b], domain="d") for a, b in (("a", "t"), ("t", "b"))]
        functions.append(helper.make_function("d", f"f{level}", ["a"], ["b"], calls, imports))
    graph = helper.make_graph(
        [helper.make_node(f"f{depth - 1}", ["x"], ["y"], domain="d")],
        "g",
        [helper.make_tensor_value_info("x", FLOAT, [2])],
        [helper.make_tensor_value_info("y", FLOAT, [2])],
    )
    return helper.make_model(graph, opset_imports=imports, functions=functions, ir_version=8)


def test_functions_that_double():
    x = np.array([1, 2], np.float32)
    for depth in (4, 12):
        assert genai.InferenceSession(doubling_functions(depth)).run(None, {"x": x})[0].tolist() == [1, 2]
    for depth in (19, 60):
        with pytest.raises(genai.InvalidGraph, match="nodes once its functions are expanded"):
            genai.InferenceSession(doubling_functions(depth))


def test_calls_share_a_body_only_where_they_are_alike(make_model):
    """The same function with other attributes, or an input left out, is another body."""
    scaled = helper.make_node("Mul", ["a", "k"], ["s"])
    nodes = [helper.make_node("Constant", [], ["k"]), scaled, helper.make_node("Clip", ["s", "low"], ["b"])]
    nodes[0].attribute.add(name="value_float", type=onnx.AttributeProto.FLOAT, ref_attr_name="factor")
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("d", 1)]
    function = helper.make_function("d", "scale", ["a", "low"], ["b"], nodes, imports, ["factor"])
    calls = [
        helper.make_node("scale", ["x", "zero"], ["p"], domain="d", factor=2.0),
        helper.make_node("scale", ["x", "zero"], ["q"], domain="d", factor=3.0),
        helper.make_node("scale", ["x"], ["r"], domain="d", factor=3.0),
        helper.make_node("scale", ["x", "zero"], ["s"], domain="d", factor=2.0),
    ]
    kind = (FLOAT, [2])
    model = make_model(
        calls, {"x": kind}, dict.fromkeys("pqrs", kind), {"zero": np.float32(0)}, functions=[function], imports=imports
    )
    results = genai.InferenceSession(model).run(None, {"x": np.array([-1, 1], np.float32)})
    assert [value.tolist() for value in results] == [[0, 2], [0, 3], [-3, 3], [0, 2]]


def _node(op_type: str, *inputs: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op_type, inputs, ["z"], **attributes)


def _chain(op_type: str, steps: int, **attributes: Any) -> list[onnx.NodeProto]:
    names = ["x", *(f"t{step}" for step in range(1, steps)), "z"]
    return [helper.make_node(op_type, [a, a], [b], **attributes) for a, b in pairwise(names)]


def _loop() -> list[onnx.NodeProto]:
    body = helper.make_graph(
        [helper.make_node("Identity", ["c"], ["more"]), helper.make_node("Identity", ["x"], ["o"])],
        "body",
        [helper.make_tensor_value_info("i", INT64, []), helper.make_tensor_value_info("c", BOOL, [])],
        [helper.make_tensor_value_info("more", BOOL, []), helper.make_tensor_value_info("o", FLOAT, None)],
    )
    return [_node("Loop", "n", "", body=body)]


OUTER = {"x": COLUMN, "y": ROW}
BOMBS: dict[str, tuple[list[onnx.NodeProto], dict[str, Any]]] = {
    **{name: ([_node(name, "x", "y")], OUTER) for name in ("Add", "Equal", "Pow", "Max", "Sum", "MatMul", "Gemm")},
    "Mod": ([_node("Mod", "x", "y", fmod=1)], OUTER),
    "Where": ([_node("Where", "c", "x", "y")], {"c": np.ones(1, bool), **OUTER}),
    "Einsum": ([_node("Einsum", "x", "y", equation="ab,bc->ac")], OUTER),
    "Gather": ([_node("Gather", "y", "n")], {"y": ROW, "n": np.zeros(SIDE, np.int64)}),
    "GatherND": ([_node("GatherND", "y", "n")], {"y": ROW, "n": np.zeros((SIDE, 1), np.int64)}),
    "Concat of many": ([_node("Concat", *["x"] * 1000, axis=0)], {"x": COLUMN}),
    "Concat that doubles": (_chain("Concat", 50, axis=0), {"x": np.ones(100, np.float32)}),
    "StringConcat": (_chain("StringConcat", 60), {"x": np.array(["abc"], object)}),
    "Loop": (_loop(), {"n": np.array(2**62), "x": COLUMN}),
    "Expand": ([_node("Expand", "x", "n")], {"x": COLUMN, "n": np.array([SIDE, SIDE])}),
}


@pytest.mark.parametrize("name", BOMBS)
def test_values_that_are_too_large(name, make_model):
    nodes, feed = BOMBS[name]
    kinds = {np.dtype(np.float32): FLOAT, np.dtype(np.int64): INT64, np.dtype(bool): BOOL, np.dtype(object): STRING}
    inputs = {key: (kinds[value.dtype], list(value.shape)) for key, value in feed.items()}
    model = make_model(
        nodes, inputs, {"z": (BOOL if name == "Equal" else STRING if name == "StringConcat" else FLOAT, None)}
    )
    options = genai.SessionOptions()
    options.add_session_config_entry("session.max_value_bytes", str(LIMIT))
    for level in (genai.GraphOptimizationLevel.ORT_DISABLE_ALL, genai.GraphOptimizationLevel.ORT_ENABLE_ALL):
        options.graph_optimization_level = level
        with pytest.raises(genai.Fail, match=r"allowed are|than a value may") as caught:
            genai.InferenceSession(model, options).run(None, feed)
        assert caught.value.fix


def test_the_limit_is_what_the_machine_has_left(make_model, monkeypatch):
    model = make_model([_node("Add", "x", "y")], {"x": (FLOAT, [64, 1]), "y": (FLOAT, [1, 64])}, {"z": (FLOAT, None)})
    feed = {"x": COLUMN[:64], "y": ROW[:, :64]}
    make: Callable[[], Any] = lambda: genai.InferenceSession(model).run(None, feed)  # noqa: E731
    monkeypatch.setattr(preparing, "available_memory", lambda: 64 * 64 * 4)
    assert make()[0].shape == (64, 64)
    monkeypatch.setattr(preparing, "available_memory", lambda: 64 * 64 * 4 - 1)
    with pytest.raises(genai.Fail, match="takes 16384 bytes, allowed are 16383"):
        make()

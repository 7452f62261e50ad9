"""Random graphs: with all rewrites they compute what they compute without any, or both fail with a typed error."""

from __future__ import annotations

import math
import os
import warnings
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from onnx import helper, numpy_helper

import genai as ort
from tests.drawing import VARIABLE, Draw

FLOAT, INT64, BOOL = 1, 7, 9
CONSTANTS = {
    "half": np.float32(0.5),
    "one": np.float32(1),
    "two": np.float32(2),
    "root": np.float32(math.sqrt(2)),
    "zero": np.zeros(1, np.float32),
    "odd": np.array([np.nan, np.inf, -np.inf, 0], np.float32),
    "first": np.array(0),
    "row": np.linspace(-1, 1, 4, dtype=np.float32),
    "matrix": np.linspace(-1, 1, 16, dtype=np.float32).reshape(4, 4),
    "to3d": np.array([0, -1, 4]),
    "to2d": np.array([-1, 4]),
    "axes": np.array([-1]),
    "index": np.array([0, 1]),
    "scale": np.float32(0.05),
    "point": np.uint8(100),
}
# Operator -> inputs, output kind. A letter draws a value: f float, b bool, i integer, q 8 bits, s sequence. A word is a
# constant.
OPERATORS: dict[str, list[tuple[str, str, dict[str, Any]]]] = {
    "Add": [("f f", "f", {}), ("f row", "f", {}), ("one f", "f", {})],
    "Sub": [("f f", "f", {})],
    "Mul": [("f f", "f", {}), ("f half", "f", {})],
    "Div": [("f root", "f", {}), ("f f", "f", {}), ("f two", "f", {})],
    "Pow": [("f two", "f", {})],
    "MatMul": [("f matrix", "f", {}), ("f f", "f", {})],
    "Transpose": [("f", "f", {}), ("f", "f", {"perm": [0, 2, 1]}), ("f", "f", {"perm": [1, 0]})],
    "Reshape": [("f to3d", "f", {}), ("f to2d", "f", {})],
    "Softmax": [("f", "f", {"axis": -1})],
    "ReduceMean": [("f axes", "f", {"keepdims": 1})],
    "Concat": [("f f", "f", {"axis": 0}), ("i i", "i", {"axis": 0})],
    "Cast": [("f", "f", {"to": FLOAT}), ("b", "f", {"to": FLOAT}), ("f", "i", {"to": INT64})],
    "Where": [("b f f", "f", {}), ("b zero f", "f", {})],
    "IsNaN": [("f", "b", {})],
    "Greater": [("f f", "b", {})],
    "Shape": [("f", "i", {})],
    "Gather": [("f index", "f", {"axis": 0}), ("i index", "i", {"axis": 0})],
    "Expand": [("f i", "f", {})],
    "ConstantOfShape": [("i", "f", {})],
    "Clip": [("f zero one", "f", {})],
    "LayerNormalization": [("f row row", "f", {"axis": -1})],
    "Gemm": [("f matrix row", "f", {}), ("f matrix odd", "f", {"beta": 0.0})],
    "SequenceConstruct": [("f f", "s", {}), ("row zero", "s", {})],
    "SequenceInsert": [("s row", "s", {})],
    "SequenceAt": [("s first", "f", {})],
    "DynamicQuantizeLinear": [("f", "q", {}), ("half", "q", {})],
    "QuantizeLinear": [("f scale point", "q", {})],
    "DequantizeLinear": [("q scale point", "f", {})],
    **{name: [("f", "f", {})] for name in ("Erf", "Sqrt", "Tanh", "Relu", "Identity", "Sigmoid", "Neg", "Exp")},
}


@st.composite
def graphs(draw: Any) -> onnx.ModelProto:
    """A graph of one to a dozen of these operators, whose values are used at random."""
    values = {"f": ["x", "y"], "b": ["mask"], "i": [], "q": [], "s": []}
    nodes = []
    for index in range(draw(st.integers(1, 12))):
        op_type = draw(st.sampled_from(sorted(OPERATORS)))
        inputs, kind, attributes = draw(st.sampled_from(OPERATORS[op_type]))
        # A letter for which there is no value yet stands for a node that cannot be made.
        if any(len(item) == 1 and not values[item] for item in inputs.split()):
            continue
        names = [draw(st.sampled_from(values[i][-4:])) if len(i) == 1 else i for i in inputs.split()]
        output = f"{op_type.lower()}_{index}"
        outputs = [output, f"{output}_scale", f"{output}_point"] if op_type == "DynamicQuantizeLinear" else [output]
        nodes.append(helper.make_node(op_type, names, outputs, **attributes))
        values[kind].append(output)
    values.pop("s")  # compared through the values that are read from them
    made = [name for names in values.values() for name in names if name not in ("x", "y", "mask")]
    wanted = draw(st.lists(st.sampled_from(made), min_size=1, max_size=3, unique=True)) if made else ["x"]
    if not made:
        nodes, wanted = [helper.make_node("Identity", ["x"], ["copy"])], ["copy"]
    inputs = [("x", FLOAT, [2, 3, 4]), ("y", FLOAT, ["rows", 4]), ("mask", BOOL, [3, 4])]
    kinds = {
        name: {"f": FLOAT, "b": BOOL, "i": INT64, "q": 2}[kind] for kind, names in values.items() for name in names
    }
    graph = helper.make_graph(
        nodes,
        "random",
        [helper.make_tensor_value_info(*item) for item in inputs],
        [helper.make_tensor_value_info(name, kinds.get(name, FLOAT), None) for name in wanted],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in CONSTANTS.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


LEVELS = (ort.GraphOptimizationLevel.ORT_DISABLE_ALL, ort.GraphOptimizationLevel.ORT_ENABLE_ALL)


def outcome(model: onnx.ModelProto, level: ort.GraphOptimizationLevel) -> list[Any] | str:
    """Results, or the kind of error."""
    generator = np.random.default_rng(0)
    feed = {
        "x": generator.standard_normal((2, 3, 4)).astype(np.float32),
        "y": generator.standard_normal((3, 4)).astype(np.float32),
        "mask": generator.random((3, 4)) < 0.5,
    }
    options = ort.SessionOptions()
    options.graph_optimization_level = level
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.max_value_bytes", str(1 << 24))
    try:
        return ort.InferenceSession(model, options).run(None, feed)
    except ort.GenaiError as error:
        assert error.what
        assert error.why
        assert error.fix
        assert "cannot take" not in error.what, onnx.printer.to_text(model.graph)  # an unforeseen error while loading
        return "error"


def check(model: onnx.ModelProto) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain, full = (outcome(model, level) for level in LEVELS)
    # Rewrites may remove a node that fails, so that only one of both gives an error; never the other way round.
    if isinstance(plain, str):
        return
    assert not isinstance(full, str), onnx.printer.to_text(model.graph)
    # What differs in rounding may differ by a step of quantisation.
    step = 1.2 * float(CONSTANTS["scale"]) if any("QuantizeLinear" in n.op_type for n in model.graph.node) else 0.0
    for name, a, b in zip((value.name for value in model.graph.output), plain, full, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        _check_close(name, a, b, step)


def _check_close(name: str, a: Any, b: Any, step: float) -> None:
    """Near, measured by the largest finite value; rounded values may differ by one, but not most of them."""
    if a.dtype.kind != "f":
        assert (np.abs(a.astype(np.float64) - b.astype(np.float64)) <= 1).mean() > 0.5 or a.size == 0, name
        return
    finite = np.abs(a[np.isfinite(a)])
    scale = float(finite.max(initial=1))
    np.testing.assert_allclose(b, a, rtol=1e-3, atol=max(1e-4 * scale, step), equal_nan=True, err_msg=name)


common = settings(deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@settings(common, max_examples=40)
@given(graphs())
def test_rewrites_change_no_result(model):
    check(model)


@pytest.mark.slow
@settings(common, max_examples=Draw(os.environ[VARIABLE]).fewer(1000, 3), derandomize=False)
@given(graphs())
def test_rewrites_change_no_result_of_many(model):
    check(model)

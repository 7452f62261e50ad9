"""Graphs as text."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper

from genai.graph.ir import AttributeType, DataType, Graph, Tensor, Value, make_node
from genai.graph.printer import format_diff, format_graph, format_node, format_type
from genai.graph.reader import read_model
from genai.graph.types import MapType, OpaqueType, OptionalType, SequenceType, SparseTensorType, TensorType


@pytest.mark.parametrize(
    ("known", "text"),
    [
        (None, "?"),
        (TensorType(DataType.FLOAT16, ("batch", 8, None)), "float16[batch, 8, ?]"),
        (TensorType(DataType.INT64, ()), "int64[]"),
        (TensorType(DataType.BOOL), "bool[...]"),
        (SparseTensorType(DataType.DOUBLE, (3,)), "sparse double[3]"),
        (SequenceType(TensorType(DataType.STRING)), "seq(tensor(string))"),
        (OptionalType(SequenceType(TensorType(DataType.FLOAT))), "optional(seq(tensor(float)))"),
        (MapType(DataType.INT64, TensorType(DataType.FLOAT)), "map(int64,tensor(float))"),
        (OpaqueType("own", "Key"), "opaque(own,Key)"),
        (SparseTensorType(DataType.FLOAT8E4M3FN), "sparse float8e4m3fn[...]"),
    ],
)
def test_types(known, text):
    assert format_type(known) == text


def test_a_node_in_one_line():
    node = make_node(
        "MatMulNBits", ["x", "w", "", "z"], ["y", ""], domain="com.microsoft", bits=4, alpha=0.5, mode="full"
    )
    graph = Graph(values={"y": Value("y", TensorType(DataType.FLOAT, ("n", 4)))})
    assert format_node(node, graph) == (
        "y: float[n, 4], _ = com.microsoft.MatMulNBits(x, w, _, z) {bits=4, alpha=0.5, mode='full'}"
    )
    assert format_node(make_node("Relu", ["x"], ["y"])) == "y = Relu(x)"


def test_long_attributes_are_shortened():
    node = make_node("Op", [], ["y"], ints=list(range(100)), text="a" * 500)
    node.set_attribute("none", [], AttributeType.INTS)
    node.set_attribute("table", Tensor.from_array("", np.zeros((100, 100), np.float32)))
    node.set_attribute("few", Tensor.from_array("", np.array([1, 2], np.int64)))
    text = format_node(node)
    assert "0, 1, 2, 3, 4, 5, 6, 7, ... 100 items" in text
    assert "none=[]" in text
    assert "table=float[100, 100]" in text
    assert "few=int64[2] = [1, 2]" in text
    assert len(text) < 300


def test_a_whole_model_with_subgraphs(if_model):
    text = format_graph(read_model(if_model))
    assert text.splitlines() == [
        "model (IR 10; ai.onnx 20)",
        "graph graph",
        "  input x: float[2]",
        "  input flag: bool[]",
        "  constant w: float[2] = [2.0, 3.0]",
        "  a = Relu(x)",
        "  b = Neg(x)",
        "  y: float[2] = If(flag) {else_branch=graph, then_branch=graph}",
        "    else_branch:",
        "      graph else_graph",
        "        else_out: float[2] = Mul(b, w)",
        "        output else_out: float[2]",
        "    then_branch:",
        "      graph then_graph",
        "        then_sum = Add(a, w)",
        "        then_out: float[2] = Identity(then_sum)",
        "        output then_out: float[2]",
        "  output y: float[2]",
    ]


def test_external_weights_are_not_read(external_model):
    model = read_model(external_model)
    model.producer_name, model.producer_version = "maker", "1"
    text = format_graph(model)
    assert "constant w: float[64, 32] external" in text
    assert text.startswith("model (IR 10; ai.onnx 20) by maker 1")


def test_functions_and_references(make_model):
    node = helper.make_node("LeakyRelu", ["x"], ["y"])
    node.attribute.add(name="alpha", type=1, ref_attr_name="slope")
    function = helper.make_function("own", "F", ["x"], ["y"], [node], [helper.make_opsetid("", 20)], ["slope"])
    kind = (TensorProto.FLOAT, [1])
    call = helper.make_node("F", ["x"], ["y"], domain="own", slope=0.5)
    proto = make_model([call], {"x": kind}, {"y": kind}, functions=[function], domains={"own": 1})
    lines = format_graph(read_model(proto)).splitlines()
    assert "function own::F <slope>" in lines
    assert "    y = LeakyRelu(x) {alpha=@slope}" in lines


def test_a_diff_shows_what_changed_and_nothing_else(if_model):
    model = read_model(if_model)
    before = model.copy()
    assert format_diff(before, model) == ""
    model.graph.replace_node(model.graph.nodes[0], make_node("Abs", ["x"], ["a"]))
    diff = format_diff(before, model)
    changed = [line for line in diff.splitlines() if line[0] in "+-" and line[:3] not in ("+++", "---")]
    assert changed == ["-  a = Relu(x)", "+  a = Abs(x)"]
    assert len(diff.splitlines()) < len(format_graph(model).splitlines())


def test_an_empty_constant_costs_nothing_however_long_its_other_side():
    graph = Graph("g")
    none = Tensor.from_array("t", np.zeros((0,), np.float32))
    graph.initializers["t"] = Tensor("t", none.dtype, (2**40, 0), none.storage)
    assert "constant t: float[1099511627776, 0] = []" in format_graph(graph)

"""Chains of 8-bit operators as tables: the graph after the rule, and results that stay the same to the bit."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import genai as ort
from genai.kernels.cpu.arrays.byte_functions import looked_up
from genai.kernels.cpu.program.thread_pool import Threads
from genai.onnx.reader import read_model
from genai.optimize.base import Level, run_rewrites
from genai.optimize.byte_tables import tabulate_bytes
from genai.optimize.shapes import infer_shapes
from genai.optimize.simplify import remove_dead_code
from tests.integrity import check_graph


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def gelu_of_bytes(dtype: type, scale_shape: tuple[int, ...] = ()) -> onnx.ModelProto:
    """Quantised x -> x * (erf(x / sqrt 2) + 1), in steps that are quantised again."""
    kind = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    point = np.asarray(3, dtype)

    def quantized(name: str, source: str, scale: str) -> list[onnx.NodeProto]:
        return [
            helper.make_node("QuantizeLinear", [source, scale, "point"], [f"{name}_q"]),
            helper.make_node("DequantizeLinear", [f"{name}_q", scale, "point"], [name]),
        ]

    nodes = [
        helper.make_node("DequantizeLinear", ["x", "s1", "point"], ["f"]),
        helper.make_node("Div", ["f", "root"], ["d"]),
        helper.make_node("Erf", ["d"], ["e"]),
        *quantized("e2", "e", "s2"),
        *quantized("one2", "one", "s2"),
        helper.make_node("Add", ["e2", "one2"], ["a"]),
        *quantized("a2", "a", "s2"),
        helper.make_node("Mul", ["f", "a2"], ["m"]),
        helper.make_node("QuantizeLinear", ["m", "s1", "point"], ["y"]),
    ]
    constants = {
        "s1": np.full(scale_shape, 0.05, np.float32), "s2": np.asarray(0.01, np.float32), "point": point,
        "root": np.asarray(2**0.5, np.float32), "one": np.asarray(1, np.float32),
    }  # fmt: skip
    values = [helper.make_tensor_value_info(name, kind, ["rows", 70]) for name in "xy"]
    tensors = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
@pytest.mark.parametrize("rows", [2, 60])
def test_the_chain_becomes_a_table(rng, dtype, rows):
    model = gelu_of_bytes(dtype)
    read = read_model(model)
    infer_shapes(read)
    run_rewrites(read, (tabulate_bytes, remove_dead_code), Level.ALL)
    check_graph(read.graph)
    (table,) = [node for node in read.graph.nodes if node.op_type == "ByteTable"]
    assert table.input(0) == "x"
    assert not [node for node in read.graph.nodes if "x" in node.inputs and node is not table]
    info = np.iinfo(dtype)
    x = rng.integers(info.min, info.max + 1, (rows, 70)).astype(dtype)
    plain = ort.SessionOptions()
    plain.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    (expected,) = ort.InferenceSession(model, plain).run(None, {"x": x})
    session = ort.InferenceSession(model)
    np.testing.assert_array_equal(session.run(None, {"x": x})[0], expected)
    assert [step.op_type for step in session._session.plan.calls] == ["ByteTable"]


def test_two_values_are_no_chain():
    model = gelu_of_bytes(np.uint8)
    model.graph.input.append(helper.make_tensor_value_info("one_more", 1, ["rows", 70]))
    model.graph.node[2].input[0] = "sum"
    model.graph.node.insert(2, helper.make_node("Add", ["d", "one_more"], ["sum"]))
    read = read_model(model)
    infer_shapes(read)
    run_rewrites(read, (tabulate_bytes, remove_dead_code), Level.ALL)
    assert "ByteTable" not in [node.op_type for node in read.graph.nodes]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", [(0,), (1,), (3, 5), (9000,), (64, 1000)])
def test_looking_up(rng, threads, shape):
    workers = Threads(threads)
    x, table = rng.integers(-128, 128, shape).astype(np.int8), rng.integers(0, 256, 256).astype(np.uint8)
    np.testing.assert_array_equal(looked_up(workers, x, table), table[x.view(np.uint8)])
    with pytest.raises(ValueError, match="table is uint8"):
        looked_up(workers, x, table[:10])

"""Matching of the axis swap through three dimensions and of the sizes that exporters compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from genai.lowering.exported_attention import flat_swap, settle_shapes
from genai.onnx.decoder_names import GraphNames
from genai.onnx.ir import OnnxModel
from genai.onnx.reader import read_model

NAMES = GraphNames("ids", "mask", "positions", "past.%d.key", "past.%d.value", "logits", "present.%d.key", "present.v")


def constant(name: str, *values: int) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array(values, np.int64), name)


@pytest.fixture
def read(tmp_path: Path) -> Any:
    """read(nodes, constants, inputs, outputs) -> the model as our graph."""

    def make(
        nodes: list[Any], constants: list[Any], inputs: dict[str, list[Any]], outputs: dict[str, list[Any]]
    ) -> OnnxModel:
        values = [
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name, dims in side.items()]
            for side in (inputs, outputs)
        ]
        graph = helper.make_graph(nodes, "g", *values, constants)
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]), tmp_path / "m.onnx")
        return read_model(tmp_path / "m.onnx")

    return make


def swap_nodes(rows: str = "rows", perm: tuple[int, ...] = (0, 2, 1)) -> list[Any]:
    return [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Slice", ["shape", "last", "end"], ["columns"]),
        helper.make_node("Slice", ["shape", "second", "last"], ["rows"]),
        helper.make_node("Slice", ["shape", "begin", "second"], ["lead"]),
        helper.make_node("Concat", ["any", rows, "columns"], ["three"], axis=0),
        helper.make_node("Reshape", ["x", "three"], ["joined"]),
        helper.make_node("Transpose", ["joined"], ["swapped"], perm=perm),
        helper.make_node("Concat", ["lead", "columns", rows], ["four"], axis=0),
        helper.make_node("Reshape", ["swapped", "four"], ["y"]),
    ]


BOUNDS = [
    constant("any", -1),
    constant("last", -1),
    constant("second", -2),
    constant("begin", -(1 << 63)),
    constant("end", (1 << 63) - 1),
    constant("six", 6),
]


@pytest.mark.parametrize(
    ("nodes", "found"),
    [
        (swap_nodes(), "x"),
        (swap_nodes(rows="six"), None),
        (swap_nodes(rows="columns"), None),
        (swap_nodes(perm=(0, 1, 2)), None),
        (swap_nodes(perm=(1, 2, 0)), None),
    ],
)
def test_flat_swap(read: Any, nodes: list[Any], found: str | None) -> None:
    model = read(nodes, BOUNDS, {"x": ["b", 2, "t", 6]}, {"y": ["b", 2, None, None]})
    assert flat_swap(model.graph, "y") == found
    assert flat_swap(model.graph, "joined") is None
    assert flat_swap(model.graph, "x") is None


def test_fixed_dimensions_become_constants(read: Any) -> None:
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Gather", ["shape", "last"], ["size"]),
        helper.make_node("Div", ["size", "two"], ["half"]),
        helper.make_node("Gather", ["shape", "zero"], ["batch"]),
        helper.make_node("Shape", ["x"], ["tail"], start=1),
        helper.make_node("Concat", ["half", "batch", "tail"], ["target"], axis=0),
        helper.make_node("Expand", ["one", "target"], ["y"]),
    ]
    constants = [constant("last", -1), constant("zero", 0), constant("two", 2)]
    constants.append(numpy_helper.from_array(np.ones(1, np.float32), "one"))
    model = read(nodes, constants, {"x": ["b", 4, 12]}, {"y": [None] * 4})
    settle_shapes(model, NAMES)
    assert model.graph.constant("half").tolist() == [6]
    assert model.graph.constant("tail").tolist() == [4, 12]
    assert model.graph.constant("batch") is None


def test_the_batch_size_of_a_past_is_that_of_the_tokens(read: Any) -> None:
    nodes = [
        helper.make_node("Shape", ["past.0.key"], ["batch"], start=0, end=1),
        helper.make_node("Shape", ["other"], ["others"], start=0, end=1),
        helper.make_node("Shape", ["past.0.key"], ["length"], start=2, end=3),
        helper.make_node("Concat", ["batch", "others", "length"], ["target"], axis=0),
        helper.make_node("Expand", ["one", "target"], ["y"]),
    ]
    inputs = {"ids": ["b", "s"], "past.0.key": ["b", 2, "p", 6], "other": ["o"]}
    one = numpy_helper.from_array(np.ones(1, np.float32), "one")
    model = read(nodes, [one], inputs, {"y": [None] * 3})
    settle_shapes(model, NAMES)
    sources = {node.outputs[0]: node.inputs[0] for node in model.graph.nodes if node.op_type == "Shape"}
    assert sources == {"batch": "ids", "others": "other", "length": "past.0.key"}

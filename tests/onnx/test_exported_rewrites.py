"""Rules for exported decoders: equal results, and no change where the parts of a head differ."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from genai.onnx.reader import read_model
from genai.onnx.writer import to_proto
from genai.optimize.base import Level, run_rewrites
from genai.optimize.exported import join_centred_norm, remove_whole_slices, select_columns_of_heads
from genai.optimize.shapes import infer_shapes
from genai.optimize.simplify import remove_dead_code
from tests.integrity import check_graph

HEADS, SIZE = 3, 8
Nodes = list[onnx.NodeProto]


def rewritten(nodes: Nodes, constants: dict[str, Any], output: str = "y") -> tuple[list[str], onnx.ModelProto, Any]:
    """Return the operators after the rules, the model before, and the model after."""
    x = helper.make_tensor_value_info("x", 1, ["b", "s", HEADS * SIZE])
    y = helper.make_tensor_value_info(output, 1, None)
    tensors = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    before = helper.make_model(
        helper.make_graph(nodes, "g", [x], [y], tensors), opset_imports=[helper.make_opsetid("", 18)], ir_version=8
    )
    model = read_model(before)
    infer_shapes(model)
    rules = (select_columns_of_heads, join_centred_norm, remove_whole_slices, remove_dead_code)
    run_rewrites(model, rules, Level.EXTENDED)
    check_graph(model.graph)
    return [node.op_type for node in model.graph.nodes], before, to_proto(model)


def swap(source: str, result: str) -> onnx.NodeProto:
    return helper.make_node("Transpose", [source], [result], perm=[0, 2, 1, 3])


def cut(part: onnx.NodeProto, first: str = "swap") -> Nodes:
    """The nodes that split heads, cut them by `part`, and join the heads of the part."""
    apart = [helper.make_node("Reshape", ["x", "heads"], ["apart"]), swap("apart", "swapped")]
    apart = apart if first == "swap" else [apart[0], helper.make_node("Identity", ["apart"], ["swapped"])]
    return [*apart, part, swap("part", "back"), helper.make_node("Reshape", ["back", "joined"], ["y"])]


SHAPES = {"heads": [0, 0, HEADS, SIZE], "joined": [0, 0, -1]}
SLICE = helper.make_node("Slice", ["swapped", "starts", "ends", "axes", "steps"], ["part"])
BOUNDS = {"starts": [2], "ends": [5], "axes": [3], "steps": [1]}
SPLIT = helper.make_node("Split", ["swapped", "sizes"], ["other", "part"], axis=-1)
EVEN = helper.make_node("Split", ["swapped"], ["other", "part"], axis=3, num_outputs=2)


@pytest.mark.parametrize(
    ("part", "constants"),
    [
        (SLICE, BOUNDS),
        (SLICE, BOUNDS | {"starts": [-3], "ends": [1 << 60], "axes": [-1]}),
        (SLICE, BOUNDS | {"heads": [0, 0, HEADS, -1], "joined": [0, 0, HEADS * 3]}),
        (SPLIT, {"sizes": [6, 2], "heads": [0, 0, -1, SIZE]}),
        (EVEN, {}),
    ],
    ids=["slice", "from the end", "sizes left open", "split", "even split"],
)
def test_parts_of_heads_become_a_gather(part: onnx.NodeProto, constants: dict[str, Any]) -> None:
    kinds, before, after = rewritten(cut(part), SHAPES | constants)
    assert kinds == ["Gather"]
    x = np.random.default_rng(0).standard_normal((2, 4, HEADS * SIZE)).astype(np.float32)
    expected, found = (ReferenceEvaluator(model).run(None, {"x": x})[0] for model in (before, after))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("nodes", "constants"),
    [
        (cut(SLICE), BOUNDS | {"steps": [2]}),
        (cut(SLICE), BOUNDS | {"axes": [1], "starts": [0], "ends": [2]}),
        (cut(SLICE), BOUNDS | {"starts": [2, 0], "ends": [5, 2], "axes": [3, 1], "steps": [1, 1]}),
        (cut(SLICE), BOUNDS | {"heads": [0, HEADS, -1, SIZE]}),
        (cut(SLICE), BOUNDS | {"joined": [0, -1, 3]}),
        (cut(SLICE, "no swap"), BOUNDS),
        (cut(helper.make_node("Split", ["swapped"], ["other", "part"], axis=2, num_outputs=2)), {}),
    ],
    ids=["steps", "heads", "two axes", "tokens mixed", "not joined", "not swapped", "split of tokens"],
)
def test_other_parts_stay(nodes: Nodes, constants: dict[str, Any]) -> None:
    assert "Gather" not in rewritten(nodes, SHAPES | constants)[0]


def centred(axes: list[int], other: str = "x", norm: str = "SimplifiedLayerNormalization") -> list[str]:
    nodes = [
        helper.make_node("ReduceMean", [other, "axes"], ["mean"]),
        helper.make_node("Sub", ["x", "mean"], ["centred"]),
        helper.make_node(norm, ["centred", "scale"], ["y"], axis=-1, epsilon=1e-3),
    ]
    return rewritten(nodes, {"axes": axes, "scale": np.ones(HEADS * SIZE, "f"), "z": np.ones((1, 1, 4), "f")})[0]


@pytest.mark.parametrize("norm", ["SimplifiedLayerNormalization", "RMSNormalization"])
def test_norms_of_centred_rows(norm: str) -> None:
    assert centred([-1], norm=norm) == ["LayerNormalization"]
    assert centred([-2], norm=norm) == ["ReduceMean", "Sub", norm]
    assert centred([-1], "z", norm) == ["ReduceMean", "Sub", norm]


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({}, ["Neg"]),
        ({"starts": [1]}, ["Slice", "Neg"]),
        ({"ends": [4]}, ["Slice", "Neg"]),
        ({"steps": [2]}, ["Slice", "Neg"]),
        ({"starts": [0, 1], "ends": [2**40] * 2, "axes": [0, 1], "steps": [1, 1]}, ["Slice", "Neg"]),
    ],
    ids=["whole", "start", "end", "step", "second axis"],
)
def test_slices_of_everything(changes: dict[str, Any], kinds: list[str]) -> None:
    nodes = [
        helper.make_node("Slice", ["x", "starts", "ends", "axes", "steps"], ["kept"]),
        helper.make_node("Neg", ["kept"], ["y"]),
    ]
    whole = {"starts": [0], "ends": [2**63 - 1], "axes": [1], "steps": [1]}
    assert rewritten(nodes, whole | changes)[0] == kinds

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
from genai.session import prepare

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
        with pytest.raises(genai.InvalidGraph, match="after its functions are expanded, the model has more than"):
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


F, N, U, LARGE = np.float32, np.int64, np.uint8, 1 << 40
TEXTS = np.array(["a " * 3000, *["b"] * 3000], object)
IMAGE, BYTES = np.ones((1, 1, 4, 4), F), np.ones(SIDE, U)
ONE, ZERO = F(1), U(0)
HEADS = np.ones((1, 1, SIDE, 4), F)
MS, ML = "com.microsoft", "ai.onnx.ml"


def _quantised(op_type: str) -> tuple[str, list[Any], dict[str, Any]]:
    return op_type, [BYTES[:, None], ONE, ZERO, BYTES[None], ONE, ZERO, ONE, ZERO], {"domain": MS}


# What the values of inputs or attributes ask for: operator, inputs, attributes ("domain", and "out" results).
ASKED: list[tuple[str, list[Any], dict[str, Any]]] = [
    ("MelWeightMatrix", [N(1 << 30), N(1 << 30), N(8000), F(0), F(4000)], {}),
    ("MelWeightMatrix", [N(1 << 12), N(1 << 12), N(8000), F(0), F(4000)], {}),
    *[(f"{name}Window", [N(size)], {}) for name in ("Hann", "Hamming", "Blackman") for size in (1 << 20, 1 << 62)],
    ("DFT", [np.ones((1 << 12, 1, 1), F), N(1 << 12)], {}), ("DFT", [np.ones((1, 4, 1), F), N(LARGE)], {}),
    ("STFT", [np.ones((1, 1 << 18, 1), F), N(1), np.ones(1000, F)], {}),
    ("StringSplit", [TEXTS], {"out": 2}),
    ("AffineGrid", [np.ones((1, 2, 3), F), np.array([1, 1, 1 << 10, 1 << 10])], {}),
    ("ConstantOfShape", [np.array([LARGE, LARGE])], {}), ("Tile", [COLUMN, np.array([1, LARGE])], {}),
    ("Range", [F(0), F(1e9), F(0.5)], {}), ("Range", [N(0), N(1 << 62), N(1)], {}),
    ("OneHot", [np.zeros(1, N), N(1 << 62), np.ones(2, F)], {}),
    *[("Pad", [np.ones(2, F), np.array([0, LARGE])], {"mode": mode}) for mode in ("constant", "reflect", "edge")],
    *[("Resize", [IMAGE, None, None, np.array([1, 1, size, size])], {"mode": mode})
      for mode in ("nearest", "linear", "cubic") for size in (1 << 14, LARGE)],
    ("Resize", [IMAGE, None, np.array([1, 1, 1e30, 1e30], F)], {}),
    ("RandomNormal", [], {"shape": [LARGE, LARGE]}), ("RandomUniform", [], {"shape": [1 << 22]}),
    ("Multinomial", [np.ones((1, 2), F)], {"sample_size": LARGE}),
    ("EyeLike", [np.ones((1 << 12, 1 << 12), U)], {}), ("CenterCropPad", [IMAGE, np.array([1, 1, LARGE, LARGE])], {}),
    ("MaxUnpool", [IMAGE, np.zeros((1, 1, 4, 4), N), np.array([1, 1, LARGE, LARGE])], {"kernel_shape": [2, 2]}),
    ("RoiAlign", [IMAGE, np.ones((1, 4), F), np.zeros(1, N)], {"output_height": LARGE}),
    ("MaxRoiPool", [IMAGE, np.zeros((1, 5), F)], {"pooled_shape": [LARGE, LARGE]}),
    ("SplitToSequence", [BYTES.repeat(4)], {"keepdims": 0}), ("SplitToSequence", [BYTES.repeat(4), N(1)], {}),
    ("Conv", [IMAGE, np.ones((1, 1, 2, 2), F)], {"pads": [1 << 30] * 4}),
    ("ConvTranspose", [IMAGE, np.ones((1, 1, 2, 2), F)], {"strides": [LARGE, LARGE]}),
    ("GatherND", [ROW, np.zeros((SIDE, 0), N)], {}), ("NonZero", [np.ones((1 << 20, 1, 1), bool)], {}),
    ("Cast", [BYTES.repeat(4)], {"to": STRING}), ("Cast", [np.ones(1 << 23, U)], {"to": FLOAT}),
    ("FeatureVectorizer", [COLUMN], {"inputdimensions": [1 << 20], "domain": ML}),
    ("OneHotEncoder", [np.zeros(SIDE, N)], {"cats_int64s": list(range(200)), "domain": ML}),
    ("ArrayFeatureExtractor", [COLUMN, np.zeros(SIDE, N)], {"domain": ML}),
    ("LinearRegressor", [COLUMN], {"coefficients": [1.0], "targets": LARGE, "domain": ML}),
    _quantised("QLinearAdd"), _quantised("QLinearMul"),
    *[(name, [COLUMN, ROW], {"domain": MS}) for name in ("FusedMatMul", "TransposeMatMul")],
    ("FusedGemm", [COLUMN, ROW], {"activation": "Relu", "domain": MS}),
    ("QGemm", [BYTES[:, None], ONE, ZERO, BYTES[None], ONE, ZERO], {"domain": MS}),
    ("MatMulIntegerToFloat", [BYTES[:, None], BYTES[None], ONE, ONE], {"domain": MS}),
    ("GatedAdd", [COLUMN, COLUMN, ROW], {"domain": MS}), ("BiasAdd", [COLUMN, ROW, COLUMN], {"domain": MS}),
    ("Attention", [HEADS] * 3, {}), ("Attention", [HEADS] * 3, {"out": 4}),
    ("MultiHeadAttention", [HEADS[0]] * 3, {"num_heads": 1, "domain": MS}),
    *[("GroupQueryAttention",
       [*[HEADS[0, :, :1]] * 3, *[HEADS[:, :, :0]] * 2, np.full(1, length, np.int32), np.int32(1 << 30)],
       {"num_heads": 1, "kv_num_heads": 1, "domain": MS, "out": 3}) for length in (0, (1 << 30) - 1)],
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(ASKED)), ids=lambda case: f"{ASKED[case][0]} {case}")
def test_sizes_that_values_ask_for(case):
    """The session ends with the limit's own error, before it makes anything so large."""
    op_type, values, given = ASKED[case]
    attributes = dict(given)
    domain, outputs = attributes.pop("domain", ""), attributes.pop("out", 1)
    feed = {f"x{index}": np.asarray(value) for index, value in enumerate(values) if value is not None}
    names = [f"x{index}" if value is not None else "" for index, value in enumerate(values)]
    results = [f"y{index}" for index in range(outputs)]
    graph = helper.make_graph(
        [helper.make_node(op_type, names, results, domain=domain, **attributes)],
        "g",
        [
            helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(v.dtype), [None] * v.ndim)
            for n, v in feed.items()
        ],
        [onnx.ValueInfoProto(name=name) for name in results],
    )
    imports = [helper.make_opsetid("", 23), *([helper.make_opsetid(domain, 1)] if domain else [])]
    options = genai.SessionOptions()
    options.add_session_config_entry("session.max_value_bytes", str(LIMIT))
    with pytest.raises(genai.GenaiError, match=r"the limit is|exceed the size limit of a single value") as caught:
        genai.InferenceSession(helper.make_model(graph, opset_imports=imports, ir_version=10), options).run(None, feed)
    assert caught.value.fix


def _piling(op_type: str, make_model: Any) -> tuple[onnx.ModelProto, dict[str, Any]]:
    """A body whose turns each make a value that is kept."""
    x = np.ones((1 << 12, 1), np.float32)
    wide = helper.make_tensor_value_info("o", FLOAT, None)
    node = helper.make_node("Expand", ["v", "to"], ["o"])
    scalars = [helper.make_tensor_value_info("i", INT64, []), helper.make_tensor_value_info("c", BOOL, [])]
    row = helper.make_tensor_value_info("v", FLOAT, [1])
    if op_type == "Scan":
        body = helper.make_graph([node], "body", [row], [wide])
        nodes = [helper.make_node("Scan", ["x"], ["z"], body=body, num_scan_inputs=1)]
    elif op_type == "SequenceMap":
        body = helper.make_graph([node], "body", [row], [wide])
        nodes = [
            helper.make_node("SplitToSequence", ["x"], ["s"], axis=0, keepdims=0),
            helper.make_node("SequenceMap", ["s"], ["m"], body=body),
            helper.make_node("SequenceLength", ["m"], ["z"]),
        ]
    else:
        held = helper.make_tensor_sequence_value_info("s", FLOAT, None)
        grown = helper.make_tensor_sequence_value_info("t", FLOAT, None)
        body = helper.make_graph(
            [helper.make_node("Expand", ["x", "to"], ["o"]), helper.make_node("SequenceInsert", ["s", "o"], ["t"]),
             helper.make_node("Identity", ["c"], ["d"])],
            "body", [*scalars, held], [helper.make_tensor_value_info("d", BOOL, []), grown],
        )  # fmt: skip
        nodes = [
            helper.make_node("SequenceEmpty", [], ["e"]),
            helper.make_node("Loop", ["n", "", "e"], ["m"], body=body),
            helper.make_node("SequenceLength", ["m"], ["z"]),
        ]
    inputs = {"x": (FLOAT, [None, 1]), "n": (INT64, []), "to": (INT64, [None])}
    kind = FLOAT if op_type == "Scan" else INT64
    model = make_model(nodes, inputs, {"z": (kind, None)})
    to = [1 << 12] if op_type != "SequenceInsert" else [1 << 12, 4]
    return model, {"x": x, "n": np.array(1 << 62), "to": np.array(to)}


@pytest.mark.parametrize("op_type", ["Scan", "SequenceMap", "SequenceInsert"])
def test_what_turns_pile_up(op_type, make_model):
    model, feed = _piling(op_type, make_model)
    options = genai.SessionOptions()
    options.add_session_config_entry("session.max_value_bytes", str(LIMIT))
    with pytest.raises(genai.Fail, match=r"the limit is|exceed the size limit of a single value"):
        genai.InferenceSession(model, options).run(None, feed)


def test_a_value_that_must_be_too_large_is_refused_before_a_run(make_model):
    """Where every extent is known, the chain of doublings ends when the session is made; branches may never run."""
    nodes, kinds = _chain("Concat", 50, axis=0), {"x": (FLOAT, [100])}
    with pytest.raises(genai.Fail, match=r"Concat .*: the result 't\d+' takes \d+ bytes, but the limit is"):
        genai.InferenceSession(make_model(nodes, kinds, {"z": (FLOAT, None)}))
    genai.InferenceSession(make_model(nodes, {"x": (FLOAT, ["n"])}, {"z": (FLOAT, None)}))
    wide = helper.make_graph(nodes, "wide", [], [helper.make_tensor_value_info("z", FLOAT, None)])
    plain = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["same"])],
        "plain",
        [],
        [helper.make_tensor_value_info("same", FLOAT, None)],
    )
    choice = helper.make_node("If", ["c"], ["y"], then_branch=wide, else_branch=plain)
    model = make_model([choice], {**kinds, "c": (BOOL, [])}, {"y": (FLOAT, None)})
    feed = {"x": np.ones(100, np.float32), "c": np.array(False)}
    assert genai.InferenceSession(model).run(None, feed)[0].shape == (100,)


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
        with pytest.raises(genai.Fail, match=r"the limit is|exceed the size limit of a single value") as caught:
            genai.InferenceSession(model, options).run(None, feed)
        assert caught.value.fix


def test_the_limit_is_what_the_machine_has_left(make_model, monkeypatch):
    model = make_model([_node("Add", "x", "y")], {"x": (FLOAT, [64, 1]), "y": (FLOAT, [1, 64])}, {"z": (FLOAT, None)})
    feed = {"x": COLUMN[:64], "y": ROW[:, :64]}
    make: Callable[[], Any] = lambda: genai.InferenceSession(model).run(None, feed)  # noqa: E731
    monkeypatch.setattr(prepare, "available_memory", lambda: 64 * 64 * 4)
    assert make()[0].shape == (64, 64)
    monkeypatch.setattr(prepare, "available_memory", lambda: 64 * 64 * 4 - 1)
    with pytest.raises(genai.Fail, match="takes 16384 bytes, but the limit is 16383"):
        make()

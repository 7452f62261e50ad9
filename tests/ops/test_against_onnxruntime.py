"""Standard operators in forms that the backend suite does not contain, compared with onnxruntime."""

# ruff: noqa: E501 - each case is one line of a table

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from genai import InferenceSession

pytestmark = pytest.mark.oracle
ML = "ai.onnx.ml"


def f(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (
        "Conv",
        {"x": f(2, 4, 9, 8), "w": f(6, 2, 3, 2), "b": f(6)},
        {"group": 2, "strides": [2, 1], "pads": [1, 0, 2, 1], "dilations": [1, 2]},
    ),
    ("Conv", {"x": f(2, 4, 9, 8), "w": f(4, 1, 3, 3)}, {"group": 4, "auto_pad": "SAME_UPPER", "strides": [2, 2]}),
    ("Conv", {"x": f(1, 3, 9), "w": f(5, 3, 4)}, {"auto_pad": "SAME_LOWER"}),
    ("Conv", {"x": f(1, 2, 5, 6, 7), "w": f(3, 2, 2, 3, 3)}, {"pads": [1, 1, 1, 0, 0, 0]}),
    (
        "ConvTranspose",
        {"x": f(2, 4, 5, 6), "w": f(4, 3, 3, 2), "b": f(6)},
        {"group": 2, "strides": [2, 3], "pads": [1, 0, 1, 1], "output_padding": [1, 0]},
    ),
    ("ConvTranspose", {"x": f(1, 2, 5), "w": f(2, 3, 4)}, {"strides": [2], "auto_pad": "SAME_UPPER"}),
    (
        "MaxPool",
        {"x": f(2, 3, 9, 8)},
        {"kernel_shape": [3, 2], "strides": [2, 2], "pads": [1, 0, 1, 1], "ceil_mode": 1},
    ),
    (
        "AveragePool",
        {"x": f(2, 3, 9, 8)},
        {"kernel_shape": [3, 2], "strides": [2, 2], "pads": [1, 0, 1, 1], "count_include_pad": 1},
    ),
    ("LpPool", {"x": f(2, 3, 9, 8)}, {"kernel_shape": [3, 2], "p": 3}),
    (
        "MaxRoiPool",
        {"x": f(2, 3, 12, 12), "rois": np.array([[0, 0, 0, 7, 7], [1, 2, 3, 20, 9], [0, 5, 5, 5, 5]], np.float32)},
        {"pooled_shape": [3, 2], "spatial_scale": 0.6},
    ),
    ("LRN", {"x": f(2, 5, 3, 3)}, {"size": 3, "alpha": 0.01}),
    ("LpNormalization", {"x": f(3, 4)}, {"p": 1, "axis": 0}),
    ("Resize", {"x": f(1, 2, 5, 7), "roi": None, "scales": np.array([1, 1, 1.7, 0.6], np.float32)}, {"mode": "linear"}),
    (
        "Resize",
        {"x": f(1, 2, 5, 7), "roi": None, "scales": np.array([1, 1, 2, 2], np.float32)},
        {"mode": "cubic", "coordinate_transformation_mode": "pytorch_half_pixel"},
    ),
    (
        "Resize",
        {"x": f(1, 2, 5, 7), "roi": None, "scales": np.array([1, 1, 2, 3], np.float32)},
        {"mode": "nearest", "nearest_mode": "ceil", "coordinate_transformation_mode": "asymmetric"},
    ),
    ("Softmax", {"x": f(2, 3, 4)}, {"axis": 1}),
    ("LogSoftmax", {"x": f(2, 3, 4) * 100}, {"axis": 0}),
    ("ReduceLogSumExp", {"x": f(2, 3, 4) * 100}, {"axes": [1], "keepdims": 0}),
    ("TopK", {"x": np.array([[3, 1, 3, 2], [0, 0, 0, 0]], np.float32), "k": np.array([3])}, {"axis": -1}),
    ("CumSum", {"x": f(3, 4), "axis": np.array(1)}, {"exclusive": 1, "reverse": 1}),
    ("Einsum", {"a": f(2, 3, 4), "b": f(2, 4, 5)}, {"equation": "bij,bjk->bik"}),
    ("Einsum", {"a": f(3, 3)}, {"equation": "ii->i"}),
    ("ScatterElements", {"x": f(3, 4), "i": np.array([[0, 1, 1, 2]]), "u": f(1, 4)}, {"axis": 0, "reduction": "add"}),
    ("Erf", {"x": f(3, 4)}, {}),
    ("InstanceNormalization", {"x": f(2, 3, 4, 4), "s": f(3), "b": f(3)}, {"epsilon": 1e-3}),
]


@pytest.mark.parametrize(("op", "inputs", "attributes"), CASES, ids=[f"{case[0]}-{i}" for i, case in enumerate(CASES)])
def test_equals_onnxruntime(one_node, both, op, inputs, attributes):
    outputs = 2 if op == "TopK" else 1
    ours, theirs = both(one_node(op, inputs, outputs, **attributes), inputs)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == other.dtype
        np.testing.assert_allclose(mine, other, rtol=2e-4, atol=2e-5)


def test_integer_products_of_extremes_are_exact(one_node):
    """Expected values are computed by hand: without VNNI, onnxruntime adds such products in pairs in 16 bits and saturates."""
    a, b = np.full((2, 3000), 255, np.uint8), np.full((3000, 3), -128, np.int8)
    zero_points = np.array([127, 0, -1], np.int8)
    sums = a.astype(np.int64) @ (b.astype(np.int64) - zero_points)
    inputs = {"a": a, "b": b, "az": np.array(0, np.uint8), "bz": zero_points}
    (found,) = InferenceSession(one_node("MatMulInteger", inputs)).run(None, inputs)
    assert (found.dtype, found.tolist()) == (np.int32, sums.tolist())
    a, b = np.array([[255] * 700, [101] * 700], np.uint8), np.full((700, 3), 127, np.int8)
    inputs = {
        "a": a, "as": np.array(0.1, np.float32), "az": np.array(0, np.uint8), "b": b, "bs": np.array(0.1, np.float32),
        "bz": np.array(-3, np.int8), "ys": np.array(2000, np.float32), "yz": np.array(5, np.uint8),
    }  # fmt: skip
    (found,) = InferenceSession(one_node("QLinearMatMul", inputs)).run(None, inputs)
    # 700 a (127 + 3) 0.01 / 2000 + 5
    assert found.tolist() == [[121] * 3, [51] * 3] and found.dtype == np.uint8


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize(("op", "gates"), [("LSTM", 4), ("GRU", 3), ("RNN", 1)])
@pytest.mark.parametrize("has_lengths", [False, True])
def test_recurrent(one_node, both, op, gates, direction, has_lengths):
    ways, hidden = (2 if direction == "bidirectional" else 1), 3
    inputs = {
        "x": f(5, 2, 4), "w": f(ways, gates * hidden, 4), "r": f(ways, gates * hidden, hidden), "b": f(ways, 2 * gates * hidden),
        "l": np.array([5, 3], np.int32) if has_lengths else None, "h": f(ways, 2, hidden),
    }  # fmt: skip
    if op == "LSTM":
        inputs |= {"c": f(ways, 2, hidden, seed=1), "p": f(ways, 3 * hidden)}
    more = {"linear_before_reset": 1} if op == "GRU" else {}
    model = one_node(op, inputs, 3 if op == "LSTM" else 2, hidden_size=hidden, direction=direction, **more)
    ours, theirs = both(model, inputs)
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-5)


def _ml_model(op: str, outputs: list[str], **attributes: Any) -> onnx.ModelProto:
    node = helper.make_node(op, ["x"], outputs, domain=ML, **attributes)
    infos = [onnx.ValueInfoProto(name=name) for name in outputs]
    graph = helper.make_graph([node], "g", [helper.make_tensor_value_info("x", 1, [None, 2])], infos)
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid(ML, 3)], ir_version=8
    )


# Two trees over two features: the first splits once, the second twice.
NODES = {
    "nodes_treeids": [0, 0, 0, 1, 1, 1, 1, 1], "nodes_nodeids": [0, 1, 2, 0, 1, 2, 3, 4],
    "nodes_featureids": [0, 0, 0, 1, 0, 0, 0, 0], "nodes_values": [0.0, 0, 0, 0.5, -1.0, 0, 0, 0],
    "nodes_truenodeids": [1, 0, 0, 1, 3, 0, 0, 0], "nodes_falsenodeids": [2, 0, 0, 2, 4, 0, 0, 0],
    "nodes_missing_value_tracks_true": [1, 0, 0, 0, 0, 0, 0, 0],
}  # fmt: skip
LEAVES = {"treeids": [0, 0, 1, 1, 1], "nodeids": [1, 2, 2, 3, 4]}
ROWS = np.array([[-1, 0], [1, 0], [0.0, 0.5], [np.nan, 2], [-2, np.nan], [3, 3]], np.float32)


@pytest.mark.parametrize("mode", ["BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ"])
@pytest.mark.parametrize("aggregate", ["SUM", "AVERAGE", "MIN", "MAX"])
def test_tree_regressor(both, mode, aggregate):
    modes = [mode, "LEAF", "LEAF", mode, mode, "LEAF", "LEAF", "LEAF"]
    weights = {f"target_{name}": values for name, values in LEAVES.items()}
    model = _ml_model(
        "TreeEnsembleRegressor", ["y"], nodes_modes=modes, n_targets=1, aggregate_function=aggregate,
        target_ids=[0] * 5, target_weights=[1.0, -2.0, 3.0, 0.25, 5.0], base_values=[0.5], **weights, **NODES,
    )  # fmt: skip
    rows = ROWS[~np.isnan(ROWS).any(axis=1)] if mode != "BRANCH_LEQ" else ROWS
    ours, theirs = both(model, {"x": rows})
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-6)


@pytest.mark.parametrize("transform", ["NONE", "LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("ids", [[0, 0, 0, 0, 0], [0, 1, 2, 0, 1]])
def test_tree_classifier(both, transform, sign, ids):
    modes = ["BRANCH_LEQ", "LEAF", "LEAF", "BRANCH_LEQ", "BRANCH_LEQ", "LEAF", "LEAF", "LEAF"]
    weights = {f"class_{name}": values for name, values in LEAVES.items()}
    labels = [5, 7, 9] if max(ids) == 2 else [0, 1]
    model = _ml_model(
        "TreeEnsembleClassifier", ["label", "scores"], nodes_modes=modes, classlabels_int64s=labels, class_ids=ids,
        class_weights=[0.2, 0.1, sign * 0.3, 0.25, 0.6], post_transform=transform, **weights, **NODES,
    )  # fmt: skip
    ours, theirs = both(model, {"x": ROWS})
    assert ours[0].tolist() == theirs[0].tolist()
    np.testing.assert_allclose(ours[1], theirs[1], rtol=1e-5, atol=1e-6)


BROKEN_TREES = {
    "a cycle": {"nodes_truenodeids": [0, 0, 0, 1, 3, 0, 0, 0]},
    "two parents": {"nodes_truenodeids": [2, 0, 0, 1, 3, 0, 0, 0]},
    "no such child": {"nodes_truenodeids": [99, 0, 0, 1, 3, 0, 0, 0]},
    "a negative feature": {"nodes_featureids": [-4, 0, 0, 1, 0, 0, 0, 0]},
    "too few values": {"nodes_values": [0.0]},
    "two nodes with one id": {"nodes_nodeids": [0, 1, 1, 0, 1, 2, 3, 4]},
    "a weight of a node that another tree has": {"target_nodeids": [1, 3, 2, 3, 4]},
    "a weight of an unknown tree": {"target_treeids": [0, 0, 1, 7, 1]},
}
BROKEN_TREE_MESSAGES = {
    "no such child": r"the child \(0, 99\)",
    "two nodes with one id": "the same id",
    "a weight of a node that another tree has": r"the node \(0, 3\)",
    "a weight of an unknown tree": r"the node \(7, 3\)",
}


def _regressor(**changes: Any) -> onnx.ModelProto:
    modes = ["BRANCH_LEQ", "LEAF", "LEAF", "BRANCH_LEQ", "BRANCH_LEQ", "LEAF", "LEAF", "LEAF"]
    attributes: dict[str, Any] = {f"target_{name}": values for name, values in LEAVES.items()}
    attributes |= {"nodes_modes": modes, "target_ids": [0] * 5, "target_weights": [1.0, -2.0, 3.0, 0.25, 5.0]}
    return _ml_model("TreeEnsembleRegressor", ["y"], n_targets=1, base_values=[0.5], **NODES | attributes | changes)


def test_nodes_of_trees_may_have_any_order_and_ids(both):
    """The results are those of the same trees with ids from 0 in ascending order."""
    import genai

    expected = both(_regressor(), {"x": ROWS})[1]
    nodes, weights = [3, 7, 0, 2, 6, 5, 1, 4], [4, 0, 3, 1, 2]
    ids = {0: 2**40, 1: -3, 2: 17, 3: 5, 4: 0}
    trees = {0: 9, 1: -(2**35)}
    full = {attribute.name: helper.get_attribute_value(attribute) for attribute in _regressor().graph.node[0].attribute}
    changes: dict[str, Any] = {}
    for name, values in full.items():
        if name.startswith(("nodes_", "target_")):
            values = [ids[one] for one in values] if name.endswith("nodeids") else values
            values = [trees[one] for one in values] if name.endswith("treeids") else values
            changes[name] = [values[index] for index in (nodes if name.startswith("nodes_") else weights)]
    found = genai.InferenceSession(_regressor(**changes)).run(None, {"x": ROWS})
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)


@pytest.mark.parametrize("broken", BROKEN_TREES)
def test_broken_trees_are_refused(broken):
    import genai

    with pytest.raises(genai.GenaiError, match=BROKEN_TREE_MESSAGES.get(broken)):
        genai.InferenceSession(_regressor(**BROKEN_TREES[broken])).run(None, {"x": ROWS})


def test_too_few_features():
    import genai

    modes = ["BRANCH_LEQ", "LEAF", "LEAF", "BRANCH_LEQ", "BRANCH_LEQ", "LEAF", "LEAF", "LEAF"]
    weights = {f"target_{name}": values for name, values in LEAVES.items()}
    model = _ml_model(
        "TreeEnsembleRegressor", ["y"], nodes_modes=modes, n_targets=1, target_ids=[0] * 5, target_weights=[1.0] * 5,
        **weights, **NODES,
    )  # fmt: skip
    model.graph.input[0].type.tensor_type.ClearField("shape")
    with pytest.raises(genai.Fail, match=r"2 features, .*the input has 1"):
        genai.InferenceSession(model).run(None, {"x": ROWS[:, :1].copy()})


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
def test_cubic_overshoot_of_integers_saturates(dtype):
    """onnxruntime resizes only float numbers cubically, so its float results are cut off."""
    import onnxruntime

    limits = np.iinfo(dtype)
    x = np.repeat(np.array([limits.min, limits.max], dtype), 4).reshape(1, 1, 1, 8)

    def model(kind):
        node = helper.make_node("Resize", ["x", "", "s"], ["y"], mode="cubic")
        values = [
            helper.make_tensor_value_info("x", kind, [1, 1, 1, 8]),
            helper.make_tensor_value_info("y", kind, None),
        ]
        scales = helper.make_tensor("s", 1, [4], [1.0, 1.0, 1.0, 2.5])
        graph = helper.make_graph([node], "g", values[:1], values[1:], [scales])
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)

    there = onnxruntime.InferenceSession(model(1).SerializeToString())
    exact = there.run(None, {"x": x.astype(np.float32)})[0]
    assert exact.max() > limits.max and exact.min() < limits.min
    found = InferenceSession(model(helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))).run(None, {"x": x})[0]
    assert np.abs(found - np.clip(exact, limits.min, limits.max)).max() <= 1

"""Attention in plain operators becomes one node: before, after, and equal outputs."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper

import genai as ort
from genai.onnx.reader import read_model
from genai.optimize.base import Level, run_rewrites
from genai.optimize.composites import fuse_attention
from genai.optimize.shapes import infer_shapes
from genai.optimize.simplify import remove_dead_code
from tests.integrity import check_graph

Q, K, V, BIAS = (1, [2, 3, 5, 8]), (1, [2, 3, 8, 7]), (1, [2, 3, 7, 4]), (1, [2, 1, 5, 7])


def node(op, inputs, output, **attributes):
    return helper.make_node(op, inputs.split(), [output], **attributes)


PRODUCT, SOFTMAX, MIX = node("MatMul", "q k", "s"), node("Softmax", "s", "p"), node("MatMul", "p v", "y")
ZEROED = [node("IsNaN", "p", "n"), node("Where", "n zero p", "w"), node("MatMul", "w v", "y")]
FORMS = {
    "bare": [PRODUCT, SOFTMAX, MIX],
    "score divided": [PRODUCT, node("Div", "s c", "d"), node("Softmax", "d", "p", axis=3), MIX],
    "both sides scaled": [
        node("Mul", "q c", "qc"), node("Mul", "c k", "kc"), node("MatMul", "qc kc", "s"), SOFTMAX, MIX,
    ],
    "scaled and masked": [PRODUCT, node("Mul", "s c", "d"), node("Add", "d b", "m"), node("Softmax", "m", "p"), MIX],
    "mask first": [PRODUCT, node("Add", "b s", "m"), node("Softmax", "m", "p"), MIX],
    "hidden rows are zero": [PRODUCT, node("Add", "s b", "m"), node("Softmax", "m", "p"), *ZEROED],
}  # fmt: skip


@pytest.fixture
def build(make_model):
    def build(nodes, shapes=(Q, K, V, BIAS)):
        constants = {"c": np.float32(0.3), "zero": np.float32(0)}
        return make_model(nodes, dict(zip("qkvb", shapes, strict=True)), {"y": (1, None)}, constants)

    return build


@pytest.fixture
def feed():
    generator = np.random.default_rng(0)
    values = {
        name: generator.standard_normal(shape[1]).astype(np.float32)
        for name, shape in zip("qkvb", (Q, K, V, BIAS), strict=True)
    }
    values["b"][0, 0, :, 4:] = -np.inf
    values["b"][1, 0, 2] = -np.inf  # a row that sees nothing
    return values


def ops_after(model):
    read = read_model(model)
    infer_shapes(read)
    run_rewrites(read, (fuse_attention, remove_dead_code), Level.ALL)
    check_graph(read.graph)
    return [item.op_type for item in read.graph.nodes]


def runs(model, feed):
    plain = ort.SessionOptions()
    plain.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return [ort.InferenceSession(model, options).run(None, feed)[0] for options in (plain, None)]


@pytest.mark.parametrize("name", FORMS)
def test_forms(build, feed, name):
    model = build(FORMS[name])
    assert ops_after(model) == ["DenseAttention"]
    before, after = runs(model, feed)
    np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-6)
    assert np.isnan(before).any() == ("mask" in name)


@pytest.mark.parametrize(
    "nodes",
    [
        [PRODUCT, node("Softmax", "s", "p", axis=2), MIX],
        [node("MatMul", "q k", "s"), node("Relu", "s", "r"), node("Softmax", "r", "p"), MIX],
        [PRODUCT, SOFTMAX, node("Add", "p p", "p2"), node("MatMul", "p2 v", "y")],
        [PRODUCT, SOFTMAX, node("IsNaN", "p", "n"), node("Where", "n c p", "w"), node("MatMul", "w v", "y")],
        [PRODUCT, SOFTMAX, node("MatMul", "p v", "m"), node("ReduceSum", "p", "t"), node("Add", "m t", "y")],
    ],
    ids=["another axis", "another operator", "weights doubled", "NaN become another number", "weights used twice"],
)
def test_what_is_left_alone(build, feed, nodes):
    model = build(nodes)
    assert "DenseAttention" not in ops_after(model)
    before, after = runs(model, feed)
    np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-6)


def test_a_product_of_one_row_stays(build, feed):
    """The two products are faster than the kernel, which packs the keys."""
    model = build(FORMS["bare"], ((1, [2, 3, 1, 8]), K, V, BIAS))
    assert "DenseAttention" not in ops_after(model)
    before, after = runs(model, {**{name: feed[name] for name in "kvb"}, "q": feed["q"][:, :, :1]})
    np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-6)


def test_the_older_softmax_without_an_axis_stays(build, feed):
    model = build(FORMS["bare"])
    model.opset_import[0].version = 12
    assert "DenseAttention" not in ops_after(model)
    before, after = runs(model, feed)
    np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-6)


def test_batch_axes_broadcast(build, feed):
    shapes = ((1, [1, 3, 5, 8]), (1, [2, 1, 8, 7]), V, BIAS)
    model = build(FORMS["mask first"], shapes)
    small = {**feed, "q": feed["q"][:1], "k": feed["k"][:, :1]}
    assert ops_after(model) == ["DenseAttention"]
    before, after = runs(model, small)
    np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-6)


def test_a_bias_may_widen_the_scores(build, feed):
    shapes = ((1, [2, 3, 1, 8]), (1, [2, 3, 8, 1]), V, BIAS)
    small = {**feed, "q": feed["q"][:, :, :1], "k": feed["k"][..., :1], "b": np.maximum(feed["b"], -1)}
    before, after = runs(build(FORMS["mask first"], shapes), small)
    assert before.shape == (2, 3, 5, 4)
    np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-6)


def test_many_blocks_of_rows(make_model):
    kind = (1, [1, 2, 300, 4])
    nodes = [
        node("Transpose", "x", "k", perm=[0, 1, 3, 2]),
        node("MatMul", "x k", "s"),
        SOFTMAX,
        node("MatMul", "p x", "y"),
    ]
    model = make_model(nodes, {"x": kind}, {"y": kind})
    before, after = runs(model, {"x": np.random.default_rng(0).standard_normal(kind[1]).astype(np.float32)})
    np.testing.assert_allclose(after, before, rtol=1e-4, atol=1e-6)


def test_shapes_that_do_not_fit_are_named(make_model):
    unknown = (1, ["a", "b", "c", "d"])
    model = make_model(FORMS["bare"], dict.fromkeys("qkv", unknown), {"y": (1, None)})
    session = ort.InferenceSession(model)
    with pytest.raises(ort.GenaiError, match="DenseAttention"):
        session.run(
            None, {name: np.zeros((1, 1, size, 4), np.float32) for name, size in (("q", 2), ("k", 3), ("v", 5))}
        )

"""Operators of com.microsoft, compared with onnxruntime."""

# ruff: noqa: E501 - each case is one line of a table

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import helper, numpy_helper

from genai.compat.onnxruntime.inference_session import InferenceSession

pytestmark = pytest.mark.oracle
MS = "com.microsoft"


def f(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def u8(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).integers(0, 256, shape, np.uint8)


def u7(*shape: int, seed: int = 0) -> np.ndarray:
    """Return 7-bit values: two products with int8 fit in 16 bits, where onnxruntime saturates without VNNI."""
    return u8(*shape, seed=seed) // 2


def i8(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).integers(-100, 100, shape, np.int8)


def scalar(value: float) -> np.ndarray:
    return np.array(value, np.float32)


def q(name: str, values: np.ndarray, scale: float, point: int) -> dict[str, Any]:
    return {name: values, f"{name}_scale": scalar(scale), f"{name}_zero": np.array(point, values.dtype)}


def out(scale: float, point: int) -> dict[str, Any]:
    return {"y_scale": scalar(scale), "y_zero": np.array(point, np.uint8)}


EXACT = [
    ("FusedMatMul", {"a": f(2, 5, 3), "b": f(2, 5, 4)}, {"transA": 1, "alpha": 0.5}),
    ("FusedMatMul", {"a": f(2, 3, 5), "b": f(2, 4, 5)}, {"transB": 1}),
    ("FusedMatMul", {"a": f(4, 2, 3), "b": f(2, 3, 5)}, {"transBatchA": 1}),
    ("FusedGemm", {"a": f(3, 4), "b": f(4, 5), "c": f(5)}, {"activation": "Relu"}),
    ("FusedGemm", {"a": f(3, 4), "b": f(5, 4), "c": f(5)}, {"activation": "LeakyRelu", "activation_alpha": 0.1, "transB": 1}),
    ("FusedConv", {"x": f(1, 3, 7, 7), "w": f(4, 3, 3, 3), "b": f(4)}, {"activation": "Relu", "pads": [1, 1, 1, 1]}),
    ("FusedConv", {"x": f(1, 3, 7, 7), "w": f(4, 3, 3, 3), "b": f(4), "z": f(1, 4, 5, 5)}, {"activation": "Clip", "activation_params": [0.0, 0.4]}),
    ("BiasGelu", {"x": f(2, 3, 8), "b": f(8)}, {}),
    ("Gelu", {"x": f(2, 3, 8)}, {}),
    ("FastGelu", {"x": f(2, 3, 8), "b": f(8)}, {}),
    ("QuickGelu", {"x": f(2, 3, 8)}, {}),
    ("Inverse", {"x": f(2, 4, 4)}, {}),
    ("ExpandDims", {"x": f(2, 4), "axis": np.array(1, np.int32)}, {}),
    ("Trilu", {"x": f(4, 5), "k": np.array(1, np.int64)}, {"upper": 0}),
    ("MatMulIntegerToFloat", {"a": u7(3, 300), "b": i8(300, 5), "as": scalar(0.02), "bs": f(5) ** 2, "az": np.array(7, np.uint8), "bz": None, "bias": f(5)}, {}),
    ("DynamicQuantizeMatMul", {"a": f(3, 40), "b": i8(40, 5), "bs": scalar(0.01), "bz": np.array(3, np.int8), "bias": f(5)}, {}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("op", "inputs", "attributes"), EXACT, ids=lambda value: value if isinstance(value, str) else ""
)
def test_floats(one_node, both, op, inputs, attributes):
    ours, theirs = both(one_node(op, inputs, domain=MS, **attributes), inputs)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == other.dtype
        np.testing.assert_allclose(mine, other, rtol=2e-4, atol=2e-5)


# All other inputs are constants.
COMPUTED = ("x", "skip", "scores", "ids")
SHAPES = {"w": (3, 24, 16), "v": (3, 16, 24)}
WEIGHTS = [
    ("QuickGelu", {"x": f(2, 3, 8)}, {}),
    ("SkipSimplifiedLayerNormalization", {"x": 1e-3 * f(2, 3, 8), "skip": 1e-3 * f(1, 3, 8, seed=1), "w": f(8)}, {}),
    ("SkipLayerNormalization", {"x": f(2, 3, 8), "skip": f(3, 8), "w": f(8), "b": f(8, seed=1), "bias": f(8, seed=2)}, {"epsilon": 1e-3}),
    ("MatMulNBits", {"x": f(3, 64), "w": u8(8, 2, 16), "s": f(8, 2) / 99}, {"K": 64, "N": 8, "bits": 4, "block_size": 32}),
    ("GatherBlockQuantized", {"w": u8(9, 32), "ids": np.array([[7, 0]]), "s": f(9, 2) / 99}, {"bits": 4, "block_size": 32}),
    ("MoE", {"x": f(5, 16), "scores": f(5, 3), "w": f(3, 24, 16), "b": f(3, 24), "v": f(3, 16, 24) / 9}, {"k": 2, "activation_type": "gelu"}),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize(("op", "inputs", "attributes"), WEIGHTS, ids=[case[0] for case in WEIGHTS])
def test_weights_and_the_type_of_results(one_node, both, op, inputs, attributes, dtype):
    given = {name: value.astype(dtype) if value.dtype == np.float32 else value for name, value in inputs.items()}
    model = one_node(op, given, domain=MS, **attributes)
    computed = [value for value in model.graph.input if value.name in COMPUTED]
    constants = [numpy_helper.from_array(given[name], name) for name in given if name not in COMPUTED]
    del model.graph.input[:]
    model.graph.input.extend(computed)
    model.graph.initializer.extend(constants)
    (ours,), (theirs,) = both(model, {name: given[name] for name in given if name in COMPUTED})
    assert ours.dtype == theirs.dtype == dtype
    np.testing.assert_allclose(
        ours, theirs, rtol=0, atol=(2e-3 if dtype == np.float16 else 1e-6) * np.abs(theirs).max()
    )


def test_constants_of_one_name_in_two_branches(both):
    """Names are local to their branch."""

    def branch(name):
        weights = [
            numpy_helper.from_array(f(*shape, seed=ord(name)), shape_name) for shape_name, shape in SHAPES.items()
        ]
        node = helper.make_node("MoE", ["x", "scores", "w", "", "v"], [name], domain=MS, k=2, activation_type="silu")
        return helper.make_graph([node], name, [], [helper.make_tensor_value_info(name, 1, [5, 16])], weights)

    feed = {"x": f(5, 16), "scores": f(5, 3), "c": np.array(True)}
    types = {name: helper.np_dtype_to_tensor_dtype(value.dtype) for name, value in feed.items()}
    infos = [helper.make_tensor_value_info(name, types[name], value.shape) for name, value in feed.items()]
    node = helper.make_node("If", ["c"], ["y"], then_branch=branch("a"), else_branch=branch("b"))
    graph = helper.make_graph([node], "graph", infos, [helper.make_tensor_value_info("y", 1, [5, 16])])
    imports = [helper.make_opsetid("", 17), helper.make_opsetid(MS, 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=8)
    for condition in (True, False):
        (ours,), (theirs,) = both(model, feed | {"c": np.array(condition)})
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6 * np.abs(theirs).max())


QUANTISED = [
    ("QLinearAdd", {**q("a", u8(3, 5), 0.1, 10), **q("b", u8(5, seed=1), 0.05, 99), **out(0.2, 20)}, {}),
    ("QLinearMul", {**q("a", u8(3, 5), 0.1, 10), **q("b", u8(3, 1, seed=1), 0.05, 99), **out(2.0, 128)}, {}),
    ("QLinearSigmoid", {**q("x", u8(3, 5), 0.05, 128), **out(1 / 256, 0)}, {}),
    ("QLinearLeakyRelu", {**q("x", u8(3, 5), 0.05, 128), **out(0.05, 60)}, {"alpha": 0.3}),
    ("QLinearSoftmax", {**q("x", u8(3, 5), 0.05, 128), **out(1 / 256, 0)}, {"axis": -1, "opset": 13}),
    ("QLinearGlobalAveragePool", {**q("x", u8(2, 3, 4, 5), 0.05, 128), **out(0.02, 60)}, {}),
    ("QLinearAveragePool", {**q("x", u8(2, 3, 6, 6), 0.05, 128), **out(0.05, 60)}, {"kernel_shape": [2, 2], "strides": [2, 2]}),
    ("QLinearConcat", {**out(0.1, 30), **q("a", u8(2, 3), 0.05, 128), **q("b", u8(2, 4, seed=1), 0.1, 3)}, {"axis": 1}),
    ("QLinearWhere", {"c": np.array([True, False, True]), **q("a", u8(3), 0.05, 128), **q("b", u8(3, seed=1), 0.1, 3), **out(0.1, 30)}, {}),
    ("QGemm", {**q("a", u8(3, 20), 0.05, 128), **q("b", u8(20, 4, seed=1), 0.02, 100), "c": np.arange(4, dtype=np.int32), **out(2.0, 30)}, {}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("op", "inputs", "attributes"), QUANTISED, ids=lambda value: value if isinstance(value, str) else ""
)
def test_quantised_within_one_step(one_node, both, op, inputs, attributes):
    ours, theirs = both(one_node(op, inputs, domain=MS, **attributes), inputs)
    assert ours[0].dtype == theirs[0].dtype
    assert ours[0].shape == theirs[0].shape
    difference = np.abs(ours[0].astype(np.int32) - theirs[0].astype(np.int32))
    assert difference.max() <= 1


MASKS = {
    "none": None,
    "lengths": np.array([5, 3], np.int32),
    "ends and starts": np.array([5, 4, 0, 1], np.int32),
    "per key": np.array([[1, 1, 1, 1, 0], [1, 1, 1, 0, 0]], np.int32),
    "per pair": (np.arange(5)[:, None] >= np.arange(5))[None].repeat(2, 0).astype(np.int32),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("causal", [0, 1])
def test_packed_attention(one_node, both, mask, causal):
    inputs = {"x": f(2, 5, 8), "w": f(8, 24), "b": f(24), "mask": mask}
    model = one_node("Attention", inputs, domain=MS, num_heads=2, unidirectional=causal)
    ours, theirs = both(model, inputs)
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-3, atol=1e-4)


def test_packed_attention_with_past(one_node, both):
    inputs = {"x": f(2, 3, 8), "w": f(8, 24), "b": f(24), "mask": None, "past": f(2, 2, 2, 4, 4)}
    model = one_node("Attention", inputs, 2, domain=MS, num_heads=2, unidirectional=1)
    ours, theirs = both(model, inputs)
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "inputs",
    [
        {"q": f(2, 5, 8), "k": f(2, 6, 8), "v": f(2, 6, 12), "b": None},
        {"q": f(2, 5, 8), "k": f(2, 6, 8, seed=1), "v": f(2, 6, 8, seed=2), "b": f(24)},
        {"q": f(2, 5, 8), "k": f(2, 2, 6, 4), "v": f(2, 2, 6, 4)},
        {"q": f(2, 5, 8), "k": f(2, 5, 8, seed=1), "v": f(2, 5, 8, seed=2), "b": None, "m": MASKS["per key"], "bias": f(1, 2, 5, 5)},
    ],
    ids=["apart", "bias", "heads apart", "mask and bias"],
)  # fmt: skip
def test_multi_head_attention(one_node, both, inputs):
    ours, theirs = both(one_node("MultiHeadAttention", inputs, domain=MS, num_heads=2), inputs)
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-3, atol=1e-4)


def test_packed_forms_equal_those_apart(one_node):
    """Packed QKV and KV equal separate inputs; onnxruntime supports packed inputs only on GPUs."""
    q, k, v = f(2, 5, 2, 4), f(2, 5, 2, 4, seed=1), f(2, 5, 2, 4, seed=2)
    apart, packed, packed_kv = (
        InferenceSession(one_node("MultiHeadAttention", inputs, domain=MS, num_heads=2)).run(None, inputs)[0]
        for inputs in (
            {"q": q.reshape(2, 5, 8), "k": k.reshape(2, 5, 8), "v": v.reshape(2, 5, 8)},
            {"q": np.stack([q, k, v], axis=3)},
            {"q": q.reshape(2, 5, 8), "kv": np.stack([k, v], axis=3)},
        )
    )
    np.testing.assert_array_equal(packed, apart)
    np.testing.assert_array_equal(packed_kv, apart)


def test_embed_layer_normalization(one_node, both):
    ids, segments = np.array([[1, 2, 3], [4, 0, 1]], np.int32), np.array([[0, 0, 1], [0, 1, 1]], np.int32)
    inputs = {
        "ids": ids, "segments": segments, "words": f(5, 8), "places": f(4, 8), "kinds": f(2, 8),
        "gamma": f(8), "beta": f(8, seed=1), "mask": np.array([[1, 1, 1], [1, 1, 0]], np.int32),
    }  # fmt: skip
    ours, theirs = both(one_node("EmbedLayerNormalization", inputs, 2, domain=MS), inputs)
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-4, atol=1e-5)
    assert ours[1].tolist() == theirs[1].tolist()


def test_quantised_attention(one_node, both):
    inputs = {
        "x": u7(2, 5, 8), "w": i8(8, 24), "b": f(24), "xs": scalar(0.02), "ws": scalar(0.01),
        "mask": None, "xz": np.array(60, np.uint8), "wz": np.array(3, np.int8),
    }  # fmt: skip
    ours, theirs = both(one_node("QAttention", inputs, domain=MS, num_heads=2), inputs)
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-3, atol=1e-4)

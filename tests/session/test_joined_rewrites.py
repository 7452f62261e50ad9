"""Products joined with their neighbours: the graph before and after, and equal outputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import genai as ort
from genai.onnx.reader import read_model
from genai.optimize.base import Level, run_rewrites
from genai.optimize.linear import fuse_linear, fuse_linear_activation, fuse_linear_addition, join_products
from genai.optimize.quantized import fuse_integer_product_bias, fuse_matmul_integer_to_float
from genai.optimize.reshapes import fold_known_reshapes
from genai.optimize.shapes import infer_shapes
from genai.optimize.simplify import remove_dead_code
from tests.integrity import check_graph

ROWS, TERMS, COLUMNS = 5, 96, 96


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(3)


def model_of(nodes: list[onnx.NodeProto], tensors: dict[str, np.ndarray], outputs: list[str]) -> onnx.ModelProto:
    x = helper.make_tensor_value_info("x", 1, ["batch", "rows", TERMS])
    results = [helper.make_tensor_value_info(name, 1, None) for name in outputs]
    constants = [numpy_helper.from_array(value, name) for name, value in tensors.items()]
    graph = helper.make_graph(nodes, "g", [x], results, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def linear(name: str, x: str, rng: np.random.Generator) -> tuple[list[onnx.NodeProto], dict[str, np.ndarray]]:
    tensors = {f"{name}w": rng.standard_normal((TERMS, COLUMNS)).astype(np.float32), f"{name}b": np.ones(COLUMNS, "f")}
    product = helper.make_node("MatMul", [x, f"{name}w"], [f"{name}m"])
    return [product, helper.make_node("Add", [f"{name}m", f"{name}b"], [name])], tensors


def integer_linear(name: str, rng: np.random.Generator) -> tuple[list[onnx.NodeProto], dict[str, np.ndarray]]:
    """A dynamically quantised product of x with a bias, as quantisers write it."""
    tensors = {
        f"{name}w": rng.integers(-128, 128, (TERMS, COLUMNS)).astype(np.int8),
        f"{name}s": np.asarray([rng.random() / 50], np.float32),
        f"{name}z": np.asarray([0], np.int8),
        f"{name}b": rng.standard_normal(COLUMNS).astype(np.float32),
    }
    nodes = [
        helper.make_node("MatMulInteger", ["q", f"{name}w", "p", f"{name}z"], [f"{name}i"]),
        helper.make_node("Cast", [f"{name}i"], [f"{name}f"], to=1),
        helper.make_node("Mul", ["s", f"{name}s"], [f"{name}ss"]),
        helper.make_node("Mul", [f"{name}f", f"{name}ss"], [f"{name}m"]),
        helper.make_node("Add", [f"{name}m", f"{name}b"], [name]),
    ]
    return nodes, tensors


QUANTIZE = helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "p"])
INTEGER_RULES = (fuse_matmul_integer_to_float, fuse_integer_product_bias)


def rewritten(model: onnx.ModelProto, *rules: Any) -> list[str]:
    read = read_model(model)
    infer_shapes(read)
    run_rewrites(read, (*rules, remove_dead_code), Level.ALL)
    check_graph(read.graph)
    return [node.op_type for node in read.graph.nodes]


def agrees(model: onnx.ModelProto, x: np.ndarray) -> None:
    plain = ort.SessionOptions()
    plain.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    before = ort.InferenceSession(model, plain).run(None, {"x": x})
    after = ort.InferenceSession(model).run(None, {"x": x})
    for a, b in zip(before, after, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("is_integer", [False, True])
def test_products_of_one_value_are_joined(rng, is_integer):
    parts = [integer_linear(name, rng) if is_integer else linear(name, "x", rng) for name in "abc"]
    nodes = [node for made, _ in parts for node in made]
    tensors = {name: value for _, made in parts for name, value in made.items()}
    # Results that are given out keep their names: each is used once more.
    nodes += [helper.make_node("Neg", [name], [f"{name}n"]) for name in "abc"]
    model = model_of([QUANTIZE, *nodes] if is_integer else nodes, tensors, ["an", "bn", "cn"])
    ops = rewritten(model, *(INTEGER_RULES if is_integer else [fuse_linear]), join_products)
    product = "MatMulIntegerToFloat" if is_integer else "Linear"
    assert [op for op in ops if op != "DynamicQuantizeLinear"] == [product, "Split", "Neg", "Neg", "Neg"]
    agrees(model, rng.standard_normal((2, ROWS, TERMS)).astype(np.float32))


def test_a_shared_matrix_is_not_joined(rng):
    (first, tensors), (second, more) = linear("a", "x", rng), linear("b", "x", rng)
    second[0].input[1] = "aw"
    nodes = [*first, *second, *[helper.make_node("Neg", [name], [f"{name}n"]) for name in "ab"]]
    model = model_of(nodes, tensors | more, ["an", "bn"])
    assert "Split" not in rewritten(model, fuse_linear, join_products)


@pytest.mark.parametrize("is_integer", [False, True])
@pytest.mark.parametrize("wide", [False, True])
def test_a_residual_joins_its_product(rng, is_integer, wide):
    nodes, tensors = integer_linear("a", rng) if is_integer else linear("a", "x", rng)
    residual = "x"
    if wide:  # another batch axis than the product has
        tensors["two"] = np.array([2, 1, 1, 1], np.int64)
        nodes.append(helper.make_node("Expand", ["x", "two"], ["more"]))
        residual = "more"
    nodes.append(helper.make_node("Add", ["a", residual], ["y"]))
    model = model_of([QUANTIZE, *nodes] if is_integer else nodes, tensors, ["y"])
    ops = rewritten(model, *(INTEGER_RULES if is_integer else [fuse_linear]), fuse_linear_addition)
    assert "Add" not in ops
    assert ops[-1] == ("IntegerLinear" if is_integer else "Linear")
    agrees(model, rng.standard_normal((2, ROWS, TERMS)).astype(np.float32))


@pytest.mark.parametrize("function", ["Relu", "Sigmoid", "Tanh"])
def test_an_activation_joins_an_integer_product(rng, function):
    nodes, tensors = integer_linear("a", rng)
    model = model_of([QUANTIZE, *nodes, helper.make_node(function, ["a"], ["y"])], tensors, ["y"])
    ops = rewritten(model, *INTEGER_RULES, fuse_linear_activation)
    assert ops == ["DynamicQuantizeLinear", "IntegerLinear"]
    agrees(model, rng.standard_normal((2, ROWS, TERMS)).astype(np.float32))


def reshaping(axes: tuple[int, int], source: str = "a") -> tuple[list[onnx.NodeProto], dict[str, np.ndarray]]:
    """Reshape(a, [extent of x at an axis, another, 12, 8])."""
    tensors = {f"i{axis}": np.asarray(axis, np.int64) for axis in axes} | {
        "zero": np.asarray([0], np.int64), "tail": np.asarray([12, 8], np.int64)
    }  # fmt: skip
    nodes = [helper.make_node("Shape", ["x"], ["shape"])]
    for place, axis in enumerate(axes):
        nodes.append(helper.make_node("Gather", ["shape", f"i{axis}"], [f"g{place}"], axis=0))
        nodes.append(helper.make_node("Unsqueeze", [f"g{place}", "zero"], [f"u{place}"]))
    nodes.append(helper.make_node("Concat", ["u0", "u1", "tail"], ["target"], axis=0))
    return [*nodes, helper.make_node("Reshape", [source, "target"], ["y"])], tensors


def test_a_computed_target_becomes_constant(rng):
    (first, tensors), (second, more) = linear("a", "x", rng), reshaping((0, 1))
    model = model_of([*first, *second], tensors | more, ["y"])
    assert rewritten(model, fuse_linear, fold_known_reshapes) == ["Linear", "Reshape"]
    agrees(model, rng.standard_normal((2, ROWS, TERMS)).astype(np.float32))


def test_extents_of_other_places_stay_computed(rng):
    nodes, tensors = reshaping((1, 0), "x")
    model = model_of(nodes, tensors, ["y"])
    assert "Concat" in rewritten(model, fold_known_reshapes)
    agrees(model, rng.standard_normal((2, ROWS, TERMS)).astype(np.float32))


def test_extents_through_a_residual_of_unknown_names(rng):
    """After a sum with a value of open extents nothing is known by name, but a later sum keeps what it has."""
    (first, tensors), (second, more) = linear("a", "t", rng), reshaping((0, 1), "t2")
    head = [helper.make_node("Gather", ["table", "ids"], ["places"]), helper.make_node("Add", ["x", "places"], ["t"])]
    second[0].input[0] = "t"
    nodes = [*head, *first, helper.make_node("Add", ["a", "t"], ["t2"]), *second]
    model = model_of(nodes, tensors | more | {"table": rng.standard_normal((9, TERMS)).astype(np.float32)}, ["y"])
    model.graph.input.append(helper.make_tensor_value_info("ids", 7, [None]))
    assert "Concat" not in rewritten(model, fuse_linear, fold_known_reshapes)
    x, ids = rng.standard_normal((2, ROWS, TERMS)).astype(np.float32), np.arange(ROWS)
    (found,) = ort.InferenceSession(model).run(None, {"x": x, "ids": ids})
    assert found.shape == (2, ROWS, 12, 8)

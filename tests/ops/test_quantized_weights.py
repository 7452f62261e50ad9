"""Quantised weights as nodes: onnxruntime runs them by its own operators or by the model functions of ours."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from genai.compat.onnxruntime.inference_session import InferenceSession
from genai.kernels.weights import ROW, QuantizedWeight, uniform_format
from genai.onnx.own_functions import own_functions
from genai.onnx.reader import read_model
from genai.ops.weight_nodes import WeightNode, embedding_node, linear_node
from genai.quant import formats
from genai.quant.formats import GRIDS, row_scaled_format
from tests.nearest import round_to_nearest

ROWS, COLUMNS, OPSET = 70, 384, 22
OURS, MS = "genai", "com.microsoft"
FORMS: dict[str, tuple[Any, Any, str, str]] = {
    "2 by 32": (uniform_format(2, 32), None, "MatMulNBits", "QuantizedGather"),
    "2 by 64 with zero points": (uniform_format(2, 64, zero_points=True), None, "MatMulNBits", "QuantizedGather"),
    "4 by 128": (uniform_format(4, 128), None, "MatMulNBits", "GatherBlockQuantized"),
    "4 by 32 with zero points": (uniform_format(4, 32, zero_points=True), None, "MatMulNBits", "GatherBlockQuantized"),
    "8 by 16": (uniform_format(8, 16), None, "MatMulNBits", "GatherBlockQuantized"),
    "3 by 32": (uniform_format(3, 32), None, "QuantizedMatMul", "QuantizedGather"),
    "5 by 64 with zero points": (uniform_format(5, 64, zero_points=True), None, "QuantizedMatMul", "QuantizedGather"),
    "6 by row": (uniform_format(6, ROW), None, "QuantizedMatMul", "QuantizedGather"),
    "4 by row with zero points": (
        uniform_format(4, ROW, zero_points=True), None, "QuantizedMatMul", "QuantizedGather",
    ),
    "Q2_K": (formats.Q2_K, None, "QuantizedMatMul", "QuantizedGather"),
    "Q3_K": (formats.Q3_K, None, "QuantizedMatMul", "QuantizedGather"),
    "Q4_K": (formats.Q4_K, None, "QuantizedMatMul", "QuantizedGather"),
    "Q5_K": (formats.Q5_K, None, "QuantizedMatMul", "QuantizedGather"),
    "Q6_K": (formats.Q6_K, None, "QuantizedMatMul", "QuantizedGather"),
    "IQ4_XS": (formats.IQ4_XS, GRIDS["iq4"], "QuantizedMatMul", "QuantizedGather"),
    "IQ4_NL": (formats.IQ4_NL, GRIDS["iq4"], "QuantizedMatMul", "QuantizedGather"),
    "MXFP4": (formats.MXFP4, GRIDS["mxfp4"], "QuantizedMatMul", "QuantizedGather"),
    "NF4": (uniform_format(4, 64), GRIDS["nf4"], "MatMulBnb4", "QuantizedGather"),
    "FP4": (uniform_format(4, 128), GRIDS["fp4"], "MatMulBnb4", "QuantizedGather"),
    "4 bits by rows": (row_scaled_format(4, 32), GRIDS["iq4"], "QuantizedMatMul", "QuantizedGather"),
    "2 bits by rows": (
        row_scaled_format(2, 32, 4), np.array([-31, -13, 1, 17], np.float32), "QuantizedMatMul", "QuantizedGather",
    ),
}  # fmt: skip


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(list(shape)).standard_normal(shape).astype(np.float32)


def made(name: str) -> QuantizedWeight:
    form, grid, *_ = FORMS[name]
    return round_to_nearest(numbers(ROWS, COLUMNS), form, grid)


def model_of(weight_node: WeightNode, given: np.ndarray, *, functions: Any = None) -> onnx.ModelProto:
    """A graph of one node from `given` to y."""
    node = helper.make_node(
        weight_node.op_type, weight_node.inputs("given", {name: name for name in weight_node.arrays}), ["y"],
        domain=weight_node.domain, **weight_node.attributes,
    )  # fmt: skip
    kind = helper.np_dtype_to_tensor_dtype(given.dtype)
    graph = helper.make_graph(
        [node], "one", [helper.make_tensor_value_info("given", kind, ["b", *given.shape[1:]])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [None] * (given.ndim + weight_node.computed))],
        [numpy_helper.from_array(array, name) for name, array in weight_node.arrays.items()],
    )  # fmt: skip
    if functions is None and weight_node.domain == OURS:
        functions = own_functions(OPSET)
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(weight_node.domain, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10, functions=functions or ())


def by_onnxruntime(model: onnx.ModelProto, given: np.ndarray) -> np.ndarray:
    ort = pytest.importorskip("onnxruntime")
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    (result,) = session.run(None, {"given": given})
    return np.asarray(result)


def here(model: onnx.ModelProto, given: np.ndarray) -> np.ndarray:
    return np.asarray(InferenceSession(model.SerializeToString()).run(None, {"given": given})[0])


@pytest.mark.oracle
@pytest.mark.parametrize("name", FORMS)
def test_onnxruntime_multiplies_the_same(name: str) -> None:
    weight, x = made(name), numbers(3, 7, COLUMNS)
    weight_node = linear_node(weight, accuracy_level=0)
    assert weight_node.op_type == FORMS[name][2]
    model = model_of(weight_node, x)
    onnx.checker.check_model(model)
    ours, theirs = here(model, x), by_onnxruntime(model, x)
    exact = x.astype(np.float64) @ weight.dequantize().astype(np.float64).T
    for found in (ours, theirs):
        assert np.abs(found - exact).max() < 2e-6 * np.abs(exact).max()


@pytest.mark.oracle
@pytest.mark.parametrize("name", FORMS)
def test_onnxruntime_looks_up_the_same(name: str) -> None:
    weight, ids = made(name), np.array([[3, 0, ROWS - 1], [7, 7, 1]])
    weight_node = embedding_node(weight)
    assert weight_node.op_type == FORMS[name][3]
    model = model_of(weight_node, ids)
    ours, theirs, exact = here(model, ids), by_onnxruntime(model, ids), weight.dequantize()[ids]
    tolerance = 1e-6 * np.abs(exact).max()
    np.testing.assert_allclose(theirs, exact, rtol=1e-6, atol=tolerance)
    np.testing.assert_allclose(ours, exact, rtol=1e-6, atol=tolerance)


@pytest.mark.parametrize("name", ["3 by 32", "Q4_K", "4 bits by rows"])
def test_rounded_activations_are_near(name: str) -> None:
    """accuracy_level 4: the error of 8-bit activations per block is small."""
    weight, x = made(name), numbers(5, COLUMNS)
    exact = x.astype(np.float64) @ weight.dequantize().astype(np.float64).T
    found = here(model_of(linear_node(weight), x), x)
    assert 0 < np.linalg.norm(found - exact) < 0.01 * np.linalg.norm(exact)


def test_functions_of_other_meaning_are_expanded() -> None:
    """Kernels run the operator only if the model's function of that name equals ours."""
    weight, x = made("3 by 32"), numbers(2, COLUMNS)
    functions = [onnx.FunctionProto.FromString(f.SerializeToString()) for f in own_functions(OPSET)]
    product = next(function for function in functions if function.name == "QuantizedMatMul")
    product.node.append(helper.make_node("Neg", ["y"], ["negative"]))
    product.output[:] = ["negative"]
    weight_node = linear_node(weight, accuracy_level=0)
    changed = model_of(weight_node, x, functions=functions)
    assert not any(function.known for function in read_model(changed).functions.values())
    usual = model_of(weight_node, x)
    assert all(function.known for function in read_model(usual).functions.values())
    np.testing.assert_allclose(here(changed, x), -here(usual, x), rtol=1e-4, atol=1e-3)


def test_a_model_that_is_written_again_keeps_its_functions(tmp_path: Any) -> None:
    weight, x = made("Q3_K"), numbers(2, COLUMNS)
    path, again = tmp_path / "model.onnx", tmp_path / "again.onnx"
    onnx.save(model_of(linear_node(weight), x), path)
    from genai.compat.onnxruntime.options import SessionOptions

    options = SessionOptions()
    options.optimized_model_filepath = str(again)
    first = InferenceSession(str(path), options).run(None, {"given": x})[0]
    assert {function.name for function in onnx.load(again).functions} >= {"QuantizedMatMul", "DequantizeWeight"}
    np.testing.assert_array_equal(InferenceSession(str(again)).run(None, {"given": x})[0], first)


@pytest.mark.parametrize(
    ("name", "attributes", "arrays", "message"),
    [
        ("3 by 32", {"bits": 7}, {}, "bits is 7"),
        ("3 by 32", {"bits": 0}, {}, "bits is 0"),
        ("3 by 32", {"block_size": 40}, {}, "block_size is 40"),
        ("3 by 32", {"block_size": -1}, {}, "block_size is -1"),
        ("3 by 32", {"K": 10**12}, {}, "codes is uint8"),
        ("3 by 32", {"N": 3}, {}, "codes is uint8"),
        ("3 by 32", {}, {"scales": np.ones((3, 12), np.float32)}, r"scales is float32 \[3, 12\]"),
        ("3 by 32", {}, {"scales": np.ones((3, 0), np.float32)}, r"the scales have shape \[3, 0\]"),
        ("3 by 32", {}, {"grid": np.ones(3, np.float32)}, r"grid is float32 \[3\]"),
        ("3 by 32", {}, {"codes": np.ones((70, 144), np.int8)}, r"codes is int8"),
        ("Q4_K", {"multiplier_zero": 5}, {}, "multiplier_zero is 5"),
        ("Q4_K", {}, {"multipliers": np.ones((70, 5), np.uint8)}, r"multipliers is uint8 \[70, 5\]"),
        ("NF4", {"quant_type": 2}, {}, "quant_type 2"),
        ("NF4", {"block_size": 48}, {}, "block_size is 48"),
        ("NF4", {"block_size": 256}, {}, "105 scales"),
        ("NF4", {"K": 380}, {}, "the scales are float32.*but 13300 bytes and 416 scales are expected"),
        ("NF4", {"K": 380}, {"codes": np.ones(13300, np.int8)}, "the codes are int8"),
        ("NF4", {"K": 0}, {}, "K is 0"),
        ("NF4", {}, {"scales": np.ones(5, np.float32)}, "420 scales"),
    ],
)
def test_refused(name: str, attributes: dict[str, int], arrays: dict[str, Any], message: str) -> None:
    """The error has what, why and fix, and is raised before anything of that size is allocated."""
    x, weight_node = numbers(2, COLUMNS), linear_node(made(name))
    changed = WeightNode(
        weight_node.domain,
        weight_node.op_type,
        {**weight_node.attributes, **attributes},
        {**weight_node.arrays, **arrays},
        0,
    )
    with pytest.raises(Exception, match=message) as caught:
        InferenceSession(model_of(changed, x).SerializeToString())
    assert caught.value.why and caught.value.fix  # type: ignore[attr-defined]


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("rows", "columns", "block_size"),
    [(7, 96, 64), (9, 1040, 256), (5, 48, 32), (6, 16, 256), (5, 100, 64), (5, 33, 16), (3, 37, 64), (1, 20, 64),
     (70, 200, 128)],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["fp4", "nf4"])
def test_bnb4_blocks_that_cross_rows(rows: int, columns: int, block_size: int, kind: str) -> None:
    """Blocks divide the flattened matrix, as in onnxruntime; the last block and the last byte may be incomplete."""
    rng = np.random.default_rng([rows, columns, block_size])
    count = rows * columns
    codes = np.zeros(count + count % 2, np.uint8)
    codes[:count] = rng.integers(0, 16, count)
    scales = rng.uniform(0.1, 2, -(-count // block_size)).astype(np.float32)
    arrays = {"packed": codes[0::2] << 4 | codes[1::2], "scales": scales}
    attributes = {"N": rows, "K": columns, "block_size": block_size, "quant_type": ("fp4", "nf4").index(kind)}
    x = numbers(3, 7, columns)
    model = model_of(WeightNode(MS, "MatMulBnb4", attributes, arrays, 0), x)
    values = GRIDS[kind].astype(np.float64)[codes[:count]] * np.repeat(scales.astype(np.float64), block_size)[:count]
    exact = x.astype(np.float64) @ values.reshape(rows, columns).T
    for found in (here(model, x), by_onnxruntime(model, x)):
        assert found.shape == (3, 7, rows)
        assert np.abs(found - exact).max() < 2e-6 * np.abs(exact).max()


def test_a_row_outside_the_table() -> None:
    model = model_of(embedding_node(made("3 by 32")), np.array([0]))
    with pytest.raises(Exception, match="70"):
        InferenceSession(model.SerializeToString()).run(None, {"given": np.array([70])})


def test_no_nodes_without_functions_that_are_unknown() -> None:
    """An operator of the genai domain runs here even without its model functions."""
    weight, x = made("Q6_K"), numbers(2, COLUMNS)
    bare = model_of(linear_node(weight, accuracy_level=0), x, functions=())
    exact = x.astype(np.float64) @ weight.dequantize().astype(np.float64).T
    np.testing.assert_allclose(here(bare, x), exact, atol=1e-4)

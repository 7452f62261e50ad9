"""Products with, and look-ups in, dequantised weights: packed where the form allows it, the same values either way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from genai.onnx.ir import DataType, OnnxTensor
from genai.onnx.reader import read_model
from genai.optimize.base import Level, run_rewrites
from genai.optimize.dequantized import PACK_DEQUANTIZED, pack_dequantized_products
from genai.optimize.simplify import remove_dead_code
from genai.session.loop import run
from genai.session.plan import PlanOptions, build_plan

K, N = 96, 34
TYPES = {
    "int4": (TensorProto.INT4, -8, 8, ml_dtypes.int4),
    "uint4": (TensorProto.UINT4, 0, 16, ml_dtypes.uint4),
    "int8": (TensorProto.INT8, -128, 128, np.int8),
    "uint8": (TensorProto.UINT8, 0, 256, np.uint8),
}


def tensor(name: str, values: Any, element: int) -> onnx.TensorProto:
    return helper.make_tensor(name, element, values.shape, values.reshape(-1).tolist())


def qdq_model(kind: str, *, block: int, points: bool, transposed: bool, columns: int = N) -> onnx.ModelProto:
    rng = np.random.default_rng(1)
    element, low, high, _ = TYPES[kind]
    shape = (columns, K) if transposed else (K, columns)
    contraction = 1 if transposed else 0
    if block:
        side = tuple(size // block if axis == contraction else size for axis, size in enumerate(shape))
        attributes = {"axis": contraction, "block_size": block}
    else:
        side, attributes = (shape[1 - contraction],), {"axis": 1 - contraction}
    initializers = [
        tensor("w", rng.integers(low, high, shape), element),
        tensor("s", rng.random(side).astype(np.float32) / high, TensorProto.FLOAT),
    ]
    if points:
        initializers.append(tensor("z", rng.integers(low, high, side), element))
    nodes = [helper.make_node("DequantizeLinear", [t.name for t in initializers], ["d"], **attributes)]
    if transposed:
        nodes.append(helper.make_node("Transpose", ["d"], ["t"], perm=[1, 0]))
    nodes.append(helper.make_node("MatMul", ["x", "t" if transposed else "d"], ["y"]))
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", K])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", columns])],
        initializers,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def rewritten(proto: onnx.ModelProto, folder: Path) -> Any:
    onnx.save(proto, folder / "m.onnx")
    model = read_model(folder / "m.onnx")
    run_rewrites(model, (pack_dequantized_products, remove_dead_code), Level.ALL)
    return model


def values_of(model: Any, x: np.ndarray, accuracy: str) -> np.ndarray:
    return run(build_plan(model, PlanOptions(kernel={"accuracy": accuracy})), {"x": x})["y"]


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("points", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("block", [0, 32, 48])
def test_same_values(kind: str, points: bool, transposed: bool, block: int, tmp_path: Path) -> None:
    proto = qdq_model(kind, block=block, points=points, transposed=transposed)
    x = np.random.default_rng(2).standard_normal((3, K)).astype(np.float32)
    (expected,) = ReferenceEvaluator(proto).run(None, {"x": x})
    model = rewritten(proto, tmp_path)
    assert [node.op_type for node in model.graph.nodes] == ["MatMulNBits"]
    assert "w" not in model.graph.initializers
    np.testing.assert_allclose(values_of(model, x, "fp32"), expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    rounded = values_of(model, x, "auto")
    assert np.abs(rounded - expected).max() < 0.05 * np.abs(expected).max()


def test_left_alone(tmp_path: Path) -> None:
    model = rewritten(qdq_model("int4", block=8, points=False, transposed=False), tmp_path)
    assert "DequantizeLinear" in [node.op_type for node in model.graph.nodes]


def test_rows_that_end_within_a_byte(tmp_path: Path) -> None:
    proto = qdq_model("int4", block=32, points=True, transposed=False, columns=N - 1)
    x = np.random.default_rng(2).standard_normal((3, K)).astype(np.float32)
    (expected,) = ReferenceEvaluator(proto).run(None, {"x": x})
    model = rewritten(proto, tmp_path)
    assert [node.op_type for node in model.graph.nodes] == ["MatMulNBits"]
    np.testing.assert_allclose(values_of(model, x, "fp32"), expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


def lookup_model(kind: str, width: int, *, first: str, block: int = 0, points: bool = True) -> onnx.ModelProto:
    """DequantizeLinear after a Gather of integers, Gather after it, or GatherBlockQuantized."""
    rng = np.random.default_rng(3)
    element, low, high, _ = TYPES[kind]
    side = (9, width // block) if block else ()
    initializers = [
        tensor("w", rng.integers(low, high, (9, width)), element),
        tensor("s", np.asarray(rng.random(side), np.float32) / high, TensorProto.FLOAT),
    ]
    if points:
        initializers.append(tensor("z", np.asarray(rng.integers(low, high, side)), element))
    others = [t.name for t in initializers[1:]]
    blocks = {"axis": 1, "block_size": block} if block else {}
    if first == "Gather":
        nodes = [
            helper.make_node("Gather", ["w", "ids"], ["g"]),
            helper.make_node("DequantizeLinear", ["g", *others], ["y"]),
        ]
    elif first == "DequantizeLinear":
        nodes = [
            helper.make_node("DequantizeLinear", ["w", *others], ["d"], **blocks),
            helper.make_node("Gather", ["d", "ids"], ["y"]),
        ]
    else:
        attributes = {"block_size": block, "gather_axis": 0, "quantize_axis": 1}
        nodes = [helper.make_node(first, ["w", "ids", *others], ["y"], domain="com.microsoft", **attributes)]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["b", "s"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["b", "s", width])],
        initializers,
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


@pytest.mark.parametrize(
    ("kind", "width", "form", "becomes"),
    [
        ("int8", 48, {"first": "Gather"}, "GatherBlockQuantized"),
        ("uint8", 64, {"first": "Gather", "points": False}, "GatherBlockQuantized"),
        ("int8", 24, {"first": "Gather"}, "DequantizeLinear Gather"),
        ("int4", 64, {"first": "DequantizeLinear", "block": 32}, "GatherBlockQuantized"),
        ("uint4", 64, {"first": "DequantizeLinear", "block": 16, "points": False}, "GatherBlockQuantized"),
        ("int4", 64, {"first": "GatherBlockQuantized", "block": 32}, "GatherBlockQuantized"),
    ],
)
def test_lookups(kind: str, width: int, form: dict[str, Any], becomes: str, tmp_path: Path) -> None:
    proto = lookup_model(kind, width, **form)
    ids = np.array([[0, 8, 3], [3, 1, 0]])
    same = {**form, "first": "DequantizeLinear"} if form["first"] == "GatherBlockQuantized" else form
    (expected,) = ReferenceEvaluator(lookup_model(kind, width, **same)).run(None, {"ids": ids})
    onnx.save(proto, tmp_path / "m.onnx")
    model = read_model(tmp_path / "m.onnx")
    run_rewrites(model, (*PACK_DEQUANTIZED, remove_dead_code), Level.ALL)
    assert " ".join(node.op_type for node in model.graph.nodes) == becomes
    table = model.graph.constant(model.graph.nodes[0].inputs[0])
    assert table is not None
    assert (table.dtype == np.uint8) == (becomes == "GatherBlockQuantized")
    np.testing.assert_allclose(run(build_plan(model, PlanOptions()), {"ids": ids})["y"], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.oracle
@pytest.mark.parametrize("scale", [(), (N,)], ids=["one scale", "one per column"])
def test_products_that_quantise_their_activations(scale: tuple[int, ...], tmp_path: Path) -> None:
    """One row, so that onnxruntime's scale for all rows is also the scale of the row."""
    import onnxruntime

    rng = np.random.default_rng(4)
    initializers = [
        tensor("w", rng.integers(-128, 128, (K, N)), TensorProto.INT8),
        tensor("s", np.asarray(rng.random(scale) / 128, np.float32), TensorProto.FLOAT),
        tensor("z", np.asarray(rng.integers(-9, 9, scale)), TensorProto.INT8),
        tensor("b", rng.standard_normal(N).astype(np.float32), TensorProto.FLOAT),
    ]
    node = helper.make_node("DynamicQuantizeMatMul", ["x", "w", "s", "z", "b"], ["y"], domain="com.microsoft")
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", K])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", N])],
        initializers,
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    proto = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    x = rng.standard_normal((1, K)).astype(np.float32)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, {"x": x})
    onnx.save(proto, tmp_path / "m.onnx")
    model = read_model(tmp_path / "m.onnx")
    run_rewrites(model, (*PACK_DEQUANTIZED, remove_dead_code), Level.ALL)
    assert [node.op_type for node in model.graph.nodes] == ["MatMulNBits"]
    assert np.abs(values_of(model, x, "auto") - expected).max() < 0.02 * np.abs(expected).max()


def test_computed_elements_are_stored_only_while_they_are_used() -> None:
    made: list[int] = []

    def make() -> np.ndarray:
        made.append(1)
        return np.arange(6, dtype=np.float32)

    computed = OnnxTensor.computed("c", DataType.FLOAT, (2, 3), make)
    assert computed.nbytes == 24
    assert not made
    first = computed.array()
    assert computed.array().base is first.base
    assert computed.raw().tobytes() == first.tobytes()
    assert len(made) == 1
    del first
    assert computed.array().tolist() == [[0, 1, 2], [3, 4, 5]]
    assert len(made) == 2

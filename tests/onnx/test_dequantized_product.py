"""Products with dequantised weights: packed where the form allows it, the same values either way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from genai.onnx.reader import read_model
from genai.optimize.base import Level, run_rewrites
from genai.optimize.decoders import pack_dequantized_products
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
    assert [node.op_type for node in model.graph.nodes] == ["DequantizedMatMul"]
    assert "w" not in model.graph.initializers
    np.testing.assert_allclose(values_of(model, x, "fp32"), expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    rounded = values_of(model, x, "auto")
    assert np.abs(rounded - expected).max() < 0.05 * np.abs(expected).max()


def test_4_bit_weights_stay_in_the_file(tmp_path: Path) -> None:
    model = rewritten(qdq_model("int4", block=32, points=False, transposed=False), tmp_path)
    assert model.graph.initializers["w/bytes"].shape == (K, N // 2)


@pytest.mark.parametrize(
    "changes",
    [{"columns": N - 1}, {"block": 8}],
    ids=["rows that end within a byte", "blocks too small"],
)
def test_left_alone(changes: dict[str, Any], tmp_path: Path) -> None:
    model = rewritten(qdq_model("int4", **{"block": 32, "points": False, "transposed": False, **changes}), tmp_path)
    assert "DequantizeLinear" in [node.op_type for node in model.graph.nodes]

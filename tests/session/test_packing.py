"""Packing weights: that pages of the model's files are given back, and constants that no run reads are deleted."""

from __future__ import annotations

import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from genai.onnx.tensor import OnnxTensor
from genai.session import prepare
from genai.session.packed_weights import WeightStore, _owner
from genai.session.plan import build_plan
from genai.session.session import Session


def test_each_weight_is_packed_once_counted_and_its_pages_released(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    released: list[str] = []
    weight, other = np.ones((4, 8), np.uint8), np.ones(3, np.float32)
    store = WeightStore({"w": weight, "view": weight.reshape(8, 4), "s": other}, counted.append)

    class Mapped:
        is_external = True

        def raw(self) -> Any:
            return weight

        def release_pages(self) -> None:
            released.append("w")

    tensors: list[Any] = [Mapped()]
    store.add_tensors(tensors)
    made = [store.packed((name, "", "s"), "tiles", lambda: object()) for name in ("w", "view", "w")]
    assert made[0] is made[1] is made[2]
    assert counted == [32, 12]
    assert released == ["w"]


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="reads how much of a mapping is resident (Linux)")
def test_a_loaded_model_keeps_few_pages_of_what_it_packed(bundled_folder: Path) -> None:
    """Of the file with the weights, little stays resident."""
    code = f"""
import genai
with genai.Model({str(bundled_folder)!r}) as model:
    lines = open("/proc/self/smaps").read().splitlines()
    resident, inside = 0, False
    for line in lines:
        if "-" in line.split(" ")[0] and ":" not in line.split(" ")[0]:
            inside = line.endswith(".data")
        elif inside and line.startswith("Rss:"):
            resident += int(line.split()[1])
print(resident)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert int(result.stdout) < 0.2 * (bundled_folder / "model.onnx.data").stat().st_size / 1024


def test_another_array_at_the_address_of_a_deleted_weight_is_packed_itself() -> None:
    constants: dict[str, Any] = {}
    store = WeightStore(constants)
    memory = bytearray(32)
    for value in (1, 2):
        # Two arrays that own the same memory one after the other, as the system assigns it.
        constants[f"w{value}"] = np.frombuffer(memory, np.uint8)
        constants[f"w{value}"][:] = value
        assert store.name_of(f"w{value}") == f"w{value}"
        assert store.packed((f"w{value}",), "bytes", constants[f"w{value}"].tobytes) == bytes([value]) * 32
        del constants[f"w{value}"]


def _products(rows: int = 300) -> onnx.ModelProto:
    """A model with a weight of two products, one of a product and a result, one that is looked up, and a Transpose."""
    nodes = [
        helper.make_node("MatMul", ["x", "twice"], ["a"]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("MatMul", ["b", "twice"], ["c"]),
        helper.make_node("MatMul", ["c", "shown"], ["d"]),
        helper.make_node("Transpose", ["turned"], ["t"], perm=[1, 0]),
        helper.make_node("MatMul", ["d", "t"], ["e"]),
        helper.make_node("Gather", ["table", "ids"], ["rows"]),
        helper.make_node("Add", ["e", "rows"], ["y"]),
    ]
    rng = np.random.default_rng(0)
    weights = [
        numpy_helper.from_array((rng.random((rows, rows), np.float32) - 0.5) / 10, name)
        for name in ("twice", "shown", "turned", "table")
    ]
    inputs = [
        helper.make_tensor_value_info("x", 1, [2, rows]),
        helper.make_tensor_value_info("ids", onnx.TensorProto.INT64, [2]),
    ]
    outputs = [helper.make_tensor_value_info("y", 1, [2, rows]), helper.make_tensor_value_info("shown", 1, None)]
    return helper.make_model(helper.make_graph(nodes, "g", inputs, outputs, weights), ir_version=10)


def test_a_session_keeps_only_the_constants_that_its_runs_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are deleted, and none is in memory together with its packed form for the whole compilation."""
    model = _products()
    onnx.save(model, tmp_path / "m.onnx")
    owners: dict[str, Any] = {}

    def build(graph_model: Any, options: Any) -> Any:
        for name, tensor in graph_model.graph.initializers.items():
            owners[name] = weakref.ref(_owner(tensor.array()))
        return build_plan(graph_model, options)

    monkeypatch.setattr(prepare, "build_plan", build)
    session = Session(tmp_path / "m.onnx")
    assert {name for name, owner in owners.items() if owner() is not None} == {"shown", "table"}
    x, ids = np.random.default_rng(1).random((2, 300), np.float32), np.array([7, 299])
    found = session.run({"x": x, "ids": ids})
    w = {item.name: numpy_helper.to_array(item).astype(np.float64) for item in model.graph.initializer}
    expected = np.maximum(x @ w["twice"], 0) @ w["twice"] @ w["shown"] @ w["turned"].T + w["table"][ids]
    np.testing.assert_allclose(found["y"], expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(found["shown"], w["shown"].astype(np.float32))


def test_constants_of_subgraphs_live_until_the_last_node_that_captures_them() -> None:
    """Both branches and a later node read one weight."""
    rng = np.random.default_rng(0)
    weight = numpy_helper.from_array(rng.random((8, 8)).astype(np.float32), "w")

    def branch(name: str, *names: str) -> onnx.GraphProto:
        out = helper.make_tensor_value_info(name, 1, None)
        return helper.make_graph([helper.make_node("MatMul", names, [name])], name, [], [out])

    nodes = [
        helper.make_node("If", ["c"], ["a"], then_branch=branch("p", "x", "w"), else_branch=branch("q", "w", "x")),
        helper.make_node("MatMul", ["a", "w"], ["y"]),
    ]
    inputs = [
        helper.make_tensor_value_info("c", onnx.TensorProto.BOOL, []), helper.make_tensor_value_info("x", 1, [8, 8]),
    ]  # fmt: skip
    outputs = [helper.make_tensor_value_info("y", 1, None)]
    model = helper.make_model(helper.make_graph(nodes, "g", inputs, outputs, [weight]), ir_version=10)
    session, w = Session(model), numpy_helper.to_array(weight)
    x = rng.random((8, 8)).astype(np.float32)
    for condition in (True, False):
        found = session.run({"c": np.array(condition), "x": x})["y"]
        np.testing.assert_allclose(found, (x @ w if condition else w @ x) @ w, rtol=1e-5)


def test_tensors_tell_whether_they_lie_in_a_file() -> None:
    assert not OnnxTensor.from_array("x", np.ones(3, np.float32)).is_external


@pytest.mark.parametrize("op", ["MatMulInteger", "QGemm"])
@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
def test_sessions_keep_8_bit_matrices_only_packed(op: str, per_row: bool, dtype: Any) -> None:
    """A product that the packed form does not support, with a zero point per row, unpacks the matrix."""
    generator = np.random.default_rng(3)
    a = generator.integers(0, 256, (4, 70)).astype(np.uint8)
    weight = generator.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, (70, 50)).astype(dtype)
    a_zero = np.array([3, 7, 100, 255] if per_row else 9, np.uint8)
    one = np.float32(1)
    named = {"w": weight if op == "MatMulInteger" else np.ascontiguousarray(weight.T), "az": a_zero}
    named |= {"one": one, "wz": np.array(5, dtype)}
    if op == "MatMulInteger":
        node = helper.make_node(op, ["a", "w", "az", "wz"], ["y"])
    else:
        inputs = ["a", "one", "az", "w", "one", "wz"]
        node = helper.make_node(op, inputs, ["y"], domain="com.microsoft", transB=1)
    kind = onnx.TensorProto.INT32 if op == "MatMulInteger" else onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("a", onnx.TensorProto.UINT8, [4, 70])],
        [helper.make_tensor_value_info("y", kind, [4, 50])],
        [numpy_helper.from_array(array, name) for name, array in named.items()],
    )
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    session = Session(helper.make_model(graph, opset_imports=imports, ir_version=8))
    assert not any(isinstance(value, np.ndarray) and value.size == weight.size for value in session.plan.initial)
    expected = (a.astype(np.int64) - a_zero.reshape(-1, 1)) @ (weight.astype(np.int64) - 5)
    np.testing.assert_array_equal(session.run({"a": a})["y"], expected)

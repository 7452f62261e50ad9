"""Models and data for quantisation tests, and what compares our results with onnxruntime's."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import genai
from genai.compat.onnxruntime_quantization import CalibrationDataReader


class Feeds(CalibrationDataReader):
    """Given feeds, one after another."""

    def __init__(self, feeds: Iterable[Any]) -> None:
        self._left = iter(list(feeds))

    def get_next(self) -> Any:
        return next(self._left, None)


def images(count: int, size: int = 8, batch: int = 2, seed: int = 0) -> list[dict[str, Any]]:
    random = np.random.default_rng(seed)
    return [{"x": random.standard_normal((batch, 3, size, size), np.float32)} for _ in range(count)]


def make(
    nodes: list[Any], constants: dict[str, Any], inputs: dict[str, Any], outputs: dict[str, Any], opset: int = 17
) -> Any:
    """A model; inputs and outputs are {name: (type, shape)}."""
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, *kind) for name, kind in inputs.items()],
        [helper.make_tensor_value_info(name, *kind) for name, kind in outputs.items()],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def small_model(opset: int = 17) -> Any:
    """A node of most kinds: convolution, pooling, arithmetic, products, norm, softmax."""
    random = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return random.standard_normal(shape, np.float32)

    node = helper.make_node
    nodes = [
        node("Conv", ["x", "w", "b"], ["c"], name="conv", pads=[1] * 4),
        node("Relu", ["c"], ["r"], name="relu"),
        node("MaxPool", ["r"], ["m"], name="pool", kernel_shape=[2, 2], strides=[2, 2]),
        node("Add", ["m", "shift"], ["a"], name="add"),
        node("Sigmoid", ["a"], ["s"], name="sigmoid"),
        node("Mul", ["a", "s"], ["mu"], name="mul"),
        node("GlobalAveragePool", ["mu"], ["g"], name="mean"),
        node("Flatten", ["g"], ["f"], name="flat"),
        node("Gemm", ["f", "gw", "gb"], ["ge"], name="gemm", transB=1),
        node("LayerNormalization", ["ge", "ls", "lb"], ["ln"], name="norm"),
        node("MatMul", ["ln", "mw"], ["y"], name="matmul"),
    ]
    constants = {
        "w": normal(4, 3, 3, 3), "b": normal(4), "shift": normal(1, 4, 1, 1), "gw": normal(6, 4), "gb": normal(6),
        "ls": normal(6), "lb": normal(6), "mw": normal(6, 5),
    }  # fmt: skip
    return make(nodes, constants, {"x": (1, ["N", 3, 8, 8])}, {"y": (1, ["N", 5])}, opset)


@pytest.fixture(scope="session")
def small() -> Any:
    return small_model()


@pytest.fixture(scope="session")
def small_path(small, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("small") / "model.onnx"
    onnx.save(small, path)
    return path


def initializers(path: Path) -> dict[str, Any]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}


def op_types(path: Path) -> list[str]:
    return [node.op_type for node in onnx.load(path).graph.node]


def apart(found: Any, expected: Any) -> float:
    """Root of the mean square difference, relative to what is expected."""
    difference = np.asarray(found, np.float64) - np.asarray(expected, np.float64)
    return float(np.linalg.norm(difference) / max(np.linalg.norm(expected), 1e-30))


def run_here(path: Any, feed: dict[str, Any]) -> Any:
    return genai.InferenceSession(path if isinstance(path, onnx.ModelProto) else str(path)).run(None, feed)[0]


def run_there(path: Any, feed: dict[str, Any]) -> Any:
    import onnxruntime

    source = path.SerializeToString() if isinstance(path, onnx.ModelProto) else str(path)
    return onnxruntime.InferenceSession(source, providers=["CPUExecutionProvider"]).run(None, feed)[0]

"""Fixtures for session tests: small models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from genai.compat.onnxruntime.inference_session import InferenceSession


@pytest.fixture(scope="session")
def make_model() -> Callable[..., onnx.ModelProto]:
    """A model from nodes, {input: (type, shape)}, {output: (type, shape)} and {initializer: array}."""

    def make(
        nodes: list[onnx.NodeProto],
        inputs: dict[str, tuple[int, Any]],
        outputs: dict[str, tuple[int, Any]],
        initializers: dict[str, np.ndarray] | None = None,
        version: int = 20,
        **model: Any,
    ) -> onnx.ModelProto:
        graph = helper.make_graph(
            nodes,
            "g",
            [helper.make_tensor_value_info(name, *kind) for name, kind in inputs.items()],
            [helper.make_tensor_value_info(name, *kind) for name, kind in outputs.items()],
            [numpy_helper.from_array(array, name) for name, array in (initializers or {}).items()],
        )
        imports = model.pop("imports", [helper.make_opsetid("", version)])
        return helper.make_model(graph, opset_imports=imports, ir_version=10, **model)

    return make


@pytest.fixture(scope="session")
def add_model(make_model) -> onnx.ModelProto:
    """c = a + b, float32 [N, 3]."""
    kind = (TensorProto.FLOAT, ["N", 3])
    return make_model([helper.make_node("Add", ["a", "b"], ["c"], name="sum")], {"a": kind, "b": kind}, {"c": kind})


@pytest.fixture
def add(add_model) -> InferenceSession:
    return InferenceSession(add_model)


@pytest.fixture
def ones() -> np.ndarray:
    return np.ones((2, 3), np.float32)


@pytest.fixture
def saved(add_model, tmp_path) -> Path:
    path = tmp_path / "add.onnx"
    path.write_bytes(add_model.SerializeToString())
    return path

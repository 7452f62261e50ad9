"""Fixtures for operator tests: one-node models, run in this package and in onnxruntime."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from genai.compat.onnxruntime.inference_session import InferenceSession

os.environ["ORT_DISABLE_TELEMETRY"] = "1"


@pytest.fixture(scope="session")
def one_node() -> Callable[..., onnx.ModelProto]:
    """A model of one node; inputs by name (None = absent), attributes as keywords."""

    def make(
        op_type: str,
        inputs: dict[str, Any],
        num_outputs: int = 1,
        *,
        domain: str = "",
        version: int = 17,
        **attributes: Any,
    ) -> onnx.ModelProto:
        outputs = [f"output_{index}" for index in range(num_outputs)]
        names = ["" if value is None else name for name, value in inputs.items()]
        node = helper.make_node(op_type, names, outputs, domain=domain, **attributes)
        infos = [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
            for name, value in inputs.items()
            if value is not None
        ]
        graph = helper.make_graph([node], "graph", infos, [onnx.ValueInfoProto(name=name) for name in outputs])
        imports = [helper.make_opsetid("", version)]
        if domain:
            imports.append(helper.make_opsetid(domain, 1))
        return helper.make_model(graph, opset_imports=imports, ir_version=8)

    return make


@pytest.fixture(scope="session")
def both() -> Callable[[onnx.ModelProto, dict[str, Any]], tuple[list[Any], list[Any]]]:
    """Return the results of a model in this package and in onnxruntime."""
    ort = pytest.importorskip("onnxruntime")

    def run(model: onnx.ModelProto, feed: dict[str, Any]) -> tuple[list[Any], list[Any]]:
        given = {name: value for name, value in feed.items() if value is not None}
        options = ort.SessionOptions()
        options.log_severity_level = 4
        peer = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        theirs = peer.run(None, given)  # runs first, so that a model that only this package rejects is its error
        return InferenceSession(model).run(None, given), theirs

    return run


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)

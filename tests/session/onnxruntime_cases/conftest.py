"""onnxruntime's own Python tests, rewritten: each case runs here and, as the oracle, in onnxruntime.

Each case has the name of the test that it rewrites. docs/reference/onnxruntime-tests.md lists all of them, including
those that are refused.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import genai


@pytest.fixture(params=["genai", pytest.param("onnxruntime", marks=pytest.mark.oracle)])
def ort(request: pytest.FixtureRequest) -> Any:
    """The library under test."""
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"
    return genai if request.param == "genai" else pytest.importorskip("onnxruntime")


@pytest.fixture
def errors(ort: Any) -> tuple[type[Exception], ...]:
    """What the library raises on purpose: here typed errors, there several that have nothing in common."""
    if ort is genai:
        return (genai.GenaiError,)
    state = ort.capi.onnxruntime_pybind11_state
    return (RuntimeError, ValueError, state.Fail, state.InvalidArgument)


@pytest.fixture
def opened(ort: Any) -> Callable[..., Any]:
    """opened(model, options): a session on the CPU."""

    def opened(model: onnx.ModelProto, options: Any = None) -> Any:
        return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])

    return opened


@pytest.fixture(scope="session")
def product(make_model: Any) -> onnx.ModelProto:
    """Y = X * W, of float32[3, 2], where W is 1 to 6."""
    kind = (onnx.TensorProto.FLOAT, [3, 2])
    nodes = [helper.make_node("Mul", ["X", "W"], ["Y"], name="product")]
    model: onnx.ModelProto = make_model(nodes, {"X": kind}, {"Y": kind}, {"W": counted()})
    return model


def counted() -> np.ndarray:
    """1 to 6, as float32[3, 2]."""
    return np.arange(1, 7, dtype=np.float32).reshape(3, 2)


@pytest.fixture
def x() -> np.ndarray:
    """1 to 6, as float32[3, 2]."""
    return counted()

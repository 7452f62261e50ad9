"""MelWeightMatrix and STFT give what onnxruntime gives."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import genai

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")


def on_both(op_type: str, feed: dict[str, np.ndarray], **attributes: Any) -> tuple[np.ndarray, np.ndarray]:
    """A node with these inputs, here and in onnxruntime."""
    ort = pytest.importorskip("onnxruntime")
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in feed.items()
    ]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph([helper.make_node(op_type, [*feed], ["y"], **attributes)], "g", inputs, [output])
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    sessions = (
        genai.InferenceSession(model.SerializeToString()),
        ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]),
    )
    ours, theirs = (session.run(None, feed)[0] for session in sessions)
    return ours, theirs


@pytest.mark.parametrize("sizes", [(8, 16, 8192, 0.0, 4096.0), (40, 512, 16000, 20.0, 8000.0), (3, 64, 100, 1.0, 40.0)])
def test_mel_weights(sizes: tuple[int, int, int, float, float]) -> None:
    feed = {name: np.array(size) for name, size in zip("abc", sizes[:3], strict=True)}
    feed |= {name: np.array(size, np.float32) for name, size in zip("de", sizes[3:], strict=True)}
    ours, theirs = on_both("MelWeightMatrix", feed)
    assert ours.dtype == theirs.dtype and np.array_equal(ours, theirs) and ours.any()


@pytest.mark.parametrize("onesided", [0, 1])
@pytest.mark.parametrize(("step", "length"), [(8, 16), (5, 12), (40, 64)])
def test_short_time_fourier_transforms(onesided: int, step: int, length: int) -> None:
    rng = np.random.default_rng(step)
    x, window = rng.standard_normal((2, 128, 1)).astype(np.float32), np.hanning(length).astype(np.float32)
    ours, theirs = on_both("STFT", {"x": x, "step": np.array(step), "window": window}, onesided=onesided)
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    assert np.abs(ours - theirs).max() < 1e-5 * np.abs(theirs).max()

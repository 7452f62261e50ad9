"""MelWeightMatrix, STFT and windows give what onnxruntime gives."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import genai

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")


def model_of(op_type: str, feed: dict[str, np.ndarray], **attributes: Any) -> onnx.ModelProto:
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in feed.items()
    ]
    node = helper.make_node(op_type, [*feed], ["y"], **attributes)
    graph = helper.make_graph([node], "g", inputs, [onnx.ValueInfoProto(name="y")])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def on_both(op_type: str, feed: dict[str, np.ndarray], **attributes: Any) -> tuple[np.ndarray, np.ndarray]:
    """A node with these inputs, here and in onnxruntime."""
    ort = pytest.importorskip("onnxruntime")
    model = model_of(op_type, feed, **attributes).SerializeToString()
    sessions = (
        genai.InferenceSession(model),
        ort.InferenceSession(model, providers=["CPUExecutionProvider"]),
    )
    ours, theirs = (session.run(None, feed)[0] for session in sessions)
    return ours, theirs


def refused(message: str, op_type: str, feed: dict[str, np.ndarray]) -> None:
    with pytest.raises(Exception, match=message):
        genai.InferenceSession(model_of(op_type, feed)).run(None, feed)


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


@pytest.mark.parametrize("onesided", [0, 1])
@pytest.mark.parametrize("kind", [np.float32, np.float64])
@pytest.mark.parametrize("samples", [1, 2, 64])
def test_signals_without_a_last_axis(onesided: int, kind: Any, samples: int) -> None:
    """torch.onnx.export(dynamo=False) writes [batch, samples] for torch.stft, also with 1 or 2 samples."""
    x = np.random.default_rng(samples).standard_normal((2, samples)).astype(kind)
    length = min(samples, 16)
    for feed in (
        {"x": x, "step": np.array(5), "window": np.hamming(length).astype(kind)},
        {"x": x, "step": np.array([5], np.int32), "window": np.ones(length, kind), "n": np.array(length, np.int32)},
    ):
        ours, theirs = on_both("STFT", feed, onesided=onesided)
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        assert np.abs(ours - theirs).max() < 1e-4


@pytest.mark.parametrize(
    ("x", "window", "message"),
    [
        (np.ones(8, np.float32), np.ones(4, np.float32), r"signal has shape \[8\]"),
        (np.ones((1, 8, 3), np.float32), np.ones(4, np.float32), r"signal has shape \[1, 8, 3\]"),
        (np.ones((1, 8, 1, 1), np.float32), np.ones(4, np.float32), r"signal has shape \[1, 8, 1, 1\]"),
        (
            np.ones((1, 8), np.float32),
            np.ones((1, 4), np.float32),
            r"window has shape \[1, 4\], but it must have one axis",
        ),
        (
            np.ones((1, 8), np.float32),
            np.ones(9, np.float32),
            "frames of 9 samples in steps of 2 are not possible in a signal of 8 samples",
        ),
    ],
)
def test_refused_signals(x: np.ndarray, window: np.ndarray, message: str) -> None:
    refused(message, "STFT", {"x": x, "step": np.array(2), "window": window})


@pytest.mark.parametrize("op", ["HannWindow", "HammingWindow", "BlackmanWindow"])
@pytest.mark.parametrize("size", [0, 1, 2, 9, [1], [9], [[9]]], ids=str)
@pytest.mark.parametrize("periodic", [0, 1])
def test_windows(op: str, size: Any, periodic: int) -> None:
    """The size is a scalar; exporters also write a tensor with one element."""
    for kind in (np.int32, np.int64):
        ours, theirs = on_both(op, {"size": np.array(size, kind)}, periodic=periodic)
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("size", "message"), [(-1, "contains a negative size"), ([3, 4], "a single number is expected")]
)
def test_refused_windows(size: Any, message: str) -> None:
    refused(message, "HannWindow", {"size": np.array(size)})


@pytest.mark.parametrize("domain", ["", "com.microsoft"])
def test_pads_of_two_axes(one_node: Any, both: Any, domain: str) -> None:
    x = {"x": np.ones((2, 3), np.float32), "pads": np.array([[0, 1, 2, 0]])}
    (ours,), (theirs,) = both(one_node("Pad", x, domain=domain), x)
    np.testing.assert_array_equal(ours, theirs)
    for shape in ((2, 2), (4, 1), (1, 1, 4)):
        wrong = x | {"pads": x["pads"].reshape(shape)}
        with pytest.raises(Exception, match=r"expected \[2 \* axes\] or \[1, 2 \* axes\]"):
            genai.InferenceSession(one_node("Pad", wrong, domain=domain)).run(None, wrong)


def test_constant_pads_of_two_axes_before_a_convolution() -> None:
    """The rule that merges Pad into Conv does not apply, and the result is right."""
    nodes = [
        helper.make_node("Pad", ["x", "p"], ["t"], domain="com.microsoft"),
        helper.make_node("Conv", ["t", "w"], ["y"]),
    ]
    weights = [
        onnx.numpy_helper.from_array(np.array([[0, 0, 1, 1, 0, 0, 1, 1]]), "p"),
        onnx.numpy_helper.from_array(np.ones((1, 1, 3, 3), np.float32), "w"),
    ]
    infos = [helper.make_tensor_value_info(name, 1, [1, 1, 4, 4]) for name in "xy"]
    graph = helper.make_graph(nodes, "g", infos[:1], infos[1:], weights)
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=8)
    (y,) = genai.InferenceSession(model).run(None, {"x": np.ones((1, 1, 4, 4), np.float32)})
    assert y[0, 0].tolist() == [[4, 6, 6, 4], [6, 9, 9, 6], [6, 9, 9, 6], [4, 6, 6, 4]]


@pytest.mark.parametrize("axis", [None, 1])
@pytest.mark.parametrize("shape", [(), (1,), (2, 1), (2, 2), (3, 1, 1)], ids=str)
def test_conditions_of_any_rank(one_node: Any, both: Any, shape: tuple[int, ...], axis: int | None) -> None:
    condition = np.asarray(np.arange(int(np.prod(shape))).reshape(shape) % 2 == 0)
    x = {"x": np.arange(24.0).reshape(2, 3, 4), "condition": condition}
    (ours,), (theirs,) = both(one_node("Compress", x, **({} if axis is None else {"axis": axis})), x)
    np.testing.assert_array_equal(ours, theirs)

"""Less common operators of com.microsoft: values, shapes and refusals, compared with onnxruntime."""

# ruff: noqa: E501 - each case is one line of a table

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from genai.compat.onnxruntime.inference_session import InferenceSession
from genai.compat.onnxruntime.options import SessionOptions
from genai.onnx.reader import read_model
from genai.onnx.types import DataType, TensorType
from genai.optimize.shapes import infer_shapes

pytestmark = pytest.mark.oracle
MS = "com.microsoft"
NAN = float("nan")


def types_of(proto: onnx.ModelProto) -> list[tuple[str, tuple[Any, ...] | None]]:
    """Return the inferred types and shapes of a model's outputs."""
    model = read_model(proto.SerializeToString())
    infer_shapes(model)
    known = [output.type for output in model.graph.outputs]
    assert all(isinstance(type_, TensorType) for type_ in known)
    return [(type_.dtype.name, type_.shape) for type_ in known if isinstance(type_, TensorType)]


def f(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def ints(high: int, *shape: int, dtype: Any = np.int32, seed: int = 0, low: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).integers(low, high, shape).astype(dtype)


def number(value: float, dtype: Any) -> np.ndarray:
    return np.array(value, dtype)


TEXT = np.array([["", "a", "ab"], ["abc", "abcd", "Grüße"]], object)
# Operator, inputs, attributes, number of outputs.
Case = tuple[str, dict[str, Any], dict[str, Any], int]
VALUES: list[Case] = [
    ("CDist", {"a": f(5, 7), "b": f(4, 7)}, {}, 1),
    ("CDist", {"a": f(5, 7), "b": f(4, 7)}, {"metric": "euclidean"}, 1),
    ("CDist", {"a": f(5, 7).astype(np.float64), "b": f(4, 7).astype(np.float64)}, {"metric": "euclidean"}, 1),
    ("CDist", {"a": f(0, 7), "b": f(4, 7)}, {}, 1),
    ("CDist", {"a": np.array([[1, NAN]], np.float32), "b": f(4, 2)}, {}, 1),
    ("Unique", {"x": np.array([2, 1, 1, 3, 4, 3], np.float32)}, {}, 3),
    ("Unique", {"x": np.array([2, NAN, 1, NAN, -0.0, 0.0, np.inf, 2, -np.inf, np.inf], np.float32)}, {}, 3),
    ("Unique", {"x": np.zeros(0, np.float32)}, {}, 3),
    *(("MurmurHash3", {"x": ints(200, 3, 4, dtype=kind, low=0 if kind[0] == "u" else -200)}, {"seed": 7}, 1) for kind in ("int32", "uint32", "int64", "uint64")),
    ("MurmurHash3", {"x": f(3, 4)}, {"positive": 0}, 1),
    ("MurmurHash3", {"x": f(3, 4).astype(np.float64)}, {"positive": 0, "seed": -1}, 1),
    ("MurmurHash3", {"x": TEXT}, {}, 1),
    ("MurmurHash3", {"x": TEXT}, {"positive": 0, "seed": 3}, 1),
    ("MurmurHash3", {"x": np.zeros((0, 2), np.int32)}, {}, 1),
    *(("Range", {"a": number(1, kind), "b": number(12, kind), "d": number(3, kind)}, {}, 1) for kind in ("int16", "int32", "int64", "float32", "float64")),
    ("Range", {"a": number(2, "int64"), "b": number(5, "int64")}, {}, 1),
    ("Range", {"a": number(2.5, "float32"), "b": number(5, "float32"), "d": None}, {}, 1),
    ("Range", {"a": np.array([1.0]), "b": np.array([0.0]), "d": np.array([-0.3])}, {}, 1),
    ("Range", {"a": number(5, "int32"), "b": number(2, "int32")}, {}, 1),
    *(("NGramRepeatBlock", {"ids": ints(3, 4, 9, dtype=np.int64), "scores": f(4, 5)}, {"ngram_size": size}, 1) for size in (1, 2, 3, 9, 10)),
    *(("UnfoldTensor", {"x": ints(99, 4, 5, 3, dtype=kind)}, {"dim": 1, "size": 2, "step": 2}, 1) for kind in ("float32", "float64", "int32", "int64")),
    ("UnfoldTensor", {"x": f(4, 5)}, {"size": 3}, 1),
    ("UnfoldTensor", {"x": f(4, 5)}, {"dim": -2, "size": 4}, 1),
    ("UnfoldTensor", {"x": f(0, 5)}, {"size": 2}, 1),
    ("DynamicTimeWarping", {"x": ints(3, 5, 9, dtype=np.float32)}, {}, 1),
    ("DynamicTimeWarping", {"x": ints(3, 9, 5, dtype=np.float32)}, {}, 1),
    ("DynamicTimeWarping", {"x": f(1, 40, 70)}, {}, 1),
    ("DynamicTimeWarping", {"x": np.array([[NAN, 1, 2], [np.inf, NAN, 0], [-np.inf, 1, 1]], np.float32)}, {}, 1),
    ("DynamicTimeWarping", {"x": f(1, 1)}, {}, 1),
    ("DynamicTimeWarping", {"x": f(3, 0)}, {}, 1),
    ("GatherND", {"x": f(3, 4, 5), "i": ints(3, 2, 6, 2, low=-3)}, {}, 1),
    ("GatherND", {"x": f(3, 4, 5), "i": ints(3, 2, 3, dtype=np.int64)}, {}, 1),
    ("GatherND", {"x": TEXT, "i": np.array([[0, 1], [1, 2]])}, {}, 1),
    ("GatherND", {"x": f(3, 4), "i": np.zeros((2, 0), np.int64)}, {}, 1),
    *(("GridSample", {"x": f(2, 3, 5, 6), "g": 1.3 * f(2, 4, 3, 2)}, {"mode": mode, "padding_mode": padding, "align_corners": align}, 1) for mode in ("bilinear", "nearest", "bicubic") for padding in ("zeros", "border", "reflection") for align in (0, 1)),
    *(("CropAndResize", {"x": f(2, 3, 7, 9), "r": np.array([[0, 0, 1, 1], [0.2, 0.9, 0.7, -0.3], [-0.1, 0.1, 1.2, 0.8]], np.float32), "b": np.array([1, 0, 1], np.int32), "s": np.array(size, np.int32)}, {"mode": mode, "extrapolation_value": -2.0}, 1) for size in ((4, 5), (1, 3), (13, 1)) for mode in ("bilinear", "nearest")),
    ("CropAndResize", {"x": f(2, 3, 7, 9), "r": np.zeros((0, 4), np.float32), "b": np.zeros(0, np.int32), "s": np.array([2, 2], np.int32)}, {}, 1),
    ("ConvTransposeWithDynamicPads", {"x": f(2, 4, 5, 6), "w": f(4, 3, 3, 3), "p": np.array([0, 1, 1, 0]), "b": f(6)}, {"group": 2, "strides": [2, 3], "output_padding": [1, 0]}, 1),
    ("ConvTransposeWithDynamicPads", {"x": f(2, 4, 5), "w": f(4, 3, 3), "p": np.array([2, 1])}, {"dilations": [2]}, 1),
    ("NhwcMaxPool", {"x": ints(256, 2, 7, 8, 3, dtype=np.uint8)}, {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 0, 0, 1]}, 1),
    ("NhwcMaxPool", {"x": ints(100, 2, 7, 8, 3, dtype=np.int8, low=-100)}, {"kernel_shape": [2, 2], "dilations": [2, 3], "pads": [1, 1, 1, 1]}, 1),
    ("NhwcMaxPool", {"x": ints(256, 2, 7, 8, 3, dtype=np.uint8)}, {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1}, 1),
    ("NhwcMaxPool", {"x": ints(256, 2, 7, 8, 3, dtype=np.uint8)}, {"kernel_shape": [3, 3], "strides": [2, 2], "auto_pad": "SAME_LOWER"}, 1),
    *(("MaxpoolWithMask", {"x": f(2, 3, *[5] * rank), "m": ints(2, 1, 1, *[5] * rank, seed=seed)}, {"kernel_shape": [3] * rank, "pads": [1] * 2 * rank, "strides": [step] * rank}, 1) for rank in (1, 2, 3) for seed in (0, 1) for step in (1, 2)),
    ("MaxpoolWithMask", {"x": f(2, 3, 5, 4), "m": np.zeros((1, 1, 5, 4), np.int32)}, {"kernel_shape": [2, 2], "auto_pad": "SAME_UPPER"}, 1),
    ("MatMulInteger16", {"a": ints(32767, 2, 3, 4, dtype=np.int16, low=-32768), "b": ints(32767, 4, 5, dtype=np.int16)}, {}, 1),
]  # fmt: skip


def identity(case: Any) -> str:
    return case if isinstance(case, str) else ""


@pytest.mark.parametrize(("op", "inputs", "attributes", "outputs"), VALUES, ids=identity)
def test_values(one_node, both, op, inputs, attributes, outputs):
    model = one_node(op, inputs, outputs, domain=MS, **attributes)
    ours, theirs = both(model, inputs)
    for mine, other, (kind, shape) in zip(ours, theirs, types_of(model), strict=True):
        mine, other = np.asarray(mine), np.asarray(other)
        assert mine.dtype == other.dtype
        if other.dtype.kind == "f":
            np.testing.assert_allclose(mine, other, rtol=1e-4, atol=2e-5)
        else:
            np.testing.assert_array_equal(mine, other)
        assert kind == DataType.from_numpy(mine.dtype).name
        # The shape rule determines the rank, and sizes that are equal to the result's.
        assert shape is not None
        assert [have if size is None else size for size, have in zip(shape, mine.shape, strict=True)] == list(
            mine.shape
        )


SCALES = {"x_scale": number(0.02, "float32"), "x_zero": number(120, "uint8"), "y_scale": number(0.02, "float32"), "y_zero": number(100, "uint8")}  # fmt: skip


@pytest.mark.parametrize("channels_last", [0, 1])
@pytest.mark.parametrize("group", [1, 2])
def test_convolution_of_either_layout(one_node, both, channels_last, group):
    x = ints(256, 2, 4, 6, 7, dtype=np.uint8)
    inputs = {
        "x": np.moveaxis(x, 1, -1).copy() if channels_last else x, "x_scale": SCALES["x_scale"], "x_zero": SCALES["x_zero"],
        "w": ints(60, 6, 4 // group, 3, 3, dtype=np.int8, low=-60), "w_scale": np.linspace(0.001, 0.01, 6, dtype=np.float32),
        "w_zero": np.zeros(6, np.int8), "y_scale": number(0.5, "float32"), "y_zero": SCALES["y_zero"], "b": ints(500, 6, low=-500),
    }  # fmt: skip
    attributes = {"channels_last": channels_last, "group": group, "pads": [1, 1, 1, 1], "strides": [2, 1]}
    model = one_node("QLinearConv", inputs, domain=MS, **attributes)
    ours, theirs = both(model, inputs)
    assert ours[0].shape == theirs[0].shape
    assert np.abs(ours[0].astype(np.int32) - theirs[0]).max() <= 1
    assert types_of(model)[0][1][3 if channels_last else 1] == 6


@pytest.mark.parametrize(
    ("op", "attributes"),
    [
        ("QLinearAveragePool", {"kernel_shape": [2, 3], "strides": [2, 1], "pads": [0, 1, 0, 1]}),
        ("QLinearAveragePool", {"kernel_shape": [2, 2], "pads": [1, 1, 1, 1], "count_include_pad": 1}),
        ("QLinearGlobalAveragePool", {}),
    ],
    ids=identity,
)
def test_pools_of_channels_last(one_node, both, op, attributes):
    inputs = {"x": ints(256, 2, 6, 7, 3, dtype=np.uint8), **SCALES}
    ours, theirs = both(one_node(op, inputs, domain=MS, channels_last=1, **attributes), inputs)
    assert ours[0].shape == theirs[0].shape
    assert np.abs(ours[0].astype(np.int32) - theirs[0]).max() <= 1


def embedded(segments: bool = True, mask: bool = True, **other: Any) -> dict[str, Any]:
    """Return the inputs of QEmbedLayerNormalization."""
    tables = {"w": (9, 8), "p": (6, 8), "k": (2, 8), "g": (8,), "b": (8,)}
    present = {name for name in tables if segments or name != "k"}
    tensors = {
        name: ints(256, *shape, dtype=np.uint8, seed=len(name)) if name in present else None
        for name, shape in tables.items()
    }
    scales = {
        f"{name}s": number(0.01 * (i + 1), "float32") if name in present else None for i, name in enumerate(tables)
    }
    points = {f"{name}z": number(100 + i, "uint8") if name in present else None for i, name in enumerate(tables)}
    ids = {"ids": ints(9, 2, 4), "segments": ints(2, 2, 4) if segments else None}
    masks = np.array([[1, 1, 1, 0], [1, 0, 0, 0]], np.int32)
    return {**ids, **tensors, "m": masks if mask else None, **scales, **points, **other}


@pytest.mark.parametrize("mask", [True, False])
@pytest.mark.parametrize("segments", [True, False])
def test_quantised_embeddings(one_node, both, segments, mask):
    inputs = embedded(segments, mask)
    model = one_node("QEmbedLayerNormalization", inputs, 2, domain=MS)
    ours, theirs = both(model, inputs)
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(ours[1], theirs[1])
    assert types_of(model) == [("FLOAT", (2, 4, 8)), ("INT32", (2,))]


REGION = {"r": np.array([[0, 0, 1, 1]], np.float32), "b": np.array([0], np.int32), "s": np.array([2, 2], np.int32)}
REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], int, str]] = [
    ("CDist", {"a": f(2, 3), "b": f(1, 4)}, {}, 1, r"expected \[M, N\] and \[K, N\]"),
    ("CDist", {"a": f(3), "b": f(1, 3)}, {}, 1, r"expected \[M, N\] and \[K, N\]"),
    ("CDist", {"a": f(2, 3), "b": f(1, 3)}, {"metric": "cosine"}, 1, "it must be one of sqeuclidean, euclidean"),
    ("Unique", {"x": f(2, 2)}, {}, 3, "expected a vector"),
    ("MurmurHash3", {"x": ints(5, 2, dtype=np.int8)}, {}, 1, "MurmurHash3 of int8 is not defined"),
    ("Range", {"a": number(1, "int32"), "b": number(2, "int32"), "d": number(0, "int32")}, {}, 1, "delta is 0"),
    ("Range", {"a": ints(5, 2), "b": number(2, "int32")}, {}, 1, "a single number is expected"),
    ("Range", {"a": number(NAN, "float32"), "b": number(2, "float32")}, {}, 1, "has no finite length"),
    ("NGramRepeatBlock", {"ids": np.array([[1, 7, 1]]), "scores": f(1, 4)}, {"ngram_size": 2}, 1, "tokens from 7 to 7 are outside 0 to 3"),
    ("NGramRepeatBlock", {"ids": np.array([[1, -2, 1]]), "scores": f(1, 4)}, {"ngram_size": 2}, 1, "tokens from -2 to -2"),
    ("NGramRepeatBlock", {"ids": np.array([[1, 2, 1]]), "scores": f(2, 4)}, {"ngram_size": 2}, 1, r"expected \[batch, sequence\]"),
    ("NGramRepeatBlock", {"ids": np.array([[1, 2, 1]]), "scores": f(1, 4)}, {"ngram_size": 0}, 1, "it must be at least 1"),
    ("NGramRepeatBlock", {"ids": np.array([[1, 2, 1]]), "scores": f(1, 4)}, {}, 1, "the attribute 'ngram_size' is missing"),
    ("UnfoldTensor", {"x": f(4, 5)}, {"size": 6}, 1, "slices of 6 do not fit axis 1"),
    ("UnfoldTensor", {"x": f(4, 5)}, {"size": 1, "dim": 2}, 1, "axis 2 is out of range"),
    ("UnfoldTensor", {"x": f(4, 5)}, {"size": 1, "step": 0}, 1, "it must be at least 1"),
    ("UnfoldTensor", {"x": f(4, 5)}, {"size": 0}, 1, "the attribute must be at least 1"),
    ("UnfoldTensor", {"x": f()}, {"size": 1}, 1, "has no axes"),
    ("DynamicTimeWarping", {"x": f(2, 3, 3)}, {}, 1, r"expected \[M, N\] or \[1, M, N\]"),
    ("DynamicTimeWarping", {"x": f(3)}, {}, 1, r"expected \[M, N\] or \[1, M, N\]"),
    ("GatherND", {"x": f(2, 2), "i": np.array([2, 0])}, {}, 1, r"index 2 must be within the inclusive range \[-2, 1\]"),
    ("GatherND", {"x": f(2, 2), "i": np.array([0, 0, 0])}, {}, 1, "do not match data"),
    ("GatherND", {"x": f(2, 2), "i": np.array(1)}, {}, 1, "do not match data"),
    ("GridSample", {"x": f(1, 1, 2, 2), "g": f(2, 2, 2, 2)}, {}, 1, "does not match an input"),
    ("CropAndResize", {"x": f(1, 1, 4, 4), **REGION, "b": np.array([1], np.int32)}, {}, 1, "indices of images range from 1 to 1"),
    ("CropAndResize", {"x": f(1, 1, 4, 4), **REGION, "b": np.array([0, 0], np.int32)}, {}, 1, "expected 4 axes"),
    ("CropAndResize", {"x": f(1, 1, 4, 4), **REGION, "s": np.array([0, 2], np.int32)}, {}, 1, "two sizes of at least 1"),
    ("CropAndResize", {"x": f(1, 1, 4, 4), **REGION, "s": np.array([2, 2, 2], np.int32)}, {}, 1, "two sizes of at least 1"),
    ("CropAndResize", {"x": f(1, 1, 4, 4), **REGION}, {"mode": "cubic"}, 1, "expected one of bilinear, nearest"),
    ("ConvTransposeWithDynamicPads", {"x": f(1, 1, 2, 2), "w": f(1, 1, 2, 2), "p": None}, {}, 1, "the pads are None"),
    ("ConvTransposeWithDynamicPads", {"x": f(1, 1, 2, 2), "w": f(1, 1, 2, 2), "p": np.array([0, 0])}, {}, 1, "expected 4 numbers"),
    ("ConvTransposeWithDynamicPads", {"x": f(1, 1, 2, 2), "w": f(1, 1, 2, 2), "p": np.array([0, 0, -1, 0])}, {}, 1, "of at least 0"),
    ("ConvTransposeWithDynamicPads", {"x": f(1, 1, 2, 2), "w": f(1, 1, 2, 2), "p": np.array([2, 2, 2, 2])}, {}, 1, "contains a negative size"),
    ("NhwcMaxPool", {"x": ints(9, 1, 4, 4, 2, dtype=np.uint8)}, {}, 1, "needs the attribute 'kernel_shape'"),
    ("MaxpoolWithMask", {"x": f(1, 1, 4, 4), "m": ints(2, 1, 1, 4, 3)}, {"kernel_shape": [2, 2]}, 1, r"the mask has shape \[1, 1, 4, 3\]"),
    ("MaxpoolWithMask", {"x": f(1, 1, 2, 2, 2, 2), "m": ints(2, 1, 1, 2, 2, 2, 2)}, {"kernel_shape": [1] * 4}, 1, "expected 1 to 3 spatial axes"),
    ("QEmbedLayerNormalization", embedded(ids=np.full((2, 4), 9, np.int32)), {}, 2, "ids range from 9 to 9, but they must be from 0 to 8"),
    ("QEmbedLayerNormalization", embedded(False, False, ids=np.zeros((2, 7), np.int32)), {}, 2, "positions range from 0 to 6, but they must be from 0 to 5"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "inputs", "attributes", "outputs", "message"), REFUSED, ids=identity)
def test_refused(one_node, op, inputs, attributes, outputs, message):
    ort = pytest.importorskip("onnxruntime")
    model = one_node(op, inputs, outputs, domain=MS, **attributes)
    feed = {name: value for name, value in inputs.items() if value is not None}
    with pytest.raises(Exception, match=message):
        InferenceSession(model).run(None, feed)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    with pytest.raises(Exception, match=r"."):
        ort.InferenceSession(model.SerializeToString(), options).run(None, feed)


def test_masks_per_channel_are_refused(one_node):
    """onnxruntime reads parts of other planes for such masks, so the operator has no definition for them."""
    inputs = {"x": f(1, 2, 4, 4), "m": np.ones((1, 2, 4, 4), np.int32)}
    with pytest.raises(Exception, match="the mask has shape"):
        InferenceSession(one_node("MaxpoolWithMask", inputs, domain=MS, kernel_shape=[2, 2])).run(None, inputs)


def test_other_types_of_slices(one_node):
    """onnxruntime declares these types, but its kernel refuses them."""
    for values in (
        np.arange(3, dtype=np.int8),
        np.arange(3, dtype=np.uint64),
        np.arange(3) > 0,
        np.arange(3, dtype=np.float16),
        np.array(["a", "b", "c"], object),
    ):
        x = {"x": values}
        (result,) = InferenceSession(one_node("UnfoldTensor", x, domain=MS, size=2)).run(None, x)
        assert result.tolist() == [values[:2].tolist(), values[1:].tolist()]


@pytest.mark.parametrize(
    ("op", "inputs", "attributes"),
    [
        ("CDist", {"a": f(3000, 2), "b": f(3000, 2)}, {}),
        ("UnfoldTensor", {"x": f(20000)}, {"size": 10000}),
        ("DynamicTimeWarping", {"x": f(9000, 3000)}, {}),
        ("GatherND", {"x": f(2, 9000), "i": np.zeros((9000, 1), np.int64)}, {}),
        ("CropAndResize", {"x": f(1, 1, 4, 4), **REGION, "s": np.array([9000, 9000], np.int32)}, {}),
        ("GridSample", {"x": f(1, 5000, 1, 1), "g": f(1, 100, 100, 2)}, {}),
    ],
    ids=identity,
)
def test_large_results_are_refused(one_node, op, inputs, attributes):
    options = SessionOptions()
    options.add_session_config_entry("session.max_value_bytes", str(1 << 25))
    with pytest.raises(Exception, match="the limit is"):
        InferenceSession(one_node(op, inputs, domain=MS, **attributes), options).run(None, inputs)

"""Nodes whose results once differed from onnxruntime's: they are equal now, with and without rewrites."""

# ruff: noqa: E501 - each case is one line of a table

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import genai

pytestmark = pytest.mark.oracle
LINE = np.arange(1, 6, dtype=np.float32).reshape(1, 1, 5)
SQUARE = np.arange(9, dtype=np.float32).reshape(1, 1, 3, 3)
THIRDS = np.arange(8, dtype=np.float32).reshape(2, 2, 2) / 3
WORDS = np.array([["b", "x"], ["a", "y"], ["b", "x"]], object)


def f(*values: Any) -> Any:
    return np.array(values, np.float32)


def i(*values: int) -> Any:
    return np.array(values, np.int64)


def windows(**attributes: Any) -> dict[str, Any]:
    return {"kernel_shape": [2], "pads": [1, 0], "strides": [3], **attributes}


def lstm(**attributes: Any) -> tuple[str, dict[str, Any], dict[str, Any]]:
    inputs = {
        "x": np.ones((2, 1, 1), np.float32),
        "w": np.full((1, 4, 1), 5, np.float32),
        "r": np.full((1, 4, 1), 0.5, np.float32),
        "b": None,
        "lengths": None,
        "h": np.zeros((1, 1, 1), np.float32),
        "c": np.full((1, 1, 1), 2, np.float32),
    }
    return "LSTM", inputs, {"hidden_size": 1, **attributes}


# operator, inputs, attributes; "out" is the number of outputs, "version" the operator set.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "softmax before 13": ("Softmax", {"x": THIRDS}, {"axis": 1, "version": 11}),
    "log softmax before 13": ("LogSoftmax", {"x": THIRDS}, {"axis": 1, "version": 11}),
    "log softmax of far numbers": ("LogSoftmax", {"x": f([0, 200, 1000])}, {"axis": -1}),
    "max pool, least integers": ("MaxPool", {"x": np.array([[[0, 0, 0, 5]]], np.uint8)}, windows(out=2)),
    "max pool, -inf": ("MaxPool", {"x": np.full((1, 1, 4), -np.inf, np.float32)}, windows(out=2)),
    "max pool, nan": ("MaxPool", {"x": np.full((1, 1, 4), np.nan, np.float32)}, windows(out=2)),
    **{f"average pool, kernel of {k}": ("AveragePool", {"x": SQUARE}, {"kernel_shape": [k, k], "strides": [k, k], "ceil_mode": 1, "version": 20}) for k in (64, 513, 1280)},
    "average pool, kernel and pads": ("AveragePool", {"x": LINE}, {"kernel_shape": [1000], "strides": [700], "pads": [600, 600], "ceil_mode": 1, "count_include_pad": 1, "version": 20}),
    **{f"{op}, window beyond, ceil {c}": (op, {"x": np.ones((1, 1, 2, 1), np.float32)}, {"kernel_shape": [2, 2], "ceil_mode": c, "version": 18}) for op in ("AveragePool", "MaxPool", "LpPool") for c in (0, 1)},
    **{f"{op}, partial window, ceil {c}": (op, {"x": LINE}, {"kernel_shape": [6], "strides": [2], "ceil_mode": c, "version": 18}) for op in ("AveragePool", "MaxPool", "LpPool") for c in (0, 1)},
    "slice from before the start": ("Slice", {"x": i(2, 1, 7), "s": i(-10), "e": i(-7), "a": i(0), "t": i(-1)}, {}),
    "slice to before the start": ("Slice", {"x": i(2, 1, 7), "s": i(10), "e": i(-10), "a": i(0), "t": i(-2)}, {}),
    "layer norm of float64": ("LayerNormalization", {"x": np.arange(6.0).reshape(2, 3), "s": np.ones(3)}, {"out": 3}),
    "suppression without a limit": ("NonMaxSuppression", {"b": f([[0, 0, 1, 1], [2, 2, 3, 3]]), "s": f([[0.9, 0.8]])}, {}),
    "suppression with a limit": ("NonMaxSuppression", {"b": f([[0, 0, 1, 1], [2, 2, 3, 3]]), "s": f([[0.9, 0.8]]), "n": i(2)}, {}),
    **{f"{op} of nothing": (op, {"x": np.zeros((0, 0), np.float32)}, {"axis": 1, "keepdims": 0}) for op in ("ArgMax", "ArgMin")},
    "arg max of no rows": ("ArgMax", {"x": np.zeros((0, 3), np.float32)}, {"axis": 1}),
    "unique strings by axis": ("Unique", {"x": WORDS}, {"axis": 0, "out": 4}),
    "unique strings, unsorted": ("Unique", {"x": WORDS}, {"axis": 1, "sorted": 0, "out": 4}),
    "lstm, clipped": lstm(clip=0.5),
    "lstm, clipped, forget coupled": lstm(clip=0.2, input_forget=1, activations=["Sigmoid", "Tanh", "Softsign"]),
    "lstm, activations with two numbers each": lstm(activations=["HardSigmoid", "Affine", "ScaledTanh"], activation_alpha=[0.3, 0.5, 0.7], activation_beta=[0.4, 0.2, 0.9]),
    **{f"{op}, rows without steps, {direction}": (op, {"x": THIRDS[:, :, :1], "w": np.ones((d, g, 1), np.float32), "r": np.ones((d, g, 1), np.float32), "b": None, "n": np.array([0, 1], np.int32), "h": np.full((d, 2, 1), 3, np.float32), **({"c": np.full((d, 2, 1), 2, np.float32)} if g == 4 else {})}, {"hidden_size": 1, "direction": direction, "out": 3 if g == 4 else 2}) for op, g in (("RNN", 1), ("GRU", 3), ("LSTM", 4)) for direction, d in (("forward", 1), ("reverse", 1), ("bidirectional", 2))},
    "gru, affine gates": ("GRU", {"x": f([[1.0]], [[2.0]]), "w": f([[1], [2], [3]]), "r": f([[1], [-1], [2]])}, {"hidden_size": 1, "activations": ["Affine", "Elu"], "activation_alpha": [0.3, 0.5], "activation_beta": [0.4], "out": 2}),
    **{f"rms norm and its factor, {t.__name__}, axis {a}": ("SimplifiedLayerNormalization", {"x": (THIRDS - 1).astype(t), "s": np.ones((2,) * -a, t)}, {"axis": a, "out": 2}) for t in (np.float32, np.float64) for a in (-1, -2)},
    "gru, clipped": ("GRU", {"x": f([[1.0]], [[2.0]]), "w": f([[1], [2], [3]]), "r": f([[1], [-1], [2]])}, {"hidden_size": 1, "clip": 0.4, "out": 2}),
    "resize of bytes, antialiased": ("Resize", {"x": np.array([[[10, 20, 35, 47, 3]]], np.uint8), "r": None, "s": None, "n": i(1, 1, 3)}, {"mode": "linear", "antialias": 1, "version": 19}),
    "resize of an image, antialiased": ("Resize", {"x": np.arange(42, dtype=np.uint8).reshape(1, 1, 6, 7) * 5, "r": None, "s": f(1, 1, 0.5, 0.7)}, {"mode": "cubic", "antialias": 1, "version": 19}),
    "resize by 0.6": ("Resize", {"x": np.arange(6, dtype=np.float32).reshape(1, 1, 6), "r": None, "s": f(1, 1, 0.6)}, {"mode": "nearest", "nearest_mode": "floor"}),
    "resize by 5/3 in float32": ("Resize", {"x": f([[1.0, 2, 3]]), "r": None, "s": f(1, 1, 5 / 3)}, {"mode": "linear"}),
    "upsample by 7/5 in float32": ("Upsample", {"x": f([1, 2, 3, 4, 5]), "s": f(1, 7 / 5)}, {"mode": "nearest", "version": 9}),
    "resize to what it was": ("Resize", {"x": f([1, 2, 4]), "r": None, "s": f(1, 1.2)}, {"mode": "linear"}),
    "resize before there were modes": ("Resize", {"x": f([1, 2, 3, 4, 5, 6, 7]), "s": f(1, 0.6)}, {"mode": "nearest", "version": 10}),
    "resize of corners by float32": ("Resize", {"x": np.arange(7, dtype=np.float32).reshape(7, 1), "r": None, "s": f(8 / 7, 1)}, {"mode": "nearest", "nearest_mode": "floor", "coordinate_transformation_mode": "align_corners"}),
    "resize of bytes, cut off": ("Resize", {"x": np.array([[[[255, 105, 0], [7, 226, 24]]]], np.uint8), "r": None, "s": f(1, 1, 1, 3)}, {"mode": "linear", "coordinate_transformation_mode": "asymmetric"}),
    "resize, filtered along one axis": ("Resize", {"x": np.arange(10, dtype=np.float32).reshape(1, 1, 5, 2), "r": None, "s": f(1, 1, 0.75, 1.47)}, {"mode": "linear", "antialias": 1, "version": 19}),
    "resize to nothing": ("Resize", {"x": np.ones((1, 1, 2, 1), np.int32), "r": None, "s": f(1, 1, 2, 0.5)}, {"mode": "linear"}),
    "conv of nothing": ("Conv", {"x": np.zeros((0, 2, 7), np.float32), "w": np.ones((2, 2, 3), np.float32)}, {"dilations": [2]}),
    "transposed conv of nothing": ("ConvTranspose", {"x": np.zeros((0, 2, 7), np.float32), "w": np.ones((2, 2, 3), np.float32)}, {}),
    **{f"attention and its product, softcap {cap}, {heads} heads": ("Attention", {"q": np.arange(24, dtype=np.float32).reshape(1, 4, 2, 3) / 9, "k": np.arange(heads * 6, dtype=np.float32).reshape(1, heads, 2, 3) / 7, "v": np.ones((1, heads, 2, 2), np.float32), "m": f([0, -1], [-2, 0])}, {"softcap": cap, "version": 23, "out": 4}) for cap in (0.0, 2.0) for heads in (2, 4)},
    "gelu of float64": ("Gelu", {"x": np.array([-1e300, -3.0, -1e-9, 0.0, 0.7, 2.0, 1e300])}, {"approximate": "tanh", "version": 20}),
    "gelu of nothing": ("Gelu", {"x": np.zeros((2, 0), np.float32)}, {"version": 20}),
    "an infinity among pixels": ("Resize", {"x": f([[1, np.inf, 3, 4]]), "r": None, "s": f(1, 1, 2)}, {"mode": "nearest"}),
    "one string of many": ("GatherND", {"x": WORDS, "n": i(1, 0)}, {}),
    "all that was there taken away": ("Pad", {"x": np.zeros(0, np.float32), "p": i(-1, 3)}, {}),
    "the mean of nothing": ("ReduceMean", {"x": np.zeros((2, 0), np.float32)}, {"axes": [1]}),
    "zeros quantised": ("DynamicQuantizeLinear", {"x": np.zeros(3, np.float32)}, {"out": 3}),
    "a mask of nothing dropped": ("Dropout", {"x": f(1, 2)}, {"out": 2, "version": 10}),
    "bools as text": ("Cast", {"x": np.array([True, False])}, {"to": 8}),
    "floats as text": ("Cast", {"x": f(0, -0.0, 1, -0.5294097, 1e-5, 123456789, 1e20, np.nan, np.inf, -np.inf)}, {"to": 8}),
    "doubles as text": ("Cast", {"x": np.array([0.1, 1 / 3, 1e17, -np.inf])}, {"to": 8}),
    "halves as text": ("Cast", {"x": np.array([0.1, 65504, np.inf], np.float16)}, {"to": 8}),
    "integers as text": ("Cast", {"x": i(-(2**63), 0, 7)}, {"to": 8}),
    "layer norm without statistics, of no type": ("LayerNormalization", {"x": THIRDS.astype(np.float16), "s": np.ones(2, np.float16)}, {"stash_type": 0}),
    "gather at no coordinates": ("GatherND", {"x": THIRDS, "n": np.zeros((2, 0), np.int64)}, {}),
    "gather at no coordinates of a batch": ("GatherND", {"x": THIRDS, "n": np.zeros((2, 3, 0), np.int64)}, {"batch_dims": 1}),
    "scatter at no coordinates": ("ScatterND", {"x": THIRDS, "n": np.zeros((2, 0), np.int64), "u": np.arange(16, dtype=np.float32).reshape(2, 2, 2, 2)}, {}),
    **{f"conv to no channels, {g} groups": ("Conv", {"x": np.ones((1, 2, 5, 5), np.float32), "w": np.ones((0, 2 // g, 3, 3), np.float32)}, {"group": g}) for g in (1, 2)},
    "transposed conv of no channels": ("ConvTranspose", {"x": np.zeros((0, 0, 3), np.float32), "w": np.ones((0, 2, 3), np.float32)}, {}),
    **{f"grid sample of no channels, {n}": ("GridSample", {"x": np.zeros((n, 0, 3, 2), np.float32), "g": np.zeros((n, 2, 4, 2), np.float32)}, {}) for n in (0, 1)},
    "regions of no height": ("RoiAlign", {"x": np.ones((1, 4, 4, 4), np.float32), "r": np.ones((1, 4), np.float32), "n": i(0)}, {"output_height": 0}),
    "conv from no channels to none": ("Conv", {"x": np.ones((1, 0, 5), np.float32), "w": np.ones((0, 0, 3), np.float32)}, {}),
    **{f"a condition of 5, axis {a}": ("Compress", {"x": np.arange(9, dtype=np.float32).reshape(3, 3), "c": np.array([1, 0, 1, 1, 1], bool)}, {} if a is None else {"axis": a}) for a in (0, 1, -1, None)},
    "a condition longer than all": ("Compress", {"x": f(1, 2, 3), "c": np.array([0, 1, 0, 1], bool)}, {}),
    **{f"singular matrices, {t.__name__}": ("Inverse", {"x": np.array([[[1, 2], [2, 4]], [[0, 0], [0, 0]], [[2, 0], [0, 4]]], t)}, {"domain": "com.microsoft"}) for t in (np.float32, np.float64)},
    "a singular matrix of 3": ("Inverse", {"x": np.ones((3, 3), np.float32)}, {"domain": "com.microsoft"}),
    **{f"text as type {to}": ("Cast", {"x": np.array(["-2", "300", "010", "5abc", "1e3", " +7", "0x10", "1_0", "4294967297"], object)}, {"to": to}) for to in (2, 3, 4, 5, 6, 7, 9, 12, 13)},
    **{f"text as floats {to}": ("Cast", {"x": np.array(["-2", "0x10", "-0X1.8p1", "1e3", "1.", ".5", "1,5", "\t8 \n", "+inf", "-Infinity", "NaN", "nan(1)", "1e", "0x", "0b1"], object)}, {"to": to}) for to in (1, 10, 11)},
    "tokens by expression": ("Tokenizer", {"x": np.array(["the cat", "dog", ""], object)}, {"domain": "com.microsoft", "mark": 1, "mincharnum": 1, "pad_value": "#", "tokenexp": "[a-zA-Z0-9_]+"}),
    "tokens by the longest alternative": ("Tokenizer", {"x": np.array([["abab c"], ["b"]], object)}, {"domain": "com.microsoft", "mark": 0, "mincharnum": 1, "pad_value": "", "tokenexp": "a|ab"}),
    **{f"byte range of a number, {x}": ("DynamicQuantizeLinear", {"x": np.array(x, np.float32)}, {"out": 3}) for x in (3, 0, -3)},
    **{f"{op} without C, {beta}, {alpha}": (op, {"a": f([1, 2], [3, 4]), "b": f([1, 0], [0, 2]), "c": f(math.nan, math.inf)}, {"beta": beta, "alpha": alpha, **given}) for op, given in (("Gemm", {}), ("FusedGemm", {"domain": "com.microsoft", "activation": "Relu"})) for beta in (0.0, -0.0) for alpha in (1.0, 0.5)},
    "tokens between separators": ("Tokenizer", {"x": np.array(["a,bb;;c", ",x"], object)}, {"domain": "com.microsoft", "mark": 0, "mincharnum": 2, "pad_value": "#", "separators": [",", ";"]}),
    "tokens of characters": ("Tokenizer", {"x": np.array(["héllo", "日本"], object)}, {"domain": "com.microsoft", "mark": 1, "mincharnum": 1, "pad_value": "#", "separators": [""]}),
}  # fmt: skip


def model_of(name: str, *, constant: bool) -> onnx.ModelProto:
    """A model of the node; its inputs are graph inputs, or constants, so that the node is folded."""
    op_type, inputs, given = CASES[name]
    attributes = dict(given)
    domain, version, outputs = (attributes.pop(key, d) for key, d in (("domain", ""), ("version", 17), ("out", 1)))
    node = helper.make_node(
        op_type,
        ["" if value is None else key for key, value in inputs.items()],
        [f"y{n}" for n in range(outputs)],
        domain=domain,
        **attributes,
    )
    present = {key: value for key, value in inputs.items() if value is not None}
    infos = [
        helper.make_tensor_value_info(key, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        for key, value in present.items()
    ]
    tensors = [numpy_helper.from_array(value, key) for key, value in present.items()]
    graph = helper.make_graph(
        [node],
        "g",
        [] if constant else infos,
        [onnx.ValueInfoProto(name=f"y{n}") for n in range(outputs)],
        tensors if constant else [],
    )
    imports = [helper.make_opsetid("", version), *([helper.make_opsetid(domain, 1)] if domain else [])]
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


@pytest.mark.parametrize("constant", [False, True], ids=["computed", "constant"])
@pytest.mark.parametrize("name", CASES)
def test_it_is_what_onnxruntime_gives(name, constant, both):
    model = model_of(name, constant=constant)
    _, inputs, _ = CASES[name]
    feed = {} if constant else {value.name: inputs[value.name] for value in model.graph.input}
    ours, theirs = both(model, feed)
    options = genai.SessionOptions()
    options.graph_optimization_level = genai.GraphOptimizationLevel.ORT_DISABLE_ALL
    plain = genai.InferenceSession(model, options).run(None, feed)
    for a, b, c in zip(ours, plain, theirs, strict=True):
        for found in (a, b):
            assert (found.dtype, found.shape) == (c.dtype, c.shape)
            if c.dtype.kind == "f":
                np.testing.assert_allclose(found, c, rtol=2e-6, atol=1e-6)
            else:
                assert found.tolist() == c.tolist()


def test_windows_larger_than_many(one_node, both, rng):
    """Pools of any kernel, stride, padding and rounding; windows may exceed the padded input."""
    compared = 0
    for _ in range(150):
        op_type, axes = rng.choice(["AveragePool", "MaxPool", "LpPool"]), int(rng.integers(1, 3))
        kernel = rng.integers(1, 8, axes).tolist()
        attributes = {
            "kernel_shape": kernel,
            "strides": rng.integers(1, 4, axes).tolist(),
            "pads": [int(rng.integers(0, min(kernel[k % axes], 3))) for k in range(2 * axes)],
            "ceil_mode": int(rng.integers(2)),
        }
        version = int(rng.choice([18, 19]))
        if op_type == "AveragePool":
            attributes["count_include_pad"] = int(rng.integers(2))
        x = rng.integers(-3, 4, (1, 2, *rng.integers(1, 6, axes))).astype(np.float32)
        outputs = 2 if op_type == "MaxPool" else 1
        model = one_node(op_type, {"x": x}, outputs, version=version, **attributes)
        try:
            ours, theirs = both(model, {"x": x})
        except genai.GenaiError:
            raise  # onnxruntime, which runs first, accepts it
        except Exception:
            continue  # it rejects windows that are larger still
        compared += 1
        for a, b in zip(ours, theirs, strict=True):
            assert a.shape == b.shape, attributes
            np.testing.assert_allclose(a, b, rtol=1e-5, err_msg=f"{version} {attributes}")
    assert compared > 100


def refused(model: onnx.ModelProto, feed: dict[str, Any], message: str) -> None:
    with pytest.raises(genai.GenaiError, match=message) as caught:
        genai.InferenceSession(model).run(None, feed)
    assert caught.value.what
    assert caught.value.why
    assert caught.value.fix


@pytest.mark.parametrize("position", [-1, 4])
@pytest.mark.parametrize("domain", ["", "com.microsoft"])
def test_positions_outside_the_rotary_tables(domain, position, one_node):
    x, table, positions = np.ones((1, 1, 1, 4), np.float32), np.ones((4, 2), np.float32), np.array([[position]])
    order = (
        {"x": x, "c": table, "s": table, "p": positions}
        if not domain
        else {"x": x, "p": positions, "c": table, "s": table}
    )
    model = one_node("RotaryEmbedding", order, domain=domain, version=23)
    model.ir_version = 10
    refused(model, order, f"position_ids range from {position}")


@pytest.mark.parametrize("index", [-1, 3])
def test_indices_that_count_from_the_front_only(index, one_node):
    """NumPy would count negative indices from the end."""
    table, norm = np.ones((3, 4), np.float32), np.ones(4, np.float32)
    ids, row = np.array([[index]], np.int32), np.ones((1, 3), np.float32)
    embedding = {"i": ids, "k": None, "w": table, "p": table, "t": None, "g": norm, "b": norm}
    given = {key: value for key, value in embedding.items() if value is not None}
    model = one_node("EmbedLayerNormalization", embedding, 2, domain="com.microsoft")
    refused(model, given, f"ids range from {index}")
    columns = {"x": row, "i": np.array([index])}
    refused(one_node("ArrayFeatureExtractor", columns, domain="ai.onnx.ml"), columns, f"indices range from {index}")
    writing = {"c": np.zeros((1, 3, 1), np.float32), "u": np.ones((1, 1, 1), np.float32), "n": np.array([index])}
    model = one_node("TensorScatter", writing, version=24)
    model.ir_version = 11
    refused(model, writing, f"write positions range from {index}")
    regions = {"x": np.ones((3, 1, 4, 4), np.float32), "r": np.ones((1, 4), np.float32), "n": np.array([index])}
    refused(one_node("RoiAlign", regions, version=16), regions, f"batch_indices range from {index}")


@pytest.mark.parametrize("op_type", ["RNN", "GRU", "LSTM"])
@pytest.mark.parametrize("length", [-1, 3])
def test_lengths_outside_the_sequence(op_type, length, one_node):
    gates = {"RNN": 1, "GRU": 3, "LSTM": 4}[op_type]
    weight = np.ones((1, gates, 1), np.float32)
    inputs = {
        "x": np.ones((2, 1, 1), np.float32),
        "w": weight,
        "r": weight,
        "b": None,
        "n": np.array([length], np.int32),
    }
    feed = {key: value for key, value in inputs.items() if value is not None}
    refused(one_node(op_type, inputs, version=14, hidden_size=1), feed, "sequence_lens")


@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
@pytest.mark.parametrize("op_type", ["RNN", "GRU", "LSTM"])
def test_shapes_that_contradict_the_hidden_size(op_type, direction, one_node, both):
    """Each input has the shape that hidden_size, the directions and the data give; onnxruntime refuses others too."""
    gates, count = {"RNN": 1, "GRU": 3, "LSTM": 4}[op_type], 1 if direction == "forward" else 2
    shapes = {
        "x": (3, 2, 4), "w": (count, gates * 5, 4), "r": (count, gates * 5, 5), "b": (count, gates * 10), "n": None,
        "h": (count, 2, 5), **({"c": (count, 2, 5), "p": (count, 15)} if op_type == "LSTM" else {}),
    }  # fmt: skip
    inputs = {key: None if shape is None else np.ones(shape, np.float32) for key, shape in shapes.items()}
    feed = {key: value for key, value in inputs.items() if value is not None}
    attributes = {"version": 14, "direction": direction}
    ours, theirs = both(one_node(op_type, inputs, hidden_size=5, **attributes), feed)
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-5)
    for size in (4, 6):
        model = one_node(op_type, inputs, hidden_size=size, **attributes)
        refused(model, feed, f"W has shape .*hidden_size is {size}")
        with pytest.raises(Exception, match="Input W must have shape"):
            both(model, feed)
    for name, value in feed.items():
        wrong = {**feed, name: np.concatenate([value, value], axis=-1)}
        refused(
            one_node(op_type, {**inputs, **wrong}, hidden_size=5, **attributes),
            wrong,
            r"has shape .*, but it must have shape \[",
        )


@pytest.mark.parametrize(("text", "to"), [(t, to) for t in ("", "abc", "\u0663", "-", "99999999999999999999") for to in (2, 6, 7, 9, 13)]
                         + [(t, 1) for t in ("", "abc", "\u0663", ".", "-e5")] + [("9223372036854775808", 7)])  # fmt: skip
def test_texts_that_are_no_numbers(text, to, one_node, both):
    feed = {"x": np.array([text], object)}
    model = one_node("Cast", feed, to=to)
    refused(model, feed, "Cast: the ")
    with pytest.raises(Exception, match="sto"):
        both(model, feed)


@pytest.mark.parametrize("op_type", ["Conv", "ConvTranspose"])
@pytest.mark.parametrize("constant", [False, True])
def test_a_kernel_shape_that_contradicts_the_weight(op_type, constant, one_node, both):
    feed = {"x": np.ones((1, 4, 4, 4), np.float32), "w": np.ones((4, 4, 3, 3), np.float32)}
    model = one_node(op_type, feed, kernel_shape=[2, 2])
    if constant:
        model.graph.initializer.append(numpy_helper.from_array(feed.pop("w"), "w"))
        del model.graph.input[1:]
    refused(model, feed, "kernel_shape is ")
    with pytest.raises(Exception, match="kernel_shape"):
        both(model, feed)


@pytest.mark.parametrize("values", [[1, 2], [[1, 2]]])
def test_a_number_is_one_number(values, one_node):
    """Several numbers for a scalar are an error; the first one is not used."""
    feed = {"x": np.ones((3, 3), np.float32), "k": np.array(values)}
    refused(one_node("Trilu", feed), feed, "a single number is expected")


def test_arg_max_needs_an_element(one_node):
    x = np.zeros((2, 0), np.float32)
    refused(one_node("ArgMax", {"x": x}, version=13, axis=1), {"x": x}, "no elements")


@pytest.mark.parametrize("number", [2**32, 2**31])
@pytest.mark.parametrize("name", ["target_ids", "nodes_featureids"])
def test_ids_of_trees_that_do_not_fit(name, number, one_node):
    tree: dict[str, Any] = {
        "n_targets": 1, "nodes_featureids": [0, 0, 0], "nodes_treeids": [0, 0, 0], "nodes_nodeids": [0, 1, 2],
        "nodes_modes": ["BRANCH_LEQ", "LEAF", "LEAF"], "nodes_values": [0.5, 0.0, 0.0], "nodes_truenodeids": [1, 0, 0],
        "nodes_falsenodeids": [2, 0, 0], "target_treeids": [0, 0], "target_nodeids": [1, 2], "target_ids": [0, 0],
        "target_weights": [1.0, 2.0],
    }  # fmt: skip
    x = np.zeros((1, 1), np.float32)
    genai.InferenceSession(one_node("TreeEnsembleRegressor", {"x": x}, domain="ai.onnx.ml", **tree))
    tree[name] = [number, *tree[name][1:]]
    refused(one_node("TreeEnsembleRegressor", {"x": x}, domain="ai.onnx.ml", **tree), {"x": x}, "32 bits")


def test_a_linear_machine_whose_terms_cancel(one_node):
    """The decision is a small difference of large products, which float64 preserves and float32 would lose."""
    generator = np.random.default_rng(0)
    vectors, x = (1000 * generator.standard_normal((rows, 30)) for rows in (40, 20))
    weights, rho = generator.standard_normal(40), 3.0
    vectors, x, weights = (value.astype(np.float32) for value in (vectors, x, weights))
    model = one_node(
        "SVMClassifier", {"x": x}, 2, domain="ai.onnx.ml", kernel_type="LINEAR", kernel_params=[1.0, 0.0, 3.0],
        classlabels_ints=[0, 1], vectors_per_class=[20, 20], support_vectors=vectors.ravel().tolist(),
        coefficients=weights.tolist(), rho=[rho],
    )  # fmt: skip
    labels, scores = genai.InferenceSession(model).run(None, {"x": x})
    exact = x.astype(np.float64) @ vectors.astype(np.float64).T @ weights.astype(np.float64) + rho
    np.testing.assert_allclose(scores[:, 1], exact, rtol=1e-6)
    assert labels.tolist() == (exact <= 0).astype(int).tolist()


@pytest.mark.parametrize("centred", [True, False])
def test_statistics_of_a_sum(centred, one_node, rng):
    """Mean and inverse deviation of input + skip; onnxruntime leaves both outputs uninitialised."""
    op_type = "SkipLayerNormalization" if centred else "SkipSimplifiedLayerNormalization"
    x, skip = rng.standard_normal((2, 2, 3, 8)).astype(np.float32)
    feed = {"x": x, "skip": skip, "weight": np.ones(8, np.float32)}
    model = one_node(op_type, feed, 4, domain="com.microsoft", epsilon=0.01)
    normed, mean, inverse, total = genai.InferenceSession(model).run(None, feed)
    np.testing.assert_allclose(mean, total.mean(-1, keepdims=True) * centred, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose((total - mean) * inverse, normed, rtol=1e-5, atol=1e-6)


def test_gelu_of_float64_is_not_rounded_to_float32(one_node):
    x = np.array([-1e300, -3.0, -1e-9, 0.0, 0.7, 2.0, 1e300])
    model = one_node("Gelu", {"x": x}, version=20)
    model.ir_version = 10
    exact = [value * 0.5 * (1 + math.erf(value / math.sqrt(2))) for value in x.tolist()]
    np.testing.assert_allclose(genai.InferenceSession(model).run(None, {"x": x})[0], exact, rtol=1e-14)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_probabilities_of_scikit_learn():
    pytest.importorskip("skl2onnx")
    from skl2onnx import to_onnx
    from sklearn import datasets, svm

    x, y = datasets.load_digits(return_X_y=True)
    x = (x / 16).astype(np.float32)
    for kernel in ("rbf", "linear"):
        fitted = svm.SVC(kernel=kernel, probability=True, random_state=0).fit(x[::2], y[::2])
        model = to_onnx(fitted, x[:1], options={"zipmap": False})
        labels, probabilities = genai.InferenceSession(model.SerializeToString()).run(None, {"X": x[1::5]})
        np.testing.assert_allclose(probabilities, fitted.predict_proba(x[1::5]), atol=1e-5)
        assert labels.tolist() == fitted.predict(x[1::5]).tolist()


@pytest.mark.parametrize("attributes", [
    {"tokenexp": ""}, {"separators": [" *"]}, {"separators": [""], "mincharnum": 2}, {"tokenexp": "["}, {"tokenexp": "a", "mincharnum": 0},
])  # fmt: skip
def test_tokenizers_that_cannot_be(attributes, one_node):
    x = np.array(["a b"], object)
    given = {"mark": 0, "mincharnum": 1, "pad_value": "", **attributes}
    refused(one_node("Tokenizer", {"x": x}, domain="com.microsoft", **given), {"x": x}, "Tokenizer")


@pytest.mark.parametrize(
    ("block", "points", "level"), [(16, None, 0), (32, "packed", 1), (128, "floats", 2), (64, "packed", 3)]
)
def test_products_of_2_bit_weights(block, points, level, one_node, both):
    generator, n, k = np.random.default_rng(block), 24, 200
    blocks = -(-k // block)
    given: dict[str, Any] = {
        "x": generator.standard_normal((3, k)).astype(np.float32),
        "w": generator.integers(0, 256, (n, blocks, block // 4), dtype=np.uint8),
        "s": generator.random(n * blocks).astype(np.float32),
    }
    if points == "packed":
        given["z"] = generator.integers(0, 256, n * -(-blocks // 4), dtype=np.uint8)
    elif points == "floats":
        given["z"] = (3 * generator.random(n * blocks)).astype(np.float32)
    sizes = {"N": n, "K": k, "bits": 2, "block_size": block, "accuracy_level": level}
    model = one_node("MatMulNBits", given, domain="com.microsoft", **sizes)
    constants = [numpy_helper.from_array(value, key) for key, value in given.items() if key != "x"]
    model.graph.initializer.extend(constants)
    del model.graph.input[1:]
    (ours,), (theirs,) = both(model, {"x": given["x"]})
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("missing", ["w", "s", "z"])
def test_weights_of_a_product_must_be_constants(missing, one_node):
    given = {
        "x": np.ones((1, 32), np.float32),
        "w": np.ones((2, 1, 16), np.uint8),
        "s": np.ones(2, np.float32),
        "z": np.ones(2, np.uint8),
    }
    model = one_node("MatMulNBits", given, domain="com.microsoft", N=2, K=32, bits=4, block_size=32)
    inputs = [value for value in model.graph.input if value.name in ("x", missing)]
    model.graph.initializer.extend(
        numpy_helper.from_array(given[key], key) for key in ("w", "s", "z") if key != missing
    )
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    refused(model, {"x": given["x"], missing: given[missing]}, f"'{missing}'.* must be a constant")


@pytest.mark.parametrize("beta", [0.0, 1.0])
@pytest.mark.parametrize("shape", [(3,), (2, 2, 2), (3, 2)])
def test_gemm_never_takes_the_shape_of_its_addend(shape, beta, one_node, both):
    inputs = {"a": np.ones((1, 2), np.float32), "b": np.ones((2, 2), np.float32), "c": np.ones(shape, np.float32)}
    model = one_node("Gemm", inputs, beta=beta)
    with pytest.raises(Exception, match="Invalid bias shape"):
        both(model, inputs)
    with pytest.raises(genai.Fail, match=r"C of shape .* does not broadcast to the product, \[1, 2\]"):
        genai.InferenceSession(model).run(None, inputs)


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_nan_is_the_largest_number_of_a_pool(kind, one_node):
    """As in NumPy's maximum. onnxruntime's results depend on the position of NaN, and on the number of outputs."""
    x = np.array([[[1, np.nan, 2, 3, np.nan, np.nan, -np.inf, np.inf]]], kind)
    windows = np.lib.stride_tricks.sliding_window_view(x[0, 0], 2)
    for outputs in (1, 2):
        model = one_node("MaxPool", {"x": x}, outputs, kernel_shape=[2])
        found = genai.InferenceSession(model).run(None, {"x": x})
        np.testing.assert_array_equal(found[0][0, 0], windows.max(axis=1))
    assert found[1][0, 0].tolist() == [1, 1, 3, 4, 4, 5, 7]

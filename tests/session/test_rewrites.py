"""Each rewrite of the session: the graph before and after, and equal outputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import genai as ort
from genai.onnx.ir import DataType, OnnxTensor
from genai.onnx.reader import read_model
from genai.ops.registry import evaluated
from genai.optimize import constant_folding
from genai.optimize.base import Level, run_rewrites
from genai.optimize.composites import fuse_gelu, fuse_hard_swish, fuse_layer_norm, fuse_silu
from genai.optimize.constant_folding import lift_constants
from genai.optimize.convolutions import (
    fold_arithmetic_after_conv,
    fold_conv_batch_norm,
    fold_factor_before_conv,
    fold_pad_into_conv,
    fuse_conv_activation,
    fuse_conv_addition,
)
from genai.optimize.linear import fold_product_batch_norm, fuse_linear, fuse_linear_activation
from genai.optimize.quantized import fuse_integer_product_bias, fuse_matmul_integer_to_float
from genai.optimize.reshapes import fold_known_shapes
from genai.optimize.shapes import infer_shapes
from genai.optimize.simplify import merge_transposes, remove_dead_code, remove_identities, share_subexpressions
from tests.integrity import check_graph

X = (1, [2, 4])
IMAGE = (1, [1, 3, 6, 6])


def node(op: str, inputs: Sequence[str], output: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op, list(inputs), [output], **attributes)


def ops_after(model: onnx.ModelProto, *rules: Any) -> list[str]:
    """Operators after the rules, which must not change what the model computes."""
    read = read_model(model)
    infer_shapes(read)
    run_rewrites(read, (*rules, remove_dead_code), Level.ALL)
    check_graph(read.graph)
    return [item.op_type for item in read.graph.nodes]


def outputs_agree(model: onnx.ModelProto, feed: dict[str, np.ndarray]) -> None:
    plain, full = ort.SessionOptions(), ort.SessionOptions()
    plain.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    before = ort.InferenceSession(model, plain).run(None, feed)
    after = ort.InferenceSession(model, full).run(None, feed)
    for a, b in zip(before, after, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-6)


@pytest.fixture
def x() -> np.ndarray:
    return np.random.default_rng(1).standard_normal((2, 4)).astype(np.float32)


def f(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


GELUS = {
    "half of the product": [
        node("Div", "xr", "d"), node("Erf", "d", "e"), node("Add", "eo", "p"),
        node("Mul", "xp", "m"), node("Mul", "mh", "y"),
    ],
    "half first": [
        node("Div", "xr", "d"), node("Erf", "d", "e"), node("Add", "oe", "p"),
        node("Mul", "hx", "m"), node("Mul", "mp", "y"),
    ],
    "half of the sum": [
        node("Mul", "xi", "d"), node("Erf", "d", "e"), node("Add", "eo", "p"),
        node("Mul", "ph", "m"), node("Mul", "mx", "y"),
    ],
}  # fmt: skip
CONSTANTS = {"r": f(math.sqrt(2)), "i": f(math.sqrt(0.5)), "o": f(1.0), "h": f(0.5)}


@pytest.mark.parametrize("nodes", GELUS.values(), ids=GELUS)
def test_gelu(make_model, x, nodes):
    model = make_model(nodes, {"x": X}, {"y": X}, CONSTANTS)
    assert ops_after(model, fuse_gelu) == ["Gelu"]
    outputs_agree(model, {"x": x})


def test_gelu_by_tanh(make_model, x):
    nodes = [
        node("Pow", "xe", "c"), node("Mul", "ck", "d"), node("Add", "xd", "s"), node("Mul", "sq", "a"),
        node("Tanh", "a", "t"), node("Add", "to", "p"), node("Mul", "hx", "m"), node("Mul", "mp", "y"),
    ]  # fmt: skip
    constants = {**CONSTANTS, "e": f(3.0)[0], "k": f(0.044715)[0], "q": f(math.sqrt(2 / math.pi))[0]}
    model = make_model(nodes, {"x": X}, {"y": X}, constants)
    assert ops_after(model, fuse_gelu) == ["FastGelu"]
    outputs_agree(model, {"x": x})
    other = make_model(nodes, {"x": X}, {"y": X}, {**constants, "k": f(0.05)[0]})
    assert "Tanh" in ops_after(other, fuse_gelu)


def test_no_gelu_with_another_factor(make_model):
    model = make_model(GELUS["half first"], {"x": X}, {"y": X}, {**CONSTANTS, "h": f(0.7)})
    assert "Erf" in ops_after(model, fuse_gelu)


def test_no_gelu_where_its_parts_are_wanted(make_model):
    model = make_model(GELUS["half first"], {"x": X}, {"y": X, "p": X}, CONSTANTS)
    assert "Erf" in ops_after(model, fuse_gelu)


def layer_norm(epsilon_node: str = "ve") -> list[onnx.NodeProto]:
    return [
        node("ReduceMean", ["x"], "u", axes=[-1]), node("Sub", "xu", "c"), node("Pow", "ct", "q"),
        node("ReduceMean", ["q"], "v", axes=[-1]), node("Add", epsilon_node, "w"), node("Sqrt", "w", "s"),
        node("Div", "cs", "n"), node("Mul", "ng", "k"), node("Add", "kb", "y"),
    ]  # fmt: skip


NORM_CONSTANTS = {"t": f(2.0)[0], "e": f(1e-5)[0], "g": f(1, 2, 3, 4), "b": f(4, 3, 2, 1)}


@pytest.mark.parametrize("epsilon", ["ve", "ev"])
def test_layer_norm(make_model, x, epsilon):
    model = make_model(layer_norm(epsilon), {"x": X}, {"y": X}, NORM_CONSTANTS, version=17)
    assert ops_after(model, fuse_layer_norm) == ["LayerNormalization"]
    outputs_agree(model, {"x": x})


def test_no_layer_norm_over_another_axis(make_model):
    nodes = layer_norm()
    nodes[0] = node("ReduceMean", ["x"], "u", axes=[0])
    model = make_model(nodes, {"x": X}, {"y": X}, NORM_CONSTANTS, version=17)
    assert "LayerNormalization" not in ops_after(model, fuse_layer_norm)


def test_no_layer_norm_before_version_17(make_model):
    model = make_model(layer_norm(), {"x": X}, {"y": X}, NORM_CONSTANTS, version=16)
    assert "LayerNormalization" not in ops_after(model, fuse_layer_norm)


@pytest.mark.parametrize("has_bias", [False, True])
def test_conv_batch_norm(make_model, has_bias):
    rng = np.random.default_rng(3)
    constants = {
        "w": rng.standard_normal((2, 3, 3, 3)).astype(np.float32), "b": f(1, -1), "g": f(2, 3), "h": f(0.5, 1),
        "m": f(0.1, 0.2), "v": f(1.5, 0.5),
    }  # fmt: skip
    nodes = [node("Conv", "xwb" if has_bias else "xw", "c"), node("BatchNormalization", "cghmv", "y", epsilon=1e-3)]
    model = make_model(nodes, {"x": IMAGE}, {"y": (1, None)}, constants)
    assert ops_after(model, fold_conv_batch_norm) == ["Conv"]
    outputs_agree(model, {"x": rng.standard_normal((1, 3, 6, 6)).astype(np.float32)})


def test_no_conv_batch_norm_where_the_convolution_is_wanted(make_model):
    constants = {"w": np.ones((2, 3, 3, 3), np.float32), **{name: f(1, 1) for name in "ghmv"}}
    nodes = [node("Conv", "xw", "c"), node("BatchNormalization", "cghmv", "y")]
    model = make_model(nodes, {"x": IMAGE}, {"y": (1, None), "c": (1, None)}, constants)
    assert len(ops_after(model, fold_conv_batch_norm)) == 2


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("inputs", ["xw", "xwb"])
def test_transposed_conv_batch_norm(make_model, inputs, groups):
    rng = np.random.default_rng(3)
    constants = {
        "w": rng.standard_normal((4, 6 // groups, 3, 3)).astype(np.float32),
        "v": rng.uniform(0.5, 2, 6).astype(np.float32),
        **{name: rng.standard_normal(6).astype(np.float32) for name in "bghm"},
    }
    nodes = [node("ConvTranspose", inputs, "c", group=groups), node("BatchNormalization", "cghmv", "y")]
    model = make_model(nodes, {"x": (1, [1, 4, 5, 6])}, {"y": (1, None)}, constants, version=14)
    assert ops_after(model, fold_conv_batch_norm) == ["ConvTranspose"]
    outputs_agree(model, {"x": rng.standard_normal((1, 4, 5, 6)).astype(np.float32)})


NORM_OF_COLUMNS = {"g": f(2, -3, 0.5), "h": f(0.5, 1, 2), "m": f(0.1, 0.2, -1), "v": f(1.5, 0.5, 2)}


@pytest.mark.parametrize("version", [9, 14, 17])
@pytest.mark.parametrize(
    ("nodes", "rows", "bias"),
    [
        ([node("Gemm", "xw", "c")], 2, 0),
        ([node("Gemm", "xwb", "c", alpha=0.5, beta=-2.0)], 2, f(1, 2, 3)),
        ([node("Gemm", "xwb", "c", alpha=0.5, beta=2.0)], 2, f(1, 2, 3).reshape(1, 3)),
        ([node("Gemm", "xtb", "c", transB=1)], 2, f(3)),
        ([node("Gemm", "xwb", "c", transA=1)], 4, f(1, 2, 3)),
        ([node("MatMul", "xw", "c")], 2, 0),
        ([node("MatMul", "xw", "d"), node("Add", "db", "c")], 2, f(1, 2, 3)),
        ([node("MatMul", "xw", "d"), node("Add", "bd", "c")], 2, f(2)),
    ],
)
def test_product_batch_norm(make_model, nodes, rows, bias, version):
    rng = np.random.default_rng(3)
    weight = rng.standard_normal((4, 3)).astype(np.float32)
    constants = {"w": weight, "t": weight.T.copy(), "b": np.asarray(bias, np.float32), **NORM_OF_COLUMNS}
    if version < 11 and len(nodes[0].input) == 2 and nodes[0].op_type == "Gemm":
        nodes = [node("Gemm", "xwb", "c")]  # the bias was not optional
    shape = [4, 4] if rows == 4 else [2, 4]
    nodes = [*nodes, node("BatchNormalization", "cghmv", "y", epsilon=1e-3)]
    model = make_model(nodes, {"x": (1, shape)}, {"y": (1, None)}, constants, version=version)
    assert ops_after(model, fold_product_batch_norm) == ["Gemm"]
    outputs_agree(model, {"x": rng.standard_normal(shape).astype(np.float32)})


@pytest.mark.parametrize(
    ("nodes", "outputs", "constants"),
    [
        ([node("Gemm", "xw", "c")], "c", {}),
        ([node("MatMul", "xw", "d"), node("Add", "db", "c")], "d", {"b": f(1, 2, 3)}),
        ([node("MatMul", "xw", "d"), node("Add", "db", "c")], "", {"b": f(1, 2).reshape(2, 1)}),
        ([node("MatMul", "xw", "d"), node("Add", "dd", "c")], "", {}),
        ([node("MatMul", "xw", "d"), node("Add", "dx", "c")], "", {"w": np.ones((4, 1), np.float32)}),
        ([node("Gemm", "xwb", "c")], "", {"b": f(1, 2).reshape(2, 1)}),
        ([node("Gemm", "xw", "c")], "", {"v": f(1, -1, 1)}),
        ([node("Gemm", "xw", "c")], "", {"g": f(1, 3e38, 1), "w": np.full((4, 3), 9, np.float32)}),
    ],
)  # fmt: skip
def test_batch_norm_that_stays_after_a_product(make_model, nodes, outputs, constants):
    constants = {"w": np.ones((4, 3), np.float32), **NORM_OF_COLUMNS, **constants}
    nodes = [*nodes, node("BatchNormalization", "cghmv", "y")]
    model = make_model(nodes, {"x": X}, dict.fromkeys(["y", *outputs], (1, None)), constants)
    assert ops_after(model, fold_product_batch_norm) == [item.op_type for item in nodes]


def test_batch_norm_that_stays_after_stacked_products(make_model):
    nodes = [node("MatMul", "xw", "c"), node("BatchNormalization", "cghmv", "y")]
    constants = {"w": np.ones((4, 5), np.float32), **NORM_OF_COLUMNS}
    model = make_model(nodes, {"x": (1, [2, 3, 4])}, {"y": (1, None)}, constants)
    assert ops_after(model, fold_product_batch_norm) == ["MatMul", "BatchNormalization"]


PER_CHANNEL = {"number": f(-1.5)[0], "vector": f(0.5), "channels": f(2, -3, 0.5).reshape(3, 1, 1)}


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", PER_CHANNEL)
@pytest.mark.parametrize("inputs", ["xc", "cx"])
@pytest.mark.parametrize("op", ["Add", "Sub", "Mul", "Div"])
def test_arithmetic_around_conv(make_model, op, inputs, shape, has_bias):
    rng = np.random.default_rng(3)
    constants = {"w": rng.standard_normal((3, 3, 3, 3)).astype(np.float32), "b": f(1, -1, 2), "c": PER_CHANNEL[shape]}
    conv, feed = "swb" if has_bias else "sw", {"x": rng.standard_normal((1, 3, 6, 6)).astype(np.float32)}
    before = [node(op, inputs, "s"), node("Conv", conv, "y")]
    model = make_model(before, {"x": IMAGE}, {"y": (1, None)}, constants)
    is_factor, is_quotient_of_constant = op in ("Mul", "Div"), (op, inputs) == ("Div", "cx")
    expected = ["Conv"] if is_factor and not is_quotient_of_constant else [op, "Conv"]
    assert ops_after(model, fold_factor_before_conv) == expected
    outputs_agree(model, feed)
    after = [node("Conv", conv.replace("s", "x"), "s", pads=[1] * 4), node(op, inputs.replace("x", "s"), "y")]
    model = make_model(after, {"x": IMAGE}, {"y": (1, None)}, constants)
    assert ops_after(model, fold_arithmetic_after_conv) == (["Conv", op] if is_quotient_of_constant else ["Conv"])
    outputs_agree(model, feed)


@pytest.mark.parametrize("groups", [2, 4])
def test_factors_before_groups(make_model, groups):
    rng = np.random.default_rng(3)
    weight = rng.standard_normal((8, 4 // groups, 3, 3)).astype(np.float32)
    constants = {"w": weight, "s": f(1, 2, 3, 4).reshape(1, 4, 1, 1), "t": f(-1, 1, 2, 3).reshape(4, 1, 1)}
    nodes = [node("Mul", "xs", "p"), node("Div", "pt", "q"), node("Conv", "qw", "y", group=groups)]
    model = make_model(nodes, {"x": (1, [1, 4, 6, 6])}, {"y": (1, None)}, constants)
    assert ops_after(model, fold_factor_before_conv) == ["Conv"]
    outputs_agree(model, {"x": rng.standard_normal((1, 4, 6, 6)).astype(np.float32)})


@pytest.mark.parametrize(
    ("nodes", "constants"),
    [
        ([node("Mul", "xc", "s"), node("Conv", "sw", "y")], {"c": f(1, 2, 3, 4, 5, 6)}),  # per column
        ([node("Mul", "xc", "s"), node("Conv", "sw", "y")], {"c": np.ones((2, 1, 1, 1), np.float32)}),  # per image
        ([node("Mul", "xx", "s"), node("Conv", "sw", "y")], {}),
        ([node("Mul", "xc", "s"), node("Conv", "sw", "y")], {"c": f(np.inf)}),
        ([node("Mul", "xc", "s"), node("Conv", "sw", "y")], {"c": f(3e38), "w": np.full((2, 3, 3, 3), 9, np.float32)}),
        ([node("Div", "xc", "s"), node("Conv", "sw", "y")], {"c": f(0)}),
        ([node("Conv", "xw", "s"), node("Add", "sc", "y")], {"c": np.ones((1, 1, 1, 1, 1), np.float32)}),
        ([node("Conv", "xw", "s"), node("Mul", "ss", "y")], {}),
        ([node("Conv", "xw", "s"), node("Add", "sc", "y")], {"c": np.ones((2, 4, 4), np.float32)}),
    ],
)  # fmt: skip
def test_arithmetic_that_stays(make_model, nodes, constants):
    model = make_model(nodes, {"x": IMAGE}, {"y": (1, None)}, WEIGHT | constants)
    found = ops_after(model, fold_factor_before_conv, fold_arithmetic_after_conv)
    assert found == [item.op_type for item in nodes]


def test_arithmetic_that_broadcasts_channels_stays(make_model):
    nodes = [node("Mul", "xc", "s"), node("Conv", "sw", "y")]
    model = make_model(nodes, {"x": (1, [1, 1, 6, 6])}, {"y": (1, None)}, {"c": PER_CHANNEL["channels"], **WEIGHT})
    assert ops_after(model, fold_factor_before_conv) == ["Mul", "Conv"]


def test_arithmetic_on_a_value_that_is_also_an_output_stays(make_model):
    nodes = [node("Mul", "xc", "s"), node("Conv", "sw", "t"), node("Mul", "tc", "y")]
    model = make_model(nodes, {"x": IMAGE}, {"y": (1, None), "s": IMAGE, "t": (1, None)}, {"c": f(2), **WEIGHT})
    assert ops_after(model, fold_factor_before_conv, fold_arithmetic_after_conv) == ["Mul", "Conv", "Mul"]


WEIGHT = {"w": np.random.default_rng(2).standard_normal((2, 3, 3, 3)).astype(np.float32)}


@pytest.mark.parametrize(("version", "inputs"), [(20, "xp"), (20, "xpz"), (9, "x")])
def test_pad_and_conv(make_model, version, inputs):
    pads = [0, 0, 1, 0, 0, 0, 2, 1]
    more = {"pads": pads} if version < 11 else {}
    nodes = [node("Pad", inputs, "q", **more), node("Conv", "qw", "y", pads=[1, 1, 0, 0])]
    constants = {"p": np.array(pads), "z": f(0.0)[0], **WEIGHT}
    model = make_model(nodes, {"x": IMAGE}, {"y": (1, None)}, constants, version=version)
    assert ops_after(model, fold_pad_into_conv) == ["Conv"]
    outputs_agree(model, {"x": np.random.default_rng(4).standard_normal((1, 3, 6, 6)).astype(np.float32)})


@pytest.mark.parametrize(
    ("pads", "mode", "value"),
    [
        ([0, 1, 0, 0, 0, 0, 0, 0], "constant", 0.0),
        ([0, 0, 1, 1, 0, 0, 1, 1], "edge", 0.0),
        ([0] * 6 + [1, 1], "constant", 2.0),
    ],
)
def test_pads_that_stay(make_model, pads, mode, value):
    weight = {"w": np.ones((2, 3 + pads[1], 3, 3), np.float32)}
    nodes = [node("Pad", "xpz", "q", mode=mode), node("Conv", "qw", "y")]
    model = make_model(nodes, {"x": IMAGE}, {"y": (1, None)}, {"p": np.array(pads), "z": f(value)[0], **weight})
    assert ops_after(model, fold_pad_into_conv) == ["Pad", "Conv"]


@pytest.mark.parametrize("after", [node("Relu", "c", "y"), node("Clip", "clh", "y")], ids=["relu", "clip"])
def test_conv_activation(make_model, after):
    constants = {"l": f(-0.5)[0], "h": f(1.0)[0], **WEIGHT}
    model = make_model([node("Conv", "xw", "c"), after], {"x": IMAGE}, {"y": (1, None)}, constants)
    assert ops_after(model, fuse_conv_activation) == ["FusedConv"]
    outputs_agree(model, {"x": np.random.default_rng(4).standard_normal((1, 3, 6, 6)).astype(np.float32)})


def test_no_conv_activation_with_one_limit(make_model):
    nodes = [node("Conv", "xw", "c"), node("Clip", "cl", "y")]
    model = make_model(nodes, {"x": IMAGE}, {"y": (1, None)}, {"l": f(-0.5)[0], **WEIGHT})
    assert ops_after(model, fuse_conv_activation) == ["Conv", "Clip"]


def quantised_product() -> list[onnx.NodeProto]:
    return [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]), node("MatMulInteger", "qwzp", "i"),
        node("Cast", "i", "f", to=1), node("Mul", "st", "k"), node("Mul", "fk", "y"),
    ]  # fmt: skip


QUANTISED = {"w": np.arange(-6, 6, dtype=np.int8).reshape(4, 3), "p": np.array(1, np.int8), "t": f(0.5)}


def test_dynamically_quantised_product(make_model, x):
    model = make_model(quantised_product(), {"x": X}, {"y": (1, [2, 3])}, QUANTISED)
    assert ops_after(model, fuse_matmul_integer_to_float) == ["DynamicQuantizeLinear", "MatMulIntegerToFloat"]
    outputs_agree(model, {"x": x})


def test_no_quantised_product_where_the_sum_is_wanted(make_model):
    model = make_model(quantised_product(), {"x": X}, {"y": (1, [2, 3]), "i": (6, [2, 3])}, QUANTISED)
    assert "MatMulInteger" in ops_after(model, fuse_matmul_integer_to_float)


def test_common_subexpressions(make_model, x):
    nodes = [node("Add", "xa", "p"), node("Add", "xb", "q"), node("Mul", "pq", "y")]
    model = make_model(nodes, {"x": X}, {"y": X}, {"a": f(1.0), "b": f(1.0)})
    assert ops_after(model, share_subexpressions) == ["Add", "Mul"]
    outputs_agree(model, {"x": x})


def test_random_numbers_are_not_shared(make_model):
    nodes = [node("RandomUniformLike", "x", "p"), node("RandomUniformLike", "x", "q"), node("Sub", "pq", "y")]
    assert len(ops_after(make_model(nodes, {"x": X}, {"y": X}), share_subexpressions)) == 3


def test_different_attributes_are_not_shared(make_model):
    nodes = [node("Elu", "x", "p"), node("Elu", "x", "q", alpha=2.0), node("Sub", "pq", "y")]
    assert len(ops_after(make_model(nodes, {"x": X}, {"y": X}), share_subexpressions)) == 3


def test_known_shapes(make_model, x):
    nodes = [node("Shape", "x", "s", start=1), node("Size", "x", "n"), node("Add", "sn", "y")]
    model = make_model(nodes, {"x": X}, {"y": (7, [1])})
    assert ops_after(model, fold_known_shapes) == ["Add"]
    outputs_agree(model, {"x": x})


def test_unknown_shapes_stay(make_model):
    model = make_model([node("Shape", "x", "s"), node("Neg", "s", "y")], {"x": (1, ["N", 3])}, {"y": (7, [2])})
    assert ops_after(model, fold_known_shapes) == ["Shape", "Neg"]


def test_an_element_picked_from_part_of_a_shape_is_known(make_model):
    """What it is picked from is no constant: half of that is open."""
    parts = [
        node("Shape", "x", "s"),
        node("Concat", "ss", "j", axis=0),
        node("Gather", "jk", "g"),
        node("Neg", "g", "y"),
    ]
    model = make_model(parts, {"x": (1, ["N", 3])}, {"y": (7, [])}, {"k": np.int64(3)})
    assert ops_after(model, fold_known_shapes) == ["Neg"]


def test_transposes_merge_and_vanish(make_model, x):
    nodes = [node("Transpose", "x", "t", perm=[1, 0]), node("Transpose", "t", "u", perm=[1, 0]), node("Neg", "u", "y")]
    model = make_model(nodes, {"x": X}, {"y": X})
    assert ops_after(model, merge_transposes, remove_identities) == ["Neg"]
    outputs_agree(model, {"x": x})


def test_levels(make_model, x, tmp_path):
    """none changes nothing, basic does not leave the standard operators, extended fuses; what is saved runs alike."""
    model = make_model(GELUS["half first"], {"x": X}, {"y": X}, CONSTANTS)
    found = {}
    for level in ("ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED"):
        options, path = ort.SessionOptions(), tmp_path / f"{level}.onnx"
        options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
        options.optimized_model_filepath = path
        expected = ort.InferenceSession(model, options).run(None, {"x": x})[0]
        found[level] = [item.op_type for item in onnx.load(path).graph.node]
        np.testing.assert_allclose(ort.InferenceSession(path).run(None, {"x": x})[0], expected, rtol=1e-5)
    assert found["ORT_DISABLE_ALL"] == [item.op_type for item in model.graph.node]
    assert "Erf" in found["ORT_ENABLE_BASIC"]
    assert found["ORT_ENABLE_EXTENDED"] == ["Gelu"]


@pytest.mark.parametrize("order", ["mb", "bm"])
def test_linear(make_model, x, order):
    nodes = [node("MatMul", "xw", "m"), node("Add", order, "y")]
    constants = {"w": np.arange(12, dtype=np.float32).reshape(4, 3), "b": f(1, 2, 3)}
    model = make_model(nodes, {"x": X}, {"y": (1, None)}, constants)
    assert ops_after(model, fuse_linear) == ["Linear"]
    outputs_agree(model, {"x": x})


@pytest.mark.parametrize("bias", [f(1), np.ones((2, 3), np.float32)], ids=["one number", "a matrix"])
def test_other_addends_stay(make_model, x, bias):
    nodes = [node("MatMul", "xw", "m"), node("Add", "mb", "y")]
    constants = {"w": np.arange(12, dtype=np.float32).reshape(4, 3), "b": bias}
    model = make_model(nodes, {"x": X}, {"y": (1, None)}, constants)
    assert ops_after(model, fuse_linear) == ["MatMul", "Add"]
    outputs_agree(model, {"x": x})


def test_constant_nodes_become_initializers(make_model, x):
    constant = helper.make_node("Constant", [], ["c"], value_floats=[1.0, 2.0, 3.0, 4.0])
    given_out = helper.make_node("Constant", [], ["z"], value_float=1.0)
    model = make_model([constant, given_out, node("Add", "xc", "y")], {"x": X}, {"y": X, "z": (1, [])})
    assert ops_after(model, lift_constants) == ["Constant", "Add"]
    outputs_agree(model, {"x": x})


FUNCTIONS = [("Relu", {}), ("Sigmoid", {}), ("Tanh", {}), ("Gelu", {}), ("Gelu", {"approximate": "tanh"})]


@pytest.mark.parametrize(("op", "attributes"), FUNCTIONS)
def test_linear_and_an_activation(make_model, x, op, attributes):
    nodes = [node("MatMul", "xw", "m"), node("Add", "mb", "a"), node(op, "a", "y", **attributes)]
    weight = np.random.default_rng(2).standard_normal((4, 3)).astype(np.float32)
    model = make_model(nodes, {"x": X}, {"y": (1, [2, 3])}, {"w": weight, "b": f(1, 2, 3)})
    assert ops_after(model, fuse_linear, fuse_linear_activation) == ["Linear"]
    outputs_agree(model, {"x": x})


def test_no_activation_where_the_product_is_wanted(make_model):
    nodes = [node("MatMul", "xw", "m"), node("Add", "mb", "a"), node("Relu", "a", "y")]
    constants = {"w": np.ones((4, 3), np.float32), "b": f(1, 2, 3)}
    model = make_model(nodes, {"x": X}, {"y": (1, [2, 3]), "a": (1, [2, 3])}, constants)
    assert ops_after(model, fuse_linear, fuse_linear_activation) == ["Linear", "Relu"]


@pytest.mark.parametrize("order", ["cz", "zc"])
@pytest.mark.parametrize("has_relu", [False, True])
def test_conv_and_a_sum(make_model, order, has_relu):
    rng = np.random.default_rng(0)
    constants = {"w": rng.standard_normal((3, 3, 3, 3)).astype(np.float32), "b": f(1, -2, 3)}
    nodes = [node("Conv", "xwb", "c", pads=[1, 1, 1, 1]), node("Add", order, "s" if has_relu else "y")]
    nodes += [node("Relu", "s", "y")] if has_relu else []
    model = make_model(nodes, {"x": IMAGE, "z": IMAGE}, {"y": IMAGE}, constants)
    assert ops_after(model, fuse_conv_addition) == ["FusedConv"]
    images = rng.standard_normal((2, 1, 3, 6, 6)).astype(np.float32)
    outputs_agree(model, {"x": images[0], "z": images[1]})


def test_a_factor_before_a_convolution_whose_input_is_also_added_stays(make_model):
    weight = np.random.default_rng(2).standard_normal((3, 3, 3, 3)).astype(np.float32)
    nodes = [node("Mul", "xk", "t"), node("Conv", "tw", "c", pads=[1, 1, 1, 1]), node("Add", "ct", "y")]
    model = make_model(nodes, {"x": IMAGE}, {"y": IMAGE}, {"w": weight, "k": f(2)})
    assert ops_after(model, fuse_conv_addition, fold_factor_before_conv) == ["Mul", "FusedConv"]
    outputs_agree(model, {"x": weight[:1, :, :1, :1] * np.ones((1, 3, 6, 6), np.float32)})


@pytest.mark.parametrize("case", ["group", "computed weight", "broadcast", "wanted"])
def test_sums_that_stay(make_model, case):
    weight = np.ones((3, 1 if case == "group" else 3, 3, 3), np.float32)
    inputs = {"x": IMAGE, "z": (1, [1, 3, 6, 1]) if case == "broadcast" else IMAGE}
    constants = {"w": weight}
    if case == "computed weight":
        inputs["w"], constants = (1, [3, 3, 3, 3]), {}
    outputs = {"y": IMAGE, **({"c": IMAGE} if case == "wanted" else {})}
    attributes = {"group": 3} if case == "group" else {}
    nodes = [node("Conv", "xw", "c", pads=[1, 1, 1, 1], **attributes), node("Add", "cz", "y")]
    assert ops_after(make_model(nodes, inputs, outputs, constants), fuse_conv_addition) == ["Conv", "Add"]


def test_bias_of_a_quantised_product(make_model, x):
    nodes = [*quantised_product()[:-1], node("Mul", "fk", "r"), node("Add", "rb", "y")]
    model = make_model(nodes, {"x": X}, {"y": (1, [2, 3])}, {**QUANTISED, "b": f(1, -2, 3)})
    rules = (fuse_matmul_integer_to_float, fuse_integer_product_bias)
    assert ops_after(model, *rules) == ["DynamicQuantizeLinear", "MatMulIntegerToFloat"]
    outputs_agree(model, {"x": x})


SWISH = {"t": f(3)[0], "l": f(0)[0], "h": f(6)[0], "i": f(1 / 6)[0]}
CLIPPED = [node("Add", "xt", "a"), node("Clip", "alh", "c")]


@pytest.mark.parametrize(
    "nodes",
    [
        [*CLIPPED, node("Mul", "xc", "m"), node("Div", "mh", "y")],
        [*CLIPPED, node("Mul", "cx", "m"), node("Mul", "im", "y")],
        [*CLIPPED, node("Div", "ch", "m"), node("Mul", "xm", "y")],
        [*CLIPPED, node("Mul", "ci", "m"), node("Mul", "mx", "y")],
        [node("HardSigmoid", "x", "m", alpha=1 / 6), node("Mul", "mx", "y")],
    ],
)
def test_hard_swish(make_model, nodes):
    x = np.linspace(-4, 4, 8, dtype=np.float32).reshape(2, 4)
    model = make_model(nodes, {"x": X}, {"y": X}, SWISH)
    assert ops_after(model, lift_constants, fuse_hard_swish) == ["HardSwish"]
    outputs_agree(model, {"x": x})
    shown = make_model(nodes, {"x": X}, {"y": X, nodes[-2].output[0]: X}, SWISH)
    assert "HardSwish" not in ops_after(shown, lift_constants, fuse_hard_swish)


@pytest.mark.parametrize(
    "nodes",
    [
        [*CLIPPED, node("Mul", "xc", "m"), node("Div", "hm", "y")],
        [*CLIPPED, node("Mul", "xc", "m"), node("Div", "mt", "y")],
        [*CLIPPED, node("Mul", "ac", "m"), node("Div", "mh", "y")],
        [node("Add", "xt", "a"), node("Clip", "ath", "c"), node("Mul", "xc", "m"), node("Div", "mh", "y")],
        [node("HardSigmoid", "x", "m"), node("Mul", "mx", "y")],
    ],
)
def test_no_hard_swish(make_model, nodes):
    model = make_model(nodes, {"x": X}, {"y": X}, SWISH)
    assert "HardSwish" not in ops_after(model, lift_constants, fuse_hard_swish)


@pytest.mark.parametrize(
    ("nodes", "alpha"),
    [
        ([node("Sigmoid", "x", "s"), node("Mul", "xs", "y")], 1.0),
        ([node("Mul", "ax", "m"), node("Sigmoid", "m", "s"), node("Mul", "sx", "y")], 1.5),
    ],
)
def test_silu(make_model, x, nodes, alpha):
    model = make_model(nodes, {"x": X}, {"y": X}, {"a": f(1.5)[0]})
    read = read_model(model)
    infer_shapes(read)
    run_rewrites(read, [lift_constants, fuse_silu, remove_dead_code], Level.ALL)
    assert [(one.op_type, one.attribute("alpha")) for one in read.graph.nodes] == [("QuickGelu", alpha)]
    outputs_agree(model, {"x": x})
    shown = make_model(nodes, {"x": X}, {"y": X, "s": X}, {"a": f(1.5)[0]})
    assert "Sigmoid" in ops_after(shown, fuse_silu)


def test_equal_constants_are_computed_once(make_model, x, monkeypatch):
    """Exporters write the same computation of pads before each convolution; the session computes only the first."""
    nodes, last = [], "x"
    for layer in range(8):
        nodes += [
            node("Constant", "", f"a{layer}", value_floats=[1.0, 2.0, 3.0, 4.0]),
            node("Exp", [f"a{layer}"], f"e{layer}"),
            node("Add", [last, f"e{layer}"], f"y{layer}"),
        ]
        last = f"y{layer}"
    model = make_model(nodes, {"x": X}, {last: X})
    computed = []
    monkeypatch.setattr(
        constant_folding, "evaluated", lambda node, *rest: computed.append(node.op_type) or evaluated(node, *rest)
    )
    found = ort.InferenceSession(model).run(None, {"x": x})[0]
    assert computed == ["Exp"]
    expected = x
    for _ in range(8):
        expected = expected + np.exp(f(1, 2, 3, 4))
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_weights_of_convolutions_are_not_read_without_need(make_model):
    """Rules that look for arithmetic next to a convolution look at the neighbours first: weights are large."""
    nodes = [node("Relu", "x", "r"), node("Conv", "rw", "c"), node("Relu", "c", "y")]
    read = read_model(make_model(nodes, {"x": IMAGE}, {"y": IMAGE}, {"w": np.ones((3, 3, 1, 1), np.float32)}))
    infer_shapes(read)

    def fail() -> np.ndarray:
        raise AssertionError("the weight was read")

    read.graph.add_initializer(OnnxTensor.computed("w", DataType.FLOAT, (3, 3, 1, 1), fail))
    for rule in (fold_arithmetic_after_conv, fold_factor_before_conv):
        assert rule.apply(read) == 0

"""QDQ form to integer nodes: before, after, and outputs that differ by no more than a step."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper

import genai as ort
from genai.onnx.reader import read_model
from genai.optimize.base import Level, run_rewrites
from genai.optimize.convolutions import fold_pad_into_conv
from genai.optimize.quantized import fuse_quantized_arithmetic, fuse_quantized_nodes, move_quantized
from genai.optimize.shapes import infer_shapes
from genai.optimize.simplify import remove_dead_code
from tests.integrity import check_graph

STEP = 0.05
generator = np.random.default_rng(0)
WEIGHT = generator.integers(-100, 100, (8, 6)).astype(np.int8)
KERNELS = generator.integers(-100, 100, (4, 3, 3, 3)).astype(np.int8)


def f(values):
    return np.asarray(values, np.float32)


def node(op, inputs, output, **attributes):
    return helper.make_node(op, inputs.split(), [output], **attributes)


COMMON = {"xs": f(0.02), "xz": np.uint8(120), "ys": f(STEP), "yz": np.uint8(128)}
ENTER = [node("QuantizeLinear", "x xs xz", "xq"), node("DequantizeLinear", "xq xs xz", "xd")]
LEAVE = [node("QuantizeLinear", "m ys yz", "yq"), node("DequantizeLinear", "yq ys yz", "y")]
ROWS, IMAGE = [3, 8], [1, 3, 7, 7]


@pytest.fixture
def build(make_model):
    def build(nodes, shape, **constants):
        return make_model(nodes, {"x": (1, shape)}, {"y": (TensorProto.FLOAT, None)}, {**COMMON, **constants})

    return build


def ops_after(model, rule=None):
    read = read_model(model)
    infer_shapes(read)
    run_rewrites(read, (rule or fuse_quantized_nodes, remove_dead_code), Level.ALL)
    check_graph(read.graph)
    return [item.op_type for item in read.graph.nodes]


def compare(model, shape, step):
    plain = ort.SessionOptions()
    plain.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    feed = {"x": np.random.default_rng(1).standard_normal(shape).astype(np.float32)}
    before, after = (ort.InferenceSession(model, options).run(None, feed)[0] for options in (plain, None))
    assert np.ptp(before) > 0
    np.testing.assert_allclose(after, before, atol=1.01 * step, rtol=1e-5)


WEIGHTS = {
    "one scale": {"w": WEIGHT, "ws": f(0.01), "wz": np.int8(0)},
    "a scale per column": {"w": WEIGHT, "ws": f(np.linspace(0.01, 0.02, 6)), "wz": np.zeros(6, np.int8)},
    "zero points": {"w": WEIGHT, "ws": f([0.01]), "wz": np.array([5], np.int8)},
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_products(build, name):
    nodes = [*ENTER, node("DequantizeLinear", "w ws wz", "wd", axis=1), node("MatMul", "xd wd", "m"), *LEAVE]
    model = build(nodes, ROWS, **WEIGHTS[name])
    assert ops_after(model) == ["QuantizeLinear", "QLinearMatMul", "DequantizeLinear"]
    compare(model, ROWS, STEP)


def test_products_that_stay_float(build):
    nodes = [*ENTER, node("DequantizeLinear", "w ws wz", "wd", axis=1), node("MatMul", "xd wd", "y")]
    model = build(nodes, ROWS, **WEIGHTS["a scale per column"])
    assert ops_after(model) == ["QuantizeLinear", "MatMulIntegerToFloat"]
    compare(model, ROWS, 1e-4)


@pytest.mark.parametrize("bias", ["none", "int32", "float"])
@pytest.mark.parametrize("per_channel", [False, True])
def test_convolutions(build, bias, per_channel):
    scale = f(np.linspace(0.01, 0.02, 4)) if per_channel else f(0.01)
    point = np.zeros(4, np.int8) if per_channel else np.int8(0)
    constants = {"w": KERNELS, "ws": scale, "wz": point}
    nodes = [*ENTER, node("DequantizeLinear", "w ws wz", "wd", axis=0)]
    conv = "xd wd"
    if bias == "int32":
        constants |= {"b": np.arange(4, dtype=np.int32) * 999, "bs": scale * f(0.02)}
        nodes.append(node("DequantizeLinear", "b bs", "bd", axis=0))
        conv = "xd wd bd"
    elif bias == "float":
        constants |= {"bd": f([0.1, -2, 3, 0])}
        conv = "xd wd bd"
    model = build([*nodes, node("Conv", conv, "m", pads=[1, 1, 1, 1], strides=[2, 2]), *LEAVE], IMAGE, **constants)
    assert ops_after(model) == ["QuantizeLinear", "QLinearConv", "DequantizeLinear"]
    compare(model, IMAGE, STEP)


LEFT_ALONE = {
    "rows with scales of their own": ({**WEIGHTS["one scale"], "ws": f(np.ones(8)), "wz": np.zeros(8, np.int8)}, 0),
    "16 bits": ({"w": WEIGHT.astype(np.int16), "ws": f(0.01), "wz": np.int16(0)}, 1),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_what_is_left_alone(build, name):
    constants, axis = LEFT_ALONE[name]
    nodes = [*ENTER, node("DequantizeLinear", "w ws wz", "wd", axis=axis), node("MatMul", "xd wd", "m"), *LEAVE]
    model = build(nodes, ROWS, **constants)
    model.opset_import[0].version = 21
    assert "MatMul" in ops_after(model)
    compare(model, ROWS, STEP)


def test_a_bias_of_another_scale_is_rounded_to_that_of_the_products(build):
    constants = {"w": KERNELS, "ws": f(0.01), "wz": np.int8(0), "b": np.arange(4, dtype=np.int32), "bs": f(0.5)}
    dequantize = [node("DequantizeLinear", "w ws wz", "wd", axis=0), node("DequantizeLinear", "b bs", "bd")]
    model = build([*ENTER, *dequantize, node("Conv", "xd wd bd", "m"), *LEAVE], IMAGE, **constants)
    assert ops_after(model) == ["QuantizeLinear", "QLinearConv", "DequantizeLinear"]
    compare(model, IMAGE, STEP)


def test_a_bias_beyond_int32_stays(build):
    constants = {"w": KERNELS, "ws": f(0.01), "wz": np.int8(0), "b": f([1e9, 0, 0, 0])}
    nodes = [*ENTER, node("DequantizeLinear", "w ws wz", "wd", axis=0), node("Conv", "xd wd b", "m"), *LEAVE]
    model = build(nodes, IMAGE, **constants)
    assert "Conv" in ops_after(model)
    compare(model, IMAGE, STEP)


MOVES = {
    "reshape": (node("Reshape", "xd extents", "m"), {"extents": np.array([8, 3])}, "Reshape"),
    "transpose": (node("Transpose", "xd", "m", perm=[1, 0]), {}, "Transpose"),
    "pad": (node("Pad", "xd pads zero", "m"), {"pads": np.array([1, 0, 2, 0]), "zero": f(0.04)}, "Pad"),
    "pad without a number": (node("Pad", "xd pads", "m"), {"pads": np.array([1, 0, 2, 0])}, "Pad"),
    "slice": (node("Slice", "xd first last", "m"), {"first": np.array([1, 2]), "last": np.array([3, 7])}, "Slice"),
}
SAME_FORM = [node("QuantizeLinear", "m xs xz", "yq"), node("DequantizeLinear", "yq xs xz", "y")]


@pytest.mark.parametrize("name", MOVES)
def test_integers_are_moved(build, name):
    move, constants, op_type = MOVES[name]
    model = build([*ENTER, move, *SAME_FORM], ROWS, **constants)
    assert ops_after(model, move_quantized) == ["QuantizeLinear", op_type, "DequantizeLinear"]
    compare(model, ROWS, 0)


def test_what_is_quantised_again_in_the_same_form(build):
    model = build([*ENTER, node("QuantizeLinear", "xd xs xz", "yq"), SAME_FORM[1]], ROWS)
    assert ops_after(model, move_quantized) == ["QuantizeLinear", "DequantizeLinear"]
    compare(model, ROWS, 0)


def test_other_forms_are_left(build):
    model = build([*ENTER, MOVES["transpose"][0], *LEAVE], ROWS)
    assert "Transpose" in ops_after(model, move_quantized)
    assert len(ops_after(model, move_quantized)) == 5


@pytest.mark.parametrize(("filling", "expected"), [(120, "QLinearConv"), (121, "Pad")])
def test_pads_of_zero_points_join_the_convolution(build, filling, expected):
    nodes = [
        ENTER[0],
        node("Pad", "xq pads fill", "p"),
        node("QLinearConv", "p xs xz w ws wz ys yz", "yq"),
        LEAVE[1],
    ]
    constants = {
        "pads": np.array([0, 0, 1, 1, 0, 0, 1, 1]), "fill": np.uint8(filling), "w": KERNELS, "ws": f(0.01),
        "wz": np.int8(0),
    }  # fmt: skip
    model = build(nodes, IMAGE, **constants)
    assert ops_after(model, fold_pad_into_conv)[1] == expected
    compare(model, IMAGE, STEP)


@pytest.mark.parametrize("op", ["Add", "Mul"])
@pytest.mark.parametrize("other", [np.arange(8, dtype=np.uint8) * 20, np.uint8(200), np.arange(-4, 4, dtype=np.int8)])
def test_sums_and_products(build, op, other):
    nodes = [*ENTER, node("DequantizeLinear", "b bs bz", "bd"), node(op, "xd bd", "m"), *LEAVE]
    model = build(nodes, ROWS, b=other, bs=f(0.01), bz=other.dtype.type(3))
    after = ops_after(model, fuse_quantized_arithmetic)
    assert after == ["QuantizeLinear", "QuantizedBinary", "DequantizeLinear"]
    compare(model, ROWS, STEP)


def test_large_sums(build):
    shape = [40, 80]
    nodes = [*ENTER, node("DequantizeLinear", "b bs bz", "bd"), node("Add", "bd xd", "m"), *LEAVE]
    bias = np.random.default_rng(0).integers(-128, 128, 80).astype(np.int8)
    compare(build(nodes, shape, b=bias, bs=f(0.01), bz=np.int8(3)), shape, STEP)


def test_sums_with_numbers_stay(build):
    model = build([*ENTER, node("Add", "xd b", "m"), *LEAVE], ROWS, b=f(np.ones(8)))
    assert "Add" in ops_after(model, fuse_quantized_arithmetic)

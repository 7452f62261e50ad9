"""Regions of blocked images: which nodes are converted, and that the results stay the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from genai.onnx.reader import read_model
from genai.optimize.base import Level, run_rewrites
from genai.optimize.shapes import infer_shapes
from genai.optimize.standard import LAYOUT_RULES, SESSION_RULES
from genai.session.config import SessionConfig
from genai.session.session import Session
from tests.integrity import check_graph

IMAGE = (1, [1, 3, 14, 14])
RNG = np.random.default_rng(0)


def node(op: str, inputs: str, output: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op, inputs.split(), output.split(), **attributes)


def weight(*shape: int) -> np.ndarray:
    return (RNG.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32)


def conv(inputs: str, output: str, size: int = 3, **attributes: Any) -> onnx.NodeProto:
    return node("Conv", inputs, output, kernel_shape=[size, size], pads=[size // 2] * 4, **attributes)


def nodes_after(model: onnx.ModelProto) -> list[Any]:
    read = read_model(model)
    infer_shapes(read)
    run_rewrites(read, SESSION_RULES, Level.ALL)
    run_rewrites(read, LAYOUT_RULES, Level.ALL)
    check_graph(read.graph)
    return list(read.graph.nodes)


def converted(make_model: Any, nodes: Sequence[onnx.NodeProto], constants: dict[str, Any], **more: Any) -> list[Any]:
    """The nodes after all rules, which must not change the result for random images."""
    outputs, image = more.pop("outputs", "y").split(), more.pop("image", IMAGE)
    model = make_model(list(nodes), {"x": image}, dict.fromkeys(outputs, (1, None)), constants, **more)
    x = np.random.default_rng(1).standard_normal(image[1]).astype(np.float32)
    expected = Session(model, SessionConfig(level=Level.EXTENDED)).run({"x": x})
    one, two = (Session(model, SessionConfig(threads=threads)).run({"x": x}) for threads in (1, 2))
    for name, value in expected.items():
        np.testing.assert_array_equal(one[name], two[name])
        np.testing.assert_allclose(one[name], value, rtol=1e-4, atol=1e-5)
    return nodes_after(model)


WEIGHTS = {"a": weight(32, 3, 3, 3), "b": weight(32), "c": weight(32, 32, 1, 1), "d": weight(32, 1, 3, 3)}
LIMITS = {"zero": np.float32(0), "six": np.float32(6)}


def test_a_region(make_model):
    nodes = [
        conv("x a b", "p", strides=[2, 2]), node("Relu", "p", "q"), conv("q d", "r", group=32),
        node("Clip", "r zero six", "s"), conv("s c b", "t", 1), node("Add", "t q", "u"), node("Sigmoid", "u", "v"),
        node("Mul", "u v", "w"), node("GlobalAveragePool", "w", "y"),
    ]  # fmt: skip
    after = converted(make_model, nodes, WEIGHTS | LIMITS)
    names = [item.op_type for item in after]
    assert names == ["BlockedConv", "BlockedConv", "BlockedConv", "BlockedMean", "FromBlocked"]
    first, second, third, *_ = after
    assert [item.attribute("activation", "") for item in after[:3]] == ["Relu", "Clip", "QuickGelu"]
    assert first.attribute("plain") == 1 and not first.attribute("border") and len(third.inputs) == 4
    assert second.attribute("crop") is None


def test_numbers_after_an_activation(make_model):
    constants = WEIGHTS | LIMITS | {"three": np.float32(3), "s": np.float32([1.5]), "t": np.float32(-0.25)}
    swish = [node("Add", "p three", "i"), node("Clip", "i zero six", "j"), node("Mul", "p j", "k"),
             node("Div", "k six", "q")]  # fmt: skip
    nodes = [
        conv("x a b", "p"), *swish, node("Mul", "q s", "r"), node("Div", "r three", "u"), node("Sub", "t u", "v"),
        conv("v d", "w", group=32), node("Relu", "w", "y"),
    ]  # fmt: skip
    first, second, _ = converted(make_model, nodes, constants, version=12)
    assert first.attribute("activation") == "HardSwish" and second.attribute("activation") == "Relu"
    assert [first.attribute(name) for name in ("scale", "shift")] == pytest.approx([-0.5, -0.25])
    nodes[-1:] = [node("Add", "w q", "y")]  # q is read twice
    first, *_ = converted(make_model, nodes, constants, version=12)
    assert first.attribute("scale") is None


def test_numbers_for_channels(make_model):
    """A gate of squeeze and excitation, batch normalisation before a convolution, and constants."""
    names = ("g", "h", "m")
    constants = WEIGHTS | {name: weight(32) for name in names} | {"v": np.abs(weight(32)) + 1, "k": weight(32, 1, 1)}
    nodes = [
        conv("x a b", "p"), node("GlobalAveragePool", "p", "q"), conv("q c b", "r", 1), node("Sigmoid", "r", "s"),
        node("Mul", "s p", "t"), node("BatchNormalization", "t g h m v", "u"), node("Relu", "u", "w"),
        node("Add", "w k", "z"), conv("z c", "y", 1),
    ]  # fmt: skip
    after = converted(make_model, nodes, constants)
    assert [item.op_type for item in after] == [
        "BlockedConv", "BlockedMean", "BlockedConv", "BlockedScale", "BlockedScale", "BlockedScale", "BlockedConv",
        "FromBlocked",
    ]  # fmt: skip
    assert [item.attribute("activation", "") for item in after[3:6]] == ["", "Relu", ""]
    assert [len(item.inputs) for item in after[3:6]] == [2, 3, 3]


def test_numbers_for_channels_that_stay(make_model):
    constants = WEIGHTS | {"k": weight(14), "n": np.full((32, 1, 1), np.inf, np.float32), "e": weight(1, 1, 14, 1)}
    nodes = [
        conv("x a b", "p"), node("Mul", "p k", "y"), node("Sub", "p n", "z"), node("Mul", "p e", "v"),
        node("PRelu", "q k", "w"), node("Neg", "p", "q"),
    ]  # fmt: skip
    after = [item.op_type for item in converted(make_model, nodes, constants, outputs="y z v w")]
    assert "BlockedScale" not in after and after.count("Mul") == 2


@pytest.mark.parametrize("version", [11, 13, 18])
def test_means_that_remove_their_axes(make_model, version):
    axes = {"axes": [3, 2]} if version < 18 else {}
    nodes = [conv("x a b", "p"), node("ReduceMean", "p" if axes else "p axes", "y", keepdims=0, **axes)]
    after = converted(make_model, nodes, WEIGHTS | {"axes": np.array([2, -1])}, version=version)
    assert [item.op_type for item in after] == ["BlockedConv", "BlockedMean", "FromBlocked", "Squeeze"]


@pytest.mark.parametrize("size", [2, 4, 8])
def test_small_groups(make_model, size):
    nodes = [conv("x a b", "p"), conv("p g", "q", group=32 // size), conv("q g", "y", group=32 // size)]
    after = converted(make_model, nodes, WEIGHTS | {"g": weight(32, size, 3, 3)})
    assert [item.op_type for item in after] == ["BlockedConv"] * 3 + ["FromBlocked"]
    alone = converted(make_model, [conv("x g", "y", group=32 // size)], {"g": weight(32, size, 3, 3)},
                      image=(1, [1, 32, 9, 9]))  # fmt: skip
    assert [item.op_type for item in alone] == ["ToBlocked", "BlockedConv", "FromBlocked"]


def test_plain_images_of_depthwise_convolutions(make_model):
    names = [
        [item.op_type for item in converted(make_model, [conv("x w", "y", size, group=32)],
                                            {"w": weight(32, 1, size, size)}, image=(1, [1, 32, 9, 9]))]
        for size in (3, 5)
    ]  # fmt: skip
    assert names == [["Conv"], ["ToBlocked", "BlockedConv", "FromBlocked"]]


def test_divisions(make_model):
    for inputs, names in (("p six", ["BlockedConv", "Div"]), ("six p", ["BlockedConv", "FromBlocked", "Div"])):
        nodes = [conv("x a b", "p"), node("Div", inputs, "y"), node("Add", "p six", "z")]
        after = converted(make_model, nodes, WEIGHTS | LIMITS, outputs="y z")
        assert [item.op_type for item in after if item.op_type != "Add"][: len(names)] == names


def test_images_of_many_channels_are_converted_first(make_model):
    few, many = (
        converted(make_model, [conv("x w", "y")], {"w": weight(32, count, 3, 3)}, image=(1, [1, count, 9, 9]))
        for count in (31, 32)
    )
    assert [item.op_type for item in few] == ["BlockedConv", "FromBlocked"]
    assert [item.op_type for item in many] == ["ToBlocked", "BlockedConv", "FromBlocked"]


@pytest.mark.parametrize("shape", [[1, 3, 14, 14], [None, 3, None, None]])
def test_additions_of_unknown_shapes(make_model, shape):
    """The pads depend on a value, so that no shape is known before the run."""
    nodes = [
        conv("x a b", "p"), node("Shape", "p", "s"), node("Slice", "s two four", "t"), node("Sub", "t t", "u"),
        node("Concat", "none u none u", "pads", axis=0), node("Pad", "p pads", "q"), conv("q c", "r", 1),
        node("Add", "r p", "w"), node("Relu", "w", "z"), conv("z e", "y"),
    ]  # fmt: skip
    constants = WEIGHTS | {
        "two": np.array([2]),
        "four": np.array([4]),
        "none": np.array([0, 0]),
        "e": weight(16, 32, 3, 3),
    }
    model = make_model(nodes, {"x": (1, shape)}, {"y": (1, None)}, constants, version=13)
    x = np.random.default_rng(1).standard_normal((1, 3, 14, 14)).astype(np.float32)
    expected = Session(model, SessionConfig(level=Level.EXTENDED)).run({"x": x})["y"]
    assert "Add" not in [item.op_type for item in nodes_after(model)]
    session = Session(model)
    for _ in range(3):
        np.testing.assert_allclose(session.run({"x": x})["y"], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("operands", ["n p", "p n"])
def test_additions_that_broadcast(make_model, operands):
    nodes = [
        conv("x a b", "p"), node("GlobalAveragePool", "p", "m"), conv("m c", "n", 1), node("Add", operands, "q"),
        node("Relu", "q", "r"), conv("r e", "s"), node("Add", "m s", "y"),
    ]  # fmt: skip
    after = converted(make_model, nodes, WEIGHTS | {"e": weight(32, 32, 3, 3)})
    names = [item.op_type for item in after]
    assert names == ["BlockedConv", "BlockedMean", "BlockedConv", "Relu", "BlockedConv", "FromBlocked"]
    assert [len(item.inputs) for item in after if item.op_type == "BlockedConv"][1:] == [4, 4]


def test_a_value_that_an_addition_and_another_node_read(make_model):
    nodes = [conv("x a b", "p"), conv("p c", "q", 1), node("Add", "q p", "r"), node("Sigmoid", "q", "z")]
    image = (1, ["n", 3, 14, 14])
    model = make_model(nodes, {"x": image}, {"r": (1, None), "z": (1, None)}, WEIGHTS)
    assert "Add" in [item.op_type for item in nodes_after(model)]


def test_three_axes(make_model):
    nodes = [
        node("Conv", "x a b", "p", pads=[1] * 6, strides=[1, 2, 2]), node("Relu", "p", "q"),
        node("Conv", "q d", "r", pads=[1] * 6, group=32), node("Conv", "r c", "s", strides=[2, 1, 1]),
        node("ReduceMean", "s axes", "y"),
    ]  # fmt: skip
    weights = {"a": weight(32, 3, 3, 3, 3), "b": weight(32), "c": weight(24, 32, 1, 2, 3), "d": weight(32, 1, 3, 3, 3)}
    weights["axes"] = np.array([2, 3, -1])
    first, second, third, mean, _ = converted(make_model, nodes, weights, image=(1, [1, 3, 5, 9, 14]), version=18)
    assert [item.op_type for item in (first, second, third, mean)] == ["BlockedConv"] * 3 + ["BlockedMean"]
    assert first.attribute("border") == [1] * 6 == second.attribute("crop")


def test_transposed(make_model):
    nodes = [
        conv("x a b", "p"), node("ConvTranspose", "p t b", "q", strides=[2, 3], pads=[1, 0, 0, 2]),
        node("LeakyRelu", "q", "r"), conv("r a2", "s"), node("Concat", "q s", "y", axis=1),
    ]  # fmt: skip
    weights = WEIGHTS | {"t": weight(32, 32, 3, 3), "a2": weight(32, 32, 3, 3)}
    after = converted(make_model, nodes, weights)
    names = [item.op_type for item in after]
    assert names == ["BlockedConv", "BlockedConvTranspose", "LeakyRelu", "BlockedConv", "Concat", "FromBlocked"]
    nodes = [nodes[0], nodes[1], node("Relu", "q", "r"), conv("r a2", "y")]
    _, made, following, _ = converted(make_model, nodes, weights)
    assert made.attribute("activation") == "Relu" and made.attribute("border") == [1] * 4 == following.attribute("crop")


@pytest.mark.parametrize(
    ("attributes", "shape"),
    [
        ({"group": 2}, (32, 16, 2, 2)),
        ({"dilations": [1, 2]}, (32, 32, 2, 2)),
        ({"strides": [2, 3]}, (32, 32, 2, 2)),  # some results have no taps
        ({}, (32, 3, 2, 2)),
    ],
)
def test_transposed_nodes_that_stay(make_model, attributes, shape):
    nodes = [conv("x a b", "p"), node("ConvTranspose", "p t", "y", **attributes)]
    after = converted(make_model, nodes, WEIGHTS | {"t": weight(*shape)})
    assert [item.op_type for item in after] == ["BlockedConv", "FromBlocked", "ConvTranspose"]


def test_a_transposed_image_that_does_not_fit(make_model):
    nodes = [conv("x a", "p"), node("ConvTranspose", "p t", "y")]
    model = make_model(nodes, {"x": (1, None)}, {"y": (1, None)}, WEIGHTS | {"t": weight(32, 32, 2, 2)})
    with pytest.raises(Exception, match="does not match float32 kernels of shape"):
        Session(model).run({"x": np.zeros((1, 3, 5), np.float32)})


def test_pads_become_borders(make_model):
    nodes = [conv("x a b", "p"), conv("p d", "q", group=32), conv("q c", "y", 1)]
    first, second, third, _ = converted(make_model, nodes, WEIGHTS)
    assert first.attribute("border") == [1, 1, 1, 1] == second.attribute("crop")
    assert not second.attribute("border") and not third.attribute("crop")


@pytest.mark.parametrize("version", [11, 13, 18])
def test_movement_and_pools(make_model, version):
    sizes = {} if version < 13 else {"sizes": np.array([16, 16])}
    split = {"split": [16, 16]} if version < 13 else {}
    nodes = [
        conv("x a", "p"), node("Split", "p sizes" if sizes else "p", "l r", axis=1, **split),
        node("MaxPool", "l", "m", kernel_shape=[5, 5], pads=[2] * 4),
        node("AveragePool", "r", "n", kernel_shape=[3, 3], pads=[1] * 4), node("Concat", "m n l", "o", axis=-3),
        node("Resize", "o none scales", "y", mode="nearest", coordinate_transformation_mode="asymmetric"),
    ]  # fmt: skip
    constants = {"a": WEIGHTS["a"], "none": np.zeros(0, np.float32), "scales": np.float32([1, 1, 2, 1.5]), **sizes}
    after = converted(make_model, nodes, constants, version=version)
    expected = ["BlockedConv", "Split", "BlockedMaxPool", "BlockedAveragePool", "Concat", "Resize", "FromBlocked"]
    assert [item.op_type for item in after] == expected


def test_values_that_others_read(make_model):
    nodes = [conv("x a", "p"), node("Relu", "p", "q"), node("Softmax", "p", "r"), conv("q c", "y", 1)]
    after = [item.op_type for item in converted(make_model, nodes, WEIGHTS, outputs="y r q")]
    assert after.count("FromBlocked") == 3 and after.count("Relu") == 1


@pytest.mark.parametrize("op", ["LeakyRelu", "HardSwish", "HardSigmoid", "Tanh"])
def test_activations(make_model, op):
    after = converted(make_model, [conv("x a b", "p"), node(op, "p", "y")], WEIGHTS, version=14)
    assert [item.op_type for item in after] == ["BlockedConv", "FromBlocked"]
    assert after[0].attribute("activation") == op


@pytest.mark.parametrize("shape", [(32, 1, 1), (1, 32, 1, 1), (1,)])
def test_slopes_of_channels(make_model, shape):
    constants = WEIGHTS | {"s": RNG.standard_normal(shape).astype(np.float32)}
    nodes = [conv("x a b", "p"), node("PRelu", "p s", "q"), node("Add", "q p", "r"), node("PRelu", "r s", "y")]
    after = converted(make_model, nodes, constants, outputs="y q")
    made = sorted(item.op_type for item in after)
    assert made == ["Add", "BlockedConv", "FromBlocked", "FromBlocked", "PRelu", "PRelu"]
    nodes = [conv("x a b", "p"), node("PRelu", "p s", "y")]
    after = converted(make_model, nodes, constants)
    assert [item.op_type for item in after] == ["BlockedConv", "FromBlocked"]
    np.testing.assert_array_equal(after[0].attribute("activation_params"), np.broadcast_to(constants["s"].ravel(), 32))


@pytest.mark.parametrize("slope", [np.full((14, 14), 0.5, np.float32), np.full((32, 1, 1), np.inf, np.float32)])
def test_slopes_that_stay(make_model, slope):
    nodes = [conv("x a", "p"), node("PRelu", "p s", "y")]
    after = nodes_after(make_model(nodes, {"x": IMAGE}, {"y": (1, None)}, WEIGHTS | {"s": slope}))
    assert [item.op_type for item in after] == ["BlockedConv", "FromBlocked", "PRelu"]


def test_nodes_that_stay(make_model):
    constants = {"a": weight(5, 3, 3, 3), "d": weight(6, 1, 3, 3), "c": weight(16, 6, 1, 1), "k": weight(14)}
    nodes = [conv("x a", "p"), conv("x d", "q", group=3), conv("q c", "r", 1), node("Mul", "r k", "y")]
    after = [item.op_type for item in converted(make_model, nodes, constants, outputs="y p")]
    assert after == ["Conv", "Conv", "BlockedConv", "FromBlocked", "Mul"]


def test_a_computed_kernel_stays(make_model):
    nodes = [node("Neg", "w", "v"), conv("x v", "y")]
    model = make_model(nodes, {"x": IMAGE, "w": (1, [16, 3, 3, 3])}, {"y": (1, None)})
    assert "Conv" in [item.op_type for item in nodes_after(model)]


def test_an_image_that_does_not_fit(make_model):
    model = make_model([conv("x a", "p"), conv("p c", "y", 1)], {"x": (1, None)}, {"y": (1, None)}, WEIGHTS)
    with pytest.raises(Exception, match="does not match float32 kernels of shape"):
        Session(model).run({"x": np.zeros((1, 4, 5, 5), np.float32)})


def test_numbers_that_are_not_finite_stay_out_of_padding_channels(make_model: Any) -> None:
    """Zero times infinity is NaN, and a convolution would add the NaN of a padding channel to every result."""
    weights = {"a": weight(24, 3, 3, 3), "b": weight(32, 24, 1, 1), "most": np.float32(np.inf)}
    nodes = [conv("x a", "p"), node("Mul", "p most", "q"), conv("q b", "y", 1)]
    made = make_model(nodes, {"x": IMAGE}, {"y": (1, None)}, weights)
    assert [one.inputs for one in nodes_after(made) if one.op_type == "Mul"] == [["p", "most"]]


def test_regions_do_not_call_blas(make_model):
    nodes = [conv("x a", "p"), node("MaxPool", "p", "q", kernel_shape=[2, 2]), node("GlobalAveragePool", "q", "y")]
    assert not Session(make_model(nodes, {"x": IMAGE}, {"y": (1, None)}, WEIGHTS)).plan.calls_blas


def test_no_images(make_model):
    """All blocked operators accept a batch of no images, also where images have one pixel."""
    names = ("g", "h", "m")
    constants = WEIGHTS | LIMITS | {name: weight(32) for name in names} | {"v": np.abs(weight(32)) + 1}
    constants |= {"k": weight(32, 32, 2, 2), "l": np.float32([1, 1, 2, 2]), "n": np.array([16, 16])}
    nodes = [
        conv("x a b", "p"), node("GlobalAveragePool", "p", "q"), conv("q c b", "r", 1), node("Sigmoid", "r", "s"),
        node("Mul", "s p", "t"), node("BatchNormalization", "t g h m v", "u"), node("Relu", "u", "w"),
        conv("w d", "e", group=32), node("Clip", "e zero six", "f"),
        node("ConvTranspose", "f k", "i", strides=[2, 2]), node("MaxPool", "i", "j", kernel_shape=[2, 2]),
        node("AveragePool", "j", "o", kernel_shape=[3, 3], count_include_pad=1),
        helper.make_node("Resize", ["o", "", "l"], ["aa"]),
        node("Split", "aa n", "bb cc", axis=1), node("Concat", "bb cc", "dd", axis=1), node("Abs", "dd", "y"),
    ]  # fmt: skip
    outputs = dict.fromkeys(("q", "s", "y", "w"), (1, None))
    model = make_model(nodes, {"x": (1, ["N", 3, 14, 14])}, outputs, constants, version=17)
    blocked = {item.op_type for item in nodes_after(model)}
    assert {"BlockedMean", "BlockedScale", "BlockedConvTranspose", "BlockedMaxPool", "BlockedAveragePool"} < blocked
    plain = Session(model, SessionConfig(level=Level.NONE))
    for threads in (1, 2):
        session = Session(model, SessionConfig(threads=threads))
        for images in (0, 1, 0):
            x = np.random.default_rng(1).standard_normal((images, 3, 14, 14)).astype(np.float32)
            found, expected = session.run({"x": x}), plain.run({"x": x})
            for name, value in expected.items():
                np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("version", "ceil_mode", "count"), [(17, 0, 16), (17, 1, 12), (19, 0, 12)])
def test_pools_of_windows_that_exceed_the_pads(make_model, version, ceil_mode, count):
    pool = {"kernel_shape": [4, 4], "strides": [3, 3], "pads": [0, 1, 1, 1], "count_include_pad": 1}
    nodes = [conv("x c", "p", 1), node("AveragePool", "p", "y", ceil_mode=ceil_mode, **pool)]
    after = converted(make_model, nodes, WEIGHTS, image=(1, [1, 32, 2, 2]), version=version)
    assert "BlockedAveragePool" in [item.op_type for item in after]
    constants = {"c": np.eye(32, dtype=np.float32).reshape(32, 32, 1, 1)}
    model = make_model(nodes, {"x": (1, [1, 32, 2, 2])}, {"y": (1, None)}, constants, version=version)
    found = Session(model, SessionConfig()).run({"x": np.ones((1, 32, 2, 2), np.float32)})["y"]
    np.testing.assert_allclose(found, np.full((1, 32, 1, 1), 4 / count), rtol=1e-6)

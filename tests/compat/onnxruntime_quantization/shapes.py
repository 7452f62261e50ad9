"""Graphs of the shapes of ResNet-50, MobileNetV2 and BERT, with random weights: as wide and deep as they are asked to
be, and with the operators that exporters write.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

FLOAT, INT64 = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64
OPSET = 17


@dataclass
class Builder:
    """Nodes and constants of a graph under way; values get numbers for names."""

    seed: int = 0
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: dict[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)

    def node(self, op_type: str, *inputs: str, **attributes: Any) -> str:
        """A node of one output, whose name is returned."""
        name = f"{op_type.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, list(inputs), [f"{name}_out"], name=name, **attributes))
        return f"{name}_out"

    def constant(self, array: Any, kind: Any = np.float32) -> str:
        """A constant."""
        name = f"constant_{len(self.constants)}"
        self.constants[name] = np.asarray(array, kind)
        return name

    def weights(self, *shape: int, gain: float = 2.0, inputs: int | None = None) -> str:
        """Normal ones that keep the size of what goes through them."""
        deviation = np.sqrt(gain / (inputs or np.prod(shape[1:])))
        return self.constant(self.random.standard_normal(shape) * deviation)

    def model(self, inputs: dict[str, tuple[int, list[Any]]], output: str, shape: list[Any]) -> onnx.ModelProto:
        """The whole; its output is called "y"."""
        self.nodes[-1].output[0] = "y"
        assert self.nodes[-1].name in output
        graph = helper.make_graph(
            self.nodes,
            "shape",
            [helper.make_tensor_value_info(name, *kind) for name, kind in inputs.items()],
            [helper.make_tensor_value_info("y", FLOAT, shape)],
            [numpy_helper.from_array(array, name) for name, array in self.constants.items()],
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)

    def conv(self, x: str, inputs: int, outputs: int, size: int, stride: int = 1, groups: int = 1) -> str:
        """A convolution with a bias, as batch norms leave it."""
        weight = self.weights(outputs, inputs // groups, size, size, gain=1.6)
        bias = self.constant(self.random.standard_normal(outputs) * 0.1)
        pads = [size // 2] * 4
        return self.node(
            "Conv", x, weight, bias, kernel_shape=[size] * 2, pads=pads, strides=[stride] * 2, group=groups
        )

    def linear(self, x: str, inputs: int, outputs: int, gain: float = 1.0) -> str:
        """MatMul and bias."""
        product = self.node("MatMul", x, self.weights(inputs, outputs, gain=gain, inputs=inputs))
        return self.node("Add", product, self.constant(self.random.standard_normal(outputs) * 0.1))


def resnet(width: int = 64, depths: tuple[int, ...] = (3, 4, 6, 3), classes: int = 1000, size: int = 224) -> Any:
    """Bottleneck blocks; the defaults are ResNet-50."""
    g = Builder(1)
    x = g.node("Relu", g.conv("x", 3, width, 7, 2))
    x, channels = g.node("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4), width
    for stage, depth in enumerate(depths):
        inner, outer = width << stage, 4 * (width << stage)
        for block in range(depth):
            stride = 2 if stage and not block else 1
            branch = g.node("Relu", g.conv(x, channels, inner, 1))
            branch = g.node("Relu", g.conv(branch, inner, inner, 3, stride))
            branch = g.conv(branch, inner, outer, 1)
            shortcut = x if block else g.conv(x, channels, outer, 1, stride)
            x, channels = g.node("Relu", g.node("Add", branch, shortcut)), outer
    x = g.node("Flatten", g.node("GlobalAveragePool", x))
    x = g.node("Gemm", x, g.weights(classes, channels, gain=1.0), g.constant(np.zeros(classes)), transB=1)
    return g.model({"x": (FLOAT, ["N", 3, size, size])}, x, ["N", classes])


# Expansion, channels, repeats, stride: table 2 of Sandler et al. 2018.
_INVERTED = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))


def mobilenet(divide: int = 1, blocks: int = 7, classes: int = 1000, size: int = 224) -> Any:
    """Inverted residuals; the defaults are MobileNetV2."""
    g = Builder(2)
    limits = g.constant(0.0), g.constant(6.0)

    def relu6(x: str) -> str:
        return g.node("Clip", x, *limits)

    channels = 32 // divide
    x = relu6(g.conv("x", 3, channels, 3, 2))
    for expansion, wide, repeats, stride in _INVERTED[:blocks]:
        for repeat in range(repeats):
            inner, outputs, step = channels * expansion, wide // divide, 1 if repeat else stride
            branch = x if expansion == 1 else relu6(g.conv(x, channels, inner, 1))
            branch = relu6(g.conv(branch, inner, inner, 3, step, inner))
            branch = g.conv(branch, inner, outputs, 1)
            x = g.node("Add", branch, x) if repeat else branch
            channels = outputs
    last = 1280 // divide
    x = relu6(g.conv(x, channels, last, 1))
    x = g.node("Flatten", g.node("GlobalAveragePool", x))
    x = g.node("Gemm", x, g.weights(classes, last, gain=1.0), g.constant(np.zeros(classes)), transB=1)
    return g.model({"x": (FLOAT, ["N", 3, size, size])}, x, ["N", classes])


def bert(hidden: int = 768, layers: int = 12, heads: int = 12, words: int = 30522, masked: bool = True) -> Any:
    """An encoder, with a mask of the smallest float as exporters write it; the defaults are BERT-base."""
    g = Builder(3)
    inner, size = 4 * hidden, hidden // heads
    x = g.node("Gather", g.weights(words, hidden, gain=0.02 * hidden), "ids")
    x = norm(g, x, hidden)
    if masked:
        wide = g.node("Unsqueeze", g.node("Cast", "mask", to=FLOAT), g.constant([1, 2], np.int64))
        left = g.node("Sub", g.constant(1.0), wide)
        mask = g.node("Mul", left, g.constant(np.finfo(np.float32).min))
    for _ in range(layers):
        query, key, value = (split(g, g.linear(x, hidden, hidden), heads, size) for _ in range(3))
        key = g.node("Transpose", key, perm=[0, 1, 3, 2])
        scores = g.node("Div", g.node("MatMul", query, key), g.constant(np.sqrt(size)))
        if masked:
            scores = g.node("Add", scores, mask)
        mixed = g.node("MatMul", g.node("Softmax", scores, axis=-1), value)
        mixed = g.node("Transpose", mixed, perm=[0, 2, 1, 3])
        mixed = g.node("Reshape", mixed, g.constant([0, 0, hidden], np.int64))
        x = norm(g, g.node("Add", x, g.linear(mixed, hidden, hidden)), hidden)
        x = norm(g, g.node("Add", x, g.linear(gelu(g, g.linear(x, hidden, inner)), inner, hidden)), hidden)
    inputs = {"ids": (INT64, ["batch", "sequence"])}
    if masked:
        inputs["mask"] = (INT64, ["batch", "sequence"])
    return g.model(inputs, x, ["batch", "sequence", hidden])


def split(g: Builder, x: str, heads: int, size: int) -> str:
    """[batch, sequence, hidden] -> [batch, heads, sequence, size]"""
    return g.node("Transpose", g.node("Reshape", x, g.constant([0, 0, heads, size], np.int64)), perm=[0, 2, 1, 3])


def norm(g: Builder, x: str, hidden: int) -> str:
    """LayerNormalization."""
    scale = g.constant(1 + 0.1 * g.random.standard_normal(hidden))
    return g.node("LayerNormalization", x, scale, g.constant(0.1 * g.random.standard_normal(hidden)))


def gelu(g: Builder, x: str) -> str:
    """x * (1 + erf(x / sqrt(2))) / 2"""
    turned = g.node("Add", g.node("Erf", g.node("Div", x, g.constant(np.sqrt(2)))), g.constant(1.0))
    return g.node("Mul", g.node("Mul", x, turned), g.constant(0.5))

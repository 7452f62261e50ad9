"""Converts quantised graphs: QDQ form to integer operators, and each dynamically quantised product to a single node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..onnx.ir import DataType, Graph, Node, OnnxModel
from ..onnx.node import MS, OURS
from ..onnx.types import TensorType
from . import base

_INTEGERS = (DataType.INT8, DataType.UINT8)


@dataclass(frozen=True)
class _Quantized:
    """The names of an 8-bit value, its scale and its zero point; `axis`: the scales' axis, None for a single scale."""

    value: str
    scale: str
    zero_point: str
    axis: int | None

    @property
    def names(self) -> tuple[str, str, str]:
        return self.value, self.scale, self.zero_point


@base.graph_rule(base.Level.EXTENDED, since=10)
def fuse_quantized_nodes(model: OnnxModel, graph: Graph) -> int:
    """QuantizeLinear(f(DequantizeLinear(x), DequantizeLinear(w), ...)) -> QLinearMatMul or QLinearConv.

    A MatMul with a float result becomes com.microsoft::MatMulIntegerToFloat. Results may differ by one quantisation
    step from the results of the float form, which rounds before it quantises.
    """
    return sum(_fuse_matmul(model, graph, node) or _fuse_conv(graph, node) for node in list(graph.nodes))


def _fuse_matmul(model: OnnxModel, graph: Graph, node: Node) -> bool:
    if node.key != ("", "MatMul"):
        return False
    a, b = (dequantized(graph, name) for name in node.inputs)
    if a is None or b is None or a.axis is not None:
        return False
    matrix = graph.constant_tensor(b.value)
    by_column = matrix is not None and len(matrix.shape) == 2 and b.axis in (1, -1)
    if b.axis is not None and not by_column:
        return False
    quantize = following_quantize(graph, node.output(0))
    if quantize is not None:
        inputs = [*a.names, *b.names, *quantize.inputs[1:]]
        return base.replaced(graph, quantize, "QLinearMatMul", inputs, name=node.name)
    inputs = [a.value, b.value, a.scale, b.scale, a.zero_point, b.zero_point]
    model.opset_imports.setdefault(MS, 1)
    return base.replaced(graph, node, "MatMulIntegerToFloat", inputs, domain=MS)


def _fuse_conv(graph: Graph, node: Node) -> bool:
    if node.key != ("", "Conv"):
        return False
    x, weight = (dequantized(graph, name) for name in node.inputs[:2])
    quantize = following_quantize(graph, node.output(0))
    if x is None or weight is None or quantize is None or x.axis is not None or weight.axis not in (None, 0):
        return False
    inputs = [*x.names, *weight.names, *quantize.inputs[1:]]
    if node.input(2):
        bias = _integer_bias(graph, node.input(2), x.scale, weight.scale)
        if bias is None:
            return False
        inputs.append(bias)
    fused = node.copy()
    fused.op_type, fused.inputs, fused.outputs = "QLinearConv", inputs, list(quantize.outputs)
    graph.replace_node(quantize, fused)
    return True


def dequantized(graph: Graph, name: str) -> _Quantized | None:
    """Match an 8-bit value that is dequantised to float32 with a zero point; return its names, or None."""
    node = base.made_by(graph, name, "DequantizeLinear")
    if node is None or not node.input(2) or node.attribute("block_size", 0) or node.attribute("output_dtype", 0):
        return None
    value, scale = graph.type_of(node.input(0)), graph.type_of(node.input(1))
    if not isinstance(value, TensorType) or value.dtype not in _INTEGERS or not isinstance(scale, TensorType):
        return None
    if scale.dtype is not DataType.FLOAT or scale.shape is None or len(scale.shape) > 1:
        return None
    axis = None if scale.shape in ((), (1,)) else int(node.attribute("axis", 1))
    return _Quantized(node.input(0), node.input(1), node.input(2), axis)


def following_quantize(graph: Graph, name: str) -> Node | None:
    """Return the only user of a value if it quantises to 8 bits with one scale and zero point; otherwise None."""
    node = base.followed_by(graph, name, "QuantizeLinear")
    if node is None or not node.input(2) or node.attribute("block_size", 0):
        return None
    scale, point = graph.type_of(node.input(1)), graph.type_of(node.input(2))
    if not isinstance(scale, TensorType) or not isinstance(point, TensorType) or point.dtype not in _INTEGERS:
        return None
    return node if scale.dtype is DataType.FLOAT and scale.shape in ((), (1,)) else None


def _integer_bias(graph: Graph, name: str, x_scale: str, weight_scale: str) -> str | None:
    """Return a constant bias as int32 at the products' scale: the stored bias if it has that scale, else rounded."""
    first, second = graph.constant(x_scale), graph.constant(weight_scale)
    if first is None or second is None:
        return None
    scale = first.reshape(()).astype(np.float64) * second.reshape(-1)
    node = base.made_by(graph, name, "DequantizeLinear")
    if node is None:
        return _rounded(graph, name, graph.constant(name), scale)
    stored, stored_scale = graph.constant(node.input(0)), graph.constant(node.input(1))
    point = graph.constant(node.input(2)) if node.input(2) else np.zeros((), np.int32)
    if (
        stored is None
        or stored_scale is None
        or point is None
        or stored.ndim != 1
        or stored_scale.size not in (1, len(stored))
    ):
        return None
    if (
        stored.dtype == np.int32
        and not np.any(point)
        and np.allclose(stored_scale.reshape(-1), scale, rtol=1e-5, atol=0)
    ):
        return node.input(0)
    return _rounded(graph, name, (stored.astype(np.float64) - point) * stored_scale.reshape(-1), scale)


def _rounded(graph: Graph, name: str, bias: Any, scale: Any) -> str | None:
    if bias is None or bias.dtype.kind != "f" or not np.all(scale > 0):
        return None
    steps = np.rint(bias.astype(np.float64) / scale)
    if not np.all(np.abs(steps) < 2**31):
        return None
    return graph.add_constant(f"{name}/int32", steps.astype(np.int32))


@base.node_rule(base.Level.EXTENDED, ("", "Add"), ("", "Mul"), domain=OURS)
def fuse_quantized_arithmetic(graph: Graph, node: Node) -> bool:
    """QuantizeLinear(f(DequantizeLinear(a), DequantizeLinear(b))) -> genai::QuantizedBinary, for f = Add or Mul.

    The arithmetic does not change: dequantise, combine in float32, quantise.
    """
    a, b = (dequantized(graph, name) for name in node.inputs)
    quantize = following_quantize(graph, node.output(0))
    if a is None or b is None or quantize is None or a.axis is not None or b.axis is not None:
        return False
    inputs = [*a.names, *b.names, *quantize.inputs[1:]]
    name, function = node.name, node.op_type
    return base.replaced(graph, quantize, "QuantizedBinary", inputs, domain=OURS, name=name, function=function)


@base.node_rule(base.Level.EXTENDED, ("", "MatMulInteger"), domain=MS)
def fuse_matmul_integer_to_float(graph: Graph, product: Node) -> bool:
    """Mul(Cast(MatMulInteger(a, b, a_zero, b_zero)), Mul(a_scale, b_scale)) -> com.microsoft::MatMulIntegerToFloat.

    DynamicQuantizeLinear must compute a and its scale, and b's scale must be constant, so that the rule can distinguish
    the two scales.
    """
    found = dynamic_product(graph, product)
    if found is None:
        return False
    source, b_scale, scaled = found
    inputs = [product.input(0), product.input(1), source.output(1), b_scale, product.input(2), product.input(3)]
    return base.replaced(graph, scaled, "MatMulIntegerToFloat", inputs, domain=MS)


def dynamic_product(graph: Graph, product: Node) -> tuple[Node, str, Node] | None:
    """Match Mul(Cast(MatMulInteger(a, b, ...)), Mul(a's scale, b's scale)), where DynamicQuantizeLinear computes a.

    Returns:
        The DynamicQuantizeLinear, the name of b's scale, and the last Mul; None if the nodes are others.
    """
    source = base.made_by(graph, product.input(0), "DynamicQuantizeLinear")
    cast = base.followed_by(graph, product.output(0), "Cast")
    if source is None or cast is None or cast.attribute("to") != 1:
        return None
    match = base.operand_after(graph, cast.output(0), "Mul")
    if match is None:
        return None
    scaled, scales = match
    both = base.made_by(graph, scales, "Mul")
    b_scale = None if both is None else base.other_input(both, source.output(1))
    tensor = None if b_scale is None else graph.constant_tensor(b_scale)
    if b_scale is None or tensor is None or product.input(2) != source.output(2) or len(tensor.shape) > 1:
        return None
    return source, b_scale, scaled


@base.node_rule(base.Level.EXTENDED, (MS, "MatMulIntegerToFloat"))
def fuse_integer_product_bias(graph: Graph, product: Node) -> bool:
    """Add(MatMulIntegerToFloat(a, b, ...), bias) with a constant bias [N] -> MatMulIntegerToFloat with that bias."""
    weight = graph.constant_tensor(product.input(1))
    if product.input(6) or weight is None or len(weight.shape) != 2:
        return False
    match = base.bias_after(graph, product.output(0), weight.shape[1])
    if match is None or not base.is_float32(graph, match[1]):
        return False
    addition, bias = match
    fused = base.moved_to(graph, product, addition)
    fused.inputs = [*[product.input(index) for index in range(6)], bias]
    graph.update(fused)
    return True


_MOVES = frozenset({"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Slice", "Identity", "Pad", "MaxPool"})
# All of these operators support 8-bit integers starting with this version; Pad has since 11, and MaxPool since 12.
_FIRST_VERSION = 13


@base.node_rule(base.Level.EXTENDED, ("", "QuantizeLinear"), since=_FIRST_VERSION)
def move_quantized(graph: Graph, quantize: Node) -> bool:
    """QuantizeLinear(f(DequantizeLinear(x))) with the same scale and zero point on both sides -> f(x).

    f moves or selects values, so the results are equal. If there is no f, both nodes are removed.
    """
    if not quantize.input(2):
        return False
    between = graph.producer(quantize.input(0))
    if between is None or between.domain not in ("", "ai.onnx"):
        return False
    is_move = between.op_type in _MOVES and len([name for name in between.outputs if name]) == 1
    source = base.made_by(graph, between.input(0), "DequantizeLinear") if is_move else between
    if source is None or source.key != ("", "DequantizeLinear") or not _same_quantization(graph, source, quantize):
        return False
    if not is_move:
        if graph.is_output(quantize.output(0)):
            return False
        graph.replace_uses(quantize.output(0), source.input(0))
        return True
    if base.only_user(graph, between.output(0)) is not quantize:
        return False
    moved = between.copy()
    moved.inputs[0], moved.outputs = source.input(0), list(quantize.outputs)
    if between.op_type == "Pad" and not pad_integers(graph, moved, quantize):
        return False
    graph.replace_node(quantize, moved)
    return True


def _same_quantization(graph: Graph, source: Node, quantize: Node) -> bool:
    """Return True if both nodes have the same single scale and the same single 8-bit zero point."""
    known = graph.type_of(source.input(0))
    if not source.input(2) or not isinstance(known, TensorType) or known.dtype not in _INTEGERS:
        return False
    if any(node.attribute(name, 0) for node in (source, quantize) for name in ("block_size", "output_dtype")):
        return False
    return _same_constants(graph, source, quantize)


def _same_constants(graph: Graph, first_node: Node, second_node: Node) -> bool:
    """Return True if the scales of both nodes are equal single constants, and the zero points are equal as well."""
    for index in (1, 2):
        names = first_node.input(index), second_node.input(index)
        first, second = (graph.constant(name) for name in names)
        if first is None or second is None or first.size != 1 or first.dtype != second.dtype:
            return False
        if not np.array_equal(first.reshape(-1), second.reshape(-1)):
            return False
    return True


def pad_integers(graph: Graph, pad: Node, quantize: Node) -> bool:
    """Replace the padding value of a Pad by its quantised value; return False if it is not constant."""
    if pad.attribute("mode", "constant") != "constant":
        return True
    value = _filling(graph, pad.input(2)) if pad.input(2) else 0.0
    scale, point = graph.constant(quantize.input(1)), graph.constant(quantize.input(2))
    if value is None or scale is None or point is None:
        return False
    info = np.iinfo(point.dtype)
    with np.errstate(over="ignore"):  # -3e38 divided by a scale below 1 is -inf, which saturates
        steps = np.rint(np.float32(value) / scale.reshape(-1)[0]) + np.float32(point.reshape(-1)[0])
    filling = np.asarray(np.clip(steps, info.min, info.max), point.dtype)
    pad.inputs = [*pad.inputs, ""][:3] if len(pad.inputs) < 3 else list(pad.inputs)
    pad.inputs[2] = graph.add_constant(f"{pad.outputs[0]}/filling", filling)
    return True


def _filling(graph: Graph, name: str) -> float | None:
    """Return a constant number, even if it is quantised and then dequantised, or None."""
    value = base.number(graph, name)
    node = base.made_by(graph, name, "DequantizeLinear") if value is None else None
    if node is None:
        return value
    scale = base.number(graph, node.input(1))
    point = base.number(graph, node.input(2)) if node.input(2) else 0.0
    if scale is None or point is None:
        return None
    steps = base.number(graph, node.input(0))
    quantize = base.made_by(graph, node.input(0), "QuantizeLinear") if steps is None else None
    if quantize is not None and _same_constants(graph, node, quantize):
        inner, info = base.number(graph, quantize.input(0)), graph.constant(node.input(2))
        if inner is not None and info is not None and info.dtype.kind in "iu":
            limits = np.iinfo(info.dtype)
            steps = float(np.clip(np.rint(np.float32(inner) / np.float32(scale)) + point, limits.min, limits.max))
    return None if steps is None else float((np.float32(steps) - np.float32(point)) * np.float32(scale))

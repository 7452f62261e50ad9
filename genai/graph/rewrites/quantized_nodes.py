"""QDQ form to integer kernels: products and convolutions between dequantised values compute on the integers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..ir import DataType, Graph, Model, Node, Tensor, make_node
from ..types import TensorType
from .base import Level
from .patterns import made_by, only_user

MS = "com.microsoft"
_INTEGERS = (DataType.INT8, DataType.UINT8)


@dataclass(frozen=True)
class _Quantized:
    """A value in 8 bits with its scale and zero point, by name; `axis` of its scales, None where there is one."""

    value: str
    scale: str
    zero_point: str
    axis: int | None

    @property
    def names(self) -> tuple[str, str, str]:
        return self.value, self.scale, self.zero_point


class FuseQuantizedNodes:
    """QuantizeLinear(f(DequantizeLinear(x), DequantizeLinear(w), ...)) -> QLinearMatMul or QLinearConv.

    A MatMul whose result stays float becomes com.microsoft::MatMulIntegerToFloat. Results may differ from the float
    form by one step, where that rounds before it quantises.
    """

    name = "fuse_quantized_nodes"
    level = Level.EXTENDED

    def apply(self, model: Model) -> int:
        if (model.opset_version() or 0) < 10:
            return 0
        changes = 0
        for graph in list(model.graphs()):
            for node in list(graph.nodes):
                changes += _fuse_matmul(model, graph, node) or _fuse_conv(graph, node)
        return changes


def _fuse_matmul(model: Model, graph: Graph, node: Node) -> bool:
    if node.key != ("", "MatMul"):
        return False
    a, b = (dequantized(graph, name) for name in node.inputs)
    if a is None or b is None or a.axis is not None or not _scales_fit_columns(graph, b):
        return False
    quantize = following_quantize(graph, node.output(0))
    if quantize is not None:
        inputs = [*a.names, *b.names, *quantize.inputs[1:]]
        fused = make_node("QLinearMatMul", inputs, list(quantize.outputs), name=node.name)
        graph.replace_node(quantize, fused)
        return True
    inputs = [a.value, b.value, a.scale, b.scale, a.zero_point, b.zero_point]
    graph.replace_node(node, make_node("MatMulIntegerToFloat", inputs, list(node.outputs), domain=MS, name=node.name))
    model.opset_imports.setdefault(MS, 1)
    return True


def _scales_fit_columns(graph: Graph, b: _Quantized) -> bool:
    """One scale, or one per column of a constant matrix."""
    if b.axis is None:
        return True
    tensor = graph.constant_tensor(b.value)
    return tensor is not None and len(tensor.shape) == 2 and b.axis in (1, -1)


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
    """An 8-bit value behind a DequantizeLinear to float32, with a zero point."""
    node = made_by(graph, name, "DequantizeLinear")
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
    """The QuantizeLinear to 8 bits, of one scale and zero point, that alone uses a value."""
    node = only_user(graph, name)
    if node is None or node.key != ("", "QuantizeLinear") or not node.input(2) or node.attribute("block_size", 0):
        return None
    scale, point = graph.type_of(node.input(1)), graph.type_of(node.input(2))
    if not isinstance(scale, TensorType) or not isinstance(point, TensorType) or point.dtype not in _INTEGERS:
        return None
    return node if scale.dtype is DataType.FLOAT and scale.shape in ((), (1,)) else None


def _integer_bias(graph: Graph, name: str, x_scale: str, weight_scale: str) -> str | None:
    """A constant bias as int32 at the scale of the products: as it is stored if that is its scale, else rounded."""
    first, second = graph.constant(x_scale), graph.constant(weight_scale)
    if first is None or second is None:
        return None
    scale = first.reshape(()).astype(np.float64) * second.reshape(-1)
    node = made_by(graph, name, "DequantizeLinear")
    if node is None:
        return _rounded(graph, name, graph.constant(name), scale)
    stored, own = graph.constant(node.input(0)), graph.constant(node.input(1))
    point = graph.constant(node.input(2)) if node.input(2) else np.zeros((), np.int32)
    if stored is None or own is None or point is None or stored.ndim != 1 or own.size not in (1, len(stored)):
        return None
    if stored.dtype == np.int32 and not np.any(point) and np.allclose(own.reshape(-1), scale, rtol=1e-5, atol=0):
        return node.input(0)
    return _rounded(graph, name, (stored.astype(np.float64) - point) * own.reshape(-1), scale)


def _rounded(graph: Graph, name: str, bias: Any, scale: Any) -> str | None:
    if bias is None or bias.dtype.kind != "f" or not np.all(scale > 0):
        return None
    steps = np.rint(bias.astype(np.float64) / scale)
    if not np.all(np.abs(steps) < 2**31):
        return None
    rounded = graph.fresh_name(f"{name}/int32")
    graph.add_initializer(Tensor.from_array(rounded, steps.astype(np.int32)))
    return rounded

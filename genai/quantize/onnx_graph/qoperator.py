"""Conversion from QDQ format to integer operators.

A node between DequantizeLinear and QuantizeLinear becomes a node with integer inputs and outputs. Nodes without an
integer operator are unchanged, and compute the same results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...onnx.ir import Graph, Node, OnnxModel
from ...onnx.node import MS
from ...optimize.base import followed_by, made_by
from ...optimize.quantized import pad_integers
from .qdq import remove_unused

# ONNX operators that only move values, and the first opset in which they support integers.
_MOVES = {
    **dict.fromkeys(
        "Flatten Gather Reshape Slice Split Squeeze Transpose Unsqueeze".split(), 10
    ),
    "MaxPool": 12, "Pad": 13, "Resize": 11,
}  # fmt: skip


@dataclass(frozen=True)
class _Triple:
    """The names of a tensor of integers, its scale and its zero point."""

    value: str
    scale: str
    zero_point: str

    @property
    def names(self) -> list[str]:
        return [self.value, *self.parameters]

    @property
    def parameters(self) -> list[str]:
        return [self.scale, self.zero_point]


Operands = Callable[[Node, Sequence[_Triple], _Triple], list[str]]
"""A function that returns the inputs of the integer operator, given a node, its operands and its result."""


def to_operators_on_integers(model: OnnxModel) -> int:
    """Convert nodes to integer operators in place, and return their number."""
    graph = model.graph
    count = sum(_join(model, graph, node) for node in list(graph.nodes))
    unused = [
        node
        for node in graph.nodes
        if node.op_type in ("QuantizeLinear", "DequantizeLinear") and not graph.is_used(node.outputs[0])
    ]
    graph.remove_nodes(unused)
    remove_unused(graph)
    return count


def _join(model: OnnxModel, graph: Graph, node: Node) -> bool:
    if node.key[0] or node.op_type in ("QuantizeLinear", "DequantizeLinear"):
        return False
    if node.op_type == "ArgMax":
        return _join_argmax(model, graph, node)
    if node.op_type in _MOVES:
        return _join_move(model, graph, node)
    ends = [followed_by(graph, name, "QuantizeLinear") for name in node.outputs if name]
    if node.op_type not in _JOINED or len(ends) != 1 or ends[0] is None:
        return False
    names = node.inputs[1:] if node.op_type == "Where" else [name for name in node.inputs if name]
    operand_triples = [triple for name in names if (triple := _triple(graph, name)) is not None]
    if len(operand_triples) != len(names) or (node.op_type == "Gemm" and not _is_qgemm(node)):
        return False
    end, (domain, operands) = ends[0], _JOINED[node.op_type]
    joined = node.copy()
    joined.op_type, joined.domain = _OTHER_NAMES.get(node.op_type, f"QLinear{node.op_type}"), domain
    joined.inputs = operands(node, operand_triples, _Triple(end.outputs[0], *end.inputs[1:3]))
    joined.outputs, joined.name = list(end.outputs), graph.fresh_name(f"{node.name or node.op_type}_quant")
    joined.attributes.pop("beta", None)
    for name, value in _attributes(model, node).items():
        joined.set_attribute(name, value)
    if domain:
        model.opset_imports.setdefault(domain, 1)
    graph.replace_node(end, joined)
    graph.remove_nodes([node])
    graph.values.pop(node.outputs[0], None)
    return True


def _join_move(model: OnnxModel, graph: Graph, node: Node) -> bool:
    """Make an operator that only moves values move integers, if the scale and the zero point stay the same."""
    source = _triple(graph, node.input(0))
    followers = [followed_by(graph, name, "QuantizeLinear") for name in node.outputs if name]
    ends = [end for end in followers if end is not None]
    if source is None or len(ends) != len(followers) or (model.opset_version() or 0) < _MOVES[node.op_type]:
        return False
    if any(end.inputs[1:3] != source.parameters for end in ends):
        return False
    joined = node.copy()
    if node.op_type == "Pad" and not pad_integers(graph, joined, ends[0]):
        return False
    joined.inputs[0], joined.outputs = source.value, [end.outputs[0] for end in ends]
    graph.insert_before(ends[0], joined)
    graph.remove_nodes([node, *ends])
    graph.topological_sort()
    return True


def _join_argmax(model: OnnxModel, graph: Graph, node: Node) -> bool:
    """Make an ArgMax read integers, which is correct because the largest value has the largest integer."""
    source = _triple(graph, node.input(0))
    if source is None or (model.opset_version() or 0) < 13:
        return False
    node.inputs[0] = source.value
    graph.update(node)
    return True


def _triple(graph: Graph, name: str) -> _Triple | None:
    node = made_by(graph, name, "DequantizeLinear")
    return None if node is None else _Triple(*node.inputs[:3])


def _conv(node: Node, triples: Sequence[_Triple], result: _Triple) -> list[str]:
    x, weight, *bias = triples
    return [*x.names, *weight.names, *result.parameters, *(one.value for one in bias)]


def _is_qgemm(node: Node) -> bool:
    """Return True if QGemm computes a Gemm; QGemm multiplies the bias, whose scale is that of the product, by alpha."""
    return not node.input(2) or (node.attribute("alpha", 1.0) == 1.0 and node.attribute("beta", 1.0) == 1.0)


def _gemm(node: Node, triples: Sequence[_Triple], result: _Triple) -> list[str]:
    bias = triples[2].value if len(triples) > 2 else ""
    return [*triples[0].names, *triples[1].names, bias, *result.parameters]


def _in_order(node: Node, triples: Sequence[_Triple], result: _Triple) -> list[str]:
    return [*(name for triple in triples for name in triple.names), *result.parameters]


def _concat(node: Node, triples: Sequence[_Triple], result: _Triple) -> list[str]:
    return [*result.parameters, *(name for triple in triples for name in triple.names)]


def _where(node: Node, triples: Sequence[_Triple], result: _Triple) -> list[str]:
    return [node.inputs[0], *_in_order(node, triples, result)]


_JOINED: dict[str, tuple[str, Operands]] = {
    "Conv": ("", _conv),
    "MatMul": ("", _in_order),
    "Gemm": (MS, _gemm),
    "Concat": (MS, _concat),
    "Where": (MS, _where),
    **dict.fromkeys(
        ("Add", "Mul", "Sigmoid", "LeakyRelu", "AveragePool", "GlobalAveragePool", "Softmax"), (MS, _in_order)
    ),
}
"""The domain of each integer operator, and the function that returns its inputs."""
_OTHER_NAMES = {"Gemm": "QGemm"}


def _attributes(model: OnnxModel, node: Node) -> dict[str, int]:
    """Return the attributes that the integer operator needs in addition to the attributes of the node."""
    if node.op_type == "GlobalAveragePool":
        return {"channels_last": 0}
    if node.op_type == "Softmax":
        version = model.opset_version() or 1
        return {"opset": version, "axis": node.integer("axis", -1 if version >= 13 else 1)}
    return {}

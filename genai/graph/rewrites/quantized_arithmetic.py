"""QDQ form around sums and products of two values: they are computed from the integers in one pass."""

from __future__ import annotations

from ..ir import Graph, Model, Node, make_node
from .base import Level, fuse_nodes
from .quantized_nodes import dequantized, following_quantize

DOMAIN, OP_TYPE = "genai", "QuantizedBinary"


class FuseQuantizedArithmetic:
    """QuantizeLinear(f(DequantizeLinear(a), DequantizeLinear(b))), f a sum or product -> genai::QuantizedBinary.

    The arithmetic is the same: dequantised, combined in float32, quantised.
    """

    name = "fuse_quantized_arithmetic"
    level = Level.EXTENDED

    def apply(self, model: Model) -> int:
        return fuse_nodes(model, _fuse, DOMAIN)


def _fuse(graph: Graph, node: Node) -> bool:
    if node.key not in (("", "Add"), ("", "Mul")):
        return False
    a, b = (dequantized(graph, name) for name in node.inputs)
    quantize = following_quantize(graph, node.output(0))
    if a is None or b is None or quantize is None or a.axis is not None or b.axis is not None:
        return False
    inputs = [*a.names, *b.names, *quantize.inputs[1:]]
    outputs = list(quantize.outputs)
    fused = make_node(OP_TYPE, inputs, outputs, domain=DOMAIN, name=node.name, function=node.op_type)
    graph.replace_node(quantize, fused)
    return True

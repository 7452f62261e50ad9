"""Dynamically quantised products, as quantisers write them, become one node each."""

from __future__ import annotations

from ..ir import Graph, Model, Node, make_node
from .base import Level, fuse_nodes
from .patterns import is_float32, made_by, only_user, other_input

MS = "com.microsoft"


class FuseMatMulIntegerToFloat:
    """Mul(Cast(MatMulInteger(a, b, a_zero, b_zero)), Mul(a_scale, b_scale)) -> com.microsoft::MatMulIntegerToFloat.

    Only where a and its scale come from DynamicQuantizeLinear and b's scale is constant, so that it is known which
    scale is whose.
    """

    name = "fuse_matmul_integer_to_float"
    level = Level.EXTENDED

    def apply(self, model: Model) -> int:
        return fuse_nodes(model, _fuse, MS)


def _fuse(graph: Graph, product: Node) -> bool:
    if product.key != ("", "MatMulInteger"):
        return False
    source = made_by(graph, product.input(0), "DynamicQuantizeLinear")
    cast = only_user(graph, product.output(0))
    if source is None or cast is None or cast.key != ("", "Cast") or cast.attribute("to") != 1:
        return False
    scaled = only_user(graph, cast.output(0))
    scales = None if scaled is None or scaled.key != ("", "Mul") else other_input(scaled, cast.output(0))
    if scaled is None or scales is None:
        return False
    both = made_by(graph, scales, "Mul")
    b_scale = None if both is None else other_input(both, source.output(1))
    tensor = None if b_scale is None else graph.constant_tensor(b_scale)
    if b_scale is None or tensor is None or product.input(2) != source.output(2):
        return False
    if len(tensor.shape) > 1:
        return False
    inputs = [product.input(0), product.input(1), source.output(1), b_scale, product.input(2), product.input(3)]
    fused = make_node("MatMulIntegerToFloat", inputs, list(scaled.outputs), domain=MS, name=scaled.name)
    graph.replace_node(scaled, fused)
    return True


class FuseIntegerProductBias:
    """Add(MatMulIntegerToFloat(a, b, ...), bias) with a constant bias [N] -> MatMulIntegerToFloat with that bias."""

    name = "fuse_integer_product_bias"
    level = Level.EXTENDED

    def apply(self, model: Model) -> int:
        return sum(_fuse_bias(graph, node) for graph in list(model.graphs()) for node in list(graph.nodes))


def _fuse_bias(graph: Graph, product: Node) -> bool:
    if product.key != (MS, "MatMulIntegerToFloat") or product.input(6):
        return False
    weight = graph.constant_tensor(product.input(1))
    addition = only_user(graph, product.output(0))
    if weight is None or len(weight.shape) != 2 or addition is None or addition.key != ("", "Add"):
        return False
    other = other_input(addition, product.output(0))
    bias = graph.constant_tensor(other) if other else None
    if other is None or bias is None or bias.shape != weight.shape[1:] or not is_float32(graph, other):
        return False
    fused = product.copy()
    fused.inputs = [*[product.input(index) for index in range(6)], other]
    fused.outputs = list(addition.outputs)
    graph.replace_node(addition, fused)
    graph.remove_nodes([product])
    return True

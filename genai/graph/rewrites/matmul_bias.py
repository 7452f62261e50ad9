"""A constant bias after a block-quantised product becomes the product's own bias."""

from __future__ import annotations

from ..ir import Graph, Model, Node
from .base import Level

BIAS_INPUT = 5


class FuseMatMulBias:
    """Add(MatMulNBits(x, …), bias) with a constant bias [N] -> MatMulNBits(x, …, bias)."""

    name = "fuse_matmul_bias"
    level = Level.EXTENDED

    def apply(self, model: Model) -> int:
        graph = model.graph
        changes = 0
        for node in list(graph.nodes):
            match = _match(graph, node) if node.key == ("", "Add") else None
            if match is None:
                continue
            product, bias = match
            product.inputs += [""] * (BIAS_INPUT + 1 - len(product.inputs))
            product.inputs[BIAS_INPUT] = bias
            outputs = list(node.outputs)
            graph.remove_nodes([node])
            product.outputs[:] = outputs
            graph.update(product)
            changes += 1
        return changes


def _match(graph: Graph, node: Node) -> tuple[Node, str] | None:
    for value, bias in (tuple(node.inputs), tuple(reversed(node.inputs))):
        product, constant = graph.producer(value), graph.constant(bias)
        if (
            product is not None
            and product.op_type == "MatMulNBits"
            and not product.input(BIAS_INPUT)
            and constant is not None
            and constant.shape == (int(product.attribute("N", 0)),)
            and graph.consumers(value) == [node]
            and not graph.is_output(value)
        ):
            return product, bias
    return None

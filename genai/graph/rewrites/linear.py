"""A product with a constant matrix and the addition of a constant bias become one node."""

from __future__ import annotations

from ..ir import Graph, Model, Node, make_node
from .base import Level, fuse_nodes
from .patterns import is_float32, only_user, other_input

DOMAIN, OP_TYPE = "genai", "Linear"


class FuseLinear:
    """Add(MatMul(x, weight), bias), weight a constant [K, N], bias a constant [N] -> genai::Linear(x, weight, bias)."""

    name = "fuse_linear"
    level = Level.EXTENDED

    def apply(self, model: Model) -> int:
        return fuse_nodes(model, _fuse, DOMAIN)


def _fuse(graph: Graph, product: Node) -> bool:
    weight = graph.constant_tensor(product.input(1)) if product.key == ("", "MatMul") else None
    if weight is None or len(weight.shape) != 2 or not is_float32(graph, product.input(0)):
        return False
    addition = only_user(graph, product.output(0))
    if addition is None or addition.key != ("", "Add"):
        return False
    other = other_input(addition, product.output(0))
    bias = graph.constant_tensor(other) if other else None
    if other is None or bias is None or bias.shape != weight.shape[1:]:
        return False
    fused = make_node(OP_TYPE, [*product.inputs, other], list(addition.outputs), domain=DOMAIN, name=product.name)
    graph.replace_node(addition, fused)
    return True

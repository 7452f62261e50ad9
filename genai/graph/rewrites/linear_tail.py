"""What follows a product with a constant matrix becomes part of it: an activation of its results."""

from __future__ import annotations

from ..ir import Graph, Model, Node
from .base import Level
from .linear import DOMAIN, OP_TYPE
from .patterns import only_user

MS = "com.microsoft"
# Larger weights are not packed, and BLAS knows no activations.
_MAX_BYTES = 1 << 31
# Operator -> the function's name in `kernels.cpu.rowwise.unary`.
_FUNCTIONS = {
    (MS, "Gelu"): "gelu",
    (MS, "FastGelu"): "gelu_tanh",
    ("", "Relu"): "relu",
    ("", "Sigmoid"): "sigmoid",
    ("", "Tanh"): "tanh",
}


class FuseLinearActivation:
    """f(Linear(x, weight, bias)) -> Linear with the attribute `function`, where f is an activation of float32 rows."""

    name = "fuse_linear_activation"
    level = Level.EXTENDED

    def apply(self, model: Model) -> int:
        return sum(_fuse(graph, node) for graph in list(model.graphs()) for node in list(graph.nodes))


def _fuse(graph: Graph, linear: Node) -> bool:
    if linear.key != (DOMAIN, OP_TYPE) or linear.attribute("function", ""):
        return False
    weight = graph.constant_tensor(linear.input(1))
    if weight is None or 4 * weight.num_elements >= _MAX_BYTES:
        return False
    after = only_user(graph, linear.output(0))
    function = None if after is None else _function(after)
    if after is None or function is None or len([name for name in after.inputs if name]) != 1:
        return False
    fused = linear.copy()
    fused.outputs = list(after.outputs)
    fused.set_attribute("function", function)
    graph.replace_node(after, fused)
    graph.remove_nodes([linear])
    return True


def _function(node: Node) -> str | None:
    if node.key == ("", "Gelu"):
        return "gelu_tanh" if node.attribute("approximate", "none") == "tanh" else "gelu"
    return _FUNCTIONS.get(node.key)

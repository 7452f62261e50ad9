"""A layer normalisation spelled out by exporters becomes one node."""

from __future__ import annotations

from ..ir import Graph, Model, Node, make_node
from .base import Level
from .patterns import is_float32, is_number, made_by, number, only_user, other_input


class FuseLayerNorm:
    """(x - mean(x)) / sqrt(mean((x - mean(x)) ^ 2) + epsilon) * scale + bias over the last axis -> LayerNormalization.

    Only where scale and bias are constant vectors; the result is of operator set 17, which is raised to where needed.
    """

    name = "fuse_layer_norm"
    level = Level.EXTENDED

    def apply(self, model: Model) -> int:
        if (model.opset_version() or 0) < 17:
            return 0
        return sum(_fuse(graph, node) for graph in list(model.graphs()) for node in list(graph.nodes))


def _fuse(graph: Graph, division: Node) -> bool:
    if division.key != ("", "Div"):
        return False
    centred, deviation = division.inputs
    subtraction = made_by(graph, centred, "Sub")
    root = made_by(graph, deviation, "Sqrt")
    if subtraction is None or root is None:
        return False
    x = subtraction.input(0)
    epsilon = _epsilon_of_variance(graph, root.input(0), centred)
    if epsilon is None or not is_float32(graph, x) or not _is_mean(graph, subtraction.input(1), x):
        return False
    scaled = only_user(graph, division.output(0))
    scale = _vector_operand(graph, scaled, "Mul", division.output(0))
    if scaled is None or scale is None:
        return False
    shifted = only_user(graph, scaled.output(0))
    bias = _vector_operand(graph, shifted, "Add", scaled.output(0))
    if shifted is None or bias is None:
        return False
    fused = make_node(
        "LayerNormalization", [x, scale, bias], list(shifted.outputs), name=shifted.name, axis=-1, epsilon=epsilon
    )
    graph.replace_node(shifted, fused)
    return True


def _is_mean(graph: Graph, name: str, x: str) -> bool:
    """Whether a value is the mean of x over its last axis, kept."""
    mean = made_by(graph, name, "ReduceMean")
    if mean is None or mean.input(0) != x or not int(mean.attribute("keepdims", 1)):
        return False
    axes = mean.attribute("axes")
    if axes is None and mean.input(1):
        found = graph.constant(mean.input(1))
        axes = None if found is None else found.reshape(-1).tolist()
    return axes is not None and [int(axis) for axis in axes] == [-1]


def _epsilon_of_variance(graph: Graph, name: str, centred: str) -> float | None:
    """The epsilon of a value that is mean(centred ^ 2) + epsilon."""
    addition = made_by(graph, name, "Add")
    if addition is None:
        return None
    for variance, epsilon in (tuple(addition.inputs), tuple(reversed(addition.inputs))):
        value, mean = number(graph, epsilon), made_by(graph, variance, "ReduceMean")
        if value is not None and mean is not None and _is_square(graph, mean.input(0), centred):
            return value if _is_mean(graph, variance, mean.input(0)) else None
    return None


def _is_square(graph: Graph, name: str, x: str) -> bool:
    power, product = made_by(graph, name, "Pow"), made_by(graph, name, "Mul")
    if power is not None:
        return power.input(0) == x and is_number(graph, power.input(1), 2.0)
    return product is not None and list(product.inputs) == [x, x]


def _vector_operand(graph: Graph, node: Node | None, op_type: str, name: str) -> str | None:
    """The other operand of a node if it is a constant vector."""
    if node is None or node.key != ("", op_type):
        return None
    other = other_input(node, name)
    tensor = None if other is None else graph.constant_tensor(other)
    return other if tensor is not None and len(tensor.shape) == 1 else None

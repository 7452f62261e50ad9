"""gate * Sigmoid(gate) * up becomes one SwiGLU."""

from __future__ import annotations

from ..ir import Graph, Model, Node
from .base import Level


class FuseSwiGLU:
    """Mul(Mul(gate, Sigmoid(gate)), up), operands in any order, or Mul(Swish(gate), up) -> genai::SwiGLU(gate, up)."""

    name = "fuse_swiglu"
    level = Level.EXTENDED

    def apply(self, model: Model) -> int:
        graph = model.graph
        changes = 0
        for node in list(graph.nodes):
            if node.key != ("", "Mul"):
                continue
            match = _match(graph, node)
            if match is None:
                continue
            gate, up, inner = match
            graph.replace_node(node, Node("SwiGLU", [gate, up], list(node.outputs), "genai", node.name))
            graph.remove_nodes(inner)
            changes += 1
        if changes:
            model.opset_imports.setdefault("genai", 1)
        return changes


def _match(graph: Graph, node: Node) -> tuple[str, str, list[Node]] | None:
    for activated, up in (tuple(node.inputs), tuple(reversed(node.inputs))):
        found = _silu(graph, activated)
        if found is not None and graph.consumers(activated) == [node] and not graph.is_output(activated):
            gate, inner = found
            if _same_shape(graph, gate, up):
                return gate, up, inner
    return None


def _silu(graph: Graph, name: str) -> tuple[str, list[Node]] | None:
    """The x of a value that is x * Sigmoid(x), and the nodes that compute it."""
    node = graph.producer(name)
    if node is None:
        return None
    if node.key == ("", "Swish") and float(node.attribute("alpha", 1.0)) == 1.0:
        return node.inputs[0], [node]
    if node.key != ("", "Mul"):
        return None
    for x, squashed in (tuple(node.inputs), tuple(reversed(node.inputs))):
        sigmoid = graph.producer(squashed)
        if (
            sigmoid is not None
            and sigmoid.key == ("", "Sigmoid")
            and sigmoid.inputs[0] == x
            and graph.consumers(squashed) == [node]
        ):
            return x, [node, sigmoid]
    return None


def _same_shape(graph: Graph, left: str, right: str) -> bool:
    """Broadcasting is not fused: both sides must be per-token rows of one width."""
    shapes = [getattr(graph.type_of(name), "shape", None) for name in (left, right)]
    return (
        shapes[0] is not None
        and shapes[1] is not None
        and len(shapes[0]) == len(shapes[1])
        and shapes[0][-1] == shapes[1][-1] is not None
    )

"""A Transpose of a Transpose becomes one, or none."""

from __future__ import annotations

from ..ir import Graph, Model, Node
from .base import Level
from .patterns import made_by


class MergeTransposes:
    """Transpose(Transpose(x, p), q) -> Transpose(x, p then q); RemoveIdentities drops what moves no axis."""

    name = "merge_transposes"
    level = Level.BASIC

    def apply(self, model: Model) -> int:
        return sum(_merge(graph, node) for graph in list(model.graphs()) for node in list(graph.nodes))


def _merge(graph: Graph, node: Node) -> bool:
    if node.key != ("", "Transpose"):
        return False
    inner = made_by(graph, node.input(0), "Transpose")
    if inner is None:
        return False
    first, second = inner.attribute("perm"), node.attribute("perm")
    if first is None or second is None or sorted(first) != sorted(second):
        return False
    node.set_attribute("perm", [int(first[axis]) for axis in second])
    node.inputs[:] = list(inner.inputs)
    graph.update(node)
    return True

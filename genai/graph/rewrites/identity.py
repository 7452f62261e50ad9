"""Removes nodes that hand their input on unchanged: Identity, no-op Cast and Transpose, Dropout in inference."""

from __future__ import annotations

from ..ir import DataType, Graph, Model, Node
from ..types import TensorType
from .base import Level, pass_through


class RemoveIdentities:
    """Identity(x), Cast(x) to x's own type, Transpose(x) that moves no axis, Dropout(x) outside training -> x."""

    name = "remove_identities"
    level = Level.BASIC

    def apply(self, model: Model) -> int:
        changes = 0
        for graph in list(model.graphs(functions=True)):
            for node in list(graph.nodes):
                if _changes_nothing(graph, node, model) and pass_through(graph, node):
                    changes += 1
        return changes


def _changes_nothing(graph: Graph, node: Node, model: Model) -> bool:
    if model.function(node) is not None or any(a.ref_attr_name for a in node.attributes.values()):
        return False
    match node.key:
        case ("", "Identity"):
            return True
        case ("", "Cast"):
            known = graph.type_of(node.input(0))
            return isinstance(known, TensorType) and node.attribute("to") == known.dtype != DataType.UNDEFINED
        case ("", "Transpose"):
            return _moves_no_axis(graph, node)
        case ("", "Dropout"):
            return _is_inference(graph, node, model.opset_version() or 1)
    return False


def _moves_no_axis(graph: Graph, node: Node) -> bool:
    permutation = node.attribute("perm")
    if permutation is not None:
        return bool(permutation == sorted(permutation))
    known = graph.type_of(node.input(0))
    return isinstance(known, TensorType) and known.rank is not None and known.rank <= 1


def _is_inference(graph: Graph, node: Node, version: int) -> bool:
    """Dropout was told by `is_test` before opset 7, always inferred until 11, and has `training_mode` since 12."""
    if version < 7:
        return bool(node.attribute("is_test", 0))
    if version < 12 or not node.input(2):
        return True
    training = graph.constant(node.input(2))
    return training is not None and not training.any()

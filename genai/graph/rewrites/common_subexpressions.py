"""Nodes that compute the same from the same inputs become one."""

from __future__ import annotations

from typing import Any

from ..ir import Attribute, Graph, Model, Node, Tensor
from .base import Level

_NEW_EACH_TIME = frozenset(
    {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial", "Bernoulli", "Dropout"}
)
# Constants and lists beyond this are not compared: equal ones are rare, and comparing costs.
_MAX_COMPARED_BYTES = 1024
_MAX_COMPARED_ITEMS = 128


class ShareSubexpressions:
    """Of nodes with equal operator, attributes and inputs the first stays; equal small constants become one, too."""

    name = "share_subexpressions"
    level = Level.BASIC

    def apply(self, model: Model) -> int:
        return sum(_share(model, graph) for graph in list(model.graphs()))


def _share(model: Model, graph: Graph) -> int:
    changes = _share_constants(graph)
    seen: dict[Any, Node] = {}
    removed = []
    for node in list(graph.nodes):
        key = _key(model, node)
        if key is None or any(graph.is_output(name) for name in node.outputs):
            continue
        first = seen.setdefault(key, node)
        if first is node or len(first.outputs) != len(node.outputs):
            continue
        if any(bool(a) != bool(b) for a, b in zip(first.outputs, node.outputs, strict=True)):
            continue
        for old, new in zip(node.outputs, first.outputs, strict=True):
            if old:
                graph.replace_uses(old, new)
                graph.values.pop(old, None)
        removed.append(node)
    graph.remove_nodes(removed)
    return changes + len(removed)


def _share_constants(graph: Graph) -> int:
    seen: dict[Any, str] = {}
    changes = 0
    for name, tensor in list(graph.initializers.items()):
        if graph.is_input(name) or graph.is_output(name) or not graph.consumers(name):
            continue
        key = _tensor_key(tensor)
        first = name if key is None else seen.setdefault(key, name)
        if first != name:
            graph.replace_uses(name, first)
            graph.remove_initializer(name)
            changes += 1
    return changes


def _key(model: Model, node: Node) -> Any:
    """What says that two nodes compute the same; None where a node must stay."""
    if node.op_type in _NEW_EACH_TIME or model.function(node) is not None or node.subgraphs():
        return None
    attributes = tuple(sorted((name, _attribute_key(item)) for name, item in node.attributes.items()))
    if any(key is None for _, key in attributes):
        return None
    return node.key, node.overload, tuple(node.inputs), attributes


def _attribute_key(attribute: Attribute) -> Any:
    value = attribute.value
    if attribute.ref_attr_name:
        return None
    if isinstance(value, Tensor):
        return _tensor_key(value)
    if isinstance(value, list):
        if len(value) > _MAX_COMPARED_ITEMS:
            return None
        return repr(value) if all(isinstance(item, int | float | bytes) for item in value) else None
    return repr(value) if isinstance(value, int | float | bytes) else None


def _tensor_key(tensor: Tensor) -> Any:
    if tensor.nbytes > _MAX_COMPARED_BYTES or tensor.dtype.name == "STRING" or tensor.segment is not None:
        return None
    return repr((tensor.dtype, tensor.shape, tensor.raw().tobytes()))

"""Shapes that are known before a run become constants, which folding then carries on."""

from __future__ import annotations

import numpy as np

from ..ir import Graph, Model, Node, Tensor
from ..types import TensorType
from .base import Level


class FoldKnownShapes:
    """Shape(x) and Size(x) of a value whose extents are all known -> a constant."""

    name = "fold_known_shapes"
    level = Level.BASIC

    def apply(self, model: Model) -> int:
        return sum(_fold(model, graph, node) for graph in list(model.graphs()) for node in list(graph.nodes))


def _fold(model: Model, graph: Graph, node: Node) -> bool:
    if node.key not in (("", "Shape"), ("", "Size")) or model.function(node) is not None:
        return False
    known = graph.type_of(node.input(0))
    if not isinstance(known, TensorType) or known.shape is None or graph.is_output(node.output(0)):
        return False
    extents = [extent for extent in known.shape if isinstance(extent, int)]
    if len(extents) != len(known.shape) or any(item.ref_attr_name for item in node.attributes.values()):
        return False
    if node.op_type == "Size":
        value = np.asarray(np.prod(extents, dtype=np.int64), np.int64)
    else:
        value = np.asarray(extents[node.attribute("start", 0) : node.attribute("end")], np.int64)
    name = node.output(0)
    graph.remove_nodes([node])
    graph.values.pop(name, None)
    graph.add_initializer(Tensor.from_array(name, value))
    return True

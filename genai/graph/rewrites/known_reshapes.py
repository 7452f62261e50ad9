"""Reshapes whose target is computed from extents that their input already has."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..ir import Graph, Model, Node, Tensor
from ..shape_values import ShapeValue, computed_value, constant_value, is_shape_computation
from .base import Level
from .extents import Extents, KnownExtents

# In a Reshape's target: the input's extent at this place.
_COPY = 0
_MAX_AXES = 64


class FoldKnownReshapes:
    """Reshape(x, Concat(Shape(x)[0], Shape(x)[1], [12, 64])) -> Reshape(x, [0, 0, 12, 64]).

    Wherever every extent of the target is a number, or an extent that x has at the same place (see `extents`).
    """

    name = "fold_known_reshapes"
    level = Level.EXTENDED

    def apply(self, model: Model) -> int:
        return sum(_fold_all(graph) for graph in list(model.graphs()))


def _fold_all(graph: Graph) -> int:
    """One walk along the nodes, with what is known of small vectors of extents."""
    if not any(_is_computed(graph, node) for node in graph.nodes):
        return 0
    known: dict[str, ShapeValue | None] = {}
    extents = KnownExtents(graph)
    changes = 0
    for node in list(graph.nodes):
        if is_shape_computation(node):
            values = [_value(graph, known, name) for name in node.inputs]
            known[node.output(0)] = computed_value(node, values, [extents.type_of(name) for name in node.inputs])
        if _is_computed(graph, node):
            changes += _fold(graph, node, known.get(node.input(1)), extents.of(node.input(0)))
        extents.follow(node)
    return changes


def _is_computed(graph: Graph, node: Node) -> bool:
    """Whether this is a Reshape whose target is no constant."""
    return node.key == ("", "Reshape") and len(node.inputs) == 2 and graph.constant_tensor(node.inputs[1]) is None


def _value(graph: Graph, known: Mapping[str, ShapeValue | None], name: str) -> ShapeValue | None:
    if name in known:
        return known[name]
    tensor = graph.constant_tensor(name) if name else None
    return constant_value(tensor.array()) if tensor is not None and tensor.num_elements <= _MAX_AXES else None


def _fold(graph: Graph, node: Node, target: ShapeValue | None, source: Extents | None) -> bool:
    if target is None or target.is_scalar or source is None:
        return False
    if node.attribute("allowzero", 0) or any(item.ref_attr_name for item in node.attributes.values()):
        return False
    extents: list[int] = []
    for place, extent in enumerate(target.dims):
        if isinstance(extent, int):
            extents.append(extent)
        elif extent is not None and place < len(source) and source[place] == extent:
            extents.append(_COPY)
        else:
            return False
    name = graph.fresh_name(f"{node.input(1)}/known")
    graph.add_initializer(Tensor.from_array(name, np.asarray(extents, np.int64)))
    node.inputs[1] = name
    graph.update(node)
    return True

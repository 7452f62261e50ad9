"""Where a graph can undo that the columns of a matrix are scaled: in what makes the matrix's input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..models.config import Config
from ..onnx.ir import Graph, Node
from ..onnx.node import MS
from .sites import Site

# Operators that multiply with a learned vector at their end, and which inputs that vector and the bias are.
_NORMS = {
    ("", "SimplifiedLayerNormalization"): (1, None),
    ("", "LayerNormalization"): (1, 2),
    (MS, "SimplifiedLayerNormalization"): (1, None),
    (MS, "SkipSimplifiedLayerNormalization"): (2, None),
    (MS, "SkipLayerNormalization"): (2, 3),
}


@dataclass(frozen=True)
class Fold:
    """The place.

    Attributes:
        vectors: initializers [columns] that are divided by the factors.
        rows: matrix, first row and number of rows that are divided by the factors.
        sharing: int64 [columns], which factor a column has; None = its own.
    """

    vectors: tuple[str, ...] = ()
    rows: tuple[Site, int, int] | None = None
    sharing: NDArray[np.int64] | None = None


def find_fold(graph: Graph, config: Config, sites: Sequence[Site], of_products: dict[str, Site]) -> Fold | None:
    """Where the input of some matrices, which all read one value, can be divided.

    Args:
        sites: the matrices that will be scaled; nobody else may read their input.
        of_products: by a product's output the matrix of a site.
    """
    nodes = [node for site in sites for node in site.products]
    values = {node.input(0) for node in nodes}
    if len(values) != 1 or any(site.lookups for site in sites):
        return None
    value = values.pop()
    if graph.is_output(value) or {id(node) for node in graph.consumers(value)} != {id(node) for node in nodes}:
        return None
    node = graph.producer(value)
    if node is None:
        return None
    if node.key in _NORMS and node.output(0) == value:
        return _in_norm(graph, node)
    if node.key == ("", "Mul"):
        return _in_product(graph, node, of_products)
    if node.op_type == "GroupQueryAttention" and node.output(0) == value:
        return _in_values(graph, node, config, of_products)
    return None


def _in_norm(graph: Graph, node: Node) -> Fold | None:
    weight, bias = _NORMS[node.key]
    names = [node.input(index) for index in (weight, bias) if index is not None and node.input(index)]
    alone = all(name in graph.initializers and len(graph.consumers(name)) == 1 for name in names)
    return Fold(vectors=tuple(names)) if alone and node.input(weight) else None


def _in_product(graph: Graph, node: Node, of_products: dict[str, Site]) -> Fold | None:
    """activation(gate) * up: the rows of up."""
    for name in node.inputs:
        site = of_products.get(name)
        if site is not None and len(site.products) == 1 and graph.consumers(name) == [node] and not site.lookups:
            return Fold(rows=(site, 0, site.rows))
    return None


def _in_values(graph: Graph, node: Node, config: Config, of_products: dict[str, Site]) -> Fold | None:
    """The rows that make values; heads of queries that share a head of values share the factors."""
    packed = not node.input(2)
    name = node.input(0) if packed else node.input(2)
    site = of_products.get(name)
    if site is None or len(site.products) != 1 or graph.consumers(name) != [node]:
        return None
    heads, kv_heads = (int(node.attribute(key, 0)) for key in ("num_heads", "kv_num_heads"))
    size = config.model.decoder.head_size
    width = kv_heads * size
    first = (heads + kv_heads) * size if packed else 0
    if kv_heads < 1 or heads % kv_heads or site.rows != first + width:
        return None
    columns = np.arange(heads * size)
    sharing = columns // size // (heads // kv_heads) * size + columns % size
    return Fold(rows=(site, first, width), sharing=sharing)

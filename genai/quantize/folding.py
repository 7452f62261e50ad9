"""Column factors that are folded into the graph. The nodes that compute a matrix's input absorb the inverse factors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..models.config import Config
from ..onnx.ir import Graph, Node
from ..onnx.node import MS
from .sites import Site

# Operators that end with a multiplication by a learned vector, and the indices of their vector and bias inputs.
_NORMS = {
    ("", "SimplifiedLayerNormalization"): (1, None),
    ("", "LayerNormalization"): (1, 2),
    (MS, "SimplifiedLayerNormalization"): (1, None),
    (MS, "SkipSimplifiedLayerNormalization"): (2, None),
    (MS, "SkipLayerNormalization"): (2, 3),
}


@dataclass(frozen=True)
class Fold:
    """The tensors that absorb the factors of a matrix's columns.

    Attributes:
        vectors: names of the initializers [columns] to divide by the factors.
        rows: a matrix, and the index of the first row and the number of rows to divide by the factors.
        sharing: int64 [columns], the index of each column's factor; None if each column has a separate factor.
    """

    vectors: tuple[str, ...] = ()
    rows: tuple[Site, int, int] | None = None
    sharing: NDArray[np.int64] | None = None


def find_fold(graph: Graph, config: Config, sites: Sequence[Site], of_products: dict[str, Site]) -> Fold | None:
    """Return the tensors to divide by the factors of matrices that read the same input, or None if there are none.

    Args:
        sites: the matrices to scale; no other node may read their input.
        of_products: sites by the outputs of their matmuls.
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
    """Return the rows of the up projection in activation(gate) * up."""
    for name in node.inputs:
        site = of_products.get(name)
        if site is not None and len(site.products) == 1 and graph.consumers(name) == [node] and not site.lookups:
            return Fold(rows=(site, 0, site.rows))
    return None


def _in_values(graph: Graph, node: Node, config: Config, of_products: dict[str, Site]) -> Fold | None:
    """Return the rows that compute the values; query heads that share a value head share its factors."""
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

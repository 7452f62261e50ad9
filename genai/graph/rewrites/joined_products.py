"""Products of one value with several constant matrices become one: queries, keys and values of attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..ir import Graph, Model, Node, Tensor, make_node
from ..types import DataType
from .base import Level
from .linear import DOMAIN, OP_TYPE

MS = "com.microsoft"
_LINEAR, _INTEGER = (DOMAIN, OP_TYPE), (MS, "MatMulIntegerToFloat")
# Larger weights are not packed; of smaller ones the product costs next to nothing.
_MAX_BYTES, _MIN_ELEMENTS = 1 << 31, 1 << 13
# The operator set in which Split takes its sizes as an input.
_SPLIT_BY_INPUT = 13


class JoinProducts:
    """Linear(x, w1, b1), Linear(x, w2, b2) ... -> Split(Linear(x, [w1 w2 ...], [b1 b2 ...])), parts being views.

    Likewise MatMulIntegerToFloat, whose scales and zero points become one per column. Only where nothing else reads
    the matrices, which are kept once, in their new form.
    """

    name = "join_products"
    level = Level.EXTENDED

    def apply(self, model: Model) -> int:
        if (model.opset_version() or 0) < _SPLIT_BY_INPUT:
            return 0
        changes = 0
        for graph in list(model.graphs()):
            groups: dict[tuple[object, ...], list[Node]] = {}
            for node in graph.nodes:
                if _fits(graph, node):
                    groups.setdefault(_key(graph, node), []).append(node)
            for nodes in groups.values():
                changes += len(nodes) > 1 and _join(graph, nodes)
        return changes


def _fits(graph: Graph, node: Node) -> bool:
    """Whether weight, bias and what belongs to them are constants of this graph and of the usual shapes."""
    if node.key not in (_LINEAR, _INTEGER) or node.attribute("function", "") or len(node.outputs) != 1:
        return False
    weight = graph.initializers.get(node.input(1))
    if weight is None or len(weight.shape) != 2 or weight.num_elements < _MIN_ELEMENTS:
        return False
    if len(graph.consumers(node.input(1))) != 1 or graph.is_output(node.output(0)):
        return False
    columns = weight.shape[1]
    if node.key == _LINEAR:
        return not node.input(3) and weight.dtype is DataType.FLOAT and _per_column(graph, node.input(2), columns)
    is_bytes = weight.dtype in (DataType.INT8, DataType.UINT8)
    points = not node.input(5) or _is_known(graph, node.input(5), columns)
    scales = _is_known(graph, node.input(3), columns)
    return is_bytes and points and scales and _per_column(graph, node.input(6), columns)


def _per_column(graph: Graph, name: str, columns: int) -> bool:
    tensor = graph.constant_tensor(name) if name else None
    return tensor is not None and tensor.shape == (columns,) and tensor.dtype is DataType.FLOAT


def _is_known(graph: Graph, name: str, columns: int) -> bool:
    tensor = graph.constant_tensor(name) if name else None
    return tensor is not None and len(tensor.shape) <= 1 and tensor.num_elements in (1, columns)


def _key(graph: Graph, node: Node) -> tuple[object, ...]:
    """Equal for products that can be one: of the same value, and matrices of the same rows and type."""
    weight = graph.initializers[node.input(1)]
    shared = [node.input(index) for index in ((0,) if node.key == _LINEAR else (0, 2, 4))]
    return node.key, *shared, weight.shape[0], weight.dtype, bool(node.input(5))


def _join(graph: Graph, nodes: Sequence[Node]) -> bool:
    weights = [graph.initializers[node.input(1)].array() for node in nodes]
    if sum(weight.nbytes for weight in weights) >= _MAX_BYTES:
        return False
    first, sizes = nodes[0], [weight.shape[1] for weight in weights]
    inputs = list(first.inputs)
    inputs[1] = _added(graph, f"{first.input(1)}/joined", np.concatenate(weights, axis=1))
    for place in (2,) if first.key == _LINEAR else (3, 5, 6):
        if first.input(place):
            given = [np.asarray(graph.constant(node.input(place))).reshape(-1) for node in nodes]
            parts = [np.broadcast_to(values, (size,)) for values, size in zip(given, sizes, strict=True)]
            inputs[place] = _added(graph, f"{first.input(place)}/joined", np.concatenate(parts))
    whole = graph.fresh_name(f"{first.output(0)}/joined")
    cut = _added(graph, f"{whole}/sizes", np.asarray(sizes, np.int64))
    outputs = [node.output(0) for node in nodes]
    joined = make_node(first.op_type, inputs, [whole], domain=first.domain, name=first.name)
    graph.insert_before(first, joined, make_node("Split", [whole, cut], outputs, name=f"{first.name}/parts", axis=-1))
    graph.remove_nodes(nodes)
    return True


def _added(graph: Graph, prefix: str, array: NDArray[Any]) -> str:
    name = graph.fresh_name(prefix)
    graph.add_initializer(Tensor.from_array(name, array))
    return name

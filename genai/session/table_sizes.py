"""Sizes that the nodes of a model require of its inputs: of tables that inputs are indices of, and of heads."""

from __future__ import annotations

from collections.abc import Iterator

from ..onnx.ir import Graph, Node
from ..onnx.types import TensorType

# Operators that change the shape of indices, but not their values.
_RESHAPING = frozenset(
    {"Identity", "Cast", "Reshape", "Unsqueeze", "Squeeze", "Slice", "Transpose", "Flatten", "Expand", "Tile"}
)
# Pairs of inputs of an operator: indices, and the table that they are indices of.
_LOOKUPS = {
    "Gather": ((1, 0),),
    "GatherBlockQuantized": ((1, 0),),
    "EmbedLayerNormalization": ((0, 2), (1, 4), (8, 3)),
    "QEmbedLayerNormalization": ((0, 2), (1, 4)),
}


def table_sizes(graph: Graph) -> dict[str, int]:
    """Return the number of rows of the smallest table of known size that each input is an index of, by input name."""
    found: dict[str, int] = {}
    for value in graph.inputs:
        if isinstance(value.type, TensorType) and value.type.dtype.numpy_dtype.kind in "iu":
            sizes = list(_sizes(graph, value.name, set()))
            found |= {value.name: min(sizes)} if sizes else {}
    return found


def head_sizes(graph: Graph) -> dict[str, int]:
    """Return the sizes of the symbolic dimensions that are the head size of a GroupQueryAttention node's cache."""
    found: dict[str, int] = {}
    inputs = {value.name: value.type for value in graph.inputs}
    for node in graph.nodes:
        queries = graph.type_of(node.input(0)) if node.op_type == "GroupQueryAttention" else None
        if not isinstance(queries, TensorType) or not queries.shape or not isinstance(queries.shape[-1], int):
            continue
        heads = node.integer("num_heads", 0) + (0 if node.input(1) else 2 * node.integer("kv_num_heads", 0))
        for past in (inputs.get(node.input(3)), inputs.get(node.input(4))):
            if isinstance(past, TensorType) and past.shape and isinstance(name := past.shape[-1], str) and heads:
                found[name] = queries.shape[-1] // heads
    return found


def _sizes(graph: Graph, name: str, seen: set[tuple[int, str]]) -> Iterator[int]:
    """Yield the sizes of the tables that a value is an index of, in a graph and in the subgraphs that capture it."""
    if (id(graph), name) in seen:
        return
    seen.add((id(graph), name))
    for node in graph.consumers(name):
        for indices, table in _LOOKUPS.get(node.op_type, ()):
            size = _rows(graph, node, node.input(table)) if node.input(indices) == name else 0
            if size:
                yield size
        if node.op_type in _RESHAPING and node.input(0) == name:
            yield from _sizes(graph, node.output(0), seen)
        for subgraph in node.subgraphs():
            yield from _sizes(subgraph, name, seen)


def _rows(graph: Graph, node: Node, table: str) -> int:
    """Return the size of a table along the axis of the look-up; 0 if it is unknown."""
    known = graph.type_of(table)
    axis = node.integer("axis", 0) if node.op_type == "Gather" else 0
    if not isinstance(known, TensorType) or known.shape is None or not -len(known.shape) <= axis < len(known.shape):
        return 0
    size = known.shape[axis]
    return size if isinstance(size, int) else 0

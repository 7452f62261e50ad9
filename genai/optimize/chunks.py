"""A rule for attention that is limited to chunks of a sequence (Llama 4).

GroupQueryAttention has no chunks, so graphs add a large negative number to the scores of tokens in other chunks.
"""

from __future__ import annotations

from ..onnx.decoder_names import GraphNames
from ..onnx.ir import Graph, Node
from ..onnx.node import MS
from .base import Level, Rewrite, made_by, node_rule, number

_BIAS = 10
# Numbers that are at most this hide a token.
_HIDDEN = -1e4


def read_chunks(names: GraphNames) -> Rewrite:
    """Return a rule that replaces the bias of GroupQueryAttention with an attribute `chunk`: the tokens in a chunk.

    The bias is Where(Equal(position of the query / chunk, position of the key / chunk), 0, a large negative number).
    """

    @node_rule(Level.ALL, (MS, "GroupQueryAttention"))
    def read_chunks(graph: Graph, node: Node) -> bool:
        size = _chunk(graph, node.input(_BIAS), names) if node.input(_BIAS) else None
        if size is None or int(node.attribute("local_window_size", -1)) > 0:
            return False
        node.inputs[_BIAS] = ""
        node.set_attribute("chunk", size)
        graph.update(node)
        return True

    return read_chunks


def _chunk(graph: Graph, name: str, names: GraphNames) -> int | None:
    where = made_by(graph, name, "Where")
    if where is None or number(graph, where.input(1)) != 0:
        return None
    hidden, same = number(graph, where.input(2)), made_by(graph, where.input(0), "Equal")
    if same is None or hidden is None or not hidden <= _HIDDEN:
        return None
    queries = made_by(graph, same.input(0), "Unsqueeze")
    sizes = (
        None if queries is None else _divisor(graph, queries.input(0), names.position_ids, names),
        _divisor(graph, same.input(1), "", names),
    )
    axes = None if queries is None else graph.constant(queries.input(1))
    is_fit = sizes[0] is not None and sizes[0] == sizes[1] and axes is not None and axes.tolist() == [1, 3]
    return sizes[0] if is_fit else None


def _divisor(graph: Graph, name: str, positions: str, names: GraphNames) -> int | None:
    """Return the divisor of all positions from 0 to the total length, or of `positions` if it is not ""."""
    quotient = made_by(graph, name, "Div")
    if quotient is None or (quotient.input(0) != positions if positions else not _is_range(graph, quotient, names)):
        return None
    size = graph.constant(quotient.input(1))
    return int(size) if size is not None and size.size == 1 and size.dtype.kind == "i" and size > 0 else None


def _is_range(graph: Graph, quotient: Node, names: GraphNames) -> bool:
    """Return True if the numerator is Range(0, Shape(attention_mask)[1], 1)."""
    every = made_by(graph, quotient.input(0), "Range")
    total = None if every is None else made_by(graph, every.input(1), "Gather")
    shape = None if total is None else made_by(graph, total.input(0), "Shape")
    if every is None or total is None or shape is None or shape.input(0) != names.attention_mask:
        return False
    return [number(graph, every.input(0)), number(graph, every.input(2)), number(graph, total.input(1))] == [0, 1, 1]

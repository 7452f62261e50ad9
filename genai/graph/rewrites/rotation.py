"""RotaryEmbedding of queries and of keys becomes part of the attention that reads them."""

from __future__ import annotations

from ..ir import Attribute, Graph, Model, Node
from .base import Level

_QUERY, _KEY, _COS, _LONG_COS, _Q_NORM, _K_NORM = 0, 1, 3, 5, 8, 9


class FuseRotation:
    """PagedAttention(RotaryEmbedding(q), RotaryEmbedding(k), v) -> PagedAttention(q, k, v, cos, sin) with do_rotary.

    Args:
        position_ids: the graph input by which both must be rotated; attention knows the same numbers from its step.
    """

    name = "fuse_rotation"
    level = Level.EXTENDED

    def __init__(self, position_ids: str) -> None:
        self._position_ids = position_ids

    def apply(self, model: Model) -> int:
        graph = model.graph
        return sum(self._fuse(graph, node) for node in list(graph.nodes) if node.key == ("genai", "PagedAttention"))

    def _fuse(self, graph: Graph, attention: Node) -> bool:
        given = [*attention.inputs, *[""] * (_K_NORM + 1 - len(attention.inputs))]
        if attention.attribute("do_rotary", 0) or any(given[i] for i in (_COS, _LONG_COS, _Q_NORM, _K_NORM)):
            return False
        rotations = [
            self._rotation(graph, attention, given[index], int(attention.attribute(heads, 0)))
            for index, heads in ((_QUERY, "num_heads"), (_KEY, "kv_num_heads"))
        ]
        query, key = rotations
        if query is None or key is None or query.inputs[1:4] != key.inputs[1:4]:
            return False
        interleaved = int(query.attribute("interleaved", 0))
        if interleaved != int(key.attribute("interleaved", 0)):
            return False
        given[_QUERY], given[_KEY] = query.inputs[0], key.inputs[0]
        given[_COS : _COS + 2] = query.inputs[2:4]
        attention.inputs = given
        attention.attributes["do_rotary"] = Attribute.of("do_rotary", 1)
        attention.attributes["rotary_interleaved"] = Attribute.of("rotary_interleaved", interleaved)
        graph.update(attention)
        graph.remove_nodes([query, key])
        return True

    def _rotation(self, graph: Graph, attention: Node, name: str, heads: int) -> Node | None:
        """The rotation that makes this value for this attention alone, if attention can do the same."""
        node = graph.producer(name) if name else None
        if node is None or node.key != ("com.microsoft", "RotaryEmbedding"):
            return None
        if graph.consumers(name) != [attention] or graph.is_output(name) or node.inputs[1] != self._position_ids:
            return None
        if float(node.attribute("scale", 1.0)) != 1.0 or int(node.attribute("is_packed_batching", 0)):
            return None
        given = getattr(graph.type_of(node.inputs[0]), "shape", None)
        table = getattr(graph.type_of(node.inputs[2]), "shape", None)
        if given is None or table is None or len(given) != 3 or not isinstance(table[1], int):
            return None
        own_heads = int(node.attribute("num_heads", 0))
        if not own_heads and isinstance(given[2], int):
            own_heads = given[2] // (2 * table[1])
        return node if own_heads == heads else None

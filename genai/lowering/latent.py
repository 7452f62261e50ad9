"""Proof that attention can use its keys as values: latent attention (MLA), whose rows are stored only once.

In multi-head latent attention (DeepSeek-AI 2024), a token's key and value are the same row, except that the first
numbers of a key are rotated. The result of these numbers is not used. So a cache of keys suffices.
"""

from __future__ import annotations

from ..onnx.ir import Graph, Node
from ..onnx.node import MS

_KEY, _VALUE, _COS, _NORMS = 1, 2, 7, (14, 15)
_ROTATION_COS = 2  # input of RotaryEmbedding


def has_keys_as_values(graph: Graph, node: Node) -> bool:
    """Return True if GroupQueryAttention computes the same used numbers from its stored keys as from its values."""
    key, value = node.input(_KEY), node.input(_VALUE)
    if not key or any(node.input(index) for index in _NORMS):
        return False
    rotated = 0
    if key != value:
        rotation = graph.producer(key)
        if rotation is None or rotation.key != (MS, "RotaryEmbedding") or rotation.input(0) != value:
            return False
        rotated = int(rotation.attribute("rotary_embedding_dim", 0)) or _columns(graph, rotation.input(_ROTATION_COS))
    elif int(node.attribute("do_rotary", 0)):
        rotated = _columns(graph, node.input(_COS))
    return rotated == 0 or 0 < rotated <= _unused_columns(graph, node)


def _columns(graph: Graph, name: str) -> int:
    """Return the number of columns that a table of cosines rotates; -1 if it is unknown."""
    table, choice = graph.constant_tensor(name), graph.producer(name)
    if table is None and choice is not None and choice.op_type == "If":
        branch = choice.attribute("then_branch")  # both branches have tables of the same width
        output = branch.outputs[choice.outputs.index(name)].name
        producer = branch.producer(output)
        table = producer.attribute("value") if producer is not None else branch.initializers.get(output)
    return -1 if table is None or len(table.shape) != 2 else 2 * int(table.shape[1])


def _unused_columns(graph: Graph, node: Node) -> int:
    """Return the number of columns at the start of each head's result that no operator reads."""
    consumers = graph.consumers(node.output(0))
    if len(consumers) != 1 or consumers[0].op_type != "Split" or graph.is_output(node.output(0)):
        return 0
    split, heads = consumers[0], int(node.attribute("num_heads", 0))
    sizes = graph.constant(split.input(1))
    if int(split.attribute("axis", 0)) not in (-1, 2) or sizes is None or len(split.outputs) != 2 * heads:
        return 0
    first, second = (set(sizes.reshape(-1)[start::2].tolist()) for start in (0, 1))
    unread = not any(name and (graph.consumers(name) or graph.is_output(name)) for name in split.outputs[::2])
    return int(first.pop()) if unread and len(first) == len(second) == 1 else 0

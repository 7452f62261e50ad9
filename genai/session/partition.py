"""A partition of a graph that groups a provider's nodes into as few parts as possible."""

from __future__ import annotations

from collections.abc import Collection

from ..onnx.ir import Graph, Node, Value, make_node
from ..onnx.uses import used_names

CPU_PROVIDER, CUDA_PROVIDER = "CPUExecutionProvider", "CUDAExecutionProvider"


def partition(graph: Graph, taken: Collection[Node]) -> list[list[Node]]:
    """Group the nodes that a provider takes into as few parts as possible, in the order in which they run.

    A part never depends on its own results through nodes outside the part, so each value enters and leaves once. The
    number of a node's part is the maximum number of times that a path from an input to the node leaves the provider and
    returns to it.
    """
    graph.topological_sort()
    inside, level = set(taken), dict[Node, int]()
    parts: dict[int, list[Node]] = {}
    for node in graph.nodes:
        before = {maker for name in used_names(node) if (maker := graph.producer(name)) is not None}
        if node in inside:
            level[node] = max((level[maker] + (maker not in inside) for maker in before), default=0)
            parts.setdefault(level[node], []).append(node)
        else:
            level[node] = max((level[maker] for maker in before), default=-1)
    return [parts[number] for number in sorted(parts)]


def keep_apart(graph: Graph, parts: list[list[Node]], on_host: Collection[str]) -> None:
    """Duplicate values that both other parts of the provider and other nodes read, so that one copy can stay in place.

    Args:
        on_host: values that are always on the host.
    """
    inside = {node for nodes in parts for node in nodes}
    for nodes in parts:
        own = set(nodes)
        for node in list(nodes):
            for name in [name for name in node.outputs if name and name not in on_host]:
                users = [user for user in graph.consumers(name) if user not in own]
                again = [user for user in users if user in inside]
                if again and len(again) < len(users):
                    nodes.append(_renamed(graph, node, name, again))


def _renamed(graph: Graph, maker: Node, name: str, users: list[Node]) -> Node:
    """Insert a node that gives a value a second name, and make these users read the second name."""
    twin = graph.fresh_name(name)
    graph.values[twin] = Value(twin, graph.type_of(name))
    same = make_node("Identity", [name], [twin], name=twin)
    graph.insert_before(users[0], same)
    for user in users:
        user.inputs = [twin if given == name else given for given in user.inputs]
        graph.update(user)
    return same

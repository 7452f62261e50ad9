"""Which nodes a provider computes together: as few parts of a graph as can be."""

from __future__ import annotations

from collections.abc import Collection

from ..onnx.ir import Graph, Node, Value, make_node
from ..onnx.uses import used_names


def partition(graph: Graph, taken: Collection[Node]) -> list[list[Node]]:
    """The nodes that a provider takes in as few parts as can be, in the order in which the parts run.

    A part needs nothing that is computed from its own results elsewhere, so that values come in once and leave once.
    A node's part is the number of times that a way to it from an input leaves the provider and comes back.
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
    """Give values that both other parts of the provider and others read two names, so that one can stay where it is.

    Args:
        on_host: values that are never elsewhere.
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
    """A node that gives a value a second name, by which these users read it."""
    twin = graph.fresh_name(name)
    graph.values[twin] = Value(twin, graph.type_of(name))
    same = make_node("Identity", [name], [twin], name=twin)
    graph.insert_before(users[0], same)
    for user in users:
        user.inputs = [twin if given == name else given for given in user.inputs]
        graph.update(user)
    return same

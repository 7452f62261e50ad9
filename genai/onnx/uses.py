"""An index of the producers and consumers of values in a graph, updated node by node, and the topological order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ..errors import GraphError
from .node import Node

if TYPE_CHECKING:  # graphs use this module, and this module reads the graphs in nodes
    from .ir import Graph


def free_names(graph: Graph) -> set[str]:
    """Return the names that a subgraph captures from enclosing graphs, at any depth."""
    used = {value.name for value in graph.outputs}
    defined = {value.name for value in graph.inputs}.union(graph.initializers, graph.sparse_initializers)
    for node in graph.nodes:
        used |= used_names(node)
        defined.update(node.outputs)
    return {name for name in used - defined if name}


def used_names(node: Node) -> set[str]:
    """Return the names that a node uses: its inputs, and the names that its subgraphs capture."""
    used = set(node.inputs)
    used.discard("")
    for subgraph in node.subgraphs():
        used |= free_names(subgraph)
    return used


class UseIndex:
    """Producers and consumers of the values of one list of nodes.

    The index records each node's names, so that a node can be removed or updated after its name lists have changed.
    """

    def __init__(self, nodes: Iterable[Node] = ()) -> None:
        self._producers: dict[str, Node] = {}
        self._consumers: dict[str, dict[Node, None]] = {}
        self._recorded: dict[Node, tuple[set[str], list[str]]] = {}
        self._with_subgraphs: set[Node] = set()
        for node in nodes:
            self.add(node)

    def __contains__(self, node: Node) -> bool:
        return node in self._recorded

    def __len__(self) -> int:
        return len(self._recorded)

    def producer(self, name: str) -> Node | None:
        return self._producers.get(name)

    def consumers(self, name: str) -> list[Node]:
        return list(self._consumers.get(name, ()))

    def has_subgraphs(self) -> bool:
        """Return True if any node has a subgraph."""
        return bool(self._with_subgraphs)

    def add(self, node: Node) -> None:
        if node.subgraphs():
            self._with_subgraphs.add(node)
        used, produced = used_names(node), [name for name in node.outputs if name]
        self._recorded[node] = used, produced
        for name in used:
            self._consumers.setdefault(name, {})[node] = None
        for name in produced:
            self._producers[name] = node

    def remove(self, node: Node) -> None:
        used, produced = self._recorded.pop(node)
        self._with_subgraphs.discard(node)
        for name in used:
            users = self._consumers[name]
            del users[node]
            if not users:
                del self._consumers[name]
        for name in produced:
            if self._producers.get(name) is node:
                del self._producers[name]

    def update(self, node: Node) -> None:
        self.remove(node)
        self.add(node)


def topological_order(nodes: Sequence[Node]) -> list[Node]:
    """Order nodes so that each node comes after the producers of its inputs, and otherwise keep the given order."""
    producers = {name: node for node in nodes for name in node.outputs if name}
    position = {node: index for index, node in enumerate(nodes)}
    ordered: list[Node] = []
    opened: set[Node] = set()
    done: set[Node] = set()
    for first in nodes:
        stack = [first]
        while stack:
            node = stack[-1]
            if node in done:
                stack.pop()
                continue
            used = () if node in opened else used_names(node)
            needed = {producers[name] for name in used if name in producers} - done
            if not needed:
                stack.pop()
                done.add(node)
                ordered.append(node)
                continue
            opened.add(node)
            if any(other in opened for other in needed):
                raise GraphError(
                    f"the graph has a cycle through {node!r}",
                    "a node may only use values that are computed before it",
                    "export the model again; an ONNX graph has no cycles",
                )
            stack.extend(sorted(needed, key=position.__getitem__, reverse=True))
    return ordered

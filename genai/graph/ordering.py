"""Topological order of nodes, by depth-first search without recursion."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import GraphError
from .node import Node
from .uses import used_names


def topological_order(nodes: Sequence[Node]) -> list[Node]:
    """The nodes, each after those that make what it needs, otherwise in the order given.

    Raises:
        GraphError: if nodes need each other in a cycle.
    """
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
            needed = [] if node in opened else _unplaced(node, producers, done)
            if not needed:
                stack.pop()
                done.add(node)
                ordered.append(node)
                continue
            opened.add(node)
            if any(other in opened for other in needed):
                raise _cycle(node)
            stack.extend(sorted(needed, key=position.__getitem__, reverse=True))
    return ordered


def _unplaced(node: Node, producers: dict[str, Node], done: set[Node]) -> set[Node]:
    found = {producers[name] for name in used_names(node) if name in producers}
    return found - done


def _cycle(node: Node) -> GraphError:
    return GraphError(
        f"the graph has a cycle through {node!r}",
        "a node may only use values that are made before it",
        "export the model again; an ONNX graph has no cycles",
    )

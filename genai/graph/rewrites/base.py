"""What a rewrite is, and how a list of them is run to a fixed point."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Protocol

from ...errors import GraphError
from ..ir import Graph, Model, Node

# Far beyond what any sensible set of rules needs; two rules that undo each other reach it.
_MAX_ROUNDS = 100


class Level(IntEnum):
    """How much a graph may be changed; each level includes those below."""

    NONE = 0
    BASIC = 1
    """Simplifications within the standard operators."""
    EXTENDED = 2
    """Fusions into operators that only this toolkit and its peers know."""
    ALL = 3
    """Changes of layout and form for one particular target."""


class Rewrite(Protocol):
    """One rule. It changes a model in place and keeps what the model computes."""

    @property
    def name(self) -> str:
        """For reports."""

    @property
    def level(self) -> Level:
        """The lowest level at which the rule runs."""

    def apply(self, model: Model) -> int:
        """Rewrite wherever the rule fits; returns how many changes were made, 0 for none."""


def run_rewrites(model: Model, rules: Sequence[Rewrite], level: Level) -> list[tuple[str, int]]:
    """Run the rules of a level, in order and again until none changes anything.

    Returns:
        Per rule that changed something its name and how many changes it made, in the order of `rules`.

    Raises:
        GraphError: if the rules never come to an end.
    """
    active = [rule for rule in rules if Level.NONE < rule.level <= level]
    changes = {rule.name: 0 for rule in active}
    total = 0
    found_nothing: dict[str, int] = {}  # rule -> changes of all rules until then
    for _ in range(_MAX_ROUNDS):
        for rule in active:
            if found_nothing.get(rule.name) != total:
                count = rule.apply(model)
                changes[rule.name] += count
                total += count
                if count == 0:
                    found_nothing[rule.name] = total
        if all(found_nothing.get(rule.name) == total for rule in active):
            return [(name, count) for name, count in changes.items() if count]
    raise GraphError(
        f"rewrites {sorted(name for name, count in changes.items() if count)} still change the graph "
        f"after {_MAX_ROUNDS} rounds",
        "two of them undo each other's work",
        "load the model with a lower optimisation level, and report this",
    )


def fuse_nodes(model: Model, fuse: Callable[[Graph, Node], bool], domain: str) -> int:
    """Try a fusion at every node; where one happened, the model imports the domain of what it makes.

    Returns how many happened.
    """
    changes = sum(fuse(graph, node) for graph in list(model.graphs()) for node in list(graph.nodes))
    if changes:
        model.opset_imports.setdefault(domain, 1)
    return changes


def pass_through(graph: Graph, node: Node) -> bool:
    """Remove a node whose first output equals its first input; users of the output get the input.

    A graph output keeps its name, so there the value behind it is renamed instead. Returns False, and changes
    nothing, where that is impossible: another output is used, or the graph would give out an input, an initializer, a
    value of an outer graph, or one value twice.
    """
    source, target = node.input(0), node.output(0)
    if not source or not target or any(name and graph.is_used(name) for name in node.outputs[1:]):
        return False
    if not graph.is_output(target):
        graph.replace_uses(target, source)
        graph.remove_nodes([node])
        graph.values.pop(target, None)
        return True
    if graph.producer(source) is None or graph.is_output(source):
        return False
    graph.values.pop(source, None)
    graph.remove_nodes([node])
    graph.rename(source, target)
    return True

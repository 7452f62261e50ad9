"""The base of rewrite rules: the fixed-point loop, decorators, pattern matching, and graph queries."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import wraps
from typing import Any, TypeAlias

import numpy as np

from ..errors import GraphError
from ..onnx.ir import Graph, Node, OnnxModel, make_node
from ..onnx.types import DataType, TensorType

# Far above what a sensible set of rules needs; only rules that undo each other reach this number.
_MAX_ROUNDS = 100


class Level(IntEnum):
    """The extent of changes to a graph; each level includes all lower levels."""

    NONE = 0
    BASIC = 1
    """Simplifications that use only standard operators."""
    EXTENDED = 2
    """Fusions into operators that only this toolkit and similar runtimes support."""
    ALL = 3
    """Changes of layout and form for a specific target."""


@dataclass(frozen=True)
class Rewrite:
    """A rule that changes a model in place and preserves its results.

    Attributes:
        name: name that reports use.
        level: lowest level at which the rule runs.
        apply: function that rewrites the model wherever the rule matches, and returns the number of changes.
    """

    name: str
    level: Level
    apply: Callable[[OnnxModel], int]


def run_rewrites(model: OnnxModel, rules: Sequence[Rewrite], level: Level) -> list[tuple[str, int]]:
    """Run the rules of a level in order, and repeat until no rule changes anything.

    Returns:
        The name and number of changes of each rule that changed something, in the order of `rules`.

    Raises:
        GraphError: the rules do not reach a fixed point.
    """
    active = [rule for rule in rules if Level.NONE < rule.level <= level]
    changes = {rule.name: 0 for rule in active}
    total = 0
    found_nothing: dict[str, int] = {}  # rule -> total number of changes when the rule last found nothing
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
        "two of these rewrites undo each other's work",
        "load the model with a lower optimisation level, and report this error",
    )


def model_rule(level: Level) -> Callable[[Callable[[OnnxModel], int]], Rewrite]:
    """Convert a function that rewrites a model and returns the number of changes to a rule; use as a decorator."""
    return lambda rewrite: Rewrite(rewrite.__name__, level, rewrite)


def graph_rule(
    level: Level, *, domain: str = "", since: int = 0, functions: bool = False
) -> Callable[[Callable[[OnnxModel, Graph], int]], Rewrite]:
    """Return a decorator that converts a function that rewrites one graph and counts the changes to a rule.

    Args:
        domain: domain of the nodes that the rule creates; the domain is added to the model's imports.
        since: oldest version of ONNX's operator set for which the rule runs.
        functions: True to also run the rule on the bodies of functions.
    """

    def rule(rewrite: Callable[[OnnxModel, Graph], int]) -> Rewrite:
        def apply(model: OnnxModel) -> int:
            if (model.opset_version() or 0) < since:
                return 0
            changes = sum(rewrite(model, graph) for graph in list(model.graphs(functions=functions)))
            if changes and domain:
                model.opset_imports.setdefault(domain, 1)
            return changes

        return Rewrite(rewrite.__name__, level, apply)

    return rule


def node_rule(
    level: Level, *keys: tuple[str, str], domain: str = "", since: int = 0
) -> Callable[[Callable[[Graph, Node], bool]], Rewrite]:
    """Return a decorator that converts a function that rewrites around a node of these operators to a rule.

    The function returns True if it changed the graph.
    """

    op_types = frozenset(op_type for _, op_type in keys)

    def rule(rewrite: Callable[[Graph, Node], bool]) -> Rewrite:
        @wraps(rewrite)
        def rewrite_graph(model: OnnxModel, graph: Graph) -> int:
            # The operator name is compared first because the node's key is computed at each access.
            matching = [node for node in graph.nodes if node.op_type in op_types and node.key in keys]
            return sum(rewrite(graph, node) for node in matching)

        return graph_rule(level, domain=domain, since=since)(rewrite_graph)

    return rule


def pass_through(graph: Graph, node: Node) -> bool:
    """Remove a node whose first output equals its first input; users of the output receive the input.

    A graph output retains its name, so the value that feeds it is renamed instead. Returns False and changes nothing if
    the node cannot be removed: another output of the node is used, or the graph would return an input, an initializer,
    an outer value, or one value twice.
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


def replaced(
    graph: Graph, end: Node, op_type: str, inputs: Sequence[str], *, domain: str = "", name: str | None = None,
    **attributes: Any,
) -> bool:  # fmt: skip
    """Replace `end` with a new node that computes the same outputs; return True, the result that a rule returns."""
    name = end.name if name is None else name
    graph.replace_node(end, make_node(op_type, inputs, end.outputs, domain=domain, name=name, **attributes))
    return True


def moved_to(graph: Graph, node: Node, end: Node) -> Node:
    """Replace `end` with a copy of `node` that computes `end`'s outputs, remove `node`, and return the copy."""
    moved = node.copy()
    moved.outputs = list(end.outputs)
    graph.replace_node(end, moved)
    graph.remove_nodes([node])
    return moved


def number(graph: Graph, name: str) -> float | None:
    """Return the number in a constant with one element, or None."""
    tensor = graph.constant_tensor(name)
    if tensor is None or tensor.num_elements != 1 or tensor.dtype is DataType.STRING:
        return None
    return float(np.asarray(tensor.array()).astype(np.float64).reshape(-1)[0])


def is_number(graph: Graph, name: str, value: float) -> bool:
    """Return True if a value is a constant close to a number (float32 constants are inexact)."""
    constant = number(graph, name)
    return constant is not None and abs(constant - value) <= 1e-3 * max(abs(value), 1e-30)


def only_user(graph: Graph, name: str) -> Node | None:
    """Return the node with the only use of a value, or None if there are other uses or the value is an output."""
    users = graph.consumers(name)
    is_only = len(users) == 1 and users[0].inputs.count(name) <= 1  # 0 in a subgraph
    return users[0] if is_only and not graph.is_output(name) else None


def made_by(graph: Graph, name: str, op_type: str) -> Node | None:
    """Return the node that computes a value if it has this ai.onnx operator, or None."""
    node = graph.producer(name)
    return node if node is not None and node.key == ("", op_type) else None


def followed_by(graph: Graph, name: str, op_type: str) -> Node | None:
    """Return the only node that uses a value if it has this ai.onnx operator and the value is not an output."""
    node = only_user(graph, name)
    return node if node is not None and node.key == ("", op_type) else None


def operand_after(graph: Graph, name: str, op_type: str) -> tuple[Node, str] | None:
    """Return `followed_by` for a binary operator, and the node's other input."""
    node = followed_by(graph, name, op_type)
    other = None if node is None else other_input(node, name)
    return None if node is None or other is None else (node, other)


def bias_after(graph: Graph, name: str, columns: int) -> tuple[Node, str] | None:
    """Return the only user of a value and its other input, if it adds a constant [columns]; otherwise None."""
    addition = operand_after(graph, name, "Add")
    constant = None if addition is None else graph.constant_tensor(addition[1])
    return addition if constant is not None and constant.shape == (columns,) else None


def other_input(node: Node, name: str) -> str | None:
    """Return the input that is not `name` of a node with two inputs, or None if both inputs or neither are `name`."""
    if len(node.inputs) != 2 or node.inputs.count(name) != 1:
        return None
    return node.inputs[1 - node.inputs.index(name)]


def both_orders(node: Node) -> tuple[tuple[str, str], ...]:
    """Return both orders of a node's two inputs, for commutative operators."""
    first, second = node.inputs
    return (first, second), (second, first)


def without_factors(graph: Graph, name: str, skip: Callable[[str], str] = lambda name: name) -> tuple[str, float]:
    """Return a value without its constant factors, and the factors' product; `skip` maps names to equivalents."""
    scale, name = 1.0, skip(name)
    while node := made_by(graph, name, "Mul") or made_by(graph, name, "Div"):
        factor, value = number(graph, skip(node.input(1))), node.input(0)
        if factor is None and node.op_type == "Mul":
            factor, value = number(graph, skip(node.input(0))), node.input(1)
        if not factor:
            break
        scale, name = (scale * factor if node.op_type == "Mul" else scale / factor), skip(value)
    return name, scale


def is_float32(graph: Graph, name: str) -> bool:
    """Return True if a value is known to be float32."""
    known = graph.type_of(name)
    return isinstance(known, TensorType) and known.dtype is DataType.FLOAT


def same_type(graph: Graph, first: str, second: str) -> bool:
    """Return True if two values are known to have the same dtype and shape; symbols must have equal names."""
    a, b = graph.type_of(first), graph.type_of(second)
    if not isinstance(a, TensorType) or not isinstance(b, TensorType) or a.shape is None or b.shape is None:
        return False
    return a.dtype == b.dtype and a.shape == b.shape and None not in a.shape


_COMMUTES = frozenset({"Add", "Mul"})


class Pattern:
    """A node of ai.onnx: Pattern("Mul", "x", Pattern("Sigmoid", "x")) is x * sigmoid(x).

    Attributes:
        inputs: patterns of the node's first inputs, in any order if the operator is commutative.
        once: True if no other node may use the node's result.
        name: key of the node's result in the match; "" = omitted.
    """

    def __init__(self, op_type: str, *inputs: Operand, once: bool = False, name: str = "") -> None:
        self.op_type, self.inputs, self.once, self.name = op_type, inputs, once, name


Operand: TypeAlias = "str | float | Pattern | Sequence[Pattern]"
"""A value name, which stands for the same value throughout the pattern; a number, which matches
constants close to it; a pattern; or alternative patterns."""


def find(graph: Graph, node: Node, pattern: Pattern) -> dict[str, str]:
    """Return the values that a pattern names if a node matches it; otherwise, return an empty dictionary."""
    return next(_matches(graph, node.output(0), pattern, {}), {})


def _matches(graph: Graph, name: str, operand: Operand, bindings: Mapping[str, str]) -> Iterator[dict[str, str]]:
    if isinstance(operand, str):
        if bindings.get(operand, name) == name:
            yield {**bindings, operand: name}
    elif isinstance(operand, float):
        if is_number(graph, name, operand):
            yield dict(bindings)
    elif isinstance(operand, Pattern):
        node = made_by(graph, name, operand.op_type)
        if node is None or len(node.inputs) < len(operand.inputs) or (operand.once and only_user(graph, name) is None):
            return
        if operand.name:
            bindings = {**bindings, operand.name: name}
        yield from _all_match(graph, node.inputs, operand.inputs, bindings)
        if operand.op_type in _COMMUTES:
            yield from _all_match(graph, node.inputs[::-1], operand.inputs, bindings)
    else:
        for option in operand:
            yield from _matches(graph, name, option, bindings)


def _all_match(
    graph: Graph, names: Sequence[str], operands: Sequence[Operand], bindings: Mapping[str, str]
) -> Iterator[dict[str, str]]:
    if not operands:
        yield dict(bindings)
        return
    for first in _matches(graph, names[0], operands[0], bindings):
        yield from _all_match(graph, names[1:], operands[1:], first)

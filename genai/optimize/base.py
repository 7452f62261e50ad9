"""What a rewrite is, how a list of them is run to a fixed point, and what rules ask of a graph: forms, small facts."""

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


@dataclass(frozen=True)
class Rewrite:
    """One rule. It changes a model in place and keeps what the model computes.

    Attributes:
        name: for reports.
        level: the lowest level at which the rule runs.
        apply: rewrites wherever the rule fits; returns how many changes were made, 0 for none.
    """

    name: str
    level: Level
    apply: Callable[[OnnxModel], int]


def run_rewrites(model: OnnxModel, rules: Sequence[Rewrite], level: Level) -> list[tuple[str, int]]:
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


def model_rule(level: Level) -> Callable[[Callable[[OnnxModel], int]], Rewrite]:
    """Decorator: a function that rewrites a model, and says how often, becomes a rule of its name."""
    return lambda rewrite: Rewrite(rewrite.__name__, level, rewrite)


def graph_rule(
    level: Level, *, domain: str = "", since: int = 0, functions: bool = False
) -> Callable[[Callable[[OnnxModel, Graph], int]], Rewrite]:
    """Decorator: a function that rewrites one graph of a model, and says how often, becomes a rule of its name.

    Args:
        domain: of the nodes it makes, which the model then imports.
        since: the version of ONNX's operator set from which on it is used.
        functions: whether it also looks at functions' bodies.
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
    """Decorator: a function that rewrites around a node of one of these operators, and says whether it did."""

    op_types = frozenset(op_type for _, op_type in keys)

    def rule(rewrite: Callable[[Graph, Node], bool]) -> Rewrite:
        @wraps(rewrite)
        def rewrite_graph(model: OnnxModel, graph: Graph) -> int:
            # A node's key is made when it is asked for, so its name alone decides first.
            matching = [node for node in graph.nodes if node.op_type in op_types and node.key in keys]
            return sum(rewrite(graph, node) for node in matching)

        return graph_rule(level, domain=domain, since=since)(rewrite_graph)

    return rule


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


def replaced(
    graph: Graph, end: Node, op_type: str, inputs: Sequence[str], *, domain: str = "", name: str | None = None,
    **attributes: Any,
) -> bool:  # fmt: skip
    """Put a new node, which makes what `end` made, in its place; True, as rules say that they changed something."""
    name = end.name if name is None else name
    graph.replace_node(end, make_node(op_type, inputs, end.outputs, domain=domain, name=name, **attributes))
    return True


def moved_to(graph: Graph, node: Node, end: Node) -> Node:
    """Put a copy of a node, which makes what `end` made, in the place of that one, and take both out."""
    moved = node.copy()
    moved.outputs = list(end.outputs)
    graph.replace_node(end, moved)
    graph.remove_nodes([node])
    return moved


def number(graph: Graph, name: str) -> float | None:
    """The value of a constant of one element, or None."""
    tensor = graph.constant_tensor(name)
    if tensor is None or tensor.num_elements != 1 or tensor.dtype is DataType.STRING:
        return None
    return float(np.asarray(tensor.array()).astype(np.float64).reshape(-1)[0])


def is_number(graph: Graph, name: str, value: float) -> bool:
    """Whether a value is a constant near this number (float32 constants are not exact)."""
    constant = number(graph, name)
    return constant is not None and abs(constant - value) <= 1e-3 * max(abs(value), 1e-30)


def only_user(graph: Graph, name: str) -> Node | None:
    """The one node that uses a value that is no output, or None."""
    users = graph.consumers(name)
    return users[0] if len(users) == 1 and not graph.is_output(name) else None


def made_by(graph: Graph, name: str, op_type: str) -> Node | None:
    """The node of ONNX's own domain and this type that makes a value, or None."""
    node = graph.producer(name)
    return node if node is not None and node.key == ("", op_type) else None


def followed_by(graph: Graph, name: str, op_type: str) -> Node | None:
    """The one node that uses a value that is no output, if it is of ONNX's own domain and this type."""
    node = only_user(graph, name)
    return node if node is not None and node.key == ("", op_type) else None


def operand_after(graph: Graph, name: str, op_type: str) -> tuple[Node, str] | None:
    """As `followed_by`, for a node of two inputs: that node, and its other input."""
    node = followed_by(graph, name, op_type)
    other = None if node is None else other_input(node, name)
    return None if node is None or other is None else (node, other)


def bias_after(graph: Graph, name: str, columns: int) -> tuple[Node, str] | None:
    """The addition of a constant [columns] that alone uses a value, and the constant."""
    addition = operand_after(graph, name, "Add")
    constant = None if addition is None else graph.constant_tensor(addition[1])
    return addition if constant is not None and constant.shape == (columns,) else None


def other_input(node: Node, name: str) -> str | None:
    """The other input of a node of two inputs, or None where both or none are `name`."""
    if len(node.inputs) != 2 or node.inputs.count(name) != 1:
        return None
    return node.inputs[1 - node.inputs.index(name)]


def both_orders(node: Node) -> tuple[tuple[str, str], ...]:
    """The inputs of a node of two, either first: for operators that commute."""
    first, second = node.inputs
    return (first, second), (second, first)


def without_factors(graph: Graph, name: str, skip: Callable[[str], str] = lambda name: name) -> tuple[str, float]:
    """A value before it was multiplied or divided by constants, and their product; `skip` finds other names' values."""
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
    """Whether a value is known to be float32."""
    known = graph.type_of(name)
    return isinstance(known, TensorType) and known.dtype is DataType.FLOAT


def same_type(graph: Graph, first: str, second: str) -> bool:
    """Whether two values are known to have the same element type and shape (open extents must have equal names)."""
    a, b = graph.type_of(first), graph.type_of(second)
    if not isinstance(a, TensorType) or not isinstance(b, TensorType) or a.shape is None or b.shape is None:
        return False
    return a.dtype == b.dtype and a.shape == b.shape and None not in a.shape


_COMMUTES = frozenset({"Add", "Mul"})


class Pattern:
    """A node of ONNX's own domain: Pattern("Mul", "x", Pattern("Sigmoid", "x")) is x * sigmoid(x).

    Attributes:
        inputs: what its first inputs are, in any order where the operator commutes.
        once: nothing else uses its result.
        name: what its result is called among the finds; "" = not wanted.
    """

    def __init__(self, op_type: str, *inputs: Operand, once: bool = False, name: str = "") -> None:
        self.op_type, self.inputs, self.once, self.name = op_type, inputs, once, name


Operand: TypeAlias = "str | float | Pattern | Sequence[Pattern]"
"""A value of this name, the same one everywhere; a constant near this number; a node's result; or one of several."""


def find(graph: Graph, node: Node, pattern: Pattern) -> dict[str, str]:
    """The values that a pattern names, if a node matches it; else nothing."""
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

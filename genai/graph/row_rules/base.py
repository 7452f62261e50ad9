"""What the rules share: the table of rules, and small questions about states and constants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..rows import Dim, Found, Kind, NotFlattenable, State, uniform, with_shape

if TYPE_CHECKING:
    from ..ir import Graph, Node

States = list[State]
Rule = Callable[["Graph", "Node", Sequence[State | None], Found], States]
RULES: dict[tuple[str, str], Rule] = {}
MS = "com.microsoft"


def rule(*ops: str, domain: str = "") -> Callable[[Rule], Rule]:
    """Register a rule for operators."""

    def add(function: Rule) -> Rule:
        RULES.update({(domain, op): function for op in ops})
        return function

    return add


def apply_rule(graph: Graph, node: Node, states: Sequence[State | None], found: Found) -> States:
    """States of a node's outputs: constants and mask arithmetic pass generically, rows need a rule of their own."""
    if missing := [name for name, state in zip(node.inputs, states, strict=True) if name and state is None]:
        raise NotFlattenable(f"nothing is known of input {missing[0]!r}")
    given = [state for state in states if state is not None]
    kinds = {state.kind for state in given}
    function = RULES.get(node.key)
    if node.op_type == "Constant" and node.key[0] == "":
        return [_constant(graph, node)]
    if function is not None and (kinds - {Kind.UNIFORM, Kind.CONTEXT} or node.op_type in ("Shape", "If")):
        return function(graph, node, states, found)
    if kinds <= {Kind.UNIFORM, Kind.CONTEXT}:
        kind = Kind.CONTEXT if Kind.CONTEXT in kinds else Kind.UNIFORM
        return [_uniform_output(graph, name, kind) for name in node.outputs]
    if kinds <= {Kind.UNIFORM, Kind.CONTEXT, Kind.LENGTHS}:
        return [State(Kind.CONTEXT)] * len(node.outputs)
    raise NotFlattenable("this operator is not known to treat tokens independently")


def _constant(graph: Graph, node: Node) -> State:
    value = graph.constant(node.outputs[0])
    return uniform(value.shape) if value is not None else State(Kind.UNIFORM)


def _uniform_output(graph: Graph, name: str, kind: Kind) -> State:
    """Uniform values computed from constants: take the shape that shape inference found, when it is static."""
    value = graph.values.get(name)
    shape = getattr(value.type, "shape", None) if value is not None else None
    if kind is Kind.UNIFORM and shape is not None and all(isinstance(size, int) for size in shape):
        return uniform([int(size) for size in shape if isinstance(size, int)])
    return State(kind)


def normal_axis(value: int, rank: int) -> int:
    return value + rank if value < 0 else value


def the_rows(states: Sequence[State | None]) -> State:
    """The only ROWS input of an operator whose other inputs are uniform."""
    found = [state for state in states if state is not None and state.kind is Kind.ROWS]
    others = [s for s in states if s is not None and s.kind not in (Kind.ROWS, Kind.UNIFORM)]
    if others or len(found) != 1:
        raise NotFlattenable("tokens meet values that are not the same for all tokens")
    return found[0]


def keep_off(state: State, axis: int, what: str) -> None:
    if normal_axis(axis, state.rank) == state.axis:
        raise NotFlattenable(f"{what} runs along the token axis {state.axis}")


def constant_ints(graph: Graph, name: str) -> list[int]:
    value = graph.constant(name)
    if value is None:
        raise NotFlattenable(f"{name!r} is not a constant")
    return [int(item) for item in np.asarray(value).reshape(-1)]


def given_axes(graph: Graph, node: Node, input_index: int = 1) -> list[int] | None:
    """Axes given as an input (newer operator sets) or as an attribute (older ones)."""
    if len(node.inputs) > input_index and node.inputs[input_index]:
        return constant_ints(graph, node.inputs[input_index])
    axes = node.attribute("axes", None)
    return None if axes is None else [int(axis) for axis in axes]


def resized(state: State, axis: int, size: Dim) -> State:
    shape = tuple(size if i == axis else dim for i, dim in enumerate(state.known_shape))
    return with_shape(state, shape, state.axis)


def without_axes(state: State, axes: Sequence[int]) -> State:
    shape = tuple(dim for i, dim in enumerate(state.known_shape) if i not in axes)
    return with_shape(state, shape, state.axis - sum(axis < state.axis for axis in axes))


def length_entries(graph: Graph, name: str, state: State | None) -> tuple[Dim, ...] | None:
    """The dimensions that a shape vector holds; -1 and 0 keep their meaning as factors."""
    if state is not None and state.kind is Kind.LENGTHS:
        return state.entries
    value = graph.constant(name)
    return None if value is None else tuple(Dim(int(item)) for item in np.asarray(value).reshape(-1))

"""Row analysis: proves that a decoder's batch may be flattened to one row of T tokens, [1, T].

Flattening mixes tokens of different sequences on the token axis. That is allowed where every operator treats tokens
independently (row-wise) or is a known exchange between rows for which a rewrite exists (attention, the last-row
gather before the head, the long-RoPE If). The analysis follows the token axis through every value (moves, merges
such as tokens x heads, rank changes) by interpreting the graph over symbolic shapes. One operator that it cannot
place makes it raise `NotFlattenable`, and the model is then run sequence by sequence instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .ir import Graph, Node


class NotFlattenable(Exception):
    """The graph cannot be flattened; the message names the node and the reason."""


@dataclass(frozen=True)
class Dim:
    """A symbolic dimension: factor x (B if batch) x (S if tokens)."""

    factor: int
    batch: bool = False
    tokens: bool = False

    def __mul__(self, other: Dim) -> Dim:
        if (self.batch and other.batch) or (self.tokens and other.tokens):
            raise NotFlattenable("a dimension holds the tokens twice, so tokens meet each other")
        return Dim(self.factor * other.factor, self.batch or other.batch, self.tokens or other.tokens)

    def __str__(self) -> str:
        return "*".join([str(self.factor)] + ["B"] * self.batch + ["S"] * self.tokens)


ONE = Dim(1)
BATCH = Dim(1, batch=True)
TOKENS = Dim(1, tokens=True)
Shape = tuple[Dim, ...]


class Kind(Enum):
    """What a value is, seen along the token axis."""

    UNIFORM = "the same for all tokens"
    ROWS = "one entry per token along one axis"
    LENGTHS = "a vector of dimensions, computed from shapes"
    CONTEXT = "computed from the attention mask or the total length"
    TABLES = "RoPE tables chosen by the total length"
    CACHE = "a past or present key/value tensor"


@dataclass(frozen=True)
class State:
    """Abstract value: kind, symbolic shape (None = not needed), token axis for ROWS, entries for LENGTHS."""

    kind: Kind
    shape: Shape | None = None
    axis: int = -1
    entries: tuple[Dim, ...] = ()

    @property
    def rank(self) -> int:
        return len(self.known_shape)

    @property
    def known_shape(self) -> Shape:
        if self.shape is None:
            raise NotFlattenable(f"the shape of a value that is {self.kind.value} is not known")
        return self.shape


def uniform(shape: Sequence[int]) -> State:
    """The state of a constant."""
    return State(Kind.UNIFORM, tuple(Dim(size) for size in shape))


def rows(shape: Shape) -> State:
    """ROWS with its token axis found from the shape."""
    axes = [i for i, dim in enumerate(shape) if dim.tokens]
    if len(axes) != 1:
        raise NotFlattenable(f"expected one token axis, found {len(axes)} in [{', '.join(map(str, shape))}]")
    return State(Kind.ROWS, shape, axes[0])


def product(shape: Shape) -> Dim:
    """The number of elements, symbolically."""
    return math.prod(shape, start=ONE)


@dataclass(frozen=True)
class RowAnalysis:
    """The result: a state per value name, and the nodes that exchange between rows in a known way."""

    states: dict[str, State]
    attention: tuple[Node, ...]
    last_row_gathers: tuple[Node, ...]
    table_choices: tuple[Node, ...]


@dataclass
class Found:
    """Known cross-row nodes, gathered while the rules run."""

    attention: list[Node]
    last_row_gathers: list[Node]
    table_choices: list[Node]


def analyse_rows(graph: Graph, inputs: dict[str, State]) -> RowAnalysis:
    """Interpret a graph (topologically sorted) from the states of its inputs.

    Args:
        graph: the decoder graph.
        inputs: the state of every graph input by name.

    Raises:
        NotFlattenable: with the node and the reason.
    """
    from .row_rules import apply_rule

    states = dict(inputs)
    for name, tensor in graph.initializers.items():
        states.setdefault(name, uniform(tensor.shape))
    found = Found([], [], [])
    for node in graph.nodes:
        arguments = [states.get(name) if name else None for name in node.inputs]
        try:
            results = apply_rule(graph, node, arguments, found)
        except NotFlattenable as error:
            raise NotFlattenable(f"{node.op_type} {node.name!r}: {error}") from None
        for name, state in zip(node.outputs, results, strict=False):
            if name:
                states[name] = state
    _check_outputs(graph, states)
    return RowAnalysis(states, tuple(found.attention), tuple(found.last_row_gathers), tuple(found.table_choices))


def _check_outputs(graph: Graph, states: dict[str, State]) -> None:
    for value in graph.outputs:
        state = states.get(value.name)
        if state is None or state.kind not in (Kind.ROWS, Kind.CACHE):
            kind = state.kind.value if state else "never computed"
            raise NotFlattenable(f"output {value.name!r} is {kind}, not one row per token")


def with_shape(state: State, shape: Shape, axis: int) -> State:
    """The same rows in another shape."""
    return replace(state, shape=shape, axis=axis)

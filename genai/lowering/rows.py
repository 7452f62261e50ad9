"""Row analysis: proves that a decoder's batch can be flattened to one row of T tokens, [1, T].

Flattening mixes tokens of different sequences on the token axis. This is valid if every operator either treats tokens
independently (row-wise) or is a known exchange between rows for which there is a rewrite (attention, the last-row
gather before the head, the long-RoPE If). The analysis interprets the graph over symbolic shapes to follow the token
axis through every value (moves, merges such as tokens x heads, rank changes). If it cannot analyse an operator, it
raises `NotFlattenable`, and the model computes sequences one by one instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..onnx.ir import Node


class NotFlattenable(Exception):
    """The graph cannot be flattened; the message names the node and the reason."""


@dataclass(frozen=True)
class RowDim:
    """A symbolic dimension: factor x (B if batch) x (S if tokens)."""

    factor: int
    batch: bool = False
    tokens: bool = False

    def __mul__(self, other: RowDim) -> RowDim:
        if (self.batch and other.batch) or (self.tokens and other.tokens):
            raise NotFlattenable("a dimension contains the tokens twice, so tokens are combined with each other")
        return RowDim(self.factor * other.factor, self.batch or other.batch, self.tokens or other.tokens)

    def __str__(self) -> str:
        return "*".join([str(self.factor)] + ["B"] * self.batch + ["S"] * self.tokens)


ONE = RowDim(1)
BATCH = RowDim(1, batch=True)
TOKENS = RowDim(1, tokens=True)
RowShape = tuple[RowDim, ...]


class Kind(Enum):
    """The role of a value with respect to the token axis."""

    UNIFORM = "the same for all tokens"
    ROWS = "one entry per token along one axis"
    LENGTHS = "a vector of dimensions, computed from shapes"
    CONTEXT = "computed from the attention mask or the total length"
    TABLES = "RoPE tables selected by the total length"
    CACHE = "a past or present key, value or state tensor"


@dataclass(frozen=True)
class State:
    """Abstract value: kind, symbolic shape (None = not needed), token axis for ROWS, entries for LENGTHS."""

    kind: Kind
    shape: RowShape | None = None
    axis: int = -1
    entries: tuple[RowDim, ...] = ()

    @property
    def rank(self) -> int:
        return len(self.known_shape)

    @property
    def known_shape(self) -> RowShape:
        if self.shape is None:
            raise NotFlattenable(f"the shape of a value is unknown (the value is {self.kind.value})")
        return self.shape

    def axis_index(self, axis: int) -> int:
        """Return an axis counted from the front."""
        return axis + self.rank if axis < 0 else axis

    def with_shape(self, shape: RowShape, axis: int | None = None) -> State:
        """Return the same rows in another shape and, if `axis` is given, with another token axis."""
        return replace(self, shape=shape, axis=self.axis if axis is None else axis)

    def resized(self, axis: int, size: RowDim) -> State:
        """Return the same rows with a different size of one axis."""
        return self.with_shape(tuple(size if i == axis else dim for i, dim in enumerate(self.known_shape)))

    def without_axes(self, axes: Sequence[int]) -> State:
        """Return the same rows without axes of size 1."""
        shape = tuple(dim for i, dim in enumerate(self.known_shape) if i not in axes)
        return self.with_shape(shape, self.axis - sum(axis < self.axis for axis in axes))


def uniform(shape: Sequence[int]) -> State:
    """Return the state of a constant."""
    return State(Kind.UNIFORM, tuple(RowDim(size) for size in shape))


def rows(shape: RowShape) -> State:
    """Return a ROWS state whose token axis is determined from the shape."""
    axes = [i for i, dim in enumerate(shape) if dim.tokens]
    if len(axes) != 1:
        raise NotFlattenable(f"expected one token axis, found {len(axes)} in [{', '.join(map(str, shape))}]")
    return State(Kind.ROWS, shape, axes[0])


def product(shape: RowShape) -> RowDim:
    """Return the symbolic number of elements."""
    return math.prod(shape, start=ONE)


@dataclass
class RowAnalysis:
    """The state of each value by name, and the nodes that exchange data between rows; the rules record both."""

    states: dict[str, State]
    attention: list[Node] = field(default_factory=list)
    last_row_gathers: list[Node] = field(default_factory=list)
    first_row_gathers: list[Node] = field(default_factory=list)
    table_choices: list[Node] = field(default_factory=list)
    recurrent: list[Node] = field(default_factory=list)

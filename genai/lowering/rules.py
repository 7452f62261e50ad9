"""What is known of operators over rows of tokens: where the tokens go, what nodes become, which inputs are weights.

A row rule says where the tokens are in a node's outputs (see `rows`). An op rule turns a node over rows of tokens
into ops.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from genai.kernels.ir import Ids, Op, RowsType, SliceColumns

from ..onnx.node import Node
from ..ops.registry import NodeSpec, files_of, load, rules_by_operator
from .index import OPERATORS
from .rows import Kind, NotFlattenable, RowAnalysis, RowDim, State, uniform

if TYPE_CHECKING:
    from ..onnx.ir import Graph


States = list[State]
_FILES = files_of(OPERATORS)
_DOMAINS = sorted({domain for domain, _ in _FILES})


def load_rules(domain: str, op_type: str) -> None:
    """Import the files of this package that know an operator, so that the tables of rules have it."""
    for module in _FILES.get((domain, op_type), ()):
        load(f"{__package__}.{module}")


@dataclass(frozen=True)
class NodeRows:
    """What a row rule may look at, and where it notes what it found.

    Attributes:
        states: per input where the tokens are in it, None where it is absent.
    """

    graph: Graph
    node: Node
    states: Sequence[State | None]
    analysis: RowAnalysis

    @property
    def rows(self) -> State:
        """The only ROWS input of an operator whose other inputs are uniform."""
        return single_rows_state(self.states)

    def first(self) -> State:
        """The state of the first input."""
        state = self.states[0]
        assert state is not None
        return state

    def axis(self, state: State, default: int, name: str = "axis") -> int:
        """The axis of a state that an attribute names."""
        return state.axis_index(int(self.node.attribute(name, default)))

    def axes(self) -> list[int] | None:
        """Axes given as input 1 (newer operator sets) or as an attribute (older ones)."""
        if self.node.input(1):
            return self.ints(1)
        axes = self.node.attribute("axes", None)
        return None if axes is None else [int(axis) for axis in axes]

    def keep_off(self, state: State, axis: int, subject: str = "") -> None:
        """Refuse what runs along the token axis."""
        if state.axis_index(axis) == state.axis:
            raise NotFlattenable(f"{subject or self.node.op_type} runs along the token axis {state.axis}")

    def ints(self, index: int) -> list[int]:
        """The numbers in a constant input."""
        name = self.node.inputs[index]
        value = self.graph.constant(name)
        if value is None:
            raise NotFlattenable(f"{name!r} is not a constant")
        return [int(item) for item in np.asarray(value).reshape(-1)]

    def lengths(self, index: int) -> tuple[RowDim, ...] | None:
        """The dimensions that a shape vector holds; -1 and 0 keep their meaning as factors."""
        state = self.states[index]
        if state is not None and state.kind is Kind.LENGTHS:
            return state.entries
        value = self.graph.constant(self.node.inputs[index])
        return None if value is None else tuple(RowDim(int(item)) for item in np.asarray(value).reshape(-1))


RowRule = Callable[[NodeRows], States]
_ROW_RULES: dict[tuple[str, str], RowRule] = {}


row_rule = rules_by_operator(_ROW_RULES, "")


def apply_rule(graph: Graph, node: Node, states: Sequence[State | None], analysis: RowAnalysis) -> States:
    """States of a node's outputs: constants and mask arithmetic pass generically, rows need a rule of their own."""
    if missing := [name for name, state in zip(node.inputs, states, strict=True) if name and state is None]:
        raise NotFlattenable(f"nothing is known of input {missing[0]!r}")
    kinds = {state.kind for state in states if state is not None}
    load_rules(*node.key)
    function = _ROW_RULES.get(node.key)
    if node.key == ("", "Constant"):
        value = graph.constant(node.outputs[0])
        return [uniform(value.shape) if value is not None else State(Kind.UNIFORM)]
    if function is not None and (kinds - {Kind.UNIFORM, Kind.CONTEXT} or node.op_type in ("Shape", "If")):
        return function(NodeRows(graph, node, states, analysis))
    if kinds <= {Kind.UNIFORM, Kind.CONTEXT}:
        kind = Kind.CONTEXT if Kind.CONTEXT in kinds else Kind.UNIFORM
        return [_uniform_output(graph, name, kind) for name in node.outputs]
    if kinds <= {Kind.UNIFORM, Kind.CONTEXT, Kind.LENGTHS}:
        return [State(Kind.CONTEXT)] * len(node.outputs)
    raise NotFlattenable("this operator is not known to treat tokens independently")


def _uniform_output(graph: Graph, name: str, kind: Kind) -> State:
    """Uniform values computed from constants: take the shape that shape inference found, when it is static."""
    value = graph.values.get(name)
    shape = getattr(value.type, "shape", None) if value is not None else None
    if kind is Kind.UNIFORM and shape is not None and all(isinstance(size, int) for size in shape):
        return uniform([int(size) for size in shape if isinstance(size, int)])
    return State(kind)


def single_rows_state(states: Sequence[State | None]) -> State:
    """The only ROWS among states of which the others are uniform."""
    rows = [state for state in states if state is not None and state.kind is Kind.ROWS]
    others = [s for s in states if s is not None and s.kind not in (Kind.ROWS, Kind.UNIFORM)]
    if others or len(rows) != 1:
        raise NotFlattenable("tokens meet values that are not the same for all tokens")
    return rows[0]


# What is known of a node's input: rows, the step's integers, or nothing.
ValueType = RowsType | Ids | None


@dataclass(frozen=True)
class Lowered:
    """What a node becomes: ops in order, and the types of the values that they make (or ask for)."""

    ops: Sequence[Op]
    types: Mapping[str, RowsType] = field(default_factory=dict)


@dataclass(frozen=True)
class LoweringSpec(NodeSpec):
    """What an op rule may know of its node: also, per input, what is known of the value."""

    types: Sequence[ValueType] = ()

    def rows(self, index: int) -> RowsType | None:
        """The type of input `index` if it is a value of rows."""
        type_ = self.types[index] if index < len(self.types) else None
        return type_ if isinstance(type_, RowsType) else None


# None for a form that has no op.
LoweringRule = Callable[[LoweringSpec], Lowered | None]
_LOWERING_RULES: dict[tuple[str, str], LoweringRule] = {}
lowering_rule = rules_by_operator(_LOWERING_RULES, "")


def find_lowering_rule(domain: str, op_type: str) -> LoweringRule | None:
    """The rule for an operator, or None."""
    load_rules(domain, op_type)
    return _LOWERING_RULES.get((domain, op_type))


def slice_columns(spec: NodeSpec, out: RowsType, first: int = 0, index: int = 0) -> Lowered:
    name = spec.outputs[index]
    return Lowered([SliceColumns(spec.inputs[0], first, name, op_type=spec.op_type)], {name: out})


@dataclass(frozen=True)
class Packed:
    """An input that holds integers of fewer bits than a byte has, in blocks.

    Attributes:
        bits: the attribute that says how many bits a weight has. scales, points: the inputs that belong to it.
        sizes: the attributes that say how many rows and columns a matrix has; None = the stored array says it, and
            row_axes tells how many of its leading axes count rows.
        block_size: where the node does not say; 0 = one scale per row.
        as_stored: packed, it takes about as much memory as it is stored in (up to a tenth more).
    """

    bits: str
    scales: int
    points: int
    sizes: tuple[str, str] | None = None
    row_axes: int = 1
    block_size: int = 128
    as_stored: bool = False


@dataclass(frozen=True)
class StoredWeights:
    """The stored inputs of one operator.

    Attributes:
        packed: packed weights by input.
        beside: inputs that are not weights themselves: scales, zero points, tables of cosines and sines.
    """

    packed: Mapping[int, Packed]
    beside: tuple[int, ...]


_STORED: dict[str, StoredWeights] = {}


def stored_weights(op_type: str, packed: Mapping[int, Packed] | None = None, beside: tuple[int, ...] = ()) -> None:
    """Say what an operator's stored inputs are; scales and zero points of packed weights lie beside them."""
    packed = packed or {}
    sides = tuple(index for stored in packed.values() for index in (stored.scales, stored.points))
    _STORED[op_type] = StoredWeights(packed, (*sides, *beside))


def find_stored_weights(op_type: str) -> StoredWeights:
    """What is known of an operator; nothing for those that store nothing of their own."""
    for domain in _DOMAINS:
        load_rules(domain, op_type)
    return _STORED.get(op_type, StoredWeights({}, ()))

"""Registries of rules for decoders, by operator: row rules, lowering rules and stored weights.

A row rule returns the state of a node's outputs, which includes the token axis (see `rows`). A lowering rule converts a
node over rows of tokens to ops.
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
    """Import the files of this package that contain an operator's rules."""
    for module in _FILES.get((domain, op_type), ()):
        load(f"{__package__}.{module}")


@dataclass(frozen=True)
class NodeRows:
    """The input of a row rule, and the analysis in which the rule records its findings.

    Attributes:
        states: state per input, None if the input is absent.
    """

    graph: Graph
    node: Node
    states: Sequence[State | None]
    analysis: RowAnalysis

    @property
    def rows(self) -> State:
        """The state of the only ROWS input; all other inputs must be uniform."""
        return single_rows_state(self.states)

    def first(self) -> State:
        """Return the state of the first input."""
        state = self.states[0]
        assert state is not None
        return state

    def axis(self, state: State, default: int, name: str = "axis") -> int:
        """Return the axis of a state that an attribute specifies."""
        return state.axis_index(int(self.node.attribute(name, default)))

    def axes(self) -> list[int] | None:
        """Return the axes from input 1 (newer operator sets) or from an attribute (older operator sets)."""
        if self.node.input(1):
            return self.ints(1)
        axes = self.node.attribute("axes", None)
        return None if axes is None else [int(axis) for axis in axes]

    def keep_off(self, state: State, axis: int, subject: str = "") -> None:
        """Raise NotFlattenable if an operation runs along the token axis."""
        if state.axis_index(axis) == state.axis:
            raise NotFlattenable(f"{subject or self.node.op_type} runs along the token axis {state.axis}")

    def ints(self, index: int) -> list[int]:
        """Return the integers in a constant input. Raises NotFlattenable if it is not constant."""
        name = self.node.inputs[index]
        value = self.graph.constant(name)
        if value is None:
            raise NotFlattenable(f"{name!r} is not a constant")
        return [int(item) for item in np.asarray(value).reshape(-1)]

    def lengths(self, index: int) -> tuple[RowDim, ...] | None:
        """Return the dimensions in a shape vector, or None if unknown. The factors -1 and 0 retain their meaning."""
        state = self.states[index]
        if state is not None and state.kind is Kind.LENGTHS:
            return state.entries
        value = self.graph.constant(self.node.inputs[index])
        return None if value is None else tuple(RowDim(int(item)) for item in np.asarray(value).reshape(-1))


# Operators with which exporters select the tokens of each expert.
_EXPERTS = ("OneHot", "NonZero", "ScatterElements", "ScatterND")

RowRule = Callable[[NodeRows], States]
_ROW_RULES: dict[tuple[str, str], RowRule] = {}


row_rule = rules_by_operator(_ROW_RULES, "")


def apply_rule(graph: Graph, node: Node, states: Sequence[State | None], analysis: RowAnalysis) -> States:
    """Return the states of a node's outputs; constants and mask arithmetic do not need a rule, but rows do."""
    if missing := [name for name, state in zip(node.inputs, states, strict=True) if name and state is None]:
        raise NotFlattenable(f"the state of input {missing[0]!r} is unknown")
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
    if node.op_type in _EXPERTS:
        raise NotFlattenable("mixtures of experts are only recognised as the operators MoE and QMoE")
    raise NotFlattenable("this operator is not known to treat tokens independently")


def _uniform_output(graph: Graph, name: str, kind: Kind) -> State:
    """Return the state of a value computed from constants, with its inferred shape if the shape is static."""
    value = graph.values.get(name)
    shape = getattr(value.type, "shape", None) if value is not None else None
    if kind is Kind.UNIFORM and shape is not None and all(isinstance(size, int) for size in shape):
        return uniform([int(size) for size in shape if isinstance(size, int)])
    return State(kind)


def single_rows_state(states: Sequence[State | None]) -> State:
    """Return the only ROWS state; all other states must be uniform."""
    rows = [state for state in states if state is not None and state.kind is Kind.ROWS]
    others = [s for s in states if s is not None and s.kind not in (Kind.ROWS, Kind.UNIFORM)]
    if others or len(rows) != 1:
        raise NotFlattenable("tokens are combined with values that are not the same for all tokens")
    return rows[0]


# The known type of a node's input: rows, the step's integers, or None.
ValueType = RowsType | Ids | None


@dataclass(frozen=True)
class Lowered:
    """The result of lowering a node: its ops in order, and the types of the values that the ops compute or require."""

    ops: Sequence[Op]
    types: Mapping[str, RowsType] = field(default_factory=dict)


@dataclass(frozen=True)
class LoweringSpec(NodeSpec):
    """The description of a node that a lowering rule receives, with the known type of each input."""

    types: Sequence[ValueType] = ()

    def rows(self, index: int) -> RowsType | None:
        """Return the type of input `index` if it has rows, else None."""
        type_ = self.types[index] if index < len(self.types) else None
        return type_ if isinstance(type_, RowsType) else None


# The rule returns None for forms of the operator that have no op.
LoweringRule = Callable[[LoweringSpec], Lowered | None]
_LOWERING_RULES: dict[tuple[str, str], LoweringRule] = {}
lowering_rule = rules_by_operator(_LOWERING_RULES, "")


def find_lowering_rule(domain: str, op_type: str) -> LoweringRule | None:
    """Return an operator's lowering rule, or None."""
    load_rules(domain, op_type)
    return _LOWERING_RULES.get((domain, op_type))


def slice_columns(spec: NodeSpec, out: RowsType, first: int = 0, index: int = 0) -> Lowered:
    name = spec.outputs[index]
    return Lowered([SliceColumns(spec.inputs[0], first, name, op_type=spec.op_type)], {name: out})


@dataclass(frozen=True)
class Packed:
    """An input that contains blocks of integers narrower than a byte.

    Attributes:
        bits: the attribute that specifies the bits per weight.
        scales, points: the inputs that contain the scales and zero points.
        sizes: the attributes with the numbers of rows and columns. None = the shape of the stored array specifies them,
            and its first `row_axes` axes count rows.
        block_size: default if the node does not specify it; 0 = one scale per row.
        as_stored: True if the packed form takes about as much memory as the stored form (at most a tenth more).
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
        beside: other inputs that are stored with the weights: scales, zero points, cos and sin tables.
    """

    packed: Mapping[int, Packed]
    beside: tuple[int, ...]


_STORED: dict[str, StoredWeights] = {}


def stored_weights(op_type: str, packed: Mapping[int, Packed] | None = None, beside: tuple[int, ...] = ()) -> None:
    """Register an operator's stored inputs; the scales and zero points of packed weights are added to `beside`."""
    packed = packed or {}
    sides = tuple(index for stored in packed.values() for index in (stored.scales, stored.points))
    _STORED[op_type] = StoredWeights(packed, (*sides, *beside))


def find_stored_weights(op_type: str) -> StoredWeights:
    """Return an operator's stored inputs; empty if the operator has no stored weights."""
    for domain in _DOMAINS:
        load_rules(domain, op_type)
    return _STORED.get(op_type, StoredWeights({}, ()))

"""Element by element operators, and RoPE."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..rows import ONE, Dim, Found, Kind, NotFlattenable, State
from .base import (
    MS,
    States,
    length_entries,
    rule,
)

if TYPE_CHECKING:
    from ..ir import Graph, Node

ELEMENTWISE = (
    "Abs Acos Acosh Asin Asinh Atan Atanh Add And BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Cast CastLike "
    "Ceil Celu Clip Cos Cosh Div Dropout Elu Equal Erf Exp Floor Gelu Greater GreaterOrEqual HardSigmoid HardSwish "
    "Identity IsInf IsNaN LeakyRelu Less LessOrEqual Log Max Mean Min Mish Mod Mul Neg Not Or PRelu Pow Reciprocal "
    "Relu Round Selu Shrink Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Sub Sum Swish Tan Tanh ThresholdedRelu Where "
    "Xor"
)


@rule(*ELEMENTWISE.split())
def elementwise(graph: Graph, node: Node, states: Sequence[State | None], found: Found) -> States:
    given = [state for state in states if state is not None]
    if all(state.kind in (Kind.LENGTHS, Kind.UNIFORM) for state in given):
        return [_length_arithmetic(graph, node, states)]
    if any(state.kind not in (Kind.ROWS, Kind.UNIFORM) for state in given):
        raise NotFlattenable("tokens meet values computed from the attention mask or from lengths")
    rank = max(state.rank for state in given)
    axes = {state.axis + rank - state.rank for state in given if state.kind is Kind.ROWS}
    if len(axes) != 1:
        raise NotFlattenable("two values bring their tokens along different axes")
    axis = axes.pop()
    shape = tuple(_broadcast(given, rank, i, axis) for i in range(rank))
    return [State(Kind.ROWS, shape, axis)] * len(node.outputs)


def _broadcast(given: Sequence[State], rank: int, index: int, axis: int) -> Dim:
    result = ONE
    for state in given:
        own = index - (rank - state.rank)
        dim = state.known_shape[own] if own >= 0 else ONE
        if state.kind is Kind.UNIFORM and index == axis and dim != ONE:
            raise NotFlattenable(f"a constant of size {dim} runs along the token axis")
        result = dim if dim != ONE else result
    return result


def _length_arithmetic(graph: Graph, node: Node, states: Sequence[State | None]) -> State:
    if node.op_type in ("Cast", "Identity"):
        assert states[0] is not None
        return states[0]
    if node.op_type in ("Mul", "Div") and len(states) == 2:
        left, right = (length_entries(graph, name, state) for name, state in zip(node.inputs, states, strict=True))
        if left and right and len(left) == len(right):
            combine = _product if node.op_type == "Mul" else _quotient
            entries = [combine(a, b) for a, b in zip(left, right, strict=True)]
            if None not in entries:
                return State(Kind.LENGTHS, entries=tuple(entry for entry in entries if entry is not None))
    return State(Kind.CONTEXT)


def _product(left: Dim, right: Dim) -> Dim | None:
    return left * right


def _quotient(left: Dim, right: Dim) -> Dim | None:
    """Half a head, say; None where the quotient is no whole number or not known."""
    whole = not (right.batch or right.tokens) and right.factor > 0 and left.factor % right.factor == 0
    return Dim(left.factor // right.factor, left.batch, left.tokens) if whole else None


@rule("RotaryEmbedding", domain=MS)
def rotary_embedding(graph: Graph, node: Node, states: Sequence[State | None], found: Found) -> States:
    x, positions, *tables = states
    if x is None or positions is None or {x.kind, positions.kind} != {Kind.ROWS}:
        raise NotFlattenable("needs one position per token")
    if any(table is None or table.kind not in (Kind.UNIFORM, Kind.TABLES) for table in tables):
        raise NotFlattenable("needs constant cos and sin tables")
    if any(table is not None and table.kind is Kind.TABLES for table in tables):
        raise NotFlattenable("tables chosen by the total length are known inside attention only")
    return [x]

"""Products with constant weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..rows import Dim, Found, Kind, NotFlattenable, State
from .base import (
    MS,
    States,
    keep_off,
    resized,
    rule,
    the_rows,
)

if TYPE_CHECKING:
    from ..ir import Graph, Node


@rule("MatMul")
def matmul(graph: Graph, node: Node, states: Sequence[State | None], found: Found) -> States:
    x, weight = states
    if x is None or weight is None or x.kind is not Kind.ROWS or weight.kind is not Kind.UNIFORM:
        raise NotFlattenable("a product whose right side is not constant mixes tokens")
    if weight.rank != 2:
        raise NotFlattenable("a product with a stacked constant is not known here")
    keep_off(x, -1, "the contraction")
    return [resized(x, x.rank - 1, weight.known_shape[1])]


@rule("Gemm")
def gemm(graph: Graph, node: Node, states: Sequence[State | None], found: Found) -> States:
    state = the_rows(states)
    if states[0] is not state or node.attribute("transA", 0) or state.axis != 0:
        raise NotFlattenable("the tokens must be the rows of the left matrix")
    weight = states[1]
    assert weight is not None
    return [resized(state, 1, weight.known_shape[0 if node.attribute("transB", 0) else 1])]


@rule("MatMulNBits", domain=MS)
def matmul_nbits(graph: Graph, node: Node, states: Sequence[State | None], found: Found) -> States:
    state = the_rows(states)
    keep_off(state, -1, "the contraction")
    return [resized(state, state.rank - 1, Dim(int(node.attribute("N", 0))))]


@rule("MoE", "QMoE", domain=MS)
def experts(graph: Graph, node: Node, states: Sequence[State | None], found: Found) -> States:
    x, scores, *weights = states
    if x is None or scores is None or {x.kind, scores.kind} != {Kind.ROWS} or scores.axis != 0 or scores.rank != 2:
        raise NotFlattenable("needs one vector and one row of scores per token")
    if any(state is not None and state.kind is not Kind.UNIFORM for state in weights):
        raise NotFlattenable("the experts must be the same for all tokens")
    keep_off(x, -1, "the contraction")
    return [x]

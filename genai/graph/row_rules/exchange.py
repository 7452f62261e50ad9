"""Known exchanges between tokens: attention, and tables chosen by the total length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..rows import Dim, Found, Kind, NotFlattenable, State
from .base import (
    MS,
    States,
    resized,
    rule,
)

if TYPE_CHECKING:
    from ..ir import Graph, Node


@rule("GroupQueryAttention", domain=MS)
def group_query_attention(graph: Graph, node: Node, states: Sequence[State | None], found: Found) -> States:
    query, key, value = states[0], states[1], states[2]
    for state in (query, key, value):
        if state is not None and (state.kind is not Kind.ROWS or state.axis != 1 or state.rank != 3):
            raise NotFlattenable("query, key and value must be [batch, tokens, features]")
    if query is None:
        raise NotFlattenable("the query is missing")
    _check_attention_inputs(node, states)
    heads, kv_heads = int(node.attribute("num_heads", 0)), int(node.attribute("kv_num_heads", 0))
    width = query.known_shape[2].factor
    head_size = width // heads if key is not None else width // (heads + 2 * kv_heads)
    found.attention.append(node)
    output = resized(query, 2, Dim(heads * head_size))
    return [output, State(Kind.CACHE), State(Kind.CACHE), *([State(Kind.CONTEXT)] * (len(node.outputs) - 3))]


def _check_attention_inputs(node: Node, states: Sequence[State | None]) -> None:
    def kind(index: int) -> Kind | None:
        state = states[index] if index < len(states) else None
        return state.kind if state is not None else None

    if not {kind(3), kind(4)} <= {Kind.CACHE, None}:
        raise NotFlattenable("past keys and values must be inputs of the graph")
    if not {kind(7), kind(8)} <= {Kind.UNIFORM, Kind.TABLES, None}:
        raise NotFlattenable("cos and sin tables must be constant or chosen by the total length")
    if kind(10) is not None:
        raise NotFlattenable("an attention bias is not supported in paged attention")
    if kind(9) not in (Kind.ROWS, None):
        raise NotFlattenable("positions must be one per token")
    if len(node.outputs) > 3 and node.outputs[3]:
        raise NotFlattenable("the attention scores are asked for as an output")


@rule("If")
def choose_tables(graph: Graph, node: Node, states: Sequence[State | None], found: Found) -> States:
    condition = states[0]
    if condition is None or condition.kind is not Kind.CONTEXT:
        raise NotFlattenable("a branch on a value that is not the total length")
    for branch in node.subgraphs():
        if any(inner.op_type != "Constant" for inner in branch.nodes):
            raise NotFlattenable("a branch that does more than choose constants")
    found.table_choices.append(node)
    return [State(Kind.TABLES)] * len(node.outputs)

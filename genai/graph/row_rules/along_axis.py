"""Operators along one axis: norms, softmax, reductions, top-k."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..rows import ONE, Dim, Found, State, with_shape
from .base import (
    MS,
    States,
    constant_ints,
    given_axes,
    keep_off,
    normal_axis,
    resized,
    rule,
    the_rows,
    without_axes,
)
from .elementwise import elementwise

if TYPE_CHECKING:
    from ..ir import Graph, Node


@rule("LpNormalization", "SimplifiedLayerNormalization", "RMSNormalization", "LayerNormalization", "Softmax")
@rule("LogSoftmax", "Hardmax")
def along_axis(graph: Graph, node: Node, states: Sequence[State | None], found: Found) -> States:
    state = the_rows(states)
    axis = normal_axis(int(node.attribute("axis", -1)), state.rank)
    wide = node.op_type in ("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization")
    for each in range(axis, state.rank) if wide else (axis,):
        keep_off(state, each, node.op_type)
    return [state] * len(node.outputs)


@rule("SkipSimplifiedLayerNormalization", "SkipLayerNormalization", "QuickGelu", "FastGelu", "BiasGelu", domain=MS)
def skip_norm(graph: Graph, node: Node, states: Sequence[State | None], found: Found) -> States:
    result = elementwise(graph, node, states, found)[0]
    keep_off(result, -1, node.op_type)
    return [result] * len(node.outputs)


@rule(
    *[
        "ReduceSum",
        "ReduceMean",
        "ReduceMax",
        "ReduceMin",
        "ReduceProd",
        "ReduceL1",
        "ReduceL2",
        "ReduceSumSquare",
        "ReduceLogSumExp",
    ]
)
def reduce(graph: Graph, node: Node, states: Sequence[State | None], found: Found) -> States:
    state = the_rows(states)
    axes = given_axes(graph, node)
    axes = list(range(state.rank)) if axes is None else [normal_axis(axis, state.rank) for axis in axes]
    for axis in axes:
        keep_off(state, axis, node.op_type)
    if node.attribute("keepdims", 1):
        return [with_shape(state, tuple(ONE if i in axes else d for i, d in enumerate(state.known_shape)), state.axis)]
    return [without_axes(state, axes)]


@rule("ArgMax", "ArgMin")
def arg_reduce(graph: Graph, node: Node, states: Sequence[State | None], found: Found) -> States:
    state = the_rows(states)
    axis = normal_axis(int(node.attribute("axis", 0)), state.rank)
    keep_off(state, axis, node.op_type)
    if node.attribute("keepdims", 1):
        return [resized(state, axis, ONE)]
    return [without_axes(state, [axis])]


@rule("TopK")
def top_k(graph: Graph, node: Node, states: Sequence[State | None], found: Found) -> States:
    state = the_rows(states)
    axis = normal_axis(int(node.attribute("axis", -1)), state.rank)
    keep_off(state, axis, node.op_type)
    k = constant_ints(graph, node.inputs[1])[0]
    return [resized(state, axis, Dim(k))] * 2

"""The check of one random graph: first each node on its own, then the whole graph with and without rewrites."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from .comparing import difference
from .faults import fault_of_node
from .graphs import CPU, Graph, outcome, random_graph, single
from .operators import OPERATORS
from .values import pick


@dataclass
class Finding:
    """A difference from onnxruntime.

    Attributes:
        what: description of the difference.
        model: a model that reproduces the difference.
        feed: the model's inputs.
        reason: the reason why the fault is not ours, which may quote ONNX's definition; "" if it is unknown.
    """

    what: str
    model: onnx.ModelProto
    feed: dict[str, Any]
    reason: str = ""


def check_seed(
    seed: int, counts: Counter[str], provider: str = CPU, operators: Sequence[str] = tuple(OPERATORS)
) -> list[Finding]:
    """Make a seed's graph and compare it with onnxruntime. If a node differs, the whole graph is not compared.

    Args:
        counts: counts of compared and refused nodes and graphs, which are increased.
        provider: our execution provider; onnxruntime always computes on the CPU.
        operators: names of the operators to draw.
    """
    rng = np.random.default_rng(seed)
    found: list[Finding] = []

    def compare_node(graph: Graph, node: onnx.NodeProto, theirs: list[Any] | str) -> None:
        model = single(graph, node)
        if isinstance(theirs, str):
            counts["nodes that onnxruntime refuses"] += 1
            return
        counts["nodes compared"] += 1
        ours = outcome("genai", model, graph.values, provider=provider)
        what = ours if isinstance(ours, str) else difference(ours, theirs)
        if what:
            feed = {value.name: graph.values[value.name] for value in model.graph.input}
            found.append(Finding(what, model, feed, fault_of_node(node, graph, ours, theirs)))

    graph = random_graph(rng, compare_node, operators)
    if graph.nodes and not found:
        found += _compare_whole(graph, rng, counts, provider)
    return found


def _compare_whole(graph: Graph, rng: np.random.Generator, counts: Counter[str], provider: str) -> list[Finding]:
    made = [name for node in graph.nodes for name in node.output if name]
    wanted = list(dict.fromkeys([made[-1], *(pick(rng, *made) for _ in range(2))]))
    model = graph.model(graph.nodes, wanted, graph.fed)
    theirs = [outcome("onnxruntime", model, graph.values, level) for level in (99, 0)]
    peers = [item for item in theirs if not isinstance(item, str)]
    if not peers:
        counts["graphs that onnxruntime refuses"] += 1
        return []
    counts["graphs compared"] += 1
    counts["graphs with only constants"] += graph.only_constants
    for level in (99, 0):
        ours = outcome("genai", model, graph.values, level, provider)
        failures = [ours] if isinstance(ours, str) else [difference(ours, peer, loose=True) for peer in peers]
        if all(failures):
            feed = {value.name: graph.values[value.name] for value in model.graph.input}
            return [Finding(f"at level {level}: {failures[0]}", model, feed, _tipped(graph))]
    return []


def _tipped(graph: Graph) -> str:
    """Return a reason if the graph has nodes that turn a difference in the last bit into a larger one, else ""."""
    inner = [child for node in graph.nodes for item in node.attribute for child in item.g.node]
    return (
        ""
        if not {node.op_type for node in (*graph.nodes, *inner)} & _STEPS
        else "a difference in the last bit changes a discrete result"
    )


_STEPS = frozenset(
    "ArgMax ArgMin Cast Ceil Equal Floor Greater GreaterOrEqual Hardmax Less LessOrEqual Mod QuantizeLinear Round Sign "
    "ThresholdedRelu TopK Unique NonZero DynamicQuantizeLinear Tan Shrink IsInf IsNaN".split()
)

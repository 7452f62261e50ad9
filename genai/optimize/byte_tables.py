"""Replaces chains of element-wise operators with 8-bit inputs and results with tables of all 256 values."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..onnx.ir import DataType, Graph, Node, OnnxModel
from ..onnx.node import MS, OURS
from ..onnx.types import TensorType
from .base import Level, graph_rule, replaced

_BYTES = (DataType.INT8, DataType.UINT8)
# Element-wise operators. Only one input of a node may vary; its other inputs must be constants with one element.
_ELEMENTWISE = frozenset(
    {("", name) for name in (
        "Abs", "Add", "DequantizeLinear", "Div", "Elu", "Erf", "Exp", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu",
        "Max", "Min", "Mul", "Neg", "Pow", "QuantizeLinear", "Relu", "Sigmoid", "Softplus", "Sqrt", "Sub", "Tanh",
    )}
    | {(MS, name) for name in ("FastGelu", "Gelu", "QLinearLeakyRelu", "QLinearSigmoid", "QuickGelu")}
    | {(OURS, "QuantizedBinary")}
)  # fmt: skip


@dataclass
class _Chains:
    """The chains that start at one 8-bit value, and copies of their results computed for all 256 values in order."""

    all_values: str = ""
    copies: dict[str, str] = field(default_factory=dict)


@graph_rule(Level.EXTENDED, domain=OURS)
def tabulate_bytes(model: OnnxModel, graph: Graph) -> int:
    """f(g(h(x))) for 8-bit x, with 8-bit results -> genai::ByteTable(x, f(g(h([0 ... 255])))), which is then folded.

    The replaced operators themselves compute the table, so results are identical.
    """
    roots = _roots(model, graph)
    chains: dict[str, _Chains] = {}
    changes = 0
    for node in list(graph.nodes):
        name = node.output(0)
        root = roots.get(name)
        # A value in the middle of a chain needs no table.
        is_needed = graph.is_output(name) or any(roots.get(user.output(0)) != root for user in graph.consumers(name))
        if root is None or not is_needed or not _is_bytes(graph, name) or graph.producer(name) is not node:
            continue
        table = _copy(graph, node, root, roots, chains.setdefault(root, _Chains()))
        changes += replaced(graph, node, "ByteTable", [root, table], domain=OURS)
    return changes


def _roots(model: OnnxModel, graph: Graph) -> dict[str, str]:
    """Map each result of a chain to the 8-bit value at the start of the chain."""
    roots: dict[str, str] = {}
    single: set[str] = set()
    for node in graph.nodes:
        if node.key not in _ELEMENTWISE or len(node.outputs) != 1 or model.function(node) is not None:
            continue
        varying = [name for name in node.inputs if name and name not in single and not _is_single(graph, name)]
        if not varying:
            single.add(node.output(0))  # quantised constants are folded later
            continue
        sources = {roots.get(name, name) for name in varying}
        source = sources.pop() if len(sources) == 1 else ""
        if source and (varying[0] in roots or _is_bytes(graph, source)):
            roots[node.output(0)] = source
    return roots


def _is_single(graph: Graph, name: str) -> bool:
    tensor = graph.constant_tensor(name)
    return tensor is not None and tensor.shape in ((), (1,))


def _is_bytes(graph: Graph, name: str) -> bool:
    """Return True if a value has 8 bits and at least one axis, and is not constant."""
    known = graph.type_of(name)
    is_tensor = isinstance(known, TensorType) and known.dtype in _BYTES and bool(known.shape)
    return is_tensor and graph.constant_tensor(name) is None


def _copy(graph: Graph, end: Node, root: str, roots: dict[str, str], chains: _Chains) -> str:
    """Copy the chain that ends in a node so that it computes all 256 values; return the result. Copies are reused."""
    if not chains.all_values:
        known = graph.type_of(root)
        is_signed = isinstance(known, TensorType) and known.dtype is DataType.INT8
        values = np.arange(256, dtype=np.uint8)
        chains.all_values = graph.add_constant(f"{root}/all", values.view(np.int8) if is_signed else values)
    chains.copies.setdefault(root, chains.all_values)
    pending = [end]
    while pending:
        node = pending[-1]
        missing = [
            producer
            for name in node.inputs
            if (name in roots and name not in chains.copies) and (producer := graph.producer(name)) is not None
        ]
        if missing:
            pending += missing
            continue
        pending.pop()
        if node.output(0) not in chains.copies:
            copy = node.copy()
            copy.inputs = [chains.copies.get(name, name) for name in node.inputs]
            copy.outputs = [graph.fresh_name(f"{node.output(0)}/all")]
            copy.name = f"{node.name}/all"
            graph.insert_before(end, copy)
            chains.copies[node.output(0)] = copy.outputs[0]
    return chains.copies[end.output(0)]

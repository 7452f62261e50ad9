"""Expands Gradient nodes (ai.onnx.preview.training): a copy of the differentiated subgraph, then the backward pass.

This is reverse accumulation over the operators in `_RULES`, for operands of equal shape. Broadcast operands are
rejected, because their gradients depend on run-time shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..errors import UnsupportedOpError, malformed
from ..onnx.ir import Graph, Node, OnnxModel, OnnxTensor, make_node
from ..onnx.types import TensorType

DOMAIN = "ai.onnx.preview.training"


class _NewNodes:
    """Creates nodes and inserts them before a Gradient node."""

    def __init__(self, graph: Graph, before: Node) -> None:
        self._graph, self._before = graph, before

    def __call__(self, op_type: str, *inputs: str, **attributes: Any) -> str:
        """Insert a new node with one output; return the output's name."""
        output = self._graph.fresh_name(f"{self._before.name or 'gradient'}/{op_type}")
        self.insert(make_node(op_type, list(inputs), [output], **attributes))
        return output

    def insert(self, node: Node) -> None:
        self._graph.insert_before(self._before, node)

    def filled_like(self, name: str, number: int, known: Any) -> str:
        """Insert a tensor filled with a number, with a value's shape and the type `known`; return the tensor's name."""
        dtype = known.dtype.numpy_dtype if isinstance(known, TensorType) else np.dtype(np.float32)
        value = OnnxTensor.from_array("", np.full(1, number, dtype))
        return self("ConstantOfShape", self("Shape", name), value=value)


# (the object that creates nodes, the node's inputs, its output, the output's gradient) -> the gradient of each input.
_Rule = Callable[[_NewNodes, Sequence[str], str, str], list[str]]


def _quotient(emit: _NewNodes, x: Sequence[str], y: str, g: str) -> list[str]:
    first = emit("Div", g, x[1])
    return [first, emit("Neg", emit("Mul", first, y))]


_RULES: dict[str, _Rule] = {
    "Identity": lambda emit, x, y, g: [g],
    "Neg": lambda emit, x, y, g: [emit("Neg", g)],
    "Add": lambda emit, x, y, g: [g, g],
    "Sub": lambda emit, x, y, g: [g, emit("Neg", g)],
    "Mul": lambda emit, x, y, g: [emit("Mul", g, x[1]), emit("Mul", g, x[0])],
    "Div": _quotient,
    "Exp": lambda emit, x, y, g: [emit("Mul", g, y)],
    "Log": lambda emit, x, y, g: [emit("Div", g, x[0])],
    "Sin": lambda emit, x, y, g: [emit("Mul", g, emit("Cos", x[0]))],
    "Cos": lambda emit, x, y, g: [emit("Neg", emit("Mul", g, emit("Sin", x[0])))],
}


def expand_gradients(model: OnnxModel) -> int:
    """Replace every Gradient node of a model, whose shapes must be inferred; return the number of Gradient nodes."""
    gradients = [
        (graph, node) for graph in list(model.graphs()) for node in graph.nodes if node.key == (DOMAIN, "Gradient")
    ]
    for graph, node in gradients:
        _expand(graph, node)
    return len(gradients)


def _expand(graph: Graph, gradient: Node) -> None:
    sources = [str(name) for name in [*gradient.attribute("xs", []), *gradient.attribute("zs", [])]]
    target = str(gradient.attribute("y", ""))
    if len(sources) != len(gradient.inputs):
        raise malformed(
            f"Gradient {gradient.name!r} names {len(sources)} tensors but has {len(gradient.inputs)} inputs",
            "xs and zs must name one tensor per input",
        )
    emit = _NewNodes(graph, gradient)
    values = dict(zip(sources, gradient.inputs, strict=True))
    nodes = _path(graph, set(sources), target)
    copies = [_evaluate_again(emit, graph, node, values) for node in nodes]
    if target not in values:
        raise malformed(
            f"Gradient {gradient.name!r} differentiates {target!r}, which does not depend on {sources}",
            "y must be the output of a node that depends on xs",
        )
    gradients = {values[target]: emit.filled_like(values[target], 1, graph.type_of(target))}
    for node in reversed(copies):
        incoming = gradients.get(node.output(0))
        if incoming is None:
            continue
        parts = _RULES[node.op_type](emit, node.inputs, node.output(0), incoming)
        for name, part in zip(node.inputs, parts, strict=True):
            gradients[name] = emit("Add", gradients[name], part) if name in gradients else part
    for name, output in zip(gradient.inputs, gradient.outputs, strict=False):
        if output:
            known = gradients.get(name) or emit.filled_like(name, 0, graph.type_of(name))
            emit.insert(make_node("Identity", [known], [output]))
    graph.remove_nodes([gradient])


def _path(graph: Graph, sources: set[str], target: str) -> list[Node]:
    """Return the nodes between the sources and the target, in order."""
    graph.topological_sort()
    reached = set(sources)
    forward = []
    for node in graph.nodes:
        if not reached.isdisjoint(node.inputs) and sources.isdisjoint(node.outputs) and node.domain != DOMAIN:
            reached.update(node.outputs)
            forward.append(node)
    needed, path = {target}, []
    for node in reversed(forward):
        if not needed.isdisjoint(node.outputs):
            needed.update(node.inputs)
            path.append(node)
    return path[::-1]


def _evaluate_again(emit: _NewNodes, graph: Graph, node: Node, values: dict[str, str]) -> Node:
    """Insert a copy of a node that is computed from the inputs of the Gradient node; return the copy."""
    if node.key not in {("", op_type) for op_type in _RULES}:
        raise UnsupportedOpError(
            f"the gradient of {node.op_type} {node.name!r} is not supported",
            f"gradients are supported for {', '.join(sorted(_RULES))}",
            "compute the gradient in the framework that created the model",
        )
    shapes = [known.shape if isinstance(known := graph.type_of(name), TensorType) else None for name in node.inputs]
    if len(node.inputs) == 2 and (None in shapes or shapes[0] != shapes[1]):
        raise UnsupportedOpError(
            f"the gradient of {node.op_type} {node.name!r} over operands of shapes {shapes} is not supported",
            "gradients require operands whose shapes are known to be equal",
            "compute the gradient in the framework that created the model",
        )
    copy = node.copy()
    copy.inputs = [values.get(name, name) for name in node.inputs]
    copy.outputs = [graph.fresh_name(f"{name}/again") for name in node.outputs]
    values.update(zip(node.outputs, copy.outputs, strict=True))
    emit.insert(copy)
    return copy

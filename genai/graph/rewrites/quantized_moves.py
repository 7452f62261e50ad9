"""QDQ form around operators that only move values: they move the integers instead."""

from __future__ import annotations

import numpy as np

from ..ir import DataType, Graph, Model, Node, Tensor
from ..types import TensorType
from .base import Level
from .patterns import made_by, number, only_user

_MOVES = frozenset({"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Slice", "Identity", "Pad", "MaxPool"})
_INTEGERS = (DataType.INT8, DataType.UINT8)
# MaxPool takes integers from this version on, Pad from the next.
_FIRST_VERSION = 13


class MoveQuantized:
    """QuantizeLinear(f(DequantizeLinear(x))) with one scale and zero point on both sides -> f(x).

    f moves values or chooses among them, so that the results are the same numbers. Without an f both nodes go.
    """

    name = "move_quantized"
    level = Level.EXTENDED

    def apply(self, model: Model) -> int:
        if (model.opset_version() or 0) < _FIRST_VERSION:
            return 0
        return sum(_fuse(graph, node) for graph in list(model.graphs()) for node in list(graph.nodes))


def _fuse(graph: Graph, quantize: Node) -> bool:
    if quantize.key != ("", "QuantizeLinear") or not quantize.input(2):
        return False
    between = graph.producer(quantize.input(0))
    if between is None or between.domain not in ("", "ai.onnx"):
        return False
    is_move = between.op_type in _MOVES and len([name for name in between.outputs if name]) == 1
    source = made_by(graph, between.input(0), "DequantizeLinear") if is_move else between
    if source is None or source.key != ("", "DequantizeLinear") or not _same_form(graph, source, quantize):
        return False
    if not is_move:
        return _bypass(graph, source, quantize)
    if only_user(graph, between.output(0)) is not quantize:
        return False
    moved = between.copy()
    moved.inputs[0], moved.outputs = source.input(0), list(quantize.outputs)
    if between.op_type == "Pad" and not _pad_integers(graph, moved, quantize):
        return False
    graph.replace_node(quantize, moved)
    return True


def _bypass(graph: Graph, source: Node, quantize: Node) -> bool:
    if graph.is_output(quantize.output(0)):
        return False
    graph.replace_uses(quantize.output(0), source.input(0))
    return True


def _same_form(graph: Graph, source: Node, quantize: Node) -> bool:
    """Whether both have the same single scale and zero point, of 8 bits."""
    known = graph.type_of(source.input(0))
    if not source.input(2) or not isinstance(known, TensorType) or known.dtype not in _INTEGERS:
        return False
    if any(node.attribute(name, 0) for node in (source, quantize) for name in ("block_size", "output_dtype")):
        return False
    return _same_constants(graph, source, quantize)


def _same_constants(graph: Graph, first_node: Node, second_node: Node) -> bool:
    """Whether the scales of both nodes are one equal number each, and the zero points, too."""
    for index in (1, 2):
        names = first_node.input(index), second_node.input(index)
        first, second = (graph.constant(name) for name in names)
        if first is None or second is None or first.size != 1 or first.dtype != second.dtype:
            return False
        if not np.array_equal(first.reshape(-1), second.reshape(-1)):
            return False
    return True


def _pad_integers(graph: Graph, pad: Node, quantize: Node) -> bool:
    """Let a Pad of integers put in what its number becomes when it is quantised."""
    if pad.attribute("mode", "constant") != "constant":
        return True
    value = _filling(graph, pad.input(2)) if pad.input(2) else 0.0
    scale, point = graph.constant(quantize.input(1)), graph.constant(quantize.input(2))
    if value is None or scale is None or point is None:
        return False
    info = np.iinfo(point.dtype)
    steps = np.rint(np.float32(value) / scale.reshape(-1)[0]) + np.float32(point.reshape(-1)[0])
    name = graph.fresh_name(f"{pad.outputs[0]}/filling")
    filling = np.asarray(np.clip(steps, info.min, info.max), point.dtype)
    graph.add_initializer(Tensor.from_array(name, filling))
    pad.inputs = [*pad.inputs, ""][:3] if len(pad.inputs) < 3 else list(pad.inputs)
    pad.inputs[2] = name
    return True


def _filling(graph: Graph, name: str) -> float | None:
    """A constant number, also one that is quantised and dequantised on the way."""
    found = number(graph, name)
    node = made_by(graph, name, "DequantizeLinear") if found is None else None
    if node is None:
        return found
    scale = number(graph, node.input(1))
    point = number(graph, node.input(2)) if node.input(2) else 0.0
    if scale is None or point is None:
        return None
    steps = number(graph, node.input(0))
    quantize = made_by(graph, node.input(0), "QuantizeLinear") if steps is None else None
    if quantize is not None and _same_constants(graph, node, quantize):
        inner, info = number(graph, quantize.input(0)), graph.constant(node.input(2))
        if inner is not None and info is not None and info.dtype.kind in "iu":
            limits = np.iinfo(info.dtype)
            steps = float(np.clip(np.rint(np.float32(inner) / np.float32(scale)) + point, limits.min, limits.max))
    return None if steps is None else float((np.float32(steps) - np.float32(point)) * np.float32(scale))

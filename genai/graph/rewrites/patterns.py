"""Small questions that fusing rules ask of a graph: is this constant a number, who alone uses this value."""

from __future__ import annotations

import numpy as np

from ..ir import Graph, Node
from ..types import DataType, TensorType


def number(graph: Graph, name: str) -> float | None:
    """The value of a constant of one element, or None."""
    tensor = graph.constant_tensor(name) if name else None
    if tensor is None or tensor.num_elements != 1 or tensor.dtype is DataType.STRING:
        return None
    return float(np.asarray(tensor.array()).astype(np.float64).reshape(-1)[0])


def is_number(graph: Graph, name: str, value: float) -> bool:
    """Whether a value is a constant near this number (float32 constants are not exact)."""
    found = number(graph, name)
    return found is not None and abs(found - value) <= 1e-3 * max(abs(value), 1e-30)


def only_user(graph: Graph, name: str) -> Node | None:
    """The one node that uses a value that is no output, or None."""
    users = graph.consumers(name)
    return users[0] if len(users) == 1 and not graph.is_output(name) else None


def made_by(graph: Graph, name: str, op_type: str) -> Node | None:
    """The node of ONNX's own domain and this type that makes a value, or None."""
    node = graph.producer(name) if name else None
    return node if node is not None and node.key == ("", op_type) else None


def other_input(node: Node, name: str) -> str | None:
    """The other input of a node of two inputs, or None where both or none are `name`."""
    if len(node.inputs) != 2 or node.inputs.count(name) != 1:
        return None
    return node.inputs[1 - node.inputs.index(name)]


def is_float32(graph: Graph, name: str) -> bool:
    """Whether a value is known to be float32."""
    known = graph.type_of(name)
    return isinstance(known, TensorType) and known.dtype is DataType.FLOAT


def same_type(graph: Graph, first: str, second: str) -> bool:
    """Whether two values are known to have the same element type and shape (open extents must have equal names)."""
    a, b = graph.type_of(first), graph.type_of(second)
    if not isinstance(a, TensorType) or not isinstance(b, TensorType) or a.shape is None or b.shape is None:
        return False
    return a.dtype == b.dtype and a.shape == b.shape and None not in a.shape

"""The value of a Constant node, whichever of its attributes holds it."""

from __future__ import annotations

import numpy as np

from .node import Node
from .tensor import Tensor
from .types import DataType

_PLAIN_VALUES = {
    "value_float": DataType.FLOAT,
    "value_floats": DataType.FLOAT,
    "value_int": DataType.INT64,
    "value_ints": DataType.INT64,
    "value_string": DataType.STRING,
    "value_strings": DataType.STRING,
}


def constant_tensor(node: Node) -> Tensor | None:
    """What a Constant node makes, named after its output; None for other nodes and sparse constants."""
    if node.key != ("", "Constant") or not node.outputs:
        return None
    for name, attribute in node.attributes.items():
        if attribute.value is None:
            continue
        if name == "value" and isinstance(attribute.value, Tensor):
            return attribute.value.renamed(node.outputs[0])
        if name in _PLAIN_VALUES:
            dtype = _PLAIN_VALUES[name]
            return Tensor.from_array(node.outputs[0], np.asarray(attribute.value, dtype=dtype.numpy_dtype), dtype)
    return None

"""A batch normalisation after a convolution becomes part of the convolution's weight and bias."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..ir import DataType, Graph, Model, Node, Tensor
from .base import Level
from .patterns import only_user


class FoldConvBatchNorm:
    """BatchNormalization(Conv(x, w, b)) with constants, in inference -> Conv(x, w', b')."""

    name = "fold_conv_batch_norm"
    level = Level.BASIC

    def apply(self, model: Model) -> int:
        return sum(_fold(graph, node) for graph in list(model.graphs()) for node in list(graph.nodes))


def _fold(graph: Graph, conv: Node) -> bool:
    if conv.key != ("", "Conv"):
        return False
    norm = only_user(graph, conv.output(0))
    if norm is None or norm.key != ("", "BatchNormalization") or norm.input(0) != conv.output(0):
        return False
    if any(norm.outputs[1:]) or norm.attribute("training_mode", 0) or not norm.attribute("spatial", 1):
        return False
    weight = _float(graph, conv.input(1))
    bias = _float(graph, conv.input(2)) if conv.input(2) else None
    scale, shift, mean, variance = (_float(graph, norm.input(index)) for index in range(1, 5))
    if weight is None or scale is None or shift is None or mean is None or variance is None:
        return False
    if conv.input(2) and bias is None:
        return False
    factor = scale / np.sqrt(variance + np.float64(norm.attribute("epsilon", 1e-5)))
    new_weight = weight * factor.reshape(-1, *[1] * (weight.ndim - 1))
    new_bias = shift + ((0 if bias is None else bias) - mean) * factor
    names = [graph.fresh_name(f"{conv.output(0)}_{part}") for part in ("weight", "bias")]
    for name, values in zip(names, (new_weight, new_bias), strict=True):
        graph.add_initializer(Tensor.from_array(name, values.astype(np.float32)))
    conv.inputs[1:] = names
    outputs = norm.outputs[:1]
    graph.remove_nodes([norm])
    graph.values.pop(conv.output(0), None)
    conv.outputs[:] = outputs
    graph.update(conv)
    return True


def _float(graph: Graph, name: str) -> NDArray[Any] | None:
    """A float32 constant as float64, or None."""
    tensor = graph.constant_tensor(name)
    if tensor is None or tensor.dtype is not DataType.FLOAT:
        return None
    return tensor.array().astype(np.float64)

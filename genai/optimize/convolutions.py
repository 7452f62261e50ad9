"""Merges nodes next to a convolution into it: a Pad, a BatchNormalization, an activation or an addition."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..onnx.ir import DataType, Graph, Node
from ..onnx.node import MS
from ..onnx.types import TensorType
from .base import (
    Level,
    followed_by,
    is_float32,
    made_by,
    moved_to,
    node_rule,
    number,
    only_user,
    other_input,
    same_type,
)


@node_rule(Level.BASIC, ("", "Conv"), ("", "QLinearConv"))
def fold_pad_into_conv(graph: Graph, conv: Node) -> bool:
    """Conv(Pad(x)) with constant zero pads on the spatial axes -> Conv(x) with larger pads.

    The rule also applies to QLinearConv, if the padding value is its zero point.
    """
    if conv.attribute("auto_pad", "NOTSET") != "NOTSET":
        return False
    # The value with which the convolution itself pads.
    nothing = 0.0 if conv.op_type == "Conv" else number(graph, conv.input(2))
    pad = made_by(graph, conv.input(0), "Pad")
    if pad is None or only_user(graph, pad.output(0)) is not conv or pad.input(3):
        return False
    pads = pad.attribute("pads") if not pad.input(1) else graph.constant(pad.input(1))
    filling = pad.attribute("value", 0.0) if not pad.input(2) else number(graph, pad.input(2))
    if (
        pads is None
        or np.ndim(pads) != 1
        or nothing is None
        or filling != nothing
        or pad.attribute("mode", "constant") != "constant"
    ):
        return False
    sizes = [int(size) for size in pads]
    rank = len(sizes) // 2
    if rank < 3 or any(size < 0 for size in sizes) or any(sizes[i] for i in (0, 1, rank, rank + 1)):
        return False
    conv_pads = conv.attribute("pads") or [0] * (2 * rank - 4)
    added = sizes[2:rank] + sizes[rank + 2 :]
    if len(conv_pads) != len(added):
        return False
    conv.set_attribute("pads", [a + b for a, b in zip(conv_pads, added, strict=True)])
    conv.inputs[0] = pad.input(0)
    graph.update(conv)
    return True


@node_rule(Level.EXTENDED, ("", "Conv"), domain=MS)
def fuse_conv_activation(graph: Graph, conv: Node) -> bool:
    """Relu(Conv(x, w, b)) or Clip(Conv(...)) with constant limits -> com.microsoft::FusedConv, for float32."""
    after = only_user(graph, conv.output(0))
    if after is None or after.input(0) != conv.output(0) or not is_float32(graph, conv.input(1)):
        return False
    if after.key not in (("", "Relu"), ("", "Clip")):
        return False
    parameters = [] if after.op_type == "Relu" else clip_limits(graph, after)
    if parameters is None:
        return False
    fused = moved_to(graph, conv, after)
    fused.op_type, fused.domain = "FusedConv", MS
    fused.set_attribute("activation", after.op_type)
    if parameters:
        fused.set_attribute("activation_params", parameters)
    return True


def clip_limits(graph: Graph, clip: Node) -> list[float] | None:
    """Return both limits of a Clip if they are constant, else None."""
    known = graph.type_of(clip.output(0))
    if isinstance(known, TensorType) and known.dtype is not DataType.FLOAT:
        return None
    limits = [
        number(graph, clip.input(index)) if clip.input(index) else clip.attribute(name)
        for index, name in ((1, "min"), (2, "max"))
    ]
    return None if None in limits else [float(value) for value in limits if value is not None]


@node_rule(Level.EXTENDED, ("", "Add"), domain=MS)
def fuse_conv_addition(graph: Graph, addition: Node) -> bool:
    """Add(Conv(x, w, b), z), operands of equal shape, and an optional Relu -> com.microsoft::FusedConv(x, w, b, z).

    Kernels must be constant and in one group; in that case, z is added while the results are in registers or cache.
    """
    for name in addition.inputs:
        other = other_input(addition, name)
        conv = made_by(graph, name, "Conv")
        if other is None or conv is None or only_user(graph, name) is not addition or conv.attribute("group", 1) != 1:
            continue
        weight = graph.constant_tensor(conv.input(1))
        constant = weight is not None and (not conv.input(2) or graph.constant_tensor(conv.input(2)) is not None)
        if not constant or not is_float32(graph, conv.input(1)) or not same_type(graph, name, other):
            continue
        relu = followed_by(graph, addition.output(0), "Relu")
        fused = moved_to(graph, conv, relu or addition)
        fused.op_type, fused.domain = "FusedConv", MS
        fused.inputs = [conv.input(0), conv.input(1), conv.input(2), other]
        graph.update(fused)
        if relu is not None:
            fused.set_attribute("activation", "Relu")
            graph.remove_nodes([addition])
        return True
    return False


@node_rule(Level.BASIC, ("", "Conv"))
def fold_conv_batch_norm(graph: Graph, conv: Node) -> bool:
    """BatchNormalization(Conv(x, w, b)) with constants, in inference mode -> Conv(x, w', b')."""
    norm = followed_by(graph, conv.output(0), "BatchNormalization")
    if norm is None or norm.input(0) != conv.output(0):
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
    conv.inputs[1:] = [
        graph.add_constant(f"{conv.output(0)}_{part}", values.astype(np.float32))
        for part, values in (("weight", new_weight), ("bias", new_bias))
    ]
    outputs = norm.outputs[:1]
    graph.remove_nodes([norm])
    graph.values.pop(conv.output(0), None)
    conv.outputs[:] = outputs
    graph.update(conv)
    return True


def _float(graph: Graph, name: str) -> NDArray[Any] | None:
    """Return a float32 constant as float64, or None."""
    tensor = graph.constant_tensor(name)
    if tensor is None or tensor.dtype is not DataType.FLOAT:
        return None
    return tensor.array().astype(np.float64)

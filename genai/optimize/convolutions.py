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


@node_rule(Level.BASIC, ("", "Conv"), ("", "ConvTranspose"))
def fold_conv_batch_norm(graph: Graph, conv: Node) -> bool:
    """BatchNormalization(Conv(x, w, b)) with constants, in inference mode -> Conv(x, w', b'); also ConvTranspose."""
    norm = followed_by(graph, conv.output(0), "BatchNormalization")
    if norm is None or norm.input(0) != conv.output(0):
        return False
    weight, step = float_constant(graph, conv.input(1)), batch_norm_step(graph, norm)
    bias = float_constant(graph, conv.input(2)) if conv.input(2) else None
    if weight is None or step is None or (conv.input(2) and bias is None):
        return False
    factor, shift = step
    new_weight = _times_outputs(conv, weight, factor)
    if new_weight is None:
        return False
    new_bias = shift + (0 if bias is None else bias * factor)
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


def _times_outputs(conv: Node, weight: NDArray[np.float64], factor: NDArray[np.float64]) -> NDArray[np.float64] | None:
    """Return kernels times one factor for each channel of the results, or None if their shapes do not match."""
    if weight.ndim < 3 or not weight.size:
        return None
    if conv.op_type == "Conv":
        return weight * factor.reshape(-1, *[1] * (weight.ndim - 1)) if factor.shape == (len(weight),) else None
    # ConvTranspose has kernels [C, M / groups, ...].
    groups, per_group = int(conv.attribute("group", 1)), weight.shape[1]
    if groups < 1 or len(weight) % groups or factor.shape != (groups * per_group,):
        return None
    grouped = weight.reshape(groups, -1, per_group, *weight.shape[2:])
    return (grouped * factor.reshape(groups, 1, per_group, *[1] * (weight.ndim - 2))).reshape(weight.shape)


def batch_norm_step(graph: Graph, norm: Node) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
    """Return s and t, each [C], if a BatchNormalization computes x * s + t with constants, else None."""
    if any(norm.outputs[1:]) or norm.attribute("training_mode", 0) or not norm.attribute("spatial", 1):
        return None
    scale, shift, mean, variance = (float_constant(graph, norm.input(index)) for index in range(1, 5))
    if scale is None or shift is None or mean is None or variance is None:
        return None
    with np.errstate(all="ignore"):  # a negative variance gives NaN, as when the model runs
        factor = scale / np.sqrt(variance + np.float64(norm.attribute("epsilon", 1e-5)))
        return factor, shift - mean * factor


@node_rule(Level.EXTENDED, ("", "Conv"))
def fold_arithmetic_after_conv(graph: Graph, conv: Node) -> bool:
    """Conv(x, w, b) * s + t with constants per channel -> Conv(x, w * s, b * s + t); also Sub and Div."""
    after, shape = only_user(graph, conv.output(0)), _weight_shape(graph, conv)
    if after is None or shape is None or not is_float32(graph, after.output(0)):
        return False
    step = constant_step(graph, after, conv.output(0), len(shape), shape[0])
    weight, bias = _weights(graph, conv) if step is not None else (None, None)
    if step is None or weight is None or bias is None:
        return False
    factor, shift = step
    weight = weight * factor.reshape(-1, *[1] * (weight.ndim - 1))
    if not _set_weights(graph, conv, weight, bias * factor + shift):
        return False
    graph.remove_nodes([after])
    graph.values.pop(conv.output(0), None)
    conv.outputs[:] = after.outputs
    graph.update(conv)
    return True


@node_rule(Level.EXTENDED, ("", "Conv"), (MS, "FusedConv"))
def fold_factor_before_conv(graph: Graph, conv: Node) -> bool:
    """Conv(x * s, w, b) with a constant s per channel -> Conv(x, w * s, b); also Div.

    Sums are not moved, because the pads are not added to, and because differences of large numbers would lose accuracy.
    """
    source = conv.input(0)
    before, kernel = graph.producer(source), _weight_shape(graph, conv)
    if before is None or only_user(graph, source) is not conv or kernel is None:
        return False
    constants = [name for name in before.inputs if graph.constant_tensor(name) is not None]
    x = other_input(before, constants[0]) if len(constants) == 1 else None
    groups, per_group = int(conv.attribute("group", 1)), kernel[1]
    if x is None or groups < 1 or kernel[0] % groups or not is_float32(graph, x):
        return False
    known = graph.type_of(x)
    shape = known.shape if isinstance(known, TensorType) else None
    if shape is None or len(shape) != len(kernel) or shape[1] != groups * per_group:
        return False  # the constant may broadcast x
    step = constant_step(graph, before, x, len(kernel), groups * per_group)
    if step is None or step[1].any():
        return False
    weight, bias = _weights(graph, conv)
    if weight is None or bias is None:
        return False
    # Output channels in groups, [groups, outputs of a group, inputs of a group, ...].
    grouped = weight.reshape(groups, -1, *weight.shape[1:])
    scaled = grouped * step[0].reshape(groups, 1, per_group, *[1] * (weight.ndim - 2))
    if not _set_weights(graph, conv, scaled.reshape(weight.shape), bias):
        return False
    conv.inputs[0] = x
    graph.update(conv)
    graph.remove_nodes([before])
    return True


def constant_step(
    graph: Graph, node: Node, x: str, rank: int, channels: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
    """Return s and t, each [channels], if a node computes x * s + t for x [N, C, ...] of this rank, else None."""
    if node.domain or node.op_type not in ("Add", "Sub", "Mul", "Div"):
        return None
    other = other_input(node, x)
    constant = None if other is None else float_constant(graph, other)
    if constant is None or constant.ndim > rank or not np.isfinite(constant).all():
        return None
    shape = (1,) * (rank - constant.ndim) + constant.shape
    if shape[1] not in (1, channels) or constant.size != shape[1]:
        return None
    values, ones, is_first = np.broadcast_to(constant.reshape(-1), channels), np.ones(channels), node.input(0) == x
    if node.op_type == "Mul":
        return values, 0 * ones
    if node.op_type == "Add":
        return ones, values
    if node.op_type == "Sub":
        return (ones, -values) if is_first else (-ones, values)
    return (1 / values, 0 * ones) if is_first and values.all() else None


def _weight_shape(graph: Graph, conv: Node) -> tuple[int, ...] | None:
    """Return the shape of a convolution's constant float32 weight, which is cheaper than the weight, or None."""
    tensor = graph.constant_tensor(conv.input(1))
    if tensor is None or tensor.dtype is not DataType.FLOAT or len(tensor.shape) < 3 or 0 in tensor.shape:
        return None
    return tensor.shape


def _weights(graph: Graph, conv: Node) -> tuple[NDArray[np.float64] | None, NDArray[np.float64] | None]:
    """Return the constant weight and bias of a convolution with a `_weight_shape`, in float64; None for others."""
    weight = float_constant(graph, conv.input(1))
    if weight is None:
        return None, None
    bias = float_constant(graph, conv.input(2)) if conv.input(2) else np.zeros(len(weight))
    return weight, (bias if bias is not None and bias.shape == (len(weight),) else None)


def _set_weights(graph: Graph, conv: Node, weight: NDArray[np.float64], bias: NDArray[np.float64]) -> bool:
    """Replace the constants of a convolution. Return False, without a change, if a value exceeds float32's range."""
    with np.errstate(over="ignore"):
        narrow = [("weight", weight.astype(np.float32)), ("bias", bias.astype(np.float32))]
    if not all(np.isfinite(values).all() for _, values in narrow):
        return False
    conv.inputs += [""] * (3 - len(conv.inputs))
    conv.inputs[1:3] = [graph.add_constant(f"{conv.output(0)}_{part}", values) for part, values in narrow]
    graph.update(conv)
    return True


def float_constant(graph: Graph, name: str) -> NDArray[Any] | None:
    """Return a float32 constant as float64, or None."""
    tensor = graph.constant_tensor(name)
    if tensor is None or tensor.dtype is not DataType.FLOAT:
        return None
    return tensor.array().astype(np.float64)

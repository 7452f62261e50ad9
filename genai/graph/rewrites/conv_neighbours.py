"""What stands beside a convolution becomes part of it: a Pad of zeros before, an activation after."""

from __future__ import annotations

from ..ir import DataType, Graph, Model, Node
from ..types import TensorType
from .base import Level, fuse_nodes
from .patterns import is_float32, made_by, number, only_user, other_input, same_type

MS = "com.microsoft"


_CONVOLUTIONS = (("", "Conv"), ("", "QLinearConv"))


class FoldPadIntoConv:
    """Conv(Pad(x)) with constant pads of zeros on the spatial axes -> Conv(x) with larger pads.

    QLinearConv likewise, where what is filled in is the zero point.
    """

    name = "fold_pad_into_conv"
    level = Level.BASIC

    def apply(self, model: Model) -> int:
        return sum(_fold_pad(graph, node) for graph in list(model.graphs()) for node in list(graph.nodes))


def _fold_pad(graph: Graph, conv: Node) -> bool:
    if conv.key not in _CONVOLUTIONS or conv.attribute("auto_pad", "NOTSET") != "NOTSET":
        return False
    # Number that a convolution's own pads stand for.
    nothing = 0.0 if conv.op_type == "Conv" else number(graph, conv.input(2))
    pad = made_by(graph, conv.input(0), "Pad")
    if pad is None or only_user(graph, pad.output(0)) is not conv or pad.input(3):
        return False
    found = pad.attribute("pads") if not pad.input(1) else graph.constant(pad.input(1))
    filling = pad.attribute("value", 0.0) if not pad.input(2) else number(graph, pad.input(2))
    if found is None or nothing is None or filling != nothing or pad.attribute("mode", "constant") != "constant":
        return False
    sizes = [int(size) for size in found]
    rank = len(sizes) // 2
    if rank < 3 or any(size < 0 for size in sizes) or any(sizes[i] for i in (0, 1, rank, rank + 1)):
        return False
    own = conv.attribute("pads") or [0] * (2 * rank - 4)
    added = sizes[2:rank] + sizes[rank + 2 :]
    if len(own) != len(added):
        return False
    conv.set_attribute("pads", [a + b for a, b in zip(own, added, strict=True)])
    conv.inputs[0] = pad.input(0)
    graph.update(conv)
    return True


class FuseConvActivation:
    """Relu(Conv(x, w, b)) or Clip(Conv(...)) with constant limits -> com.microsoft::FusedConv, for float32."""

    name = "fuse_conv_activation"
    level = Level.EXTENDED

    def apply(self, model: Model) -> int:
        return fuse_nodes(model, _fuse, MS)


def _fuse(graph: Graph, conv: Node) -> bool:
    if conv.key != ("", "Conv") or not is_float32(graph, conv.input(1)):
        return False
    after = only_user(graph, conv.output(0))
    if after is None or after.input(0) != conv.output(0):
        return False
    if after.key == ("", "Relu"):
        parameters: list[float] = []
    elif after.key == ("", "Clip"):
        limits = _limits(graph, after)
        if limits is None:
            return False
        parameters = limits
    else:
        return False
    fused = conv.copy()
    fused.op_type, fused.domain, fused.outputs = "FusedConv", MS, list(after.outputs)
    fused.set_attribute("activation", after.op_type)
    if parameters:
        fused.set_attribute("activation_params", parameters)
    graph.replace_node(after, fused)
    graph.remove_nodes([conv])
    return True


def _limits(graph: Graph, clip: Node) -> list[float] | None:
    """Both limits of a Clip, if constant."""
    known = graph.type_of(clip.output(0))
    if isinstance(known, TensorType) and known.dtype is not DataType.FLOAT:
        return None
    found = [
        number(graph, clip.input(index)) if clip.input(index) else clip.attribute(name)
        for index, name in ((1, "min"), (2, "max"))
    ]
    return None if None in found else [float(value) for value in found if value is not None]


class FuseConvAddition:
    """Add(Conv(x, w, b), z) of one shape, and a Relu after it -> com.microsoft::FusedConv(x, w, b, z).

    Only for constant kernels in one group, which add z while their results are at hand.
    """

    name = "fuse_conv_addition"
    level = Level.EXTENDED

    def apply(self, model: Model) -> int:
        return fuse_nodes(model, _fuse_addition, MS)


def _fuse_addition(graph: Graph, addition: Node) -> bool:
    if addition.key != ("", "Add"):
        return False
    for name in addition.inputs:
        other = other_input(addition, name)
        conv = made_by(graph, name, "Conv")
        if other is None or conv is None or only_user(graph, name) is not addition or conv.attribute("group", 1) != 1:
            continue
        weight = graph.constant_tensor(conv.input(1))
        constant = weight is not None and (not conv.input(2) or graph.constant_tensor(conv.input(2)) is not None)
        if not constant or not is_float32(graph, conv.input(1)) or not same_type(graph, name, other):
            continue
        after = only_user(graph, addition.output(0))
        is_relu = after is not None and after.key == ("", "Relu")
        fused = conv.copy()
        fused.op_type, fused.domain = "FusedConv", MS
        fused.inputs = [conv.input(0), conv.input(1), conv.input(2), other]
        end = after if is_relu and after is not None else addition
        fused.outputs = list(end.outputs)
        if is_relu:
            fused.set_attribute("activation", "Relu")
        graph.replace_node(end, fused)
        graph.remove_nodes([addition] if is_relu else [])
        graph.remove_nodes([conv])
        return True
    return False

"""Padding that only max or min reductions read, as in models whose MaxPool is preceded by a Pad with -inf or -1e9."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np

from ...onnx.ir import Graph, Node
from ...onnx.types import TensorType
from ...optimize.base import number

# The reductions, each with the sign of the padding values that they can discard.
_REDUCTIONS = {"MaxPool": -1, "GlobalMaxPool": -1, "ReduceMax": -1, "ReduceMin": 1}


def padding_value(graph: Graph, pad: Node) -> float | None:
    """Return the value that a Pad inserts; None if it inserts no constant."""
    if pad.attribute("mode", "constant") != "constant":
        return None
    return number(graph, pad.input(2)) if pad.input(2) else float(pad.attribute("value", 0.0))


def may_saturate(graph: Graph, pad: Node) -> bool:
    """Return True if the value that a Pad inserts may be replaced with the nearest value in the range of its input.

    This is the case if only max reductions read the result, the value is negative, and every window of the reductions
    contains elements of the input. Where the value is below these elements, the reductions discard it, and otherwise,
    the range contains it, because ranges contain 0. The same applies to min reductions and positive values. The value
    needs no scale of its own, and it can be infinite.
    """
    value, pads = padding_value(graph, pad), _pads(graph, pad)
    if value is None or pads is None:
        return False
    padded = {axis: (before, after) for axis, (before, after) in pads.items() if max(before, after) > 0}
    return _is_discarded(graph, pad.output(0), value, padded)


_Padded: TypeAlias = Mapping[int, tuple[int, int]]
"""The padded axes of a tensor, each with the numbers of inserted elements before and after the others."""


def _is_discarded(graph: Graph, name: str, value: float, padded: _Padded) -> bool:
    readers = graph.consumers(name)
    return bool(readers) and not graph.is_output(name) and all(_discards(graph, one, value, padded) for one in readers)


def _discards(graph: Graph, node: Node, value: float, padded: _Padded) -> bool:
    """Return True if a node discards the value where it is outside the range of the input."""
    if node.key == ("", "Transpose"):
        order = [int(axis) for axis in node.attribute("perm", None) or ()]
        moved = {order.index(axis): sizes for axis, sizes in padded.items() if axis in order}
        return len(moved) == len(padded) and _is_discarded(graph, node.output(0), value, moved)
    if node.key[0] or not _REDUCTIONS.get(node.op_type, 0) * value > 0:
        return False
    if node.op_type == "MaxPool":
        return not node.output(1) and _windows_reach_the_input(node, padded)
    if node.op_type == "GlobalMaxPool":
        return min(padded, default=2) >= 2
    axes = _axes(graph, node, 1)
    if not axes:
        return axes is not None and not node.attribute("noop_with_empty_axes", 0)
    return padded.keys() <= set(axes)


def _windows_reach_the_input(pool: Node, padded: _Padded) -> bool:
    """Return True if no window of a MaxPool consists of padding only; False if this is unknown."""
    kernel = [int(size) for size in pool.attribute("kernel_shape", ())]
    rank = len(kernel)
    if any(int(gap) != 1 for gap in pool.attribute("dilations", None) or ()):
        return not padded
    # The elements that the MaxPool itself may add before and after each axis. Padding to the same size adds at most
    # half of the kernel on either side, and with ceil_mode, the last window may start later by less than a stride.
    own = [int(size) for size in pool.attribute("pads", None) or [0] * (2 * rank)]
    if str(pool.attribute("auto_pad", "NOTSET")).startswith("SAME"):
        own = [size // 2 for size in kernel] * 2
    strides = [int(stride) for stride in pool.attribute("strides", None) or [1] * rank]
    late = [stride - 1 if pool.attribute("ceil_mode", 0) else 0 for stride in strides]
    return all(
        0 <= (i := axis - 2) < rank and kernel[i] > max(before + own[i], after + own[i + rank] + late[i])
        for axis, (before, after) in padded.items()
    )


def _pads(graph: Graph, pad: Node) -> dict[int, tuple[int, int]] | None:
    """Return the numbers of elements before and after each axis; None if they are unknown."""
    sizes = graph.constant(pad.input(1)) if pad.input(1) else np.asarray(pad.attribute("pads", ()))
    axes = _axes(graph, pad, 3)
    if sizes is None or axes is None:
        return None
    before, after = sizes.reshape(2, -1).tolist()
    return dict(zip(axes or range(len(before)), zip(before, after, strict=True), strict=True))


def _axes(graph: Graph, node: Node, index: int) -> list[int] | None:
    """Return the axes in an input or an attribute, at least 0; empty if there are none, None if they are unknown."""
    given = graph.constant(node.input(index)) if node.input(index) else np.asarray(node.attribute("axes", None) or ())
    if given is None:
        return None
    axes, known = [int(axis) for axis in given.reshape(-1)], graph.type_of(node.input(0))
    if all(axis >= 0 for axis in axes):
        return axes
    rank = known.rank if isinstance(known, TensorType) else None
    return None if rank is None else [axis % rank for axis in axes]

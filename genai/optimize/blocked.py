"""The layout of images: convolutions and their neighbours compute on blocks of sixteen channels, in whole regions.

Every converted value has a blocked twin [N, C / 16, ..., 16]. Converted nodes read and write twins. A conversion
follows each twin for the nodes that read the original value, and is removed if there are none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.kernels.cpu.arrays.blocked.convolution import MIXED
from genai.kernels.cpu.arrays.blocked.layout import BLOCK, blocks_of

from ..onnx.ir import Graph, Node, OnnxModel, Value, make_node
from ..onnx.node import MS, OURS
from ..onnx.types import DataType, Dim, TensorType
from .base import Level, both_orders, graph_rule, is_float32, number, only_user
from .convolutions import batch_norm_step, clip_limits, constant_step

# The padding of the last block of results costs at most this factor.
_MOST_PADDING = 1.5
# Images of at least this number of channels are converted before a convolution reads them.
_FEWEST_BLOCKED = 32
_FEW_TERMS = 9
# Elementwise operators that give finite numbers for the zeros in padding channels.
_ELEMENTWISE = frozenset(
    {("", op) for op in "Abs Elu Erf Gelu HardSigmoid HardSwish LeakyRelu Mish Neg Relu Sigmoid Softplus Tanh".split()}
    | {(MS, "QuickGelu"), (MS, "Gelu"), (OURS, "HardSwish")}
)
# From this operator set on, the slope of PRelu is broadcast; before, it belongs to axis 1.
_PRELU_BROADCASTS = 7
# From this operator set on, the axes of Squeeze are an input.
_SQUEEZE_READS_AXES = 13
# From this operator set on, the means of pools never count elements after the pads.
_COUNTS_END_WITH_PADS = 19
# The quotients of numbers by smaller ones can exceed the range of float32.
_LEAST_DIVISOR = 1e-30
_BINARY = frozenset({"Add", "Div", "Mul", "Sub"})
_POOLS = frozenset({"MaxPool", "AveragePool"})
_SCALE = (OURS, "BlockedScale")
_CONV, _TRANSPOSED = (OURS, "BlockedConv"), (OURS, "BlockedConvTranspose")


@graph_rule(Level.ALL, domain=OURS)
def block_convolutions(model: OnnxModel, graph: Graph) -> int:
    """Conv, pools and elementwise operators on float32 images -> operators on blocks of sixteen channels."""
    if not any(node.op_type in ("Conv", "FusedConv") for node in graph.nodes):
        return 0
    graph.topological_sort()
    layout = _Layout(graph, model.opset_version() or 1)
    changes = sum(layout.convert(node) for node in list(graph.nodes))
    if changes:
        layout.finish()
    return changes


class _Layout:
    """The conversion of one graph: the blocked twin and the number of channels of each converted value."""

    def __init__(self, graph: Graph, version: int) -> None:
        self._graph, self._version = graph, version
        self._twins: dict[str, str] = {}
        self._channels: dict[str, int] = {}

    def convert(self, node: Node) -> bool:
        """Convert a node if possible; return True if it was converted."""
        if node.key in (("", "Conv"), (MS, "FusedConv")):
            return self._conv(node)
        if node.input(0) not in self._twins and node.input(1) not in self._twins:
            return False
        if node.key == ("", "ConvTranspose"):
            return self._transposed(node)
        if node.key in _ELEMENTWISE or node.key in (("", "Clip"), ("", "PRelu")):
            return self._elementwise(node)
        if node.key[0]:
            return False
        if node.op_type in _BINARY:
            return self._binary(node)
        if node.op_type in _POOLS:
            return self._pool(node)
        if node.op_type == "Concat":
            return self._concat(node)
        if node.op_type == "Split":
            return self._split(node)
        if node.op_type == "Resize":
            return self._resize(node)
        if node.op_type == "BatchNormalization":
            return self._batch_norm(node)
        return self._mean(node)

    def finish(self) -> None:
        """Remove the conversions that no node reads, and let convolutions write the zeros that others pad with."""
        graph = self._graph
        graph.remove_nodes(
            [node for node in graph.nodes if node.key == (OURS, "FromBlocked") and not graph.is_used(node.output(0))]
        )
        for node in graph.nodes:
            if node.key in (_CONV, _TRANSPOSED):
                self._add_border(node)

    def _twin(self, name: str, channels: int) -> str:
        """Return the blocked twin of a value; a conversion is inserted if there is none."""
        if name not in self._twins:
            twin = self._named(name, channels)
            node = make_node("ToBlocked", [name], [twin], domain=OURS, name=twin)
            producer = self._graph.producer(name)
            self._graph.nodes.insert(0 if producer is None else self._graph.nodes.index(producer) + 1, node)
            self._graph.invalidate()
        return self._twins[name]

    def _named(self, name: str, channels: int) -> str:
        """Return a name for the twin of a value, after recording its type."""
        twin = self._twins[name] = self._graph.fresh_name(f"{name}/blocked")
        self._channels[name] = channels
        known = self._graph.type_of(name)
        shape: tuple[Dim, ...] | None = known.shape if isinstance(known, TensorType) else None
        if shape is not None and len(shape) > 1:
            blocked = TensorType(DataType.FLOAT, (shape[0], blocks_of(channels), *shape[2:], BLOCK))
            self._graph.values[twin] = Value(twin, blocked)
        return twin

    def _replace(self, node: Node, made: Node, channels: Sequence[int]) -> bool:
        """Replace a node with its blocked form, followed by conversions of the results; return True."""
        names = list(node.outputs)
        made.outputs = [self._named(name, count) if name else "" for name, count in zip(names, channels, strict=True)]
        back = [
            make_node("FromBlocked", [twin], [name], domain=OURS, name=f"{twin}/plain", channels=count)
            for twin, name, count in zip(made.outputs, names, channels, strict=True)
            if name
        ]
        self._graph.replace_node(node, made, *back)
        return True

    def _conv(self, node: Node) -> bool:
        graph, weight = self._graph, self._graph.constant_tensor(node.input(1))
        if weight is None or weight.dtype is not DataType.FLOAT or len(weight.shape) not in (3, 4, 5):
            return False
        outputs, per_group, *kernel = weight.shape
        groups, stated = int(node.attribute("group", 1)), node.attribute("kernel_shape")
        if 0 in weight.shape or groups < 1 or outputs % groups or (stated is not None and list(stated) != kernel):
            return False
        if BLOCK * blocks_of(outputs) > _MOST_PADDING * outputs or not is_float32(graph, node.output(0)):
            return False
        bias = graph.constant_tensor(node.input(2)) if node.input(2) else None
        if node.input(2) and (bias is None or bias.shape != (outputs,) or bias.dtype is not DataType.FLOAT):
            return False
        if node.attribute("activation", "") not in ("", "Relu", "Clip"):
            return False
        source, channels = node.input(0), per_group * groups
        is_blocked = source in self._twins
        if is_blocked and self._channels[source] != channels:
            return False
        if groups > 1 and not self._fits_groups(source, groups, weight.shape):
            return False
        made = node.copy()
        made.op_type, made.domain = "BlockedConv", OURS
        if is_blocked or groups > 1 or channels >= _FEWEST_BLOCKED:
            made.inputs[0] = self._twin(source, channels)
        else:
            made.set_attribute("plain", 1)
        if node.input(3):
            made.inputs[3] = self._twin(node.input(3), outputs)
        return self._replace(node, made, [outputs])

    def _transposed(self, node: Node) -> bool:
        """Convert a ConvTranspose without groups and dilations, in which every result has a tap."""
        graph, weight = self._graph, self._graph.constant_tensor(node.input(1))
        if weight is None or weight.dtype is not DataType.FLOAT or len(weight.shape) not in (3, 4, 5):
            return False
        channels, outputs, *kernel = weight.shape
        stated, rank = node.attribute("kernel_shape") or kernel, len(kernel)
        strides = [int(step) for step in node.attribute("strides") or [1] * rank]
        simple = {*(node.attribute("dilations") or [1]), int(node.attribute("group", 1))} == {1}
        if not simple or list(stated) != kernel or len(strides) != rank or 0 in weight.shape:
            return False
        if not all(1 <= step <= size for step, size in zip(strides, kernel, strict=True)):
            return False
        if min(node.attribute("pads") or [0]) < 0 or BLOCK * blocks_of(outputs) > _MOST_PADDING * outputs:
            return False
        bias = graph.constant_tensor(node.input(2)) if node.input(2) else None
        if node.input(2) and (bias is None or bias.shape != (outputs,) or bias.dtype is not DataType.FLOAT):
            return False
        if self._channels[node.input(0)] != channels or not is_float32(graph, node.output(0)):
            return False
        made = node.copy()
        made.op_type, made.domain = "BlockedConvTranspose", OURS
        made.inputs[0] = self._twins[node.input(0)]
        return self._replace(node, made, [outputs])

    def _fits_groups(self, source: str, groups: int, shape: Sequence[int]) -> bool:
        """Return True if a convolution in groups is faster with blocks: small groups, or whole blocks per group."""
        outputs, per_group, *kernel = shape
        if per_group in MIXED and outputs == groups * per_group:
            # Conversions of plain images take longer than a few terms for each pixel.
            return per_group * math.prod(kernel) > _FEW_TERMS or source in self._twins
        return per_group % BLOCK == 0 and outputs // groups % BLOCK == 0

    def _elementwise(self, node: Node) -> bool:
        source, rest = node.input(0), [name for name in node.inputs[1:] if name]
        slopes = self._slopes(node)
        if source not in self._twins or (slopes is None and any(number(self._graph, name) is None for name in rest)):
            return False
        if self._absorb(node):
            return True
        made = node.copy()
        made.inputs[0] = self._twins[source]
        if slopes is not None:
            made.inputs[1] = self._per_channel(f"{made.name or source}/slopes", source, slopes)
        return self._replace(node, made, [self._channels[source]])

    def _slopes(self, node: Node) -> Any:
        """Return the constant slope for each channel of a PRelu of a blocked value, or None."""
        source, rank = node.input(0), self._rank(node.input(0))
        if node.key != ("", "PRelu") or self._version < _PRELU_BROADCASTS or source not in self._twins or rank is None:
            return None
        tensor, channels = self._graph.constant_tensor(node.input(1)), self._channels[source]
        if tensor is None or tensor.dtype is not DataType.FLOAT or len(tensor.shape) > rank:
            return None
        shape = (1,) * (rank - len(tensor.shape)) + tuple(tensor.shape)
        if shape[1] not in (1, channels) or tensor.num_elements != shape[1]:
            return None
        slopes = np.broadcast_to(np.asarray(tensor.array()).reshape(-1), channels)
        return slopes if np.isfinite(slopes).all() else None  # the zeros in padding channels would become NaN

    def _per_channel(self, name: str, source: str, values: NDArray[Any]) -> str:
        """Add a constant with a number for each channel of an image, [1, blocks, 1 ..., 16]; return its name."""
        wide = np.zeros(blocks_of(len(values)) * BLOCK, np.float32)
        wide[: len(values)] = values
        return self._graph.add_constant(name, wide.reshape(1, -1, *[1] * ((self._rank(source) or 0) - 2), BLOCK))

    def _absorb(self, node: Node) -> bool:
        """Make an activation part of the node that computes its input, if nothing else reads that value."""
        source, parameters = node.input(0), self._parameters(node)
        before = self._before(node, source, _CONV, _TRANSPOSED, *(() if node.op_type == "PRelu" else (_SCALE,)))
        if (
            before is None
            or parameters is None
            or before.attribute("activation", "")
            or before.attribute("broadcasts", 0)
        ):
            return False
        before.set_attribute("activation", node.op_type)
        if parameters:
            before.set_attribute("activation_params", parameters)
        return self._remove_absorbed(node, source)

    def _absorb_step(self, node: Node, source: str, scale: float, shift: float) -> bool:
        """Make x * scale + shift part of the convolution that computes x, after the convolution's activation.

        The weights and the bias of convolutions without an activation already contain such numbers.
        """
        conv = self._before(node, source, _CONV, _TRANSPOSED)
        if conv is None or not conv.attribute("activation", ""):
            return False
        conv.set_attribute("shift", scale * float(conv.attribute("shift", 0.0)) + shift)
        conv.set_attribute("scale", scale * float(conv.attribute("scale", 1.0)))
        return self._remove_absorbed(node, source)

    def _before(self, node: Node, source: str, *keys: tuple[str, str]) -> Node | None:
        """Return the node of these operators that computes an input, if nothing else reads its results, else None."""
        graph, twin = self._graph, self._twins[source]
        found = graph.producer(twin)
        is_alone = only_user(graph, source) is node and len(graph.consumers(twin)) == 1
        return found if found is not None and found.key in keys and is_alone else None

    def _remove_absorbed(self, node: Node, source: str) -> bool:
        """Remove a node that the node before it computes now; return True."""
        graph, twin, channels, name = self._graph, self._twins[source], self._channels[source], node.output(0)
        back = graph.producer(source)
        assert back is not None
        graph.remove_nodes([back])
        self._twins[name], self._channels[name] = twin, channels
        converted = make_node("FromBlocked", [twin], [name], domain=OURS, name=back.name, channels=channels)
        graph.replace_node(node, converted)
        return True

    def _parameters(self, node: Node) -> list[float] | None:
        """Return the parameters of an activation that convolutions can compute, else None."""
        if node.op_type == "Clip":
            return clip_limits(self._graph, node)
        if node.op_type == "PRelu":
            slopes = self._slopes(node)
            return None if slopes is None else [float(slope) for slope in slopes]
        defaults: dict[tuple[str, str], list[tuple[str, float]]] = {
            ("", "HardSigmoid"): [("alpha", 0.2), ("beta", 0.5)],
            ("", "HardSwish"): [],
            (OURS, "HardSwish"): [],
            ("", "LeakyRelu"): [("alpha", 0.01)],
            (MS, "QuickGelu"): [("alpha", 1.702)],
            ("", "Relu"): [],
            ("", "Sigmoid"): [],
            ("", "Tanh"): [],
        }
        known = defaults.get(node.key)
        return None if known is None else [float(node.attribute(name, value)) for name, value in known]

    def _binary(self, node: Node) -> bool:
        """Convert an operator of two blocked values with equal channels, or of one and a constant per channel."""
        twins = [name in self._twins for name in node.inputs]
        first = node.inputs[twins.index(True)]
        if all(twins):
            if node.op_type == "Div":  # the zeros in padding channels would become NaN
                return False
            ranks = [self._rank(name) for name in node.inputs]
            if self._channels[node.inputs[0]] != self._channels[node.inputs[1]] or None in ranks or len({*ranks}) > 1:
                return False
            for x, gate in both_orders(node):
                if node.op_type == "Mul" and self._is_gate(x, gate):
                    return self._scale(node, x, self._twins[gate])
        else:
            other = node.inputs[twins.index(False)]
            tensor = self._graph.constant_tensor(other)
            if tensor is None or len(tensor.shape) > (self._rank(first) or 0):
                return False
            step, value = self._step(node, first), number(self._graph, other)
            if step is None:
                return False
            if value is None:
                return self._scale_and_shift(node, first, *step)
            if node.op_type == "Div" and abs(value) < _LEAST_DIVISOR:
                return False
            if self._absorb_step(node, first, float(step[0][0]), float(step[1][0])):
                return True
        if node.op_type == "Add" and all(twins) and self._add_to_convolution(node):
            return True
        made = node.copy()
        made.inputs = [self._twins.get(name, name) for name in node.inputs]
        return self._replace(node, made, [self._channels[first]])

    def _add_to_convolution(self, node: Node) -> bool:
        """Make an addition part of the convolution that computes an operand, if nothing else reads that value.

        If the shapes are equal when the model runs, the convolution adds the other operand to each finished tile.
        """
        graph = self._graph
        for name, other in (node.inputs, node.inputs[::-1]):
            conv, back = self._before(node, name, _CONV), graph.producer(name)
            if name == other or back is None or conv is None:
                continue
            if conv.input(3) or conv.attribute("activation", ""):
                continue
            made = conv.copy()
            made.inputs = [conv.input(0), conv.input(1), conv.input(2), self._twins[other]]
            made.set_attribute("broadcasts", 1)
            self._replace(node, made, [self._channels[name]])
            graph.remove_nodes([back, conv])
            return True
        return False

    def _is_gate(self, x: str, gate: str) -> bool:
        """Return True if a value has one number for each channel of each image of x."""
        whole, small = (getattr(self._graph.type_of(name), "shape", None) or () for name in (x, gate))
        if not whole or not small or any(size != 1 for size in small[2:]):
            return False
        return bool(small[0] == 1 or (small[0] == whole[0] and whole[0] is not None))

    def _step(self, node: Node, source: str) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
        """Return `constant_step` of a blocked value. If its rank is unknown, only a constant without axes fits."""
        return constant_step(self._graph, node, source, max(self._rank(source) or 0, 2), self._channels[source])

    def _batch_norm(self, node: Node) -> bool:
        """Convert BatchNormalization with constants, in inference mode."""
        step, source = batch_norm_step(self._graph, node), node.input(0)
        if step is None or len(step[0]) != self._channels[source] or self._rank(source) is None:
            return False
        del node.outputs[1:]  # their names are empty
        return self._scale_and_shift(node, source, *step)

    def _scale_and_shift(self, node: Node, source: str, scale: NDArray[Any], shift: NDArray[Any]) -> bool:
        name, steps = node.name or source, (scale.astype(np.float32), shift.astype(np.float32))
        if not all(np.isfinite(step).all() for step in steps):  # the zeros in padding channels would become NaN
            return False
        scales, shifts = (
            self._per_channel(f"{name}/{part}", source, step)
            for part, step in zip(("scale", "shift"), steps, strict=True)
        )
        return self._scale(node, source, scales, shifts)

    def _scale(self, node: Node, source: str, *others: str) -> bool:
        made = make_node("BlockedScale", [self._twins[source], *others], [], domain=OURS, name=node.name)
        return self._replace(node, made, [self._channels[source]])

    def _rank(self, name: str) -> int | None:
        known = self._graph.type_of(name)
        return len(known.shape) if isinstance(known, TensorType) and known.shape is not None else None

    def _pool(self, node: Node) -> bool:
        source = node.input(0)
        if any(node.outputs[1:]) or len(node.attribute("kernel_shape") or ()) != 2 or self._rank(source) != 4:
            return False
        made = node.copy()
        made.op_type, made.domain, made.inputs = f"Blocked{node.op_type}", OURS, [self._twins[source]]
        if self._version < _COUNTS_END_WITH_PADS and node.attribute("count_include_pad", 0):
            made.set_attribute("counts_taps", int(not node.attribute("ceil_mode", 0)))
        return self._replace(node, made, [self._channels[source]])

    def _mean(self, node: Node) -> bool:
        """Convert GlobalAveragePool, or ReduceMean over the spatial axes."""
        source = node.input(0)
        rank = self._rank(source)
        if rank not in (4, 5) or node.op_type not in ("GlobalAveragePool", "ReduceMean"):
            return False
        if node.op_type == "ReduceMean":
            axes = node.attribute("axes") if not node.input(1) else self._graph.constant(node.input(1))
            if axes is None or sorted(int(axis) % rank for axis in axes) != [*range(2, rank)]:
                return False
            if not node.attribute("keepdims", 1):
                node = self._with_axes(node, [*range(2, rank)])
        made = make_node("BlockedMean", [self._twins[source]], [], domain=OURS, name=node.name)
        return self._replace(node, made, [self._channels[source]])

    def _with_axes(self, mean: Node, axes: list[int]) -> Node:
        """Replace a mean that removes its axes with a mean that keeps them and a Squeeze; return the mean."""
        graph, name = self._graph, mean.output(0)
        wide = graph.fresh_name(f"{name}/kept")
        kept, squeeze = mean.copy(), make_node("Squeeze", [wide], [name], name=f"{wide}/squeezed")
        kept.outputs = [wide]
        kept.set_attribute("keepdims", 1)
        if self._version < _SQUEEZE_READS_AXES:
            squeeze.set_attribute("axes", axes)
        else:
            squeeze.inputs.append(graph.add_constant(f"{wide}/axes", np.array(axes, np.int64)))
        graph.replace_node(mean, kept, squeeze)
        return kept

    def _concat(self, node: Node) -> bool:
        """Convert a concatenation of channels if all parts, except possibly the last, are whole blocks."""
        if not all(name in self._twins for name in node.inputs) or self._rank(node.input(0)) is None:
            return False
        counts = [self._channels[name] for name in node.inputs]
        if int(node.attribute("axis", 1)) % (self._rank(node.input(0)) or 1) != 1 or any(
            n % BLOCK for n in counts[:-1]
        ):
            return False
        made = node.copy()
        made.inputs = [self._twins[name] for name in node.inputs]
        made.set_attribute("axis", 1)
        return self._replace(node, made, [sum(counts)])

    def _split(self, node: Node) -> bool:
        """Convert a split of channels if all parts, except possibly the last, are whole blocks."""
        source, count = node.input(0), len(node.outputs)
        rank, channels = self._rank(source), self._channels[source]
        if rank is None or int(node.attribute("axis", 0)) % rank != 1 or not all(node.outputs):
            return False
        sizes = node.attribute("split") if not node.input(1) else self._graph.constant(node.input(1))
        if sizes is None and channels % count == 0:
            sizes = [channels // count] * count
        parts = [] if sizes is None else [int(size) for size in sizes]
        if len(parts) != count or sum(parts) != channels or 0 in parts or any(part % BLOCK for part in parts[:-1]):
            return False
        blocks = [blocks_of(part) for part in parts]
        made = node.copy()
        made.inputs = [self._twins[source]]
        made.set_attribute("axis", 1)
        made.attributes.pop("num_outputs", None)
        if self._version < 13:
            made.set_attribute("split", blocks)
        else:
            made.inputs.append(self._graph.add_constant(f"{made.name or source}/blocks", np.array(blocks)))
        return self._replace(node, made, parts)

    def _resize(self, node: Node) -> bool:
        """Convert a Resize of the spatial axes by constant scales."""
        graph, source = self._graph, node.input(0)
        scales, rank = graph.constant(node.input(2)), self._rank(source)
        if self._version < 11 or scales is None or rank is None or len(scales) != rank or node.input(3):
            return False
        if list(scales[:2]) != [1, 1] or node.attribute("axes") or not all(np.isfinite(scales)):
            return False
        if node.attribute("coordinate_transformation_mode", "half_pixel") == "tf_crop_and_resize":
            return False
        made = node.copy()
        wide = graph.add_constant(f"{made.name or source}/scales", np.append(scales, scales[0]))
        made.inputs = [self._twins[source], "", wide]
        return self._replace(node, made, [self._channels[source]])

    def _add_border(self, node: Node) -> None:
        """Surround the results of a convolution with zeros if only convolutions read them, and some of them pad."""
        graph, twin = self._graph, node.output(0)
        users, rank = graph.consumers(twin), len(node.attribute("kernel_shape") or ())
        known = graph.values.get(twin)
        if graph.is_output(twin) or known is None or not isinstance(known.type, TensorType):
            return
        if node.attribute("broadcasts", 0):
            return
        rank = len(known.type.shape or ()) - 3
        pads = []
        for user in users:
            own = user.attribute("pads") or [0] * (2 * rank)
            if user.key == _TRANSPOSED:
                own = [0] * (2 * rank)  # its pads are omitted results
            if (
                user.key not in (_CONV, _TRANSPOSED)
                or user.inputs.count(twin) != 1
                or user.input(0) != twin
                or len(own) != 2 * rank
            ):
                return
            if user.attribute("auto_pad", "NOTSET") != "NOTSET" or min(own) < 0:
                return
            pads.append([int(pad) for pad in own])
        border = [max(sides) for sides in zip(*pads, strict=True)]
        if not any(border):
            return
        node.set_attribute("border", border)
        for user in users:
            user.set_attribute("crop", border)
        shape = list(known.type.shape or ())
        for axis in range(rank):
            size = shape[2 + axis]
            shape[2 + axis] = size + border[axis] + border[rank + axis] if isinstance(size, int) else None
        graph.values[twin] = replace(known, type=replace(known.type, shape=tuple(shape)))

"""Placement: the choice of the values of a graph to quantise, and of the way to quantise each operand of the nodes.

Placement does not depend on ranges, so calibration observes only the values that are needed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from ...onnx.ir import Graph, Node
from ...optimize.base import made_by, number, only_user
from .calibrate import is_float
from .operator_rules import OperatorRule, result_bounds, static_rule, weight_axis
from .options import StaticOptions
from .padding import may_saturate, padding_value


@dataclass(frozen=True)
class Activation:
    """A quantised value between nodes, or a quantised input.

    Attributes:
        shares: the value whose scale and zero point this value shares; None means separate parameters.
        range: fixed range, which overrides the calibration; None means the observed range.
        rounds_scale: True to round the scale to a power of two.
        bounded_by: the value whose observed range is used, because numbers outside that range do not matter: the output
            of the only node that reads this value, a Relu or Clip; or the input of the Pad that computes this value,
            if only max reductions read it.
    """

    shares: str | None = None
    range: tuple[float, float] | None = None
    rounds_scale: bool = False
    bounded_by: str | None = None


@dataclass(frozen=True)
class ConstantUse:
    """A constant operand of a node.

    Attributes:
        node: the node.
        index: index of the input.
        kind: "data" (with one scale and the type of activations), "weight" or "bias".
        axis: axis of the channels that have separate scales; None means one scale.
    """

    node: Node
    index: int
    kind: str
    axis: int | None = None

    @property
    def name(self) -> str:
        """The name of the constant."""
        return self.node.inputs[self.index]


@dataclass
class Placement:
    """The values and nodes to quantise.

    Attributes:
        activations: quantised values by name, in the order of the nodes.
        constants: constant operands.
        absorbed: nodes that saturation of the integers replaces (a Relu or Clip after a quantised node).
        nodes: nodes that are quantised.
    """

    activations: dict[str, Activation] = field(default_factory=dict)
    constants: list[ConstantUse] = field(default_factory=list)
    absorbed: list[Node] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)

    def root(self, name: str) -> str:
        """Return the value that determines this value's scale and zero point."""
        activation = self.activations.get(name)
        while activation is not None and activation.shares is not None:
            name = activation.shares
            activation = self.activations.get(name)
        return name


@dataclass(frozen=True)
class Placer:
    """A chooser of the values to quantise in a graph.

    Attributes:
        symmetric: names of the activations whose range is symmetric around 0; the entry None stands for all others.
    """

    graph: Graph
    options: StaticOptions
    per_channel: bool
    symmetric: Collection[str | None] = ()
    placement: Placement = field(default_factory=Placement)

    def place(self, nodes: Sequence[Node]) -> Placement:
        """Return the placement for nodes in topological order."""
        for node in nodes:
            rule = static_rule(node)
            if rule is None or (rule.only_if_forced and not self.options.force_quantize_no_input_check):
                continue
            if rule.follows and not (
                node.input(0) in self.placement.activations or self.options.force_quantize_no_input_check
            ):
                continue
            if self._absorb(node):
                continue
            if rule.keeps and not self._leaves_the_range(node):
                self._keep(node, rule)
            else:
                self._place(node, rule)
        return self.placement

    def _place(self, node: Node, rule: OperatorRule) -> None:
        graph, options = self.graph, self.options
        constant = {index for index, name in enumerate(node.inputs) if name and graph.constant_tensor(name) is not None}
        data = [index for index in (range(len(node.inputs)) if rule.data is None else rule.data) if node.input(index)]
        if node.op_type == "Pad" and node.input(2) and self._leaves_the_range(node):
            data.append(2)
        by_channel = rule.weight if rule.weight in constant else None
        if rule.weight is not None and by_channel is None and rule.weight not in data:
            return
        if node.op_type == "MatMul" and options.mat_mul_const_b_only and by_channel is None:
            return
        if by_channel is not None and by_channel not in data:
            data.append(by_channel)
        if not all(is_float(graph, node.inputs[index], options.default_tensor_type) for index in data):
            return
        if all(index in constant for index in data):
            return
        self.placement.nodes.append(node)
        for index in data:
            if index == by_channel:
                self.placement.constants.append(self._weight(node, rule, index))
            elif index in constant:
                self.placement.constants.append(ConstantUse(node, index, "data"))
            else:
                self.placement.activations.setdefault(node.inputs[index], Activation())
        if rule.bias in constant and by_channel is not None and options.quantize_bias and 0 not in constant:
            self._bias(node, rule.bias)
        if rule.follows and only_user(graph, node.input(0)) is node and node.input(0) in self.placement.activations:
            activation = self.placement.activations[node.input(0)]
            if activation.shares is None and activation.range is None:
                self.placement.activations[node.input(0)] = Activation(bounded_by=node.output(0))
        self._results(node, rule, Activation(range=rule.range, rounds_scale=rule.rounds_scale))

    def _weight(self, node: Node, rule: OperatorRule, index: int) -> ConstantUse:
        tensor = self.graph.constant_tensor(node.inputs[index])
        rank = 0 if tensor is None else len(tensor.shape)
        axis = self.options.channel_axes.get(node.op_type, weight_axis(node, rule, rank))
        # Vectors have one scale, because one scale per number saves no space; stacked matrices support no more than
        # one.
        by_channel = self.per_channel and rank >= 2 and not (node.op_type == "MatMul" and rank > 2)
        return ConstantUse(node, index, "weight", axis % rank if by_channel else None)

    def _bias(self, node: Node, index: int | None) -> None:
        assert index is not None
        tensor, weight = self.graph.constant_tensor(node.inputs[index]), self.placement.constants[-1]
        if tensor is None or not is_float(self.graph, node.inputs[index]):
            return
        if len(tensor.shape) == 1 or weight.axis is None:
            self.placement.constants.append(ConstantUse(node, index, "bias", None if weight.axis is None else 0))

    def _results(self, node: Node, rule: OperatorRule, activation: Activation) -> None:
        if node.op_type in self.options.op_types_to_exclude_output_quantization:
            return
        outputs = node.outputs if rule.outputs is None else node.outputs[: rule.outputs]
        for name in filter(None, outputs):
            self.placement.activations.setdefault(name, activation)

    def _keep(self, node: Node, rule: OperatorRule) -> None:
        source, graph, options = node.input(0), self.graph, self.options
        if not is_float(graph, source, options.default_tensor_type):
            return
        is_constant = graph.constant_tensor(source) is not None
        looks_up = node.op_type == "Gather" and is_constant
        if not (source in self.placement.activations or options.force_quantize_no_input_check or looks_up):
            return
        self.placement.nodes.append(node)
        if is_constant:
            self.placement.constants.append(ConstantUse(node, 0, "data"))
        else:
            # Reductions discard the padding of a Pad that stays float, so only the Pad's input determines the range.
            pad = made_by(graph, source, "Pad")
            bounded_by = pad.input(0) if pad is not None and may_saturate(graph, pad) else None
            self.placement.activations.setdefault(source, Activation(bounded_by=bounded_by))
        self._results(node, rule, Activation(shares=source))

    def _leaves_the_range(self, node: Node) -> bool:
        """Return True if a Pad or Resize can return values outside the range of its input and 0.

        A Pad does if it inserts a value other than 0 that may not saturate. A Resize does if its cubic curves overshoot
        or if it extrapolates.
        """
        if node.op_type == "Resize":
            where = node.attribute("coordinate_transformation_mode", "half_pixel")
            return bool(node.attribute("mode", "nearest") == "cubic" or where == "tf_crop_and_resize")
        is_filled = node.op_type == "Pad" and node.attribute("mode", "constant") == "constant"
        return is_filled and padding_value(self.graph, node) != 0 and not may_saturate(self.graph, node)

    def _absorb(self, node: Node) -> bool:
        """Remove a Relu or Clip after a quantised node if integers saturate at its bounds; return True if removed.

        Integers saturate at the bounds if the result's range, which is within the bounds, is the full range of the
        integers.
        """
        graph, source, result = self.graph, node.input(0), node.output(0)
        bounds_given = [number(graph, name) if name else None for name in (node.input(1), node.input(2))]
        if any(
            name and value is None for name, value in zip((node.input(1), node.input(2)), bounds_given, strict=True)
        ):
            return False
        bounds = result_bounds(node, *bounds_given)
        if bounds is None or self.options.keep_removable_activations or not bounds[0] <= 0 <= bounds[1]:
            return False
        is_symmetric = None in self.symmetric or result in self.symmetric
        activation = self.placement.activations.get(source)
        if is_symmetric or activation is None or activation.shares is not None or only_user(graph, source) is not node:
            return False
        producer = graph.producer(source)
        if producer is None or node.op_type in self.options.op_types_to_exclude_output_quantization:
            return False
        del self.placement.activations[source]
        self.placement.activations[result] = Activation()
        self.placement.absorbed.append(node)
        return True

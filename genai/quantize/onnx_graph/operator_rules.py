"""Rules for quantising nodes, as data: for each operator, the inputs, the outputs and the origin of their scales."""

from __future__ import annotations

from dataclasses import dataclass

from ...onnx.node import Node

LAST = -1


@dataclass(frozen=True)
class OperatorRule:
    """The rule for one operator.

    Attributes:
        data: inputs that are activations; None means all inputs.
        weight: an input that is quantised with one scale per channel if the input is constant and scales per channel
            are enabled. Otherwise, the input is treated like the inputs in `data`, or stays float if `data` does not
            include it.
        axis: axis of the weight's channels.
        bias: an input that becomes int32. Its scale is the product of the scales of the first input and of the weight.
        outputs: number of outputs that are quantised; None means all outputs.
        keeps: True if the operator is quantised only if its input is quantised, and its outputs share the input's scale
            and zero point, because the output values are a subset of the input values.
        follows: True if the operator is quantised only if its input is already quantised.
        range: fixed range of the output, which overrides the calibration.
        rounds_scale: True to round the output's scale to the nearest power of two. onnxruntime's integer softmax
            multiplies by 1 / scale rounded down: with 1/255, which float32 cannot represent, all results are too small.
        only_if_forced: True if quantising the operator is useful only when its neighbours are quantised.
    """

    data: tuple[int, ...] | None = (0,)
    weight: int | None = None
    axis: int = LAST
    bias: int | None = None
    outputs: int | None = 1
    keeps: bool = False
    follows: bool = False
    range: tuple[float, float] | None = None
    rounds_scale: bool = False
    only_if_forced: bool = False


_PLAIN, _KEEPS = OperatorRule(), OperatorRule(keeps=True)
_RULES = {
    "Conv": OperatorRule(weight=1, axis=0, bias=2),
    "ConvTranspose": OperatorRule(weight=1, axis=1, bias=2),
    "MatMul": OperatorRule((0, 1), weight=1),
    "Gemm": OperatorRule((0, 1), weight=1, bias=2),
    "LayerNormalization": OperatorRule(weight=1, bias=2),
    "InstanceNormalization": OperatorRule(weight=1, bias=2),
    "BatchNormalization": OperatorRule(weight=1, bias=2),
    "Add": OperatorRule((0, 1)),
    "Mul": OperatorRule((0, 1)),
    "Concat": OperatorRule(None),
    "Where": OperatorRule((1, 2), only_if_forced=True),
    "Softmax": OperatorRule(range=(0.0, 1.0), rounds_scale=True),
    "ArgMax": OperatorRule(outputs=0),
    "Split": OperatorRule(keeps=True, outputs=None),
    **dict.fromkeys(("Sigmoid", "LeakyRelu", "GlobalAveragePool", "CumSum"), _PLAIN),
    **dict.fromkeys(("Relu", "Clip"), OperatorRule(follows=True)),
    **dict.fromkeys(
        (
            "AveragePool", "Flatten", "Gather", "GatherElements", "MaxPool", "Pad", "Reshape", "Resize", "Slice",
            "Squeeze", "TopK", "Transpose", "Unsqueeze",
        ),
        _KEEPS,
    ),
}  # fmt: skip

STATIC_OPERATORS = tuple(sorted(_RULES))
"""The operators that `quantize_static` quantises by default."""
QOPERATOR_OPERATORS = tuple(
    sorted(
        set(_RULES)
        - set("BatchNormalization ConvTranspose CumSum GatherElements InstanceNormalization".split())
        - set("LayerNormalization Slice TopK".split())
    )
)
"""The default operators for QuantFormat.QOperator: those that have an integer operator."""
DYNAMIC_OPERATORS = ("Conv", "Gather", "MatMul")
"""The operators that `quantize_dynamic` quantises by default; a Gemm counts as a MatMul."""
ELSEWHERE = ("Attention", "EmbedLayerNormalization", "LSTM")
"""Operators that onnxruntime quantises but this toolkit does not."""
WITHOUT_EFFECT = {"Transpose": "dynamically quantised values are not passed on to this operator"}
"""Operators that dynamic quantisation leaves unchanged, and the reasons."""


def static_rule(node: Node) -> OperatorRule | None:
    """Return the rule for a node, or None if it stays float."""
    domain, op_type = node.key
    return None if domain else _RULES.get(op_type)


def weight_axis(node: Node, rule: OperatorRule, rank: int) -> int:
    """Return the axis of a weight's channels, at least 0."""
    if node.op_type == "Gemm":
        return 0 if node.attribute("transB", 0) else 1
    return rule.axis % max(rank, 1)


def result_bounds(node: Node, minimum: float | None, maximum: float | None) -> tuple[float, float] | None:
    """Return the bounds of the output of a Relu or Clip; None for other nodes.

    Args:
        minimum, maximum: constant inputs of a Clip; None for an input that is missing.
    """
    if node.key == ("", "Relu"):
        return 0.0, float("inf")
    if node.key != ("", "Clip"):
        return None
    low = node.attribute("min", float("-inf")) if minimum is None else minimum
    high = node.attribute("max", float("inf")) if maximum is None else maximum
    return float(low), float(high)

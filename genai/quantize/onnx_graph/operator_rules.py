"""What quantising a node means, by its operator, as data: which inputs and outputs, and how their scales come about."""

from __future__ import annotations

from dataclasses import dataclass

from ...onnx.node import Node

LAST = -1


@dataclass(frozen=True)
class OperatorRule:
    """One operator.

    Attributes:
        data: inputs that are activations; None = all.
        weight: an input that gets scales by channel where it is constant and these are asked for; otherwise it is as
            one of `data`, or stays float where that does not list it.
        axis: of the weight's channels.
        bias: an input that becomes int32 at the scale of the first input times that of the weight.
        outputs: how many results are quantised; None = all.
        keeps: it follows, and its results have scale and zero point of the first input, since their values are some
            of its values.
        follows: it is quantised only where its input is so anyway.
        range: of the result, whatever the calibration saw.
        rounds_scale: the result's scale is the nearest power of two. onnxruntime's softmax of integers multiplies by
            1 / scale rounded down: with 1/255, which is not quite 255, all of its results are too small.
        only_if_forced: it gains nothing unless what is around it is quantised.
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
"""What `quantize_static` quantises unless it is told otherwise."""
QOPERATOR_OPERATORS = tuple(
    sorted(
        set(_RULES)
        - set("BatchNormalization ConvTranspose CumSum GatherElements InstanceNormalization".split())
        - set("LayerNormalization Slice TopK".split())
    )
)
"""The same for QuantFormat.QOperator: those whose integers have an operator."""
DYNAMIC_OPERATORS = ("Conv", "Gather", "MatMul")
"""What `quantize_dynamic` quantises unless it is told otherwise; a Gemm counts as a MatMul."""
ELSEWHERE = ("Attention", "EmbedLayerNormalization", "LSTM")
"""Operators that onnxruntime quantises and this toolkit does not."""
WITHOUT_EFFECT = {"Transpose": "a dynamically quantised value is not passed on to it"}
"""Operators whose dynamic form changes nothing here."""


def static_rule(node: Node) -> OperatorRule | None:
    """The rule of a node; None where it stays as it is."""
    domain, op_type = node.key
    return None if domain else _RULES.get(op_type)


def weight_axis(node: Node, rule: OperatorRule, rank: int) -> int:
    """The axis of a weight's channels, at least 0."""
    if node.op_type == "Gemm":
        return 0 if node.attribute("transB", 0) else 1
    return rule.axis % max(rank, 1)


def result_bounds(node: Node, minimum: float | None, maximum: float | None) -> tuple[float, float] | None:
    """Between which values a Relu or Clip leaves them; None for other nodes.

    Args:
        minimum, maximum: the constants that a Clip has as inputs, None where it has none.
    """
    if node.key == ("", "Relu"):
        return 0.0, float("inf")
    if node.key != ("", "Clip"):
        return None
    low = node.attribute("min", float("-inf")) if minimum is None else minimum
    high = node.attribute("max", float("inf")) if maximum is None else maximum
    return float(low), float(high)

"""Row and lowering rules of norms and reductions."""

from __future__ import annotations

from genai.kernels.ir import Norm

from ..onnx.node import MS
from .elementwise import elementwise_rows
from .rows import ONE, State
from .rules import Lowered, LoweringSpec, NodeRows, States, lowering_rule, row_rule


@row_rule(
    *"ReduceL1 ReduceL2 ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare".split()
)
def reduce_rows(at: NodeRows) -> States:
    state = at.rows
    axes = at.axes()
    axes = list(range(state.rank)) if axes is None else [state.axis_index(axis) for axis in axes]
    return [_reduced(at, state, axes)]


def _reduced(at: NodeRows, state: State, axes: list[int]) -> State:
    for axis in axes:
        at.keep_off(state, axis)
    if at.node.attribute("keepdims", 1):
        return state.with_shape(tuple(ONE if i in axes else d for i, d in enumerate(state.known_shape)))
    return state.without_axes(axes)


@row_rule("ArgMax", "ArgMin")
def arg_reduce_rows(at: NodeRows) -> States:
    state = at.rows
    return [_reduced(at, state, [at.axis(state, 0)])]


def along_axis_rows(at: NodeRows) -> States:
    state = at.rows
    axis = at.axis(state, -1)
    wide = at.node.op_type in ("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization")
    for each in range(axis, state.rank) if wide else (axis,):
        at.keep_off(state, each)
    return [state] * len(at.node.outputs)


row_rule("Softmax", "LogSoftmax", "Hardmax")(along_axis_rows)


@row_rule("SkipSimplifiedLayerNormalization", "SkipLayerNormalization", "QuickGelu", "FastGelu", "BiasGelu", domain=MS)
def skip_norm_rows(at: NodeRows) -> States:
    result = elementwise_rows(at)[0]
    at.keep_off(result, -1)
    return [result] * len(at.node.outputs)


@lowering_rule("SimplifiedLayerNormalization", "RMSNormalization", "LayerNormalization")
def lower_norm(spec: LoweringSpec) -> Lowered | None:
    """Lower a norm over the last axis: over a row, or over each head of a row."""
    x = spec.rows(0)
    if x is None or int(spec.attributes.get("axis", -1)) not in (-1, len(x.shape) - 1) or any(spec.outputs[1:]):
        return None
    centred = spec.op_type == "LayerNormalization"
    if not spec.has(1) or spec.constant(1).size != x.last or (spec.has(2) and not centred):
        return None
    epsilon, out = float(spec.attributes.get("epsilon", 1e-5)), spec.outputs[0]
    weight, bias = spec.constant_name(1), spec.constant_name(2)
    op = Norm(spec.inputs[0], weight, epsilon, out, centred=centred, bias=bias, op_type=spec.op_type)
    return Lowered([op], {out: x})


@lowering_rule("SkipSimplifiedLayerNormalization", "SkipLayerNormalization", domain=MS)
def lower_skip_norm(spec: LoweringSpec) -> Lowered | None:
    """Lower the norm of x + skip (+ bias); output 3 is the sum."""
    x, skip = spec.rows(0), spec.rows(1)
    if x is None or x != skip or x.last != x.width or any(spec.outputs[1:3]) or not spec.has(2):
        return None
    centred = spec.op_type == "SkipLayerNormalization"
    total = spec.outputs[3] if len(spec.outputs) > 3 else ""
    op = Norm(
        spec.inputs[0], spec.constant_name(2), float(spec.attributes.get("epsilon", 1e-12)), spec.outputs[0],
        centred=centred, bias=spec.constant_name(3) if centred else "", skip=spec.inputs[1],
        input_bias=spec.constant_name(4 if centred else 3), total=total, op_type=spec.op_type,
    )  # fmt: skip
    return Lowered([op], dict.fromkeys(op.outputs, x))


row_rule("LpNormalization", "SimplifiedLayerNormalization", "RMSNormalization", "LayerNormalization")(along_axis_rows)

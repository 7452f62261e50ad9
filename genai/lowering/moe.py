"""Row and lowering rules of mixtures of experts (com.microsoft::MoE and QMoE)."""

from __future__ import annotations

from genai.kernels.ir import RowsType

from ..onnx.node import MS
from ..ops.experts import moe_op
from ..ops.registry import KernelError
from .rows import Kind, NotFlattenable
from .rules import Lowered, LoweringSpec, NodeRows, Packed, States, lowering_rule, row_rule, stored_weights


@lowering_rule("MoE", "QMoE", domain=MS)
def experts(spec: LoweringSpec) -> Lowered | None:
    """Lower the experts over rows of x; a host node may compute the router scores."""
    x = spec.rows(0)
    if x is None or x.last != x.width:
        return None
    op = moe_op(spec)
    count, scores = op.first.weight.experts, spec.rows(1)
    if x.width != op.second.weight.rows or (scores is not None and scores.width != count):
        raise KernelError(
            f"{spec.op_type}: the width {x.width} of the input, or the shape of the scores, does not match the experts"
        )
    return Lowered([op], {op.scores: scores or RowsType((-1, count), count, x.per), op.out: x})


@row_rule("MoE", "QMoE", domain=MS)
def experts_rows(at: NodeRows) -> States:
    x, scores, *weights = at.states
    if x is None or scores is None or {x.kind, scores.kind} != {Kind.ROWS} or scores.axis != 0 or scores.rank != 2:
        raise NotFlattenable("one vector and one row of scores per token are required")
    if any(state is not None and state.kind is not Kind.UNIFORM for state in weights):
        raise NotFlattenable("the experts must be the same for all tokens")
    at.keep_off(x, -1, "the contraction")
    return [x]


stored_weights(
    "QMoE",
    {
        2: Packed("expert_weight_bits", scales=3, points=11, row_axes=2, block_size=0),
        5: Packed("expert_weight_bits", scales=6, points=12, row_axes=2, block_size=0),
    },
)

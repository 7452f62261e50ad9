"""Row and lowering rules of recurrent layers: convolutions and linear attention, with their gates and norms."""

from __future__ import annotations

from genai.kernels.ir import Binary, CausalConv, Gate, LinearAttention, Norm, RowsType, Unary

from ..onnx.node import MS, OURS
from .elementwise import elementwise_rows
from .rows import Kind, NotFlattenable, RowDim, State
from .rules import Lowered, LoweringSpec, NodeRows, States, lowering_rule, row_rule


@row_rule("CausalConv", domain=OURS)
def causal_conv_rows(at: NodeRows) -> States:
    """Return the states of a convolution over rows of channels (see `optimize.recurrent`)."""
    x = _rows_of_three_axes(at, 0)
    _check_state(at, 3)
    if any(state is not None and state.kind is not Kind.UNIFORM for state in at.states[1:3]):
        raise NotFlattenable("the weight of a convolution must be constant")
    at.analysis.recurrent.append(at.node)
    return [x, State(Kind.CACHE)]


@row_rule("LinearAttention")
@row_rule("LinearAttention", domain=MS)
def linear_attention_rows(at: NodeRows) -> States:
    """Return the states of linear attention."""
    query, value = _rows_of_three_axes(at, 0), _rows_of_three_axes(at, 2)
    for index in (1, 4, 5):
        if at.node.input(index):
            _rows_of_three_axes(at, index)
    _check_state(at, 3)
    if at.node.attribute("state_window", 0):
        raise NotFlattenable("windows of states are not supported")
    heads, value_heads = (int(at.node.attribute(name, 0)) for name in ("q_num_heads", "kv_num_heads"))
    if heads < 1 or value_heads < 1:
        raise NotFlattenable(f"q_num_heads is {heads} and kv_num_heads is {value_heads}")
    width = max(heads, value_heads) * (value.known_shape[2].factor // value_heads)
    at.analysis.recurrent.append(at.node)
    return [query.resized(2, RowDim(width)), State(Kind.CACHE)]


def _rows_of_three_axes(at: NodeRows, index: int) -> State:
    state = at.states[index]
    if state is None or state.kind is not Kind.ROWS or state.axis != 1 or state.rank != 3:
        raise NotFlattenable("the inputs of recurrent layers must be [batch, tokens, features]")
    return state


def _check_state(at: NodeRows, index: int) -> None:
    state = at.states[index] if index < len(at.states) else None
    if state is None or state.kind is not Kind.CACHE:
        raise NotFlattenable("the state of a recurrent layer must be an input of the graph")


@row_rule("GatedAdd", domain=MS)
def gated_add_rows(at: NodeRows) -> States:
    """Return the state of x + y * gate, where the gate has one number per token."""
    if at.node.input(3):
        raise NotFlattenable("the projection of a gate is not supported")
    return elementwise_rows(at)


@row_rule("LinearAttentionGate", domain=MS)
def gate_rows(at: NodeRows) -> States:
    """Return the states of decays and betas."""
    return [_rows_of_three_axes(at, 0)] * len(at.node.outputs)


@row_rule("GatedRMSNorm", domain=MS)
def gated_norm_rows(at: NodeRows) -> States:
    """Return the state of a gated norm over groups of features."""
    return [_rows_of_three_axes(at, 0)]


@lowering_rule("CausalConv", domain=OURS)
def lower_causal_conv(spec: LoweringSpec) -> Lowered | None:
    """Lower a convolution, and the SiLU that may follow it."""
    x, weight, out = spec.rows(0), spec.constants[1], spec.outputs[0]
    if x is None or weight is None or weight.shape[:2] != (x.width, 1) or weight.ndim != 3 or x.last != x.width:
        return None
    dilation, activation = int(spec.attributes.get("dilation", 1)), spec.attributes.get("activation", "none")
    plain = out if activation == "none" else f"{out}/plain"
    op = CausalConv(
        spec.inputs[0], spec.constant_name(1), plain, int(spec.attributes["layer"]), spec.constant_name(2), dilation,
        op_type=spec.op_type,
    )  # fmt: skip
    if activation == "none":
        return Lowered([op], {out: x})
    if activation not in ("silu", "swish"):
        return None
    return Lowered([op, Unary("silu", plain, out, op_type=spec.op_type)], {plain: x, out: x})


@lowering_rule("LinearAttention")
@lowering_rule("LinearAttention", domain=MS)
def lower_linear_attention(spec: LoweringSpec) -> Lowered | None:
    """Lower linear attention, whose node has the number of its cache layer."""
    query, key, value = (spec.rows(index) for index in range(3))
    if query is None or key is None or value is None:
        return None
    heads, value_heads = int(spec.attributes["q_num_heads"]), int(spec.attributes["kv_num_heads"])
    size, rule = query.width // heads, str(spec.attributes.get("update_rule", "gated_delta"))
    decay, beta = (spec.inputs[index] if spec.has(index) else "" for index in (4, 5))
    decay, beta = decay if rule in ("gated", "gated_delta") else "", beta if "delta" in rule else ""
    scale = float(spec.attributes.get("scale", 0.0)) or size**-0.5
    op = LinearAttention(
        spec.inputs[0], spec.inputs[1], spec.inputs[2], spec.outputs[0], int(spec.attributes["layer"]), heads,
        key.width // size, value_heads, size, value.width // value_heads, scale, decay, beta, op_type=spec.op_type,
    )  # fmt: skip
    width = op.out_heads * op.v_head_size
    return Lowered([op], {op.out: RowsType((1, -1, width), width)})


@lowering_rule("LinearAttentionGate", domain=MS)
def lower_gate(spec: LoweringSpec) -> Lowered | None:
    """Lower decay = scale * softplus(a + bias), and beta = sigmoid(b)."""
    a, b, (decay, *beta) = spec.rows(0), spec.rows(3) if spec.has(3) else None, spec.outputs
    if a is None or any(constant is None for constant in spec.constants[1:3]):
        return None
    shifted, positive = f"{decay}/shifted", f"{decay}/positive"
    ops = [
        Binary("add", spec.inputs[0], "", shifted, "", spec.constant_name(1), op_type=spec.op_type),
        Unary("softplus", shifted, positive, op_type=spec.op_type),
        Binary("multiply", positive, "", decay, "", spec.constant_name(2), op_type=spec.op_type),
    ]
    types = dict.fromkeys((shifted, positive, decay), a)
    if beta and beta[0]:
        if b is None:
            return None
        ops.append(Unary("sigmoid", spec.inputs[3], beta[0], op_type=spec.op_type))
        types[beta[0]] = b
    return Lowered(ops, types)


@lowering_rule("GatedRMSNorm", domain=MS)
def lower_gated_norm(spec: LoweringSpec) -> Lowered | None:
    """Lower the norm of groups of a row, times activation(gate)."""
    x, gate, weight, out = spec.rows(0), spec.rows(2), spec.constants[1], spec.outputs[0]
    activation = str(spec.attributes.get("activation", "silu"))
    if (
        x is None
        or gate != x
        or weight is None
        or x.width % weight.size
        or activation not in ("silu", "swish", "sigmoid")
    ):
        return None
    normed, function = f"{out}/normed", "sigmoid" if activation == "sigmoid" else "silu"
    epsilon = float(spec.attributes.get("epsilon", 1e-5))
    return Lowered(
        [
            Norm(spec.inputs[0], spec.constant_name(1), epsilon, normed, op_type=spec.op_type),
            Gate(function, spec.inputs[2], normed, out, op_type=spec.op_type),
        ],
        {normed: x, out: x},
    )

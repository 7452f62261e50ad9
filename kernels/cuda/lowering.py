"""The lowering of each op to launches, and the check for ops without kernels."""

from __future__ import annotations

from functools import singledispatch
from typing import Any

from .. import ir
from ..cache_layout import PagedLayer, StateLayer
from ..device import UnsupportedOp
from ..ir import Ids, Per
from .attention import add_attention
from .decode import add_gated, can_gate
from .launches import Launch, bind
from .linear import linear, prefill_linear
from .lora import shrink
from .lowering_context import CudaLowering
from .memory import DeviceRows
from .moe import mixture
from .norms import add_norm
from .sources import CudaKernel
from .weight_layout import CHUNK, BlockReader

_IDS = {Ids.TOKENS: "tokens", Ids.POSITIONS: "positions"}
_ELEMENTS, _ELEMENT_THREADS, _EMBEDDING_THREADS = 1024, 256, 128
# Maximum number of parameters of a function.
_PARAMETERS = 3
UNARY = (
    "abs", "clip", "copy", "cube", "elu", "erf", "exp", "gelu", "gelu_tanh", "hard_sigmoid", "hard_swish", "leaky_relu",
    "log", "neg", "quick_gelu", "reciprocal", "relu", "relu_squared", "round_to_float16", "sigmoid", "silu", "softcap",
    "softplus", "sqrt", "square", "tanh",
)  # fmt: skip
BINARY = ("add", "divide", "maximum", "minimum", "multiply", "power", "prelu", "subtract")


@singledispatch
def lower(op: ir.Op, at: CudaLowering) -> None:
    """Add the launches of an op. The op's inputs are already in memory.

    Raises:
        UnsupportedOp: if there are no kernels for the op.
    """
    raise UnsupportedOp(f"CUDA has no kernels for {type(op).__name__} ops")


def knows(op: ir.Op) -> bool:
    """Return True if ops of this kind can be lowered."""
    return type(op) in lower.registry


# --- kernels ---------------------------------------------------------------------------------------------------------


def embedding_kernel(reader: BlockReader | None, scalar: str) -> CudaKernel:
    """Return the kernel that looks up rows of quantised weights or (without a reader) of floats of a C++ type."""
    if reader:
        return CudaKernel("embedding.cu", f"embed_blocks<{reader.name}>", "BlockEmbeddingArguments", _EMBEDDING_THREADS)
    return CudaKernel("embedding.cu", f"embed_dense<{scalar}>", "DenseEmbeddingArguments", _EMBEDDING_THREADS)


def apply_kernel(function: str) -> CudaKernel:
    """Return the kernel for a unary function whose result is optionally multiplied by a second value."""
    return CudaKernel("elementwise.cu", f"apply<unary::{function}>", "UnaryArguments", _ELEMENT_THREADS)


def combine_kernel(function: str) -> CudaKernel:
    """Return the kernel for a binary function."""
    return CudaKernel("elementwise.cu", f"combine<binary::{function}>", "BinaryArguments", _ELEMENT_THREADS)


_STATE_THREADS, _ATTENTION_THREADS, _LARGEST_STATE = 128, 32, 256
LINEAR_RECURRENCE = CudaKernel("recurrence.cu", "linear_recurrence", "RecurrenceArguments", _STATE_THREADS)
CONVOLUTION = CudaKernel("recurrence.cu", "causal_convolution", "ConvolutionArguments", _STATE_THREADS)
LINEAR_ATTENTION = CudaKernel("recurrence.cu", "linear_attention", "LinearAttentionArguments", _ATTENTION_THREADS)
STATES = LINEAR_RECURRENCE, CONVOLUTION, LINEAR_ATTENTION
REORDER = CudaKernel("embedding.cu", "reorder", "ReorderArguments", _ELEMENT_THREADS)


# --- copies of rows --------------------------------------------------------------------------------------------------


@lower.register
def _columns(op: ir.SliceColumns, at: CudaLowering) -> None:
    at.values.alias(op.out, op.x, at.values[op.x].columns(op.first, at.values.types[op.out].width))


@lower.register
def _reordered(op: ir.SelectColumns, at: CudaLowering) -> None:
    x, out = at.values[op.x], at.values.make(op.out)
    order = at.driver.address(at.weights.indices(at.constants, op.order))
    at.launch(
        REORDER, out.per, _by_elements(out.width), x=x.address, order=order, out=out.address, x_stride=x.stride,
        out_stride=out.stride, width=out.width,
    )  # fmt: skip


@lower.register
def _joined(op: ir.JoinColumns, at: CudaLowering) -> None:
    out, first = at.values.make(op.out), 0
    for name in op.parts:
        x = at.values[name]
        _apply(at, "copy", x, None, out.columns(first, x.width))
        first += x.width


@lower.register
def _logits_rows(op: ir.LogitsRows, at: CudaLowering) -> None:
    x, out = at.values[op.x], at.values.make(op.out)
    _gather(at, "float", x.address, x.stride, "logits_rows", out)


@lower.register
def _embedding(op: ir.Embedding, at: CudaLowering) -> None:
    if op.ids not in _IDS:
        raise UnsupportedOp(f"CUDA has no kernels for look-ups by {op.ids.value}")
    matrix, out, ids = at.weights.matrix(op.table, at.constants), at.values.make(op.out), _IDS[op.ids]
    if not matrix.reader:
        _gather(at, matrix.scalar, matrix.fields["data"], matrix.fields["chunks"] * CHUNK, ids, out)
        return
    at.launch(
        embedding_kernel(matrix.reader, ""),
        out.per,
        lambda rows: (rows, 1, 1),
        table=matrix.fields,
        ids=at.table.address(ids),
        out=out.address,
        out_stride=out.stride,
        width=out.width,
    )


def _gather(at: CudaLowering, scalar: str, table: int, stride: int, ids: str, out: DeviceRows) -> None:
    at.launch(
        embedding_kernel(None, scalar),
        out.per,
        lambda rows: (rows, 1, 1),
        table=table,
        ids=at.table.address(ids),
        out=out.address,
        table_stride=stride,
        out_stride=out.stride,
        width=out.width,
    )


# --- elementwise functions -------------------------------------------------------------------------------------------


@lower.register
def _unary(op: ir.Unary, at: CudaLowering) -> None:
    _apply(at, op.function, at.values[op.x], None, at.values.make(op.out), op.parameters)


@lower.register
def _gate(op: ir.Gate, at: CudaLowering) -> None:
    _apply(at, op.activation, at.values[op.gate], at.values[op.up], at.values.make(op.out))


def _apply(
    at: CudaLowering,
    function: str,
    x: DeviceRows,
    up: DeviceRows | None,
    out: DeviceRows,
    parameters: tuple[float, ...] = (),
    first: str = "",
) -> None:
    """Add a unary function's launch. `first`: name of the count of rows before the first row; "" = none."""
    if function not in UNARY:
        raise UnsupportedOp(f"CUDA has no kernel for the function {function}")
    numbers = [*parameters, *[0.0] * (_PARAMETERS - len(parameters))]
    at.launch(
        apply_kernel(function),
        out.per,
        _by_elements(out.width),
        first=first,
        x=x.address,
        up=up.address if up else 0,
        out=out.address,
        x_stride=x.stride,
        up_stride=up.stride if up else 0,
        out_stride=out.stride,
        width=out.width,
        p=numbers,
    )


@lower.register
def _binary(op: ir.Binary, at: CudaLowering) -> None:
    if op.function not in BINARY:
        raise UnsupportedOp(f"CUDA has no kernel for the function {op.function}")
    out = at.values.make(op.out)
    given: dict[str, Any] = {}
    for side, name, constant in (("a", op.a, op.a_constant), ("b", op.b, op.b_constant)):
        if name:
            rows = at.values[name]
            given |= {side: rows.address, f"{side}_stride": rows.stride, f"{side}_period": rows.width}
        else:
            size = at.constants.array(constant).size
            given |= {side: at.vector(constant), f"{side}_stride": 0, f"{side}_period": size}
    at.launch(
        combine_kernel(op.function), out.per, _by_elements(out.width), out=out.address, out_stride=out.stride,
        width=out.width, **given,
    )  # fmt: skip


def _by_elements(width: int) -> Any:
    return lambda rows: (-(-width // _ELEMENTS), rows, 1)


@lower.register
def _norm(op: ir.Norm, at: CudaLowering) -> None:
    add_norm(op, at)


# --- matmuls ---------------------------------------------------------------------------------------------------------


@lower.register
def _lora_shrink(op: ir.LoraShrink, at: CudaLowering) -> None:
    shrink(at, op)


@lower.register
def _linear(op: ir.Linear, at: CudaLowering) -> None:
    linear(at, op.x, op.projection, at.values.make(op.out), exact=op.exact)


@lower.register
def _gated_linear(op: ir.GatedLinear, at: CudaLowering) -> None:
    out, projections = at.values.make(op.out), (op.gate, op.up)
    gate_matrix, up_matrix = (at.weights.matrix(projection.weight, at.constants) for projection in projections)
    at_once = (
        not op.exact and can_gate(gate_matrix, up_matrix) and not any(one.delta or one.addend for one in projections)
    )
    if at_once:
        add_gated(at, op, gate_matrix, up_matrix, out)
        if out.per is not Per.TOKEN:
            return
    gate, key = at.values.temporary(out.width, out.per)
    for projection, rows in zip(projections, (gate, out), strict=True):
        if at_once:
            prefill_linear(at, op.x, projection, rows)
        else:
            linear(at, op.x, projection, rows, exact=op.exact)
    at.deltas.settle(at)
    _apply(at, op.activation, gate, out, out, first="decode_rows" if at_once else "")
    at.values.release(key)


@lower.register
def _experts(op: ir.MoE, at: CudaLowering) -> None:
    mixture(at, op)


# --- recurrent layers ------------------------------------------------------------------------------------------------


@lower.register
def _linear_recurrence(op: ir.LinearRecurrence, at: CudaLowering) -> None:
    x, decay, out = at.values[op.x], at.values[op.decay], at.values.make(op.out)
    arguments = bind(
        LINEAR_RECURRENCE, x=x.address, decay=decay.address, out=out.address, x_stride=x.stride,
        decay_stride=decay.stride, out_stride=out.stride, width=x.width, **_states(op.layer, at),
    )  # fmt: skip
    _launch_sequences(at, LINEAR_RECURRENCE, arguments, -(-x.width // _STATE_THREADS))


@lower.register
def _causal_conv(op: ir.CausalConv, at: CudaLowering) -> None:
    x, out = at.values[op.x], at.values.make(op.out)
    arguments = bind(
        CONVOLUTION, x=x.address, out=out.address, weight=at.vector(op.weight), bias=at.vector(op.bias),
        x_stride=x.stride, out_stride=out.stride, width=x.width, taps=at.constants.array(op.weight).shape[-1],
        dilation=op.dilation, **_states(op.layer, at),
    )  # fmt: skip
    _launch_sequences(at, CONVOLUTION, arguments, -(-x.width // _STATE_THREADS))


@lower.register
def _linear_attention(op: ir.LinearAttention, at: CudaLowering) -> None:
    if op.head_size > _LARGEST_STATE:
        raise UnsupportedOp(
            f"CUDA has no kernels for linear attention with heads of more than {_LARGEST_STATE} numbers"
        )
    fields: dict[str, int] = {}
    for name in ("query", "key", "value", "decay", "beta"):
        rows = at.values[getattr(op, name)] if getattr(op, name) else None
        fields |= {name: rows.address if rows else 0, f"{name}_stride": rows.stride if rows else 0}
    out, blocks = at.values.make(op.out), -(-op.v_head_size // _ATTENTION_THREADS)
    decays = max(at.values[op.decay].width // op.value_heads, 1) if op.decay else 1
    arguments = bind(
        LINEAR_ATTENTION, out=out.address, out_stride=out.stride, scale=op.scale, heads=op.heads,
        key_heads=op.key_heads, value_heads=op.value_heads, size=op.head_size, v_size=op.v_head_size, decays=decays,
        betas=int(bool(op.beta) and at.values[op.beta].width > 1), blocks=blocks, **fields, **_states(op.layer, at),
    )  # fmt: skip
    _launch_sequences(at, LINEAR_ATTENTION, arguments, op.value_heads * blocks)


def _states(layer: int, at: CudaLowering) -> dict[str, int]:
    """Return the arguments of the states of a layer."""
    states = at.layers[layer]
    assert isinstance(states, StateLayer)
    return {
        "states": at.driver.address(states.states), "slot_stride": states.states.strides[0] // 4,
        "starts": at.table.address("starts"), "reads": at.table.address("state_reads"),
        "writes": at.table.address("state_writes"),
    }  # fmt: skip


def _launch_sequences(at: CudaLowering, kernel: CudaKernel, arguments: Any, blocks: int) -> None:
    at.starts.append(Launch(kernel, arguments, {}, lambda counts: (blocks, counts["sequences"], 1)))


# --- attention -------------------------------------------------------------------------------------------------------


@lower.register
def _attention(op: ir.Attention, at: CudaLowering) -> None:
    query, layer = at.values[op.query], at.layers[op.layer]
    assert isinstance(layer, PagedLayer)
    key = value = query
    if op.key:
        key, value = at.values[op.key], at.values[op.value]
    elif op.is_packed:
        widths = [op.heads * op.head_size, op.kv_heads * op.head_size]
        value = query.columns(sum(widths), op.kv_heads * op.v_head_size)
        query, key = query.columns(0, widths[0]), query.columns(widths[0], widths[1])
    rotated, released = at.values.temporary(op.heads * op.head_size, query.per)
    rope, names = op.rope, ("cos", "sin", "long_cos", "long_sin")
    fresh: dict[str, Any] = {name: at.vector(getattr(rope, name)) if rope else 0 for name in names}
    pairs = at.constants.array(rope.cos).shape[1] if rope else 0
    fresh |= {
        "query": query.address, "key": key.address, "value": value.address, "query_stride": query.stride,
        "key_stride": key.stride, "value_stride": value.stride, "q_norm": at.vector(op.q_norm),
        "k_norm": at.vector(op.k_norm), "long_rows": at.table.address("long_rows"), "pairs": pairs,
        "interleaved": int(rope is not None and rope.interleaved), "epsilon": op.epsilon, "unused": 0,
    }  # fmt: skip
    add_attention(op, layer, at, rotated, at.values.make(op.out), fresh)
    at.values.release(released)

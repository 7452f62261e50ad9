"""Attention of decoders: GroupQueryAttention, its form over pages, and rotary embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from genai.kernels.ir import Attention, Rope, RowsType
from genai.kernels.reference.attention import attend, rotate, split_heads, turned
from genai.kernels.reference.functions import Array

from ..lowering import rules
from ..lowering.rows import Kind, NotFlattenable, RowDim, State
from ..onnx.ir import Node
from ..onnx.node import MS, OURS
from ..onnx.types import Dim, TensorType, Type
from .registry import Kernel, KernelError, NodeSpec, operator, register
from .support import checked_indices

_GQA_ATTRIBUTES = (
    "num_heads kv_num_heads scale softcap local_window_size do_rotary rotary_interleaved smooth_softmax qk_norm_epsilon"
).split()


@register("GroupQueryAttention", domain=MS)
def _dense_attention(spec: NodeSpec) -> Kernel:
    """On dense past and present tensors: for graphs run as they are."""
    unsupported = [name for name in ("k_quant_type", "v_quant_type") if spec.attributes.get(name, "NONE") != "NONE"]
    if unsupported or spec.has(10) or any(spec.outputs[3:]):
        raise KernelError("GroupQueryAttention: quantised caches, attention bias and score outputs are not supported")
    attributes = {name: spec.attributes[name] for name in _GQA_ATTRIBUTES if name in spec.attributes}
    return lambda context, inputs: group_query_attention(*inputs, **attributes)


def group_query_attention(
    *inputs: Any, num_heads: int, kv_num_heads: int, local_window_size: int = -1, do_rotary: bool = False,
    rotary_interleaved: bool = False, qk_norm_epsilon: float = 1e-6, **options: Any,
) -> tuple[Array, ...]:  # fmt: skip
    """com.microsoft::GroupQueryAttention with a float cache: output (rows of padding hold anything), keys and values.

    Args:
        inputs: the operator's, without an attention bias and the scales of quantised caches.
        options: scale, softcap and smooth_softmax, as in `records.Attention`.
    """
    inputs = (*inputs, *[None] * (16 - len(inputs)))
    query, key, value, past_key, past_value, lengths, total, cos, sin, position_ids, _, sinks, _, _, *norms = inputs
    size = query.shape[2] // (num_heads + 2 * kv_num_heads * (key is None))
    record = Attention("", "", "", "", 0, num_heads, kv_num_heads, size, size, window=local_window_size, **options)
    last, length, longest = lengths.reshape(-1).astype(np.int64), query.shape[1], int(np.max(total))
    capacity = max(longest, 0 if past_key is None else past_key.shape[2])
    presents = [np.zeros((len(query), kv_num_heads, capacity, size), query.dtype) for _ in range(2)]
    output = np.empty((len(query), length, num_heads * size), query.dtype)
    for b, heads in enumerate(zip(*split_heads(record, query, key, value), strict=True)):
        positions = (0 if length == longest else last[b] + 1 - length) + np.arange(length)
        at = positions if position_ids is None else position_ids[b]
        rotation = (cos[at], sin[at], rotary_interleaved) if do_rotary and cos is not None else None
        normed = [turned(heads[i], norms[i], qk_norm_epsilon, None).astype(query.dtype) for i in (0, 1)]
        q, k = (turned(x, None, 0.0, rotation).astype(x.dtype) for x in normed)
        for present, past, new in zip(presents, (past_key, past_value), (k, heads[2]), strict=True):
            if past is not None:
                present[b, :, : past.shape[2]] = past[b]
            present[b, :, positions] = new
        keys = max(last[b], positions[-1]) + 1
        k, v = (present[b, :, :keys].swapaxes(0, 1) for present in presents)
        output[b] = attend(record, q, k, v, positions, sinks).reshape(length, -1)
    return output, *presents


@operator("RotaryEmbedding", domain=MS)
def rotary_embedding(
    x: Array, position_ids: Array, cos_cache: Array, sin_cache: Array, *, interleaved: bool = False, num_heads: int = 0,
    rotary_embedding_dim: int = 0, scale: float = 1.0, is_packed_batching: Literal[0] = 0,
) -> Array:  # fmt: skip
    """Of x [batch, sequence, hidden] or [batch, heads, sequence, head_size]."""
    checked_indices("RotaryEmbedding: position_ids", position_ids, len(cos_cache))
    width = 2 * cos_cache.shape[1]
    if rotary_embedding_dim not in (0, width):
        raise ValueError(f"rotary_embedding_dim is {rotary_embedding_dim}, the caches rotate {width} numbers")
    heads = x.swapaxes(1, 2) if x.ndim == 4 else x.reshape(*x.shape[:2], num_heads or x.shape[2] // width, -1)
    if position_ids.size == 1:  # of the first token of every sequence
        position_ids = np.broadcast_to(position_ids.reshape(1, 1) + np.arange(heads.shape[1]), heads.shape[:2])
    turned = rotate(heads, cos_cache[position_ids], sin_cache[position_ids], interleaved).astype(x.dtype)
    result = (turned * scale).astype(x.dtype)
    return result.swapaxes(1, 2) if x.ndim == 4 else result.reshape(x.shape)


def present_types(
    types: rules.NodeTypes, past: int, query: TensorType, batch: Dim, kv_heads: int, head_size: Dim
) -> list[Type | None]:
    """Present keys and values [batch, kv heads, length, head size], of the past's type where there is a past."""
    result: list[Type | None] = []
    for index in (past, past + 1):
        known, shape = types.tensor(index), types.shape(index, rank=4)
        dtype = query.dtype if known is None else known.dtype
        if shape is not None:
            result.append(TensorType(dtype, (shape[0], shape[1], None, shape[3])))
        else:
            result.append(TensorType(dtype, (batch, kv_heads or None, None, head_size)))
    return result


@rules.shape_rule("GroupQueryAttention")
def group_query_attention_types(types: rules.NodeTypes) -> list[Type | None]:
    """Y [batch, sequence, heads * head size]; present keys and values; optionally the scores.

    The cached length is left open: it is the past's own with a shared buffer, and longer than the past without.
    """
    query, packed = types.source, not types.node.input(1)
    heads, kv_heads = types.attribute("num_heads", 0), types.attribute("kv_num_heads", 0)
    shape = types.shape(0, rank=3)
    if shape is None:
        return [TensorType(query.dtype), *present_types(types, 3, query, None, kv_heads, None)]
    batch, sequence, width = shape
    head_size = rules.divided(width, heads + 2 * kv_heads if packed else heads)
    output = TensorType(query.dtype, (batch, sequence, rules.times(head_size, heads) if packed else width))
    scores = TensorType(query.dtype, (batch, heads, sequence, None))
    return [output, *present_types(types, 3, query, batch, kv_heads, head_size), scores]


@rules.row_rule("GroupQueryAttention", domain=MS)
def group_query_attention_rows(at: rules.NodeRows) -> rules.States:
    query, key, value = at.states[:3]
    for state in (query, key, value):
        if state is not None and (state.kind is not Kind.ROWS or state.axis != 1 or state.rank != 3):
            raise NotFlattenable("query, key and value must be [batch, tokens, features]")
    if query is None:
        raise NotFlattenable("the query is missing")
    _check_attention_inputs(at.node, at.states)
    heads, kv_heads = int(at.node.attribute("num_heads", 0)), int(at.node.attribute("kv_num_heads", 0))
    width = query.known_shape[2].factor
    head_size = width // heads if key is not None else width // (heads + 2 * kv_heads)
    at.found.attention.append(at.node)
    output = query.resized(2, RowDim(heads * head_size))
    return [output, State(Kind.CACHE), State(Kind.CACHE), *([State(Kind.CONTEXT)] * (len(at.node.outputs) - 3))]


def _check_attention_inputs(node: Node, states: Sequence[State | None]) -> None:
    def kind(index: int) -> Kind | None:
        state = states[index] if index < len(states) else None
        return state.kind if state is not None else None

    if not {kind(3), kind(4)} <= {Kind.CACHE, None}:
        raise NotFlattenable("past keys and values must be inputs of the graph")
    if not {kind(7), kind(8)} <= {Kind.UNIFORM, Kind.TABLES, None}:
        raise NotFlattenable("cos and sin tables must be constant or chosen by the total length")
    if kind(10) is not None:
        raise NotFlattenable("an attention bias is not supported in paged attention")
    if kind(9) not in (Kind.ROWS, None):
        raise NotFlattenable("positions must be one per token")
    if len(node.outputs) > 3 and node.outputs[3]:
        raise NotFlattenable("the attention scores are asked for as an output")


@rules.row_rule("RotaryEmbedding", domain=MS)
def rotary_embedding_rows(at: rules.NodeRows) -> rules.States:
    x, positions, *tables = at.states
    if x is None or positions is None or {x.kind, positions.kind} != {Kind.ROWS}:
        raise NotFlattenable("needs one position per token")
    if any(table is None or table.kind not in (Kind.UNIFORM, Kind.TABLES) for table in tables):
        raise NotFlattenable("needs constant cos and sin tables")
    if any(table is not None and table.kind is Kind.TABLES for table in tables):
        raise NotFlattenable("tables chosen by the total length are known inside attention only")
    return [x]


@rules.record_rule("PagedAttention", domain=OURS)
def paged_attention(spec: rules.RowSpec) -> rules.Made | None:
    """Inputs: query (or packed QKV), key, value, cos, sin, long cos, long sin, head sink, q norm, k norm."""
    attributes, out = spec.attributes, spec.outputs[0]
    heads, kv_heads = int(attributes["num_heads"]), int(attributes["kv_num_heads"])
    head_size, v_head_size = int(attributes["head_size"]), int(attributes["v_head_size"])
    key, value = (spec.inputs[index] if spec.has(index) else "" for index in (1, 2))
    widths = [heads * head_size, kv_heads * head_size, kv_heads * v_head_size]
    # What a host node makes has no type yet; here it gets the one that attention needs.
    wanted = {spec.inputs[0]: widths[0], key: widths[1], value: widths[2]} if key else {spec.inputs[0]: sum(widths)}
    for index, width in enumerate(wanted.values()):
        known = spec.rows(index)
        if known is not None and known.width != width:
            return None
    record = Attention(
        spec.inputs[0], key, value, out, layer=int(attributes["layer"]), heads=heads, kv_heads=kv_heads,
        head_size=head_size, v_head_size=v_head_size, scale=float(attributes.get("scale", 0.0)),
        softcap=float(attributes.get("softcap", 0.0)), window=int(attributes.get("window", -1)),
        sinks=spec.constant_name(7), smooth_softmax=bool(attributes.get("smooth_softmax", 0)), rope=_rope(spec),
        q_norm=spec.constant_name(8), k_norm=spec.constant_name(9),
        epsilon=float(attributes.get("qk_norm_epsilon", 1e-6)), op_type=spec.op_type,
    )  # fmt: skip
    asked = {
        name: RowsType((1, -1, width), width)
        for index, (name, width) in enumerate(wanted.items())
        if spec.rows(index) is None
    }
    width = heads * v_head_size
    return rules.Made([record], {**asked, out: RowsType((1, -1, width), width)})


def _rope(spec: NodeSpec) -> Rope | None:
    cos, sin, long_cos, long_sin = (spec.constant_name(index) for index in (3, 4, 5, 6))
    if not int(spec.attributes.get("do_rotary", 0)) or not cos:
        return None
    return Rope(cos, sin, long_cos, long_sin, bool(spec.attributes.get("rotary_interleaved", 0)))


rules.shape_rule("RotaryEmbedding")(rules.same_as_input)


rules.stored_weights("GroupQueryAttention", beside=(7, 8))
rules.stored_weights("RotaryEmbedding", beside=(2, 3))

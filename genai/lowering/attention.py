"""Row and lowering rules of attention: GroupQueryAttention with the paged cache, and rotary embeddings."""

from __future__ import annotations

from collections.abc import Sequence

from genai.kernels.ir import Attention, Rope, RowsType

from ..onnx.ir import Node
from ..onnx.node import MS, OURS
from ..ops.registry import NodeSpec
from .rows import Kind, NotFlattenable, RowDim, State
from .rules import Lowered, LoweringSpec, NodeRows, States, lowering_rule, row_rule, stored_weights

STORED = 11
"""The index of an input of PagedAttention: the result of the operator that has stored the keys and values."""


@row_rule("GroupQueryAttention", domain=MS)
def group_query_attention_rows(at: NodeRows) -> States:
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
    at.analysis.attention.append(at.node)
    output = query.resized(2, RowDim(heads * head_size))
    return [output, State(Kind.CACHE), State(Kind.CACHE), *([State(Kind.CONTEXT)] * (len(at.node.outputs) - 3))]


def _check_attention_inputs(node: Node, states: Sequence[State | None]) -> None:
    def kind(index: int) -> Kind | None:
        state = states[index] if index < len(states) else None
        return state.kind if state is not None else None

    if not {kind(3), kind(4)} <= {Kind.CACHE, None}:
        raise NotFlattenable("past keys and values must be inputs of the graph")
    if not {kind(7), kind(8)} <= {Kind.UNIFORM, Kind.TABLES, None}:
        raise NotFlattenable("cos and sin tables must be constant or selected by the total length")
    if kind(10) is not None:
        raise NotFlattenable("an attention bias is not supported in paged attention")
    if kind(9) not in (Kind.ROWS, None):
        raise NotFlattenable("one position per token is required")
    if len(node.outputs) > 3 and node.outputs[3]:
        raise NotFlattenable("the attention scores are used as an output")


@row_rule("RotaryEmbedding", domain=MS)
def rotary_embedding_rows(at: NodeRows) -> States:
    x, positions, *tables = at.states
    if x is None or positions is None or {x.kind, positions.kind} != {Kind.ROWS}:
        raise NotFlattenable("one position per token is required")
    if any(table is None or table.kind not in (Kind.UNIFORM, Kind.TABLES) for table in tables):
        raise NotFlattenable("the cos and sin tables must be constant")
    if any(table is not None and table.kind is Kind.TABLES for table in tables):
        raise NotFlattenable("only attention supports tables selected by the total length")
    return [x]


@row_rule("PagedAttention", domain=OURS)
def paged_attention_rows(at: NodeRows) -> States:
    """Return the state of attention over whole sequences (see `encoder`)."""
    for state in at.states[:3]:
        if state is None or state.kind is not Kind.ROWS or state.axis != 1 or state.rank != 3:
            raise NotFlattenable("query, key and value must be [batch, tokens, features]")
    width = int(at.node.attribute("num_heads", 0)) * int(at.node.attribute("v_head_size", 0))
    return [at.first().resized(2, RowDim(width))]


@lowering_rule("PagedAttention", domain=OURS)
def paged_attention(spec: LoweringSpec) -> Lowered | None:
    """Lower attention over cache pages.

    Inputs: query (or packed QKV), key, value, cos, sin, long cos, long sin, head sink, q norm, k norm, bias by
    distance, result of the operator that has stored the keys and values (see `Attention.stored`).
    """
    attributes, out = spec.attributes, spec.outputs[0]
    heads, kv_heads = int(attributes["num_heads"]), int(attributes["kv_num_heads"])
    head_size, v_head_size = int(attributes["head_size"]), int(attributes["v_head_size"])
    key, value = (spec.inputs[index] if spec.has(index) else "" for index in (1, 2))
    widths = [heads * head_size, kv_heads * head_size, kv_heads * v_head_size]
    # The result of a host node has no type yet, so it gets the type that attention requires.
    stored = spec.inputs[STORED] if spec.has(STORED) else ""
    input_widths = {spec.inputs[0]: widths[0] if key or stored else sum(widths)}
    if key:
        input_widths |= {key: widths[1], value: widths[2]}
    for index, width in enumerate(input_widths.values()):
        known = spec.rows(index)
        if known is not None and known.width != width:
            return None
    op = Attention(
        spec.inputs[0], key, value, out, layer=int(attributes["layer"]), heads=heads, kv_heads=kv_heads,
        head_size=head_size, v_head_size=v_head_size, scale=float(attributes.get("scale", 0.0)),
        softcap=float(attributes.get("softcap", 0.0)), causal=bool(attributes.get("causal", 1)),
        window=int(attributes.get("window", -1)), chunk=int(attributes.get("chunk", 0)), bias=spec.constant_name(10),
        sinks=spec.constant_name(7), smooth_softmax=bool(attributes.get("smooth_softmax", 0)), rope=_rope(spec),
        q_norm=spec.constant_name(8), k_norm=spec.constant_name(9),
        epsilon=float(attributes.get("qk_norm_epsilon", 1e-6)), stored=stored, op_type=spec.op_type,
    )  # fmt: skip
    input_types = {
        name: RowsType((1, -1, width), width)
        for index, (name, width) in enumerate(input_widths.items())
        if spec.rows(index) is None
    }
    width = heads * v_head_size
    return Lowered([op], {**input_types, out: RowsType((1, -1, width), width)})


def _rope(spec: NodeSpec) -> Rope | None:
    cos, sin, long_cos, long_sin = (spec.constant_name(index) for index in (3, 4, 5, 6))
    if not int(spec.attributes.get("do_rotary", 0)) or not cos:
        return None
    return Rope(cos, sin, long_cos, long_sin, bool(spec.attributes.get("rotary_interleaved", 0)))


stored_weights("GroupQueryAttention", beside=(7, 8))


stored_weights("RotaryEmbedding", beside=(2, 3))

"""Attention: projections, optional query and key norms, GroupQueryAttention over the past, output projection."""

from __future__ import annotations

from .graph_writer import CONTRIB, FLOAT, INT32, INT64, POSITIONS, Export, hidden_dims
from .layers import write_linear, write_query_key_norm, write_split
from .projection import Projection
from .rope import query_table_names, table_names
from .write_prequantized import alike

MASK = "attention_mask"
TOTAL_LENGTH = "/model/attn_mask_reformat/attn_mask_subgraph/Gather/output_0"
# Two inputs of every attention node: the length of each sequence minus 1, and the total length of the longest sequence.
Lengths = tuple[str, str]


def write_lengths(export: Export) -> Lengths:
    """Write the nodes that derive the lengths from the attention mask [batch, total]."""
    graph, path = export.graph, "/model/attn_mask_reformat/attn_mask_subgraph"
    batch = ["batch_size"]
    size_one = graph.int64([1])
    summed = graph.node("ReduceSum", [MASK, size_one], f"{path}/ReduceSum", batch, element=INT64, keepdims=0)
    last = graph.node("Sub", [summed, size_one], f"{path}/Sub", batch, element=INT64)
    seqlens_k = graph.node("Cast", [last], f"{path}/Sub/Cast", batch, element=INT32, to=INT32)
    shape = graph.node("Shape", [MASK], f"{path}/Shape", [2], element=INT64)
    total = graph.node("Gather", [shape, graph.int64(1)], f"{path}/Gather", [], element=INT64, axis=0)
    return seqlens_k, graph.node("Cast", [total], f"{path}/Gather/Cast", [], element=INT32, to=INT32)


def write_attention(export: Export, layer: int, root: str, lengths: Lengths) -> str:
    """Write the attention of one layer and return its output, to be added to the residual stream."""
    spec, path = export.spec, f"/model/layers.{layer}/attn"
    query, key, value = _write_heads(export, layer, root)
    if spec.rotated(layer) and not export.options.fused_rope:
        tables = query_table_names(spec, layer), table_names(spec, layer)
        query = _write_rotation(export, f"{path}/q_rotary", query, spec.num_attention_heads, tables[0])
        key = _write_rotation(export, f"{path}/k_rotary", key, spec.num_key_value_heads, tables[1])
    mixed = _write_group_query_attention(export, layer, (query, key, value), lengths)
    if spec.attention_gate:
        mixed = _write_gate(export, layer, root, mixed)
    output = Projection(
        f"{path}/o_proj", (f"model.layers.{layer}.self_attn.o_proj",), (spec.hidden_size,), spec.query_size
    )
    return write_linear(export, output, mixed, precision=export.options.precision, bias=spec.o_bias)


def _write_gate(export: Export, layer: int, root: str, mixed: str) -> str:
    """Write the product of the attention's result and the sigmoid of a projection."""
    spec, graph, dims = export.spec, export.graph, hidden_dims(export.spec.query_size)
    source, path = f"model.layers.{layer}.self_attn.gate_proj", f"/model/layers.{layer}/attn/gate_proj"
    projection = Projection(path, (source,), (spec.query_size,), spec.hidden_size)
    gate = write_linear(export, projection, root, precision=export.options.precision, bias=spec.qkv_bias)
    share = graph.node("Sigmoid", [gate], f"{path}/Sigmoid", dims)
    return graph.node("Mul", [mixed, share], f"{path}/Mul", dims)


def _write_heads(export: Export, layer: int, root: str) -> tuple[str, str, str]:
    """Write queries, keys and values; the last two names are "" if the first value holds all three."""
    spec, options = export.spec, export.options
    sizes = (spec.query_size, spec.key_value_size, spec.key_value_size)
    path, source = f"/model/layers.{layer}/attn", f"model.layers.{layer}.self_attn"
    names = tuple(f"{source}.{part}_proj" for part in "qkv")
    key = value = ""
    if options.packed_qkv and options.fused_rope and alike(export, names, options.precision):
        packed = Projection(f"{path}/qkv_proj", names, sizes, spec.hidden_size)
        query = write_linear(export, packed, root, precision=options.precision, bias=spec.qkv_bias)
        query = _write_clip(export, f"{path}/qkv_proj", query, sum(sizes))
        if spec.qk_norm:
            query, key, value = write_split(export, f"{path}/qkv_proj/Split", query, sizes)
    else:
        parts = []
        for part, name, size in zip("qkv", names, sizes, strict=True):
            projection = Projection(f"{path}/{part}_proj", (name,), (size,), spec.hidden_size)
            value = write_linear(export, projection, root, precision=options.precision, bias=spec.qkv_bias)
            parts.append(_write_clip(export, projection.path, value, size))
        query, key, value = parts
    if spec.qk_norm:
        query = write_query_key_norm(export, layer, query, "q_norm", spec.num_attention_heads)
        key = write_query_key_norm(export, layer, key, "k_norm", spec.num_key_value_heads)
    return query, key, value


def _write_clip(export: Export, path: str, root: str, width: int) -> str:
    """Clamp queries, keys and values if the architecture clamps them."""
    bound, graph = export.spec.qkv_clip, export.graph
    if not bound:
        return root
    return graph.node("Clip", [root, graph.float32(-bound), graph.float32(bound)], f"{path}/Clip", hidden_dims(width))


def _write_rotation(export: Export, path: str, root: str, heads: int, tables: tuple[str, str]) -> str:
    spec, partial = export.spec, export.spec.partial_rotary_factor != 1
    return export.graph.node(
        "RotaryEmbedding",
        [root, POSITIONS, *tables],
        f"{path}/RotaryEmbedding",
        hidden_dims(heads * spec.head_size),
        domain=CONTRIB,
        interleaved=int(spec.rope_interleaved),
        num_heads=heads if partial else 0,
        rotary_embedding_dim=spec.rotary_size if partial else 0,
    )


def _write_group_query_attention(export: Export, layer: int, heads: tuple[str, str, str], lengths: Lengths) -> str:
    spec = export.spec
    fused = export.options.fused_rope and spec.rotated(layer)
    name = f"/model/layers.{layer}/attn/GroupQueryAttention"
    past = [f"past_key_values.{layer}.key", f"past_key_values.{layer}.value"]
    tables = table_names(spec, layer) if fused else ("", "")
    window = spec.window(layer)
    attributes = {
        "num_heads": spec.num_attention_heads,
        "kv_num_heads": spec.num_key_value_heads,
        "scale": float(spec.head_size**-0.5 if spec.attention_scale is None else spec.attention_scale),
        "local_window_size": -1 if window is None else window,
        "softcap": float(spec.attention_softcap),
        "do_rotary": int(fused),
        "rotary_interleaved": int(spec.rope_interleaved and spec.rotated(layer)),
    }
    if window is not None and export.options.windowed_kv_cache:
        attributes["sliding_window_cache"] = 1
    output = f"{name}/output_0"
    sinks = _write_sinks(export, layer) if spec.sinks else ""
    export.graph.nodes(
        "GroupQueryAttention",
        # The last three inputs are position_ids, attention_bias and head_sink.
        [*heads, *past, *lengths, *tables, "", "", sinks],
        [output, f"present.{layer}.key", f"present.{layer}.value"],
        name,
        domain=CONTRIB,
        **attributes,
    )
    export.graph.value(output, FLOAT, hidden_dims(spec.query_size))
    return output


def _write_sinks(export: Export, layer: int) -> str:
    name = f"model.layers.{layer}.self_attn.sinks"
    return export.graph.array(name, export.weights.vector(name, export.spec.num_attention_heads))

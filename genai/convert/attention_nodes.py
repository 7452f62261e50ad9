"""Attention: projections, optional query and key norms, GroupQueryAttention over the past, output projection."""

from __future__ import annotations

from .graph_writer import BOOL, CONTRIB, FLOAT, INT32, INT64, POSITIONS, Dims, Export, caches_window, hidden_dims
from .layers import write_linear, write_query_key_norm, write_split
from .projection import Projection
from .rope import query_table_names, table_names
from .spec import DecoderSpec
from .write_prequantized import alike

MASK = "attention_mask"
# Far below any score, but not so large in magnitude that a sum overflows.
_HIDDEN = -1e30
CHUNKS = "/model/chunks/Where/output_0"
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


def write_chunks(export: Export) -> None:
    """If layers have chunks, write 0 for the tokens in a query's chunk, and a large negative number for all others.

    The operator of attention has no chunks, but adds numbers to its scores. `optimize.chunks` recognises these nodes.
    """
    spec, graph, path = export.spec, export.graph, "/model/chunks"
    if not any(map(spec.chunk, range(spec.num_layers))):
        return
    dims: Dims = ["batch_size", 1, "sequence_length", "total_sequence_length"]
    size = graph.int64(spec.chunk_size or 0)
    chunks = graph.node("Div", [POSITIONS, size], f"{path}/Div_1", [dims[0], dims[2]], element=INT64)
    axes = graph.int64([1, 3])
    queries = graph.node("Unsqueeze", [chunks, axes], f"{path}/Unsqueeze", [*dims[:3], 1], element=INT64)
    shape = graph.node("Shape", [MASK], f"{path}/Shape", [2], element=INT64)
    total = graph.node("Gather", [shape, graph.int64(1)], f"{path}/Gather", [], element=INT64, axis=0)
    bounds = [graph.int64(0), total, graph.int64(1)]
    every = graph.node("Range", bounds, f"{path}/Range", dims[3:], element=INT64)
    keys = graph.node("Div", [every, size], f"{path}/Div_2", dims[3:], element=INT64)
    same = graph.node("Equal", [queries, keys], f"{path}/Equal", dims, element=BOOL)
    hidden = [same, graph.float32(0.0), graph.float32(_HIDDEN)]
    graph.node("Where", hidden, f"{path}/Where", dims, output=CHUNKS)


def write_attention(export: Export, layer: int, root: str, lengths: Lengths) -> str:
    """Write the attention of one layer and return its output, to be added to the residual stream."""
    spec, path = export.spec.at(layer), f"/model/layers.{layer}/attn"
    query, key, value = _write_heads(export, spec, layer, root)
    if spec.rotated(layer) and not export.options.fused_rope:
        tables = query_table_names(spec, layer), table_names(spec, layer)
        query = write_rotation(export, spec, layer, "q", query, tables[0])
        if spec.cache_layer(layer) == layer:
            key = write_rotation(export, spec, layer, "k", key, tables[1])
    if spec.has_norms(layer) and spec.rotated_norms:
        query, key = _write_norms(export, spec, layer, query, key)
    if spec.scales_queries(layer):
        query = _write_factors(export, spec, layer, query)
    source = spec.cache_layer(layer)
    if source == layer:
        export.stored[layer] = key, value
    else:  # the node stores the same keys and values again, which only other runtimes do
        key, value = export.stored[source]
    mixed = write_group_query_attention(export, spec, layer, (query, key, value), lengths)
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


def _write_heads(export: Export, spec: DecoderSpec, layer: int, root: str) -> tuple[str, str, str]:
    """Write queries, keys and values.

    The last two names are "" if the first value holds all three, or if the layer attends to the keys and values of
    another layer.
    """
    options = export.options
    own = 1 if spec.cache_layer(layer) != layer else 2 if spec.reuses_keys(layer) else 3
    sizes = (spec.query_size, spec.key_value_size, spec.key_value_size)[:own]
    path, source = f"/model/layers.{layer}/attn", f"model.layers.{layer}.self_attn"
    names = tuple(f"{source}.{part}_proj" for part in "qkv"[:own])
    key = value = ""
    changed = spec.has_norms(layer) or spec.value_norm or spec.scales_queries(layer)
    if own > 1 and options.packed_qkv and options.fused_rope and alike(export, names, options.precision):
        packed = Projection(f"{path}/qkv_proj", names, sizes, spec.hidden_size)
        query = write_linear(export, packed, root, precision=options.precision, bias=spec.qkv_bias)
        query = _write_clip(export, f"{path}/qkv_proj", query, sum(sizes))
        if changed or own < 3:
            query, key, *rest = write_split(export, f"{path}/qkv_proj/Split", query, sizes)
            value = rest[0] if rest else key
    else:
        parts = []
        for part, name, size in zip("qkv", names, sizes, strict=False):
            projection = Projection(f"{path}/{part}_proj", (name,), (size,), spec.hidden_size)
            result = write_linear(export, projection, root, precision=options.precision, bias=spec.qkv_bias)
            parts.append(_write_clip(export, projection.path, result, size))
        query, key, value = (*parts, *([parts[1]] if own == 2 else ["", ""]))[:3]
    if spec.value_norm and value:
        value = write_query_key_norm(export, spec, layer, value, "v_norm", spec.num_key_value_heads)
    if spec.has_norms(layer) and not spec.rotated_norms:
        query, key = _write_norms(export, spec, layer, query, key)
    return query, key, value


def _write_norms(export: Export, spec: DecoderSpec, layer: int, query: str, key: str) -> tuple[str, str]:
    """Write the norms of queries, and of keys unless they are ""."""
    query = write_query_key_norm(export, spec, layer, query, "q_norm", spec.num_attention_heads)
    return query, key and write_query_key_norm(export, spec, layer, key, "k_norm", spec.num_key_value_heads)


def _write_factors(export: Export, spec: DecoderSpec, layer: int, query: str) -> str:
    """Write the product of queries and the factors of their positions."""
    graph, path, name = export.graph, f"/model/layers.{layer}/attn/q_scale", "query_factors"
    assert spec.query_scaling is not None
    if not graph.has_initializer(name):
        graph.array(name, spec.query_scaling.factors(range(spec.context_length))[:, None])
    factors = graph.node("Gather", [name, POSITIONS], f"{path}/Gather", hidden_dims(1))
    return graph.node("Mul", [query, factors], f"{path}/Mul", hidden_dims(spec.query_size))


def _write_clip(export: Export, path: str, root: str, width: int) -> str:
    """Clamp queries, keys and values if the architecture clamps them."""
    bound, graph = export.spec.qkv_clip, export.graph
    if not bound:
        return root
    return graph.node("Clip", [root, graph.float32(-bound), graph.float32(bound)], f"{path}/Clip", hidden_dims(width))


def write_rotation(
    export: Export, spec: DecoderSpec, layer: int, which: str, root: str, tables: tuple[str, str]
) -> str:
    """Write the rotation of queries ("q") or keys ("k")."""
    partial = spec.partial_rotary_factor != 1 or spec.latent is not None
    heads = spec.num_attention_heads if which == "q" else spec.num_key_value_heads
    return export.graph.node(
        "RotaryEmbedding",
        [root, POSITIONS, *tables],
        f"/model/layers.{layer}/attn/{which}_rotary/RotaryEmbedding",
        hidden_dims(heads * spec.head_size),
        domain=CONTRIB,
        interleaved=int(spec.rope_interleaved),
        num_heads=heads if partial else 0,
        rotary_embedding_dim=spec.local_rotary_size if partial else 0,
    )


def write_group_query_attention(
    export: Export, spec: DecoderSpec, layer: int, heads: tuple[str, str, str], lengths: Lengths
) -> str:
    """Write the operator for queries, keys and values [batch, tokens, heads * head_size] and return its result."""
    fused, source = export.options.fused_rope and spec.rotated(layer), spec.cache_layer(layer)
    name = f"/model/layers.{layer}/attn/GroupQueryAttention"
    past = [f"past_key_values.{source}.key", f"past_key_values.{source}.value"]
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
    if caches_window(spec, export.options, layer):
        attributes["sliding_window_cache"] = 1
    output = f"{name}/output_0"
    sinks = _write_sinks(export, layer) if spec.sinks else ""
    bias = CHUNKS if spec.chunk(layer) else ""
    export.graph.nodes(
        "GroupQueryAttention",
        # The last three inputs are position_ids, attention_bias and head_sink.
        [*heads, *past, *lengths, *tables, "", bias, sinks],
        # Without these outputs, onnxruntime ignores the past. Those of a layer without a cache are not read.
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

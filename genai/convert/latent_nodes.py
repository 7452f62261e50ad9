"""Multi-head latent attention with absorbed matrices, as attention with one key/value head of latent rows.

The query of a head consists of its rotated part, and of the product of its other part with the matrix of the keys. A
latent row is the key of all heads, and also their value: the last elements of a head's result are a weighted sum of the
vectors from which values are computed. The other elements of the result are not read. The operator of attention rotates
the first elements of queries and keys, so the rotated part precedes the vector.
"""

from __future__ import annotations

from .attention_nodes import Lengths, write_group_query_attention, write_rotation
from .graph_writer import Export, hidden_dims
from .layers import write_bare_norm, write_linear, write_split
from .projection import Projection
from .rope import query_table_names, table_names
from .spec import LatentSpec


def write_latent_attention(export: Export, layer: int, root: str, lengths: Lengths) -> str:
    """Write the latent attention of one layer and return its output, to be added to the residual stream."""
    spec, latent = export.spec, export.spec.latent
    assert latent is not None
    heads, path, source = spec.num_attention_heads, f"/model/layers.{layer}/attn", f"model.layers.{layer}.self_attn"
    key = value = _write_row(export, latent, layer, root)
    query = _write_queries(export, latent, layer, root)
    if spec.rotated(layer) and not export.options.fused_rope:
        query = write_rotation(export, spec, layer, "q", query, query_table_names(spec, layer))
        key = write_rotation(export, spec, layer, "k", key, table_names(spec, layer))
    mixed = write_group_query_attention(export, spec, layer, (query, key, value), lengths)
    parts = write_split(export, f"{path}/heads/Split", mixed, (latent.rope_size, latent.rank) * heads)
    values = []
    for head in range(heads):
        projection = Projection(f"{path}/v_up/{head}", (f"{source}.v_up.{head}",), (latent.value_size,), latent.rank)
        values.append(write_linear(export, projection, parts[2 * head + 1], precision=export.options.precision))
    width = heads * latent.value_size
    joined = export.graph.node("Concat", values, f"{path}/v_up/Concat", hidden_dims(width), axis=-1)
    output = Projection(f"{path}/o_proj", (f"{source}.o_proj",), (spec.hidden_size,), width)
    return write_linear(export, output, joined, precision=export.options.precision, bias=latent.biased)


def _write_row(export: Export, latent: LatentSpec, layer: int, root: str) -> str:
    """Write the latent rows: the part of the keys that is rotated, followed by a normalised vector."""
    spec, path, source = export.spec, f"/model/layers.{layer}/attn", f"model.layers.{layer}.self_attn"
    projection = Projection(f"{path}/kv_a_proj", (f"{source}.kv_a_proj",), (latent.row_size,), spec.hidden_size)
    both = write_linear(export, projection, root, precision=export.options.precision, bias=latent.biased)
    vector, key = write_split(export, f"{path}/kv_a_proj/Split", both, (latent.rank, latent.rope_size))
    vector = _write_norm(export, latent, layer, "kv_a_layernorm", vector, latent.rank)
    dims = hidden_dims(latent.row_size)
    return export.graph.node("Concat", [key, vector], f"{path}/kv_a_proj/Concat", dims, axis=-1)


def _write_queries(export: Export, latent: LatentSpec, layer: int, root: str) -> str:
    """Write the queries of all heads for latent rows."""
    spec, precision = export.spec, export.options.precision
    heads, path, source = spec.num_attention_heads, f"/model/layers.{layer}/attn", f"model.layers.{layer}.self_attn"
    columns = spec.hidden_size
    if latent.query_rank:
        columns = latent.query_rank
        projection = Projection(f"{path}/q_a_proj", (f"{source}.q_a_proj",), (columns,), spec.hidden_size)
        root = write_linear(export, projection, root, precision=precision, bias=latent.biased)
        root = _write_norm(export, latent, layer, "q_a_layernorm", root, columns)
    names, sizes = (f"{source}.q_nope_proj", f"{source}.q_rope_proj"), (latent.nope_size, latent.rope_size)
    widths = heads * sizes[0], heads * sizes[1]
    # The rows are not in the order of the checkpoint's q_proj, so the name must not be that of an adapter's module.
    queries = write_linear(export, Projection(f"{path}/q_heads", names, widths, columns), root, precision=precision)
    plain, rotated = write_split(export, f"{path}/q_heads/Split", queries, widths)
    plain_heads, rotated_heads = (
        write_split(export, f"{path}/q_heads/Split_{index}", value, (sizes[index],) * heads)
        for index, value in enumerate((plain, rotated))
    )
    parts = []
    for head in range(heads):
        projection = Projection(f"{path}/k_up/{head}", (f"{source}.k_up.{head}",), (latent.rank,), latent.nope_size)
        parts += [rotated_heads[head], write_linear(export, projection, plain_heads[head], precision=precision)]
    return export.graph.node("Concat", parts, f"{path}/k_up/Concat", hidden_dims(spec.query_size), axis=-1)


def _write_norm(export: Export, latent: LatentSpec, layer: int, name: str, root: str, size: int) -> str:
    weight = export.weights.vector(f"model.layers.{layer}.self_attn.{name}.weight", size)
    inputs = [root, export.graph.array(f"model.layers.{layer}.attn.{name}.weight", weight)]
    path = f"/model/layers.{layer}/attn/{name}"
    return write_bare_norm(export, inputs, path, hidden_dims(size), epsilon=latent.epsilon)

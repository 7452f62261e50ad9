"""The whole decoder: inputs, lengths, embedding, layers, final norm, head, and the present keys and values."""

from __future__ import annotations

from .attention import MASK, TOTAL_LENGTH, Lengths, write_attention, write_lengths
from .embedding import POSITIONS, write_embedding, write_head
from .experts import write_experts
from .export import Export, hidden_dims
from .graph_writer import FLOAT, INT64, Dims
from .mlp import write_mlp
from .norms import Residual, write_final_norm, write_norm, write_plain_norm, write_sum
from .rope import write_rope_tables


def write_decoder(export: Export) -> None:
    """Write every node of the graph, in an order in which it can run."""
    _write_inputs(export)
    lengths = write_lengths(export)
    residual = Residual(write_embedding(export))
    write_rope_tables(export, TOTAL_LENGTH)
    for layer in range(export.spec.num_layers):
        residual = _write_layer(export, layer, residual, lengths)
    write_head(export, write_final_norm(export, residual))
    _write_caches(export, "present", "total")


def _write_layer(export: Export, layer: int, residual: Residual, lengths: Lengths) -> Residual:
    spec = export.spec
    normed, residual = _write_pre_norm(export, layer, "input", residual)
    update = write_attention(export, layer, normed, lengths)
    if spec.parallel:
        if not spec.shared_norm:
            normed = write_plain_norm(export, residual.stream, *_norm_names(layer, "post_attention"))
        path, dims = f"/model/layers.{layer}/parallel", hidden_dims(spec.hidden_size)
        update = export.graph.node("Add", [update, _write_feed_forward(export, layer, normed)], f"{path}/Add", dims)
        return Residual(residual.stream, _write_scaled(export, path, update))
    update = _write_post_norm(export, layer, "post_attention", update)
    location = "pre_feedforward" if spec.post_norms else "post_attention"
    normed, residual = _write_pre_norm(export, layer, location, Residual(residual.stream, update))
    update = _write_feed_forward(export, layer, normed)
    return Residual(residual.stream, _write_post_norm(export, layer, "post_feedforward", update))


def _write_feed_forward(export: Export, layer: int, normed: str) -> str:
    experts = export.spec.routed(layer)
    return write_mlp(export, layer, normed) if experts is None else write_experts(export, layer, experts, normed)


def _write_pre_norm(export: Export, layer: int, location: str, residual: Residual) -> tuple[str, Residual]:
    """What a part of the layer reads, and the stream behind it."""
    path, source = _norm_names(layer, location)
    if export.spec.pre_norms:
        return write_norm(export, residual, path, source)
    residual = write_sum(export, residual, path)
    return residual.stream, residual


def _write_post_norm(export: Export, layer: int, location: str, update: str) -> str:
    """What a part of the layer adds to the stream."""
    path, source = _norm_names(layer, location)
    if export.spec.post_norms:
        update = write_plain_norm(export, update, path, source)
    return _write_scaled(export, path, update)


def _write_scaled(export: Export, path: str, update: str) -> str:
    spec, graph = export.spec, export.graph
    if spec.residual_scale == 1:
        return update
    scale = graph.float32(spec.residual_scale)
    return graph.node("Mul", [update, scale], f"{path}/residual/Mul", hidden_dims(spec.hidden_size))


def _norm_names(layer: int, location: str) -> tuple[str, str]:
    return f"/model/layers.{layer}/{location}_layernorm", f"model.layers.{layer}.{location}_layernorm"


def _write_inputs(export: Export) -> None:
    graph = export.graph
    graph.input("input_ids", INT64, ["batch_size", "sequence_length"])
    graph.input(MASK, INT64, ["batch_size", "total_sequence_length"])
    if export.needs_positions:
        graph.input(POSITIONS, INT64, ["batch_size", "sequence_length"])
    _write_caches(export, "past_key_values", "past")


def _write_caches(export: Export, prefix: str, length: str) -> None:
    """All keys, then all values; a layer whose cache stops at its window has a length of its own name."""
    spec, graph = export.spec, export.graph
    declare = graph.input if length == "past" else graph.output
    for kind in ("key", "value"):
        for layer in range(spec.num_layers):
            windowed = spec.window(layer) is not None and export.options.windowed_kv_cache
            tokens = f"{length}_{'sliding' if windowed else 'sequence'}_length"
            dims: Dims = ["batch_size", spec.num_key_value_heads, tokens, "kv_cache_dim"]
            declare(f"{prefix}.{layer}.{kind}", FLOAT, dims)

"""The whole decoder: inputs, lengths, embedding, layers, final norm, head, and the present keys and values."""

from __future__ import annotations

from .attention import MASK, POSITIONS, TOTAL_LENGTH, Lengths, write_attention, write_lengths
from .embedding import write_embedding, write_head
from .export import Export
from .graph_writer import FLOAT, INT64, Dims
from .mlp import write_mlp
from .norms import Residual, write_final_norm, write_norm, write_plain_norm
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
    def norm(location: str, residual: Residual) -> tuple[str, Residual]:
        path, weight = _norm_names(layer, location)
        return write_norm(export, residual, path, weight)

    post_norms = export.spec.post_norms
    normed, residual = norm("input", residual)
    update = write_attention(export, layer, normed, lengths)
    if post_norms:
        update = write_plain_norm(export, update, *_norm_names(layer, "post_attention"))
    normed, residual = norm("pre_feedforward" if post_norms else "post_attention", Residual(residual.stream, update))
    update = write_mlp(export, layer, normed)
    if post_norms:
        update = write_plain_norm(export, update, *_norm_names(layer, "post_feedforward"))
    return Residual(residual.stream, update)


def _norm_names(layer: int, location: str) -> tuple[str, str]:
    return f"/model/layers.{layer}/{location}_layernorm", f"model.layers.{layer}.{location}_layernorm.weight"


def _write_inputs(export: Export) -> None:
    graph = export.graph
    graph.input("input_ids", INT64, ["batch_size", "sequence_length"])
    graph.input(MASK, INT64, ["batch_size", "total_sequence_length"])
    if not export.options.fused_rope:
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

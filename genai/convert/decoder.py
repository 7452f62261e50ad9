"""The whole decoder: inputs, lengths, embedding, layers, final norm, head, and the present keys and values."""

from __future__ import annotations

import numpy as np

from .altup_nodes import write_alternating_layers
from .attention_nodes import MASK, TOTAL_LENGTH, Lengths, write_attention, write_chunks, write_lengths
from .feed_forward import write_feed_forward
from .graph_writer import (
    FLOAT,
    INT64,
    POSITIONS,
    VECTORS,
    Export,
    caches_window,
    hidden_dims,
    takes_positions,
    vectors_output,
)
from .latent_nodes import write_latent_attention
from .layers import Residual, write_linear, write_norm, write_plain_norm
from .lookup import write_lookup
from .per_layer_nodes import write_per_layer_inputs, write_per_layer_update
from .projection import Projection
from .recurrent_nodes import state_dims, write_recurrent
from .rope import write_rope_tables
from .weights import row_chunks


def write_decoder(export: Export) -> None:
    """Write all nodes of the graph in topological order."""
    _write_inputs(export)
    lengths = write_lengths(export)
    embedding = write_embedding(export)
    residual = Residual(_write_projected(export, embedding) if export.spec.reads_vectors else embedding)
    given = write_per_layer_inputs(export, residual.stream)
    write_rope_tables(export, TOTAL_LENGTH)
    write_chunks(export)
    if export.spec.altup is not None:
        residual = write_alternating_layers(export, residual.stream, given, lengths)
    for layer in range(export.spec.num_layers if export.spec.altup is None else 0):
        residual = _write_layer(export, layer, residual, lengths)
        residual = _write_end(export, layer, residual, given)
    final = f"/model/layers.{export.spec.num_layers}/final_norm_layernorm"
    normed = write_norm(export, residual, final, last=True)[0]
    _write_vectors_output(export, normed)
    write_head(export, normed)
    _write_caches(export, "present", "total")


def _write_projected(export: Export, embedding: str) -> str:
    """Write the input of an MTP head's layer: a projection of embeddings and of the vectors of the previous tokens."""
    graph, width = export.graph, export.spec.hidden_size
    both = [
        write_plain_norm(export, embedding, "/model/pre_fc_norm_embedding"),
        write_plain_norm(export, VECTORS, "/model/pre_fc_norm_hidden"),
    ]
    joined = graph.node("Concat", both, "/model/fc/Concat", hidden_dims(2 * width), axis=-1)
    projection = Projection("/model/fc", ("model.fc",), (width,), 2 * width)
    return write_linear(export, projection, joined, precision=export.options.precision)


def _write_vectors_output(export: Export, normed: str) -> None:
    """Write the graph's output of normalised vectors, if the decoder is or has an MTP head."""
    spec, graph, dims = export.spec, export.graph, hidden_dims(export.spec.hidden_size)
    if (name := vectors_output(spec)) is not None:
        graph.output(name, FLOAT, dims)
        graph.node("Identity", [normed], "/model/hidden_states/Identity", dims, output=name)


def _write_layer(export: Export, layer: int, residual: Residual, lengths: Lengths) -> Residual:
    spec, path = export.spec, f"/model/layers.{layer}"
    normed, residual = write_norm(export, residual, f"{path}/input_layernorm")
    if not spec.has_mixer(layer):
        return Residual(residual.stream, write_feed_forward(export, layer, normed, residual.stream))
    update = _write_mixer(export, layer, normed, lengths)
    if spec.feed_forward_layers is not None:
        return Residual(residual.stream, update)
    if spec.parallel:
        if not spec.shared_norm:
            normed = write_plain_norm(export, residual.stream, f"{path}/post_attention_layernorm")
        both = [update, write_feed_forward(export, layer, normed, residual.stream)]
        update = export.graph.node("Add", both, f"{path}/parallel/Add", hidden_dims(spec.hidden_size))
        return Residual(residual.stream, _write_scaled(export, f"{path}/parallel", update))
    update = _write_post_norm(export, f"{path}/post_attention_layernorm", update)
    location = "pre_feedforward" if spec.post_norms else "post_attention"
    normed, residual = write_norm(export, Residual(residual.stream, update), f"{path}/{location}_layernorm")
    update = write_feed_forward(export, layer, normed, residual.stream)
    return Residual(residual.stream, _write_post_norm(export, f"{path}/post_feedforward_layernorm", update))


def _write_mixer(export: Export, layer: int, root: str, lengths: Lengths) -> str:
    """Write attention, a recurrent part, or the sum of both."""
    spec = export.spec
    if spec.is_recurrent(layer):
        return write_recurrent(export, layer, root)
    if spec.latent is not None:
        return write_latent_attention(export, layer, root, lengths)
    update = write_attention(export, layer, root, lengths)
    if not spec.has_recurrence(layer):
        return update
    both = [update, write_recurrent(export, layer, root)]
    return export.graph.node("Add", both, f"/model/layers.{layer}/mamba/Add", hidden_dims(spec.hidden_size))


def _write_end(export: Export, layer: int, residual: Residual, given: tuple[str, ...]) -> Residual:
    """Write the parts of a layer that follow its feed-forward layer: per-layer inputs, and the scale of the layer."""
    spec, graph, path, dims = export.spec, export.graph, f"/model/layers.{layer}", hidden_dims(export.spec.hidden_size)
    if residual.update is None or not (given or spec.layer_scales):
        return residual
    stream = graph.node("Add", [residual.stream, residual.update], f"{path}/Add", dims)
    if given:
        update = write_per_layer_update(export, layer, stream, given[layer])
        stream = graph.node("Add", [stream, update], f"{path}/per_layer_projection/Add", dims)
    if spec.layer_scales:
        scale = graph.float32(float(export.weights.vector(f"model.layers.{layer}.layer_scalar", 1)[0]))
        stream = graph.node("Mul", [stream, scale], f"{path}/layer_scalar/Mul", dims)
    return Residual(stream)


def _write_post_norm(export: Export, path: str, update: str) -> str:
    """Write the norm and the scaling of an update that is later added to the residual stream."""
    if export.spec.post_norms:
        update = write_plain_norm(export, update, path)
    return _write_scaled(export, path, update)


def _write_scaled(export: Export, path: str, update: str) -> str:
    spec, graph = export.spec, export.graph
    if spec.residual_scale == 1:
        return update
    scale = graph.float32(spec.residual_scale)
    return graph.node("Mul", [update, scale], f"{path}/residual/Mul", hidden_dims(spec.hidden_size))


def _write_inputs(export: Export) -> None:
    graph = export.graph
    graph.input("input_ids", INT64, ["batch_size", "sequence_length"])
    graph.input(MASK, INT64, ["batch_size", "total_sequence_length"])
    if takes_positions(export.spec, export.options):
        graph.input(POSITIONS, INT64, ["batch_size", "sequence_length"])
    if export.spec.reads_vectors:
        graph.input(VECTORS, FLOAT, hidden_dims(export.spec.hidden_size))
    _write_caches(export, "past_key_values", "past")


def _write_caches(export: Export, prefix: str, length: str) -> None:
    """Declare all keys, all values and all states; the length of a windowed cache has a separate dimension name."""
    spec, graph = export.spec, export.graph
    declare = graph.input if length == "past" else graph.output
    for kind in ("key", "value"):
        for layer in spec.cached_layers:
            windowed = caches_window(spec, export.options, layer)
            tokens, sizes = f"{length}_{'sliding' if windowed else 'sequence'}_length", spec.at(layer)
            # onnxruntime-genai reads sizes that differ between layers from the graph.
            size: int | str = sizes.head_size if spec.varies else "kv_cache_dim"
            declare(f"{prefix}.{layer}.{kind}", FLOAT, ["batch_size", sizes.num_key_value_heads, tokens, size])
    for name, dims in state_dims(spec):
        declare(f"{length if length == 'past' else prefix}.{name}", FLOAT, dims)


TABLE = "model.embed_tokens"
_PATH = "/model/embed_tokens"


def head_projection(export: Export) -> Projection:
    """Return the projection from hidden vectors to logits."""
    weight = TABLE if export.spec.tie_word_embeddings else "lm_head"
    return Projection("/lm_head", (weight,), (export.spec.vocab_size,), export.spec.hidden_size, ("lm_head",))


def write_embedding(export: Export) -> str:
    """Write the embedding of input_ids. If the head shares the matrix, the head later finds it by name."""
    vectors, spec, graph, dims = _write_vectors(export), export.spec, export.graph, hidden_dims(export.spec.hidden_size)
    if spec.embedding_scale != 1:
        vectors = graph.node("Mul", [vectors, graph.float32(spec.embedding_scale)], f"{_PATH}/Mul", dims)
    if spec.position_embeddings:
        name, shape = "model.embed_positions.weight", (spec.context_length, spec.hidden_size)
        table = graph.initializer(name, shape, np.float32, row_chunks(name, export.weights.tensor(name, shape)))
        positions = graph.node("Gather", [table, POSITIONS], "/model/embed_positions/Gather", dims)
        vectors = graph.node("Add", [vectors, positions], "/model/embed_positions/Add", dims)
    return vectors


def write_head(export: Export, root: str) -> None:
    """Write the graph's output `logits` from normalised vectors."""
    spec, options = export.spec, export.options
    sequence: int | str = "sequence_length"
    if options.prune_lm_head:
        graph, size, path, sequence = export.graph, spec.hidden_size, "/lm_head/prune", 1
        root = graph.node("Gather", [root, graph.int64(-1)], f"{path}/Gather", ["batch_size", size], axis=1)
        root = graph.node("Unsqueeze", [root, graph.int64([1])], f"{path}/Unsqueeze", hidden_dims(size, sequence=1))
    dims = hidden_dims(spec.vocab_size, sequence=sequence)
    export.graph.output("logits", FLOAT, dims)
    # Operator, name and second operand of each step that changes the logits: the scale, then cap * tanh(x / cap).
    steps: list[tuple[str, str, float | None]] = [("Mul", "scale", spec.logit_scale)] if spec.logit_scale != 1 else []
    if cap := spec.logit_softcap:
        steps += [("Div", "softcap", cap), ("Tanh", "softcap", None), ("Mul", "softcap", cap)]
    value = write_linear(
        export,
        head_projection(export),
        root,
        precision=options.head,
        bias=spec.head_bias,
        output=None if steps else "logits",
        sequence=sequence,
    )
    for index, (operator, name, operand) in enumerate(steps):
        inputs = [value] if operand is None else [value, export.graph.float32(operand)]
        output = "logits" if index == len(steps) - 1 else None
        value = export.graph.node(operator, inputs, f"/lm_head/{name}/{operator}", dims, output=output)


def _write_vectors(export: Export) -> str:
    spec, options = export.spec, export.options
    table = Projection(_PATH, (TABLE,), (spec.vocab_size,), spec.hidden_size)
    precision = options.embedding(tied=spec.tie_word_embeddings)
    shared = spec.tie_word_embeddings and precision == options.head
    return write_lookup(export, table, precision, head_projection(export) if shared else None)

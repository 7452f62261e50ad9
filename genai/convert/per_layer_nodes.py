"""Vectors per token and layer, which each layer adds to the residual stream through a gate (Gemma 3n, Gemma 4)."""

from __future__ import annotations

import math

from .feed_forward import write_activation
from .graph_writer import Dims, Export, hidden_dims
from .layers import write_bare_norm, write_linear, write_plain_norm, write_split
from .lookup import write_lookup
from .projection import Projection


def write_per_layer_inputs(export: Export, vectors: str) -> tuple[str, ...]:
    """Write the vectors of all layers from the scaled token embeddings; return one name per layer."""
    spec, graph, inputs = export.spec, export.graph, export.spec.per_layer_inputs
    if inputs is None:
        return ()
    size, wide, precision = inputs.size, spec.num_layers * inputs.size, export.options.precision
    path, parts = "/model/per_layer_inputs", inputs.table(spec.vocab_size)
    table = Projection("/model/embed_tokens_per_layer", tuple(parts), tuple(parts.values()), wide)
    embedded = write_lookup(export, table, export.options.embedding_precision or precision)
    # Both summands contain the factor sqrt(1/2) of their sum.
    scale = graph.float32(math.sqrt(size / 2))
    embedded = graph.node("Mul", [embedded, scale], f"{path}/embedding/Mul", hidden_dims(wide))
    name = "model.per_layer_model_projection"
    projected = write_linear(
        export, Projection(f"{path}/projection", (name,), (wide,), spec.hidden_size), vectors, precision=precision
    )
    heads: Dims = ["batch_size", "sequence_length * num_layers", size]
    each = graph.node("Reshape", [projected, graph.int64([0, -1, size])], f"{path}/Reshape_1", heads)
    name = "model.per_layer_projection_norm"
    weight = export.weights.vector(f"{name}.weight", size) * math.sqrt(0.5)
    # The projection is scaled by 1 / sqrt(hidden_size), which only the epsilon of the norm notices.
    epsilon = spec.rms_norm_eps * spec.hidden_size
    normed = write_bare_norm(
        export, [each, graph.array(f"{name}.weight", weight)], f"{path}/norm", heads, epsilon=epsilon
    )
    joined = graph.node("Reshape", [normed, graph.int64([0, -1, wide])], f"{path}/Reshape_2", hidden_dims(wide))
    total = graph.node("Add", [joined, embedded], f"{path}/Add", hidden_dims(wide))
    return write_split(export, f"{path}/Split", total, (size,) * spec.num_layers)


def write_per_layer_update(export: Export, layer: int, stream: str, given: str) -> str:
    """Write the update of the residual stream, or of all streams but the first, from the layer's vectors `given`."""
    spec, inputs = export.spec, export.spec.per_layer_inputs
    assert inputs is not None
    path, source = f"/model/layers.{layer}", f"model.layers.{layer}"
    gate = Projection(
        f"{path}/per_layer_input_gate", (f"{source}.per_layer_input_gate",), (inputs.size,), spec.hidden_size
    )
    active = write_linear(export, gate, stream, precision=export.options.precision)
    active = write_activation(export, f"{path}/per_layer_input_gate/act_fn", active, inputs.size)
    gated = export.graph.node("Mul", [active, given], f"{path}/per_layer_input_gate/Mul", hidden_dims(inputs.size))
    back = Projection(
        f"{path}/per_layer_projection", (f"{source}.per_layer_projection",), (spec.hidden_size,), inputs.size
    )
    update = write_linear(export, back, gated, precision=export.options.precision)
    return write_plain_norm(export, update, f"{path}/post_per_layer_input_norm")

"""Layers with alternating updates of several residual streams, and learned augmented residuals (Gemma 3n)."""

from __future__ import annotations

import math

import numpy as np

from .attention_nodes import Lengths, write_attention
from .feed_forward import write_feed_forward, write_mean
from .graph_writer import Export, hidden_dims
from .layers import Residual, write_bare_norm, write_linear, write_plain_norm, write_split
from .per_layer_nodes import write_per_layer_update
from .projection import Projection
from .spec import AltUpSpec

# As in transformers, which does not divide by smaller mean squares.
_LEAST_SQUARE = 1e-5


def write_alternating_layers(export: Export, vectors: str, given: tuple[str, ...], lengths: Lengths) -> Residual:
    """Write all layers; return the mean of the streams after the last layer.

    Args:
        vectors: the scaled embeddings, which are the first stream.
        given: the per-layer inputs of each layer.
    """
    graph, altup, dims = export.graph, export.spec.altup, hidden_dims(export.spec.hidden_size)
    assert altup is not None
    streams = [vectors, *(
        _write_scaled(export, f"/model/altup_projections/{index}", vectors, vectors)
        for index in range(altup.streams - 1)
    )]  # fmt: skip
    for layer in range(export.spec.num_layers):
        streams = _write_layer(export, altup, layer, streams, given[layer], lengths)
    total = streams[0]
    for index, stream in enumerate(streams[1:]):
        path = f"/model/altup_unembed_projections/{index}"
        total = graph.node("Add", [total, _write_scaled(export, path, stream, streams[0])], f"{path}/Add", dims)
    share = graph.float32(1 / altup.streams)
    return Residual(graph.node("Mul", [total, share], "/model/altup/Mul", dims))


def _write_layer(
    export: Export, altup: AltUpSpec, layer: int, streams: list[str], given: str, lengths: Lengths
) -> list[str]:
    """Write one layer and return its streams."""
    graph, dims, path = export.graph, hidden_dims(export.spec.hidden_size), f"/model/layers.{layer}"
    streams = _write_predictions(export, altup, layer, streams)
    active = streams[altup.active]
    normed = write_plain_norm(export, active, f"{path}/input_layernorm")
    augmented = _write_augmented(export, altup, layer, normed)
    attended = write_plain_norm(
        export, write_attention(export, layer, normed, lengths), f"{path}/post_attention_layernorm"
    )
    total = graph.node("Add", [active, attended], f"{path}/Add_1", dims)
    total = graph.node("Add", [total, augmented], f"{path}/Add_2", dims)
    stream = graph.node("Mul", [total, graph.float32(math.sqrt(0.5))], f"{path}/Mul", dims)
    normed = write_plain_norm(export, stream, f"{path}/pre_feedforward_layernorm")
    update = write_feed_forward(export, layer, normed, stream)
    update = write_plain_norm(export, update, f"{path}/post_feedforward_layernorm")
    result = graph.node("Add", [stream, update], f"{path}/Add_3", dims)
    streams = _write_corrections(export, altup, layer, streams, result)
    chosen = streams[altup.active]
    if altup.scaled:
        name = f"model.layers.{layer}.altup.correct_output_scale"
        scale = graph.array(name, export.weights.vector(name, export.spec.hidden_size))
        chosen = graph.node("Mul", [chosen, scale], f"{path}/altup/scale/Mul", dims)
    update = write_per_layer_update(export, layer, chosen, given)
    return [streams[0], *(
        graph.node("Add", [stream, update], f"{path}/per_layer_projection/Add_{index}", dims)
        for index, stream in enumerate(streams[1:], 1)
    )]  # fmt: skip


def _write_predictions(export: Export, altup: AltUpSpec, layer: int, streams: list[str]) -> list[str]:
    """Write a sum of all streams for each stream, with the coefficients that the active stream determines."""
    path, count = f"/model/layers.{layer}/altup/predict", altup.streams
    # Each stream is added to its prediction, so 1 is added to its coefficient.
    coefficients = _write_coefficients(
        export, altup, layer, "prediction", streams[altup.active], np.eye(count, dtype=np.float32).reshape(-1)
    )
    predictions = []
    for stream in range(count):
        terms = [
            _write_product(export, f"{path}/{stream}/{index}/Mul", streams[index], coefficients[count * stream + index])
            for index in range(count)
        ]
        predictions.append(_write_sum(export, f"{path}/{stream}", terms))
    return predictions


def _write_corrections(export: Export, altup: AltUpSpec, layer: int, predictions: list[str], result: str) -> list[str]:
    """Write each prediction plus the difference between the layer's result and its prediction, with a coefficient."""
    graph, dims, path = export.graph, hidden_dims(export.spec.hidden_size), f"/model/layers.{layer}/altup/correct"
    coefficients = _write_coefficients(export, altup, layer, "correction", result, np.ones(altup.streams, np.float32))
    difference = graph.node("Sub", [result, predictions[altup.active]], f"{path}/Sub", dims)
    return [
        _write_sum(
            export, f"{path}/{index}", [prediction, _write_product(export, f"{path}/{index}/Mul", difference, factor)]
        )
        for index, (prediction, factor) in enumerate(zip(predictions, coefficients, strict=True))
    ]


def _write_coefficients(
    export: Export, altup: AltUpSpec, layer: int, which: str, root: str, added: np.ndarray
) -> tuple[str, ...]:
    """Write the coefficients that a stream determines, each [batch, tokens, 1]; `added` is a constant in them."""
    graph, size, count = export.graph, export.spec.hidden_size, altup.streams
    path, source = f"/model/layers.{layer}/altup/{which}", f"model.layers.{layer}.altup"
    weight = export.weights.vector(f"{source}.router_norm.weight", size) / np.float32(size)
    norm = graph.array(f"{source}.{which}.router_norm.weight", weight)
    normed = write_bare_norm(export, [root, norm], f"{path}/router_norm", hidden_dims(size))
    router = Projection(f"{path}/modality_router", (f"{source}.modality_router",), (count,), size)
    routed = write_linear(export, router, normed, precision="fp32")
    shares = graph.node("Tanh", [routed], f"{path}/Tanh", hidden_dims(count))
    wide = len(added)
    projection = Projection(f"{path}/coefs", (f"{source}.{which}_coefs",), (wide,), count)
    coefficients = write_linear(export, projection, shares, precision="fp32")
    constant = graph.array(f"{source}.{which}.added", added)
    coefficients = graph.node("Add", [coefficients, constant], f"{path}/coefs/Add", hidden_dims(wide))
    return write_split(export, f"{path}/Split", coefficients, (1,) * wide)


def _write_augmented(export: Export, altup: AltUpSpec, layer: int, root: str) -> str:
    """Write the augmented residual: the normalised stream plus its normalised product with a matrix of low rank."""
    size, precision = export.spec.hidden_size, export.options.precision
    path, source = f"/model/layers.{layer}/laurel", f"model.layers.{layer}.laurel"
    left = Projection(f"{path}/linear_left", (f"{source}.linear_left",), (altup.laurel_rank,), size)
    right = Projection(f"{path}/linear_right", (f"{source}.linear_right",), (size,), altup.laurel_rank)
    inner = write_linear(export, left, root, precision=precision)
    update = write_linear(export, right, inner, precision=precision)
    update = write_plain_norm(export, update, f"{path}/post_laurel_norm")
    return export.graph.node("Add", [root, update], f"{path}/Add", hidden_dims(size))


def _write_scaled(export: Export, path: str, root: str, like: str) -> str:
    """Write a projection of a stream, scaled to the mean square of the stream `like`."""
    graph, size = export.graph, export.spec.hidden_size
    name = path[1:].replace("/", ".")
    projected = write_linear(export, Projection(path, (name,), (size,), size), root, precision=export.options.precision)
    roots = []
    for which, value in (("like", like), ("own", projected)):
        squared = graph.node("Mul", [value, value], f"{path}/{which}/Mul", hidden_dims(size))
        mean = write_mean(export, f"{path}/{which}", squared, size)
        if which == "own":
            mean = graph.node("Clip", [mean, graph.float32(_LEAST_SQUARE)], f"{path}/{which}/Clip", hidden_dims(1))
        roots.append(graph.node("Sqrt", [mean], f"{path}/{which}/Sqrt", hidden_dims(1)))
    factor = graph.node("Div", roots, f"{path}/Div", hidden_dims(1))
    return _write_product(export, f"{path}/Mul", projected, factor)


def _write_product(export: Export, name: str, vectors: str, factor: str) -> str:
    return export.graph.node("Mul", [vectors, factor], name, hidden_dims(export.spec.hidden_size))


def _write_sum(export: Export, path: str, terms: list[str]) -> str:
    total = terms[0]
    for index, term in enumerate(terms[1:]):
        total = export.graph.node("Add", [total, term], f"{path}/Add_{index}", hidden_dims(export.spec.hidden_size))
    return total

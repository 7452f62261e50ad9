"""Norms, of either kind, and the residual stream between them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .export import Export, hidden_dims
from .graph_writer import CONTRIB, FLOAT, Dims

FINAL = "model.norm"


@dataclass(frozen=True)
class Residual:
    """The residual stream: `stream` plus `update`, which the next norm adds while it is at it."""

    stream: str
    update: str | None = None


def write_norm(export: Export, residual: Residual, path: str, source: str) -> tuple[str, Residual]:
    """Add the pending update and norm the sum; returns the normed value and the stream after the addition.

    Args:
        path: such as "/model/layers.0/input_layernorm". source: Hugging Face name of the norm, without ".weight".
    """
    if residual.update is None:
        return write_plain_norm(export, residual.stream, path, source), residual
    normed, stream = f"{path}/output_0", f"{path}/output_3"
    _write_skip_norm(export, (residual.stream, residual.update), path, source, [normed, "", "", stream])
    return normed, Residual(stream)


def write_sum(export: Export, residual: Residual, path: str) -> Residual:
    """Add the pending update where no norm follows."""
    if residual.update is None:
        return residual
    dims = hidden_dims(export.spec.hidden_size)
    return Residual(export.graph.node("Add", [residual.stream, residual.update], f"{path}/Add", dims))


def write_final_norm(export: Export, residual: Residual) -> str:
    """The norm after the last layer; nothing reads the stream behind it."""
    path = f"/model/layers.{export.spec.num_layers}/final_norm_layernorm"
    if residual.update is None:
        return write_plain_norm(export, residual.stream, path, FINAL)
    normed = f"{path}/output_0"
    _write_skip_norm(export, (residual.stream, residual.update), path, FINAL, [normed])
    return normed


def write_plain_norm(export: Export, root: str, path: str, source: str) -> str:
    """Norm a value that is not the residual stream."""
    inputs = [root, *_write_parameters(export, path, source)]
    return _write_bare_norm(
        export, inputs, f"{path}/LayerNorm", f"{path}/output_0", hidden_dims(export.spec.hidden_size)
    )


def write_query_key_norm(export: Export, layer: int, root: str, which: str, heads: int) -> str:
    """Norm queries ("q_norm") or keys ("k_norm"): each head by itself, or all of them together."""
    if export.spec.qk_norm_scope == "all":
        path = f"/model/layers.{layer}/attn/{which}"
        width = heads * export.spec.head_size
        inputs = [root, *_write_head_parameters(export, layer, which, width)]
        return _write_bare_norm(export, inputs, f"{path}/LayerNorm", f"{path}/output_0", hidden_dims(width))
    return _write_head_norm(export, layer, root, which, heads)


def _write_head_norm(export: Export, layer: int, root: str, which: str, heads: int) -> str:
    graph, size = export.graph, export.spec.head_size
    path = f"/model/layers.{layer}/attn/{which}"
    dims: Dims = [
        "batch_size",
        f"sequence_length * num_{'attention' if which == 'q_norm' else 'key_value'}_heads",
        size,
    ]
    split = graph.node("Reshape", [root, graph.int64([0, -1, size])], f"{path}/Reshape_1", dims)
    apart = export.spec.qk_norm_scope == "heads"
    parameters = [_write_ones(export, size)] if apart else _write_head_parameters(export, layer, which, size)
    op = f"{path}/{_bare_operator(export)}"
    normed = _write_bare_norm(export, [split, *parameters], op, f"{op}/output_0", dims)
    shape = graph.int64([0, -1, heads * size])
    joined = graph.node("Reshape", [normed, shape], f"{path}/Reshape_2", hidden_dims(heads * size))
    if not apart:
        return joined
    weights = _write_head_parameters(export, layer, which, heads * size)
    return graph.node("Mul", [joined, *weights], f"{path}/Mul", hidden_dims(heads * size))


def _write_head_parameters(export: Export, layer: int, which: str, size: int) -> list[str]:
    source, name = f"model.layers.{layer}.self_attn.{which}", f"model.layers.{layer}.attn.{which}.layernorm"
    weight = _offset(export, export.weights.vector(f"{source}.weight", size))
    names = [export.graph.array(f"{name}.weight", weight)]
    if export.spec.qk_norm_biases:
        names.append(export.graph.array(f"{name}.bias", export.weights.vector(f"{source}.bias", size)))
    return names


def _bare_operator(export: Export) -> str:
    return "SimplifiedLayerNormalization" if export.spec.norm == "rms" else "LayerNormalization"


def _write_bare_norm(export: Export, inputs: list[str], name: str, output: str, dims: Dims) -> str:
    return export.graph.node(
        _bare_operator(export),
        inputs,
        name,
        dims,
        output=output,
        epsilon=float(export.spec.rms_norm_eps),
        axis=-1,
        stash_type=1,
    )


def _write_skip_norm(export: Export, addends: tuple[str, str], path: str, source: str, outputs: list[str]) -> None:
    export.graph.nodes(
        "SkipSimplifiedLayerNormalization" if export.spec.norm == "rms" else "SkipLayerNormalization",
        [*addends, *_write_parameters(export, path, source)],
        outputs,
        f"{path}/SkipLayerNorm",
        domain=CONTRIB,
        epsilon=float(export.spec.rms_norm_eps),
    )
    for output in filter(None, outputs):
        export.graph.value(output, FLOAT, hidden_dims(export.spec.hidden_size))


def _write_parameters(export: Export, path: str, source: str) -> list[str]:
    """The names of a norm's weight, and of its bias where it has one."""
    size, name = export.spec.hidden_size, path[1:].replace("/", ".")
    if not export.spec.norm_weights:
        return [_write_ones(export, size)]
    weight = export.weights.vector(f"{source}.weight", size)
    names = [export.graph.array(f"{name}.weight", _offset(export, weight))]
    if export.spec.norm_biases:
        names.append(export.graph.array(f"{name}.bias", export.weights.vector(f"{source}.bias", size)))
    return names


def _write_ones(export: Export, size: int) -> str:
    """What a norm that learned nothing multiplies with."""
    name = f"model.constants.ones.{size}"
    return name if export.graph.has_initializer(name) else export.graph.array(name, np.ones(size, np.float32))


def _offset(export: Export, weight: NDArray[np.float32]) -> NDArray[np.float32]:
    """The weight as the operator multiplies with it."""
    return weight + np.float32(export.spec.norm_weight_offset)

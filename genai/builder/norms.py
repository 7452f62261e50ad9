"""RMS norms and the residual stream between them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .export import Export, hidden_dims
from .graph_writer import CONTRIB, FLOAT, Dims


@dataclass(frozen=True)
class Residual:
    """The residual stream: `stream` plus `update`, which the next norm adds while it is at it."""

    stream: str
    update: str | None = None


def write_norm(export: Export, residual: Residual, path: str, weight: str) -> tuple[str, Residual]:
    """Add the pending update and norm the sum; returns the normed value and the stream after the addition.

    Args:
        path: such as "/model/layers.0/input_layernorm". weight: Hugging Face name of the norm's weight.
    """
    if residual.update is None:
        return write_plain_norm(export, residual.stream, path, weight), residual
    normed, stream = f"{path}/output_0", f"{path}/output_3"
    _write_skip_norm(export, (residual.stream, residual.update), path, weight, [normed, "", "", stream])
    return normed, Residual(stream)


def write_final_norm(export: Export, residual: Residual) -> str:
    """The norm after the last layer; nothing reads the stream behind it."""
    path = f"/model/layers.{export.spec.num_layers}/final_norm_layernorm"
    if residual.update is None:
        return write_plain_norm(export, residual.stream, path, "model.norm.weight")
    normed = f"{path}/output_0"
    _write_skip_norm(export, (residual.stream, residual.update), path, "model.norm.weight", [normed])
    return normed


def write_plain_norm(export: Export, root: str, path: str, weight: str) -> str:
    """Norm a value that is not the residual stream."""
    inputs = [root, _write_weight(export, path, weight)]
    return _write_simplified_norm(
        export, inputs, f"{path}/LayerNorm", f"{path}/output_0", hidden_dims(export.spec.hidden_size)
    )


def write_head_norm(export: Export, layer: int, root: str, which: str, heads: int) -> str:
    """Norm each head of the queries ("q_norm") or keys ("k_norm") by itself."""
    graph, size = export.graph, export.spec.head_size
    path = f"/model/layers.{layer}/attn/{which}"
    dims: Dims = [
        "batch_size",
        f"sequence_length * num_{'attention' if which == 'q_norm' else 'key_value'}_heads",
        size,
    ]
    split = graph.node("Reshape", [root, graph.int64([0, -1, size])], f"{path}/Reshape_1", dims)
    weight = export.weights.vector(f"model.layers.{layer}.self_attn.{which}.weight", size)
    name = graph.array(f"model.layers.{layer}.attn.{which}.layernorm.weight", _offset(export, weight))
    op = f"{path}/SimplifiedLayerNormalization"
    normed = _write_simplified_norm(export, [split, name], op, f"{op}/output_0", dims)
    shape = graph.int64([0, -1, heads * size])
    return graph.node("Reshape", [normed, shape], f"{path}/Reshape_2", hidden_dims(heads * size))


def _write_simplified_norm(export: Export, inputs: list[str], name: str, output: str, dims: Dims) -> str:
    return export.graph.node(
        "SimplifiedLayerNormalization",
        inputs,
        name,
        dims,
        output=output,
        epsilon=float(export.spec.rms_norm_eps),
        axis=-1,
        stash_type=1,
    )


def _write_skip_norm(export: Export, addends: tuple[str, str], path: str, weight: str, outputs: list[str]) -> None:
    export.graph.nodes(
        "SkipSimplifiedLayerNormalization",
        [*addends, _write_weight(export, path, weight)],
        outputs,
        f"{path}/SkipLayerNorm",
        domain=CONTRIB,
        epsilon=float(export.spec.rms_norm_eps),
    )
    for output in filter(None, outputs):
        export.graph.value(output, FLOAT, hidden_dims(export.spec.hidden_size))


def _write_weight(export: Export, path: str, weight: str) -> str:
    values = export.weights.vector(weight, export.spec.hidden_size)
    return export.graph.array(path[1:].replace("/", ".") + ".weight", _offset(export, values))


def _offset(export: Export, weight: NDArray[np.float32]) -> NDArray[np.float32]:
    """The weight as the operator multiplies with it."""
    return weight + np.float32(export.spec.norm_weight_offset)

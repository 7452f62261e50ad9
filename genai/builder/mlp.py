"""The gated feed-forward layer: down(activation(gate(x)) * up(x))."""

from __future__ import annotations

from .export import Export, hidden_dims
from .linear import Projection, write_linear


def write_mlp(export: Export, layer: int, root: str) -> str:
    """Feed-forward of one layer on normed vectors; returns what is to be added to the residual stream."""
    spec, graph = export.spec, export.graph
    path, wide = f"/model/layers.{layer}/mlp", hidden_dims(spec.intermediate_size)
    gate = _write_projection(export, layer, "gate_proj", root, spec.intermediate_size, spec.hidden_size)
    up = _write_projection(export, layer, "up_proj", root, spec.intermediate_size, spec.hidden_size)
    active = _write_activation(export, f"{path}/act_fn", gate)
    gated = graph.node("Mul", [active, up], f"{path}/Mul", wide)
    return _write_projection(export, layer, "down_proj", gated, spec.hidden_size, spec.intermediate_size)


def _write_projection(export: Export, layer: int, which: str, root: str, rows: int, columns: int) -> str:
    weight = f"model.layers.{layer}.mlp.{which}"
    projection = Projection(f"/model/layers.{layer}/mlp/{which}", (weight,), (rows,), columns)
    return write_linear(export, projection, root, precision=export.options.precision, bias=export.spec.mlp_bias)


def _write_activation(export: Export, path: str, root: str) -> str:
    graph, wide = export.graph, hidden_dims(export.spec.intermediate_size)
    if export.spec.hidden_activation == "silu":
        sigmoid = graph.node("Sigmoid", [root], f"{path}/Sigmoid", wide)
        return graph.node("Mul", [root, sigmoid], f"{path}/Mul", wide)
    tanh = export.spec.hidden_activation == "gelu_tanh"
    name = f"{path}/{'FastGelu' if tanh else 'Gelu'}"
    return graph.node("Gelu", [root], name, wide, approximate="tanh" if tanh else "none")

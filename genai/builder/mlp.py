"""The feed-forward layer: down(activation(gate(x)) * up(x)), or without a gate down(activation(up(x)))."""

from __future__ import annotations

from .export import Export, hidden_dims
from .linear import Projection, write_linear


def write_mlp(export: Export, layer: int, root: str) -> str:
    """Feed-forward of one layer on normed vectors; returns what is to be added to the residual stream."""
    return write_gated_mlp(
        export, root, f"/model/layers.{layer}/mlp", f"model.layers.{layer}.mlp", export.spec.intermediate_size
    )


def write_gated_mlp(export: Export, root: str, path: str, source: str, width: int) -> str:
    """The same under any name. Args: path in the graph, source of the weights, width between the projections."""
    spec, graph, wide = export.spec, export.graph, hidden_dims(width)

    def project(which: str, value: str, rows: int, columns: int) -> str:
        projection = Projection(f"{path}/{which}", (f"{source}.{which}",), (rows,), columns)
        return write_linear(export, projection, value, precision=export.options.precision, bias=spec.mlp_bias)

    if spec.gated_mlp:
        gate = project("gate_proj", root, width, spec.hidden_size)
        up = project("up_proj", root, width, spec.hidden_size)
        active = write_activation(export, f"{path}/act_fn", gate, width)
        active = graph.node("Mul", [active, up], f"{path}/Mul", wide)
    else:
        active = write_activation(export, f"{path}/act_fn", project("up_proj", root, width, spec.hidden_size), width)
    return project("down_proj", active, spec.hidden_size, width)


def write_activation(export: Export, path: str, root: str, width: int) -> str:
    """The architecture's activation on values of this width."""
    graph, wide, kind = export.graph, hidden_dims(width), export.spec.hidden_activation
    if kind == "silu":
        sigmoid = graph.node("Sigmoid", [root], f"{path}/Sigmoid", wide)
        return graph.node("Mul", [root, sigmoid], f"{path}/Mul", wide)
    if kind in ("relu", "relu2"):
        positive = graph.node("Relu", [root], f"{path}/Relu", wide)
        return positive if kind == "relu" else graph.node("Mul", [positive, positive], f"{path}/Mul", wide)
    tanh = kind == "gelu_tanh"
    name = f"{path}/{'FastGelu' if tanh else 'Gelu'}"
    return graph.node("Gelu", [root], name, wide, approximate="tanh" if tanh else "none")

"""Graph inputs with a default, which exporters create for adapters.

onnxruntime-genai's builder, with Olive, turns an adapter's factors into inputs with a default of rank 0, so that the
graph can run without an adapter: base matmul, matmul with A, matmul with B, sum. Such inputs are equivalent to our LoRA
targets, so the empty matmuls are removed. An adapter can replace any other input with a default (for example a bias),
but only as a whole; the graph then runs as it was exported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError, did_you_mean
from ..onnx.ir import Graph, Node
from .parameters import AdapterParameters


def with_defaults(graph: Graph) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
    """Return the type and shape of each input's default, for the inputs that have a default."""
    named = {value.name for value in graph.inputs}
    tensors = {name: tensor for name, tensor in graph.initializers.items() if name in named}
    return {name: (np.dtype(tensor.dtype.numpy_dtype), tuple(tensor.shape)) for name, tensor in tensors.items()}


def take_out_empty_factors(graph: Graph) -> dict[str, str]:
    """Remove matmuls with factors of rank 0, and the sums that add their results, from a graph.

    Returns:
        The removed inputs: a mapping from the name of factor A to the name of factor B.
    """
    empty = {name for name, (_, shape) in with_defaults(graph).items() if len(shape) == 2 and 0 in shape}
    gone: dict[str, str] = {}
    for first in sorted(empty):
        match = _pattern(graph, first, empty)
        if match is None:
            continue
        second, total, base = match
        output = total.outputs[0]
        if graph.is_output(output):
            continue
        graph.replace_uses(output, base)
        graph.remove_nodes([total])
        gone[first] = second
    return gone


def _pattern(graph: Graph, first: str, empty: set[str]) -> tuple[str, Node, str] | None:
    """Match (x @ A) @ B [* scale] + base; return the name of B, the sum, and the name of the base."""
    node = _only(graph, first)
    if node is None or node.op_type != "MatMul" or node.input(1) != first:
        return None
    node = _only(graph, node.outputs[0])
    if node is None or node.op_type != "MatMul" or node.input(1) not in empty:
        return None
    second = node.input(1)
    added = node.outputs[0]
    node = _only(graph, added)
    if node is not None and node.op_type == "Mul":
        other = node.input(1) if node.input(0) == added else node.input(0)
        scale = graph.constant(other)
        if scale is None or scale.size != 1 or float(scale.reshape(-1)[0]) != 1.0:
            return None  # the graph's scale would have to be included in the factors of every adapter
        added = node.outputs[0]
        node = _only(graph, added)
    if node is None or node.op_type != "Add":
        return None
    base = node.input(1) if node.input(0) == added else node.input(0)
    return (second, node, base) if base != added else None


def _only(graph: Graph, name: str) -> Node | None:
    """Return the only node that reads a value."""
    users = graph.consumers(name)
    return users[0] if len(users) == 1 else None


def check_values(
    adapter: AdapterParameters, defaults: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]
) -> dict[str, NDArray[Any]]:
    """Return the adapter's arrays that replace defaults of graph inputs.

    Raises:
        InputError: an input does not exist; an array has a different type or shape, or values that are not finite; or
            the adapter also has factors of linear layers.
    """
    for name, array in adapter.values.items():
        if name not in defaults:
            inputs = ", ".join(list(defaults)[:8]) or "none"
            raise InputError(
                f"{adapter.source}: Invalid input name: {name!r:.200}",
                f"inputs of the graph that have a default: {inputs}",
                did_you_mean(name, defaults, "use an adapter that was exported for this model"),
            )
        dtype, shape = defaults[name]
        if array.dtype != dtype or array.shape != shape:
            raise InputError(
                f"{adapter.source}: {name!r} is {array.dtype} {list(array.shape)}",
                f"the graph's default is {dtype} {list(shape)}",
                "use an adapter that was exported for this model",
            )
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise InputError(
                f"{adapter.source}: {name!r} has values that are not finite", "every token would become NaN",
                "train or download the adapter again",
            )  # fmt: skip
    if adapter.pairs and adapter.values:
        raise InputError(
            f"{adapter.source}: the adapter contains factors of linear layers and {next(iter(adapter.values))!r}",
            "factors change linear layers, other arrays replace graph inputs, and an adapter can do only one of these",
            "export the factors and the other arrays as two adapters",
        )
    return dict(adapter.values)

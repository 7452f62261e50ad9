"""Inputs of a graph that have a default: the places that exporters leave for adapters.

onnxruntime-genai's builder, with Olive, turns an adapter's factors into inputs whose default has rank 0, so that the
graph runs without an adapter: base product, product with A, product with B, sum. Such a place is the same as ours
beside the base product, so the products with nothing are taken out. What else has a default (a bias, say) is an input
that an adapter may replace as a whole; then the graph runs as it was exported.
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
    """Type and shape of the default of each input that has one."""
    named = {value.name for value in graph.inputs}
    tensors = {name: tensor for name, tensor in graph.initializers.items() if name in named}
    return {name: (np.dtype(tensor.dtype.numpy_dtype), tuple(tensor.shape)) for name, tensor in tensors.items()}


def take_out_empty_factors(graph: Graph) -> dict[str, str]:
    """Take products with factors of rank 0, and the sums with them, out of a graph.

    Returns:
        The inputs that this was done to: name of the factor A to that of B.
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
    """The factor B, the sum, and what it adds to: (x @ A) @ B [* scale] + base."""
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
            return None  # a scale of the graph's own would have to be folded into every adapter
        added = node.outputs[0]
        node = _only(graph, added)
    if node is None or node.op_type != "Add":
        return None
    base = node.input(1) if node.input(0) == added else node.input(0)
    return (second, node, base) if base != added else None


def _only(graph: Graph, name: str) -> Node | None:
    """The only node that reads a value."""
    users = graph.consumers(name)
    return users[0] if len(users) == 1 else None


def check_values(
    adapter: AdapterParameters, defaults: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]
) -> dict[str, NDArray[Any]]:
    """The arrays of an adapter that replace defaults.

    Raises:
        InputError: a name that the graph has not, another type or shape, numbers that are not finite, or factors of
            products beside them.
    """
    for name, array in adapter.values.items():
        if name not in defaults:
            inputs = ", ".join(list(defaults)[:8]) or "none"
            raise InputError(
                f"{adapter.source}: Invalid input name: {name!r:.200}",
                f"inputs of the graph with a default: {inputs}",
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
                f"{adapter.source}: {name!r} has numbers that are not finite", "every token would be NaN",
                "train or download the adapter again",
            )  # fmt: skip
    if adapter.pairs and adapter.values:
        raise InputError(
            f"{adapter.source}: holds factors of products, and {next(iter(adapter.values))!r}",
            "the first run beside the base, the second as an input of the graph: not both at once",
            "export them as two adapters",
        )
    return dict(adapter.values)

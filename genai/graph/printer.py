"""Graphs as text: one line per node, with types, shortened attributes, and subgraphs indented."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from typing import Any

from .ir import Attribute, Graph, Model, Node, SparseTensor, Tensor, Value
from .types import ArrayTypes, AttributeType, SparseTensorType, Type

_MAX_ITEMS = 8
_MAX_TEXT = 40
_INDENT = "  "


def format_graph(graph: Graph | Model) -> str:
    """A graph, or a model with its header and functions, as readable text."""
    lines = _model_lines(graph) if isinstance(graph, Model) else _graph_lines(graph)
    return "\n".join(lines)


def format_diff(before: Graph | Model, after: Graph | Model) -> str:
    """The lines that a rewrite removed and added, with a little context; "" if nothing changed.

    Take `before` with `copy()`, since rewrites change a model in place.
    """
    old, new = format_graph(before).splitlines(), format_graph(after).splitlines()
    return "\n".join(difflib.unified_diff(old, new, "before", "after", lineterm="", n=2))


def format_node(node: Node, graph: Graph | None = None) -> str:
    """A node in one line; with its graph, also the types of its outputs."""
    outputs = ", ".join(_typed(name, graph.type_of(name) if graph else None) for name in node.outputs) or "()"
    domain, op_type = node.key
    operator = f"{domain}.{op_type}" if domain else op_type
    inputs = ", ".join(name or "_" for name in node.inputs)
    attributes = ", ".join(_format_attribute(attribute) for attribute in node.attributes.values())
    return f"{outputs} = {operator}({inputs})" + (f" {{{attributes}}}" if attributes else "")


def format_type(known: Type | None) -> str:
    """A type as in `float16[batch, 8, ?]`; "?" where nothing is known."""
    if known is None:
        return "?"
    if not isinstance(known, ArrayTypes):
        return str(known)
    kind = "sparse " if isinstance(known, SparseTensorType) else ""
    if known.shape is None:
        return f"{kind}{known.dtype.onnx_name}[...]"
    return f"{kind}{known.dtype.onnx_name}[{', '.join('?' if dim is None else str(dim) for dim in known.shape)}]"


def _model_lines(model: Model) -> Iterator[str]:
    opsets = ", ".join(f"{domain or 'ai.onnx'} {version}" for domain, version in model.opset_imports.items())
    producer = f"{model.producer_name} {model.producer_version}".strip()
    yield f"model (IR {model.ir_version}; {opsets})" + (f" by {producer}" if producer else "")
    yield from _graph_lines(model.graph)
    for function in model.functions.values():
        name = "::".join(filter(None, function.key))
        attributes = [*function.attributes, *(f"{_format_attribute(a)}" for a in function.attribute_defaults.values())]
        yield f"function {name}" + (f" <{', '.join(attributes)}>" if attributes else "")
        yield from _indented(_graph_lines(function.body))


def _graph_lines(graph: Graph) -> Iterator[str]:
    yield f"graph {graph.name or '(unnamed)'}"
    for value in graph.inputs:
        yield f"{_INDENT}input {_format_value(value)}"
    for tensor in graph.initializers.values():
        yield f"{_INDENT}constant {tensor.name}: {_format_tensor(tensor)}"
    for sparse in graph.sparse_initializers.values():
        yield f"{_INDENT}constant {sparse.name}: {_format_item(sparse)}"
    for node in graph.nodes:
        yield _INDENT + format_node(node, graph)
        for attribute in node.attributes.values():
            for subgraph in attribute.graphs():
                yield f"{_INDENT * 2}{attribute.name}:"
                yield from _indented(_indented(_indented(_graph_lines(subgraph))))
    for value in graph.outputs:
        yield f"{_INDENT}output {_format_value(value)}"


def _indented(lines: Iterable[str]) -> Iterator[str]:
    return (_INDENT + line for line in lines)


def _format_value(value: Value) -> str:
    return _typed(value.name, value.type)


def _typed(name: str, known: Type | None) -> str:
    return f"{name or '_'}: {format_type(known)}" if known is not None else name or "_"


def _format_tensor(tensor: Tensor) -> str:
    text = format_type(tensor.type)
    if tensor.is_external:
        return f"{text} external"
    if tensor.num_elements == 0:
        return f"{text} = []"  # Not tolist(): [100000000, 0] would be a hundred million empty lists.
    if tensor.num_elements <= _MAX_ITEMS and tensor.segment is None:
        return f"{text} = {_short(str(tensor.array().tolist()))}"
    return text


def _format_attribute(attribute: Attribute) -> str:
    if attribute.ref_attr_name:
        return f"{attribute.name}=@{attribute.ref_attr_name}"
    value = attribute.python_value
    if attribute.type in (AttributeType.GRAPH, AttributeType.GRAPHS):
        return f"{attribute.name}=graph"
    if isinstance(value, list):
        shown = ", ".join(_format_item(item) for item in value[:_MAX_ITEMS])
        more = f", ... {len(value)} items" if len(value) > _MAX_ITEMS else ""
        return f"{attribute.name}=[{shown}{more}]"
    return f"{attribute.name}={_format_item(value)}"


def _format_item(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, str):
        return _short(repr(value))
    if isinstance(value, Tensor):
        return _format_tensor(value)
    if isinstance(value, SparseTensor):
        return f"{format_type(value.type)} with {value.values.num_elements} non-zero"
    if isinstance(value, int) or value is None:
        return str(value)
    return format_type(value)


def _short(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."

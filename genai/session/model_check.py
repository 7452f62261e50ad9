"""Checks nodes against ONNX's definitions of their operators, so that a wrong model is refused when it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import onnx

from ..graph.ir import Graph, Model, Node, canonical_domain
from ..graph.types import DataType, TensorType
from .errors import InvalidGraph

_VARIADIC = onnx.defs.OpSchema.FormalParameterOption.Variadic


def check_nodes(model: Model) -> None:
    """Every node of the model and its functions: domain imported, attributes and inputs as defined, types agree.

    Operators that ONNX does not define are left to the compiler.

    Raises:
        InvalidGraph: a node is not as its operator is defined.
    """
    _check_versions("the model", model.opset_imports)
    versions = {canonical_domain(name): version for name, version in model.opset_imports.items()}
    versions.setdefault("", model.opset_version() or 0)
    for graph in model.graphs():
        _check_graph(model, graph, versions)
    for function in model.functions.values():
        _check_versions(f"function {function.name!r}", function.opset_imports)
        own = {**versions, **{canonical_domain(name): version for name, version in function.opset_imports.items()}}
        for graph in function.body.nested():
            _check_graph(model, graph, own)


def _check_versions(what: str, imports: Mapping[str, int]) -> None:
    for domain, version in imports.items():
        newest = _newest_version(canonical_domain(domain))
        if newest and not 1 <= version <= newest:
            raise InvalidGraph(
                f"{what} imports version {version} of {domain or 'ai.onnx'}",
                f"the installed onnx {onnx.__version__} defines versions 1 to {newest}",
                "update the onnx package, or export the model for an older operator set",
            )


@cache
def _newest_version(domain: str) -> int:
    """The newest operator set of a domain that ONNX defines; 0 for others, which define themselves."""
    if domain == "":
        return onnx.defs.onnx_opset_version()
    return onnx.defs.onnx_ml_opset_version() if domain == "ai.onnx.ml" else 0


def _check_graph(model: Model, graph: Graph, versions: Mapping[str, int]) -> None:
    for node in graph.nodes:
        domain, op_type = node.key
        if model.function(node) is not None:
            continue
        if domain not in versions:
            raise InvalidGraph(
                f"node {node.name!r} is of {domain}::{op_type}, and the model imports no operator set for {domain!r}",
                f"imported are {', '.join(name or 'ai.onnx' for name in versions)}",
                "export the model again, or add the import",
            )
        schema = _schema(op_type, versions[domain], domain)
        if schema is not None:
            _check_node(graph, node, schema)


@cache
def _schema(op_type: str, version: int, domain: str) -> Any:
    try:
        return onnx.defs.get_schema(op_type, version, domain)
    except onnx.defs.SchemaError:
        return None


def _check_node(graph: Graph, node: Node, schema: Any) -> None:
    unknown = node.attributes.keys() - schema.attributes.keys()
    if unknown:
        raise _wrong(node, f"it has the attributes {sorted(unknown)}", f"it knows {sorted(schema.attributes)}")
    missing = [
        name for name, attribute in schema.attributes.items() if attribute.required and name not in node.attributes
    ]
    if missing:
        raise _wrong(node, f"it lacks the attributes {missing}", "they are required")
    if not schema.min_input <= len(node.inputs) <= schema.max_input:
        counts = f"{schema.min_input} to {schema.max_input}"
        raise _wrong(node, f"it has {len(node.inputs)} inputs", f"it takes {counts}")
    if not schema.min_output <= len(node.outputs) <= schema.max_output:
        counts = f"{schema.min_output} to {schema.max_output}"
        raise _wrong(node, f"it has {len(node.outputs)} outputs", f"it gives {counts}")
    _check_types(graph, node, schema)


def _check_types(graph: Graph, node: Node, schema: Any) -> None:
    """Inputs of the same type variable have one element type."""
    bound: dict[str, DataType] = {}
    for index, name in enumerate(node.inputs):
        if not schema.inputs:
            return
        formal = schema.inputs[min(index, len(schema.inputs) - 1)]
        if formal.option == _VARIADIC and not formal.is_homogeneous:
            continue
        known = graph.type_of(name) if name else None
        if not isinstance(known, TensorType) or known.dtype is DataType.UNDEFINED:
            continue
        dtype = bound.setdefault(formal.type_str, known.dtype)
        if dtype != known.dtype and not formal.type_str.startswith("tensor("):
            raise _wrong(
                node,
                f"its inputs {', '.join(node.inputs)} are of the types {dtype.onnx_name} and {known.dtype.onnx_name}",
                f"both must be of one type {formal.type_str!r}",
            )


def _wrong(node: Node, what: str, rule: str) -> InvalidGraph:
    domain, op_type = node.key
    operator = f"{domain}::{op_type}" if domain else op_type
    return InvalidGraph(
        f"node {node.name!r} ({operator}): {what}",
        f"by the definition of the operator, {rule}",
        "export the model again",
    )

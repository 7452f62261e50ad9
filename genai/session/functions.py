"""Function bodies: a model's own functions, and the functions by which ONNX defines some operators."""

from __future__ import annotations

from typing import Any

import onnx

from ..onnx.deserialize import Deserializer
from ..onnx.external_data import ExternalData
from ..onnx.ir import Attribute, Function, Graph, Node
from ..onnx.node import onnx_schema
from ..onnx.serialize import EmbeddingEncoder
from ..onnx.type_protos import encode_type


def call_key(function: Function, node: Node) -> Any:
    """Return a key that is equal for calls with identical compiled bodies: same function, attributes, absent inputs.

    Tensors and graphs are compared by identity, so the owner of the key must keep the call alive.
    """
    attributes = tuple(
        (name, item.type, repr(item.value) if isinstance(item.value, int | float | bytes) else id(item.value))
        for name, item in sorted(node.attributes.items())
    )
    absent = tuple(not node.input(index) for index in range(len(function.body.inputs)))
    return id(function), attributes, absent


def bound_body(function: Function, node: Node) -> Graph:
    """Copy a function's body for one call, with the call's attribute values and absent inputs."""
    body = function.body.copy()
    given = {**function.attribute_defaults, **node.attributes}
    for graph in body.nested():
        for inner in graph.nodes:
            inner.attributes = {
                name: bound for name, item in inner.attributes.items() if (bound := _bound(item, given)) is not None
            }
    for index, value in enumerate(body.inputs):
        if not node.input(index):
            body.replace_uses(value.name, "")
    return body


def _bound(attribute: Attribute, given: dict[str, Attribute]) -> Attribute | None:
    """Replace a reference with the caller's attribute; None if the caller does not specify it."""
    if not attribute.ref_attr_name:
        return attribute
    value = given.get(attribute.ref_attr_name)
    return None if value is None else Attribute(attribute.name, value.type, value.value)


def schema_function(node: Node, version: int, graph: Graph) -> Function | None:
    """Return ONNX's definition of an operator as a function; None if there is none, or if types are unknown."""
    domain, op_type = node.key
    schema = onnx_schema(domain, op_type, version)
    if schema is None:
        return None
    if schema.has_function:
        body = schema.get_function_with_opset_version(_newest(schema.function_opset_versions, version))
    elif schema.has_context_dependent_function:
        types = [graph.type_of(name) for name in node.inputs]
        if any(name and known is None for name, known in zip(node.inputs, types, strict=True)):
            return None
        protos = [onnx.TypeProto() if known is None else encode_type(known) for known in types]
        body = schema.get_context_dependent_function_with_opset_version(
            _newest(schema.context_dependent_function_opset_versions, version),
            EmbeddingEncoder().node(node).SerializeToString(),
            [proto.SerializeToString() for proto in protos],
        )
    else:
        return None
    proto = onnx.FunctionProto.FromString(body)
    return Deserializer(ExternalData(None), onnx.IR_VERSION).function(proto) if proto.node else None


def _newest(versions: list[int], limit: int) -> int:
    return max((version for version in versions if version <= limit), default=min(versions))

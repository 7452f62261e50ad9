"""ONNX's own shape inference, for a complete model or one node: conversion of its inputs and results.

Weights are omitted, as are constructs that would hang or crash ONNX's native code: operators with our own shape rules
are moved to a domain that ONNX does not have, and malformed Einsum equations are rejected.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from functools import cache
from typing import TypeAlias

import onnx
from onnx import shape_inference

from ..errors import GraphError, malformed
from ..onnx.ir import Attribute, Function, Graph, Node, OnnxModel, OnnxTensor, Value
from ..onnx.node import EQUATION, ML, onnx_schema
from ..onnx.serialize import Serializer, encode_value
from ..onnx.storage import StringStorage
from ..onnx.type_protos import decode_type, encode_type
from ..onnx.types import ArrayTypes, Type
from ..onnx.uses import used_names

GraphTypes: TypeAlias = dict[str, Type]

# Constants up to this size may be shapes, axes or scales, so they are passed to ONNX's inference.
MAX_CONSTANT_BYTES = 1024

# The types of these operators' results do not depend on elements of their inputs, so that nodes that differ only in
# constants are equal. Frequent operators are enough.
_READ_TYPES_ONLY = frozenset(
    ("", name)
    for name in """
    Add Cast Clip Concat Conv DequantizeLinear Div Gelu Gemm LeakyRelu MatMul MatMulInteger Mul PRelu QuantizeLinear
    Relu Sigmoid Softmax Sub Tanh Transpose
    """.split()
)

_GENERATED = re.compile(r"unk__\d+")
_HIDDEN_DOMAIN = "genai.shape_rules"
# Operators with lists of a number per node of a tree or per weight. Types depend on which lists are present only.
_TREE_ENSEMBLES = frozenset({(ML, "TreeEnsembleClassifier"), (ML, "TreeEnsembleRegressor")})
_TREE_LISTS = ("nodes_", "class_", "target_")


def infer_model(
    model: OnnxModel, known_types: Mapping[Graph, GraphTypes], is_hidden: Callable[[Node], bool]
) -> dict[Graph, GraphTypes]:
    """Return the types that ONNX infers for the values of every graph.

    Args:
        known_types: initial types, for outputs of operators that ONNX does not support.
        is_hidden: predicate for the nodes that are hidden from ONNX.
    """
    skeleton = _Skeleton(known_types, is_hidden).model(model)
    try:
        result = shape_inference.infer_shapes(skeleton)
    except Exception as error:  # ONNX raises several exception types, some without a common base.
        raise GraphError(
            f"shapes cannot be inferred: {error!s:.300}",
            "ONNX's shape inference rejects the model",
            "check the model with onnx.checker, and export it again",
        ) from error
    types_of: dict[Graph, GraphTypes] = {}
    _collect(model.graph, result.graph, types_of)
    inputs = (value.type for graph in model.graphs() for value in graph.inputs)
    dims = (dim for known in inputs if isinstance(known, ArrayTypes) for dim in known.shape or ())
    symbols = {dim for dim in dims if isinstance(dim, str)}
    return {
        graph: {name: _without_generated(known, symbols) for name, known in types.items()}
        for graph, types in types_of.items()
    }


def infer_single(
    node: Node, version: int, types: Mapping[str, Type], constants: Mapping[str, OnnxTensor]
) -> GraphTypes:
    """Return the types that ONNX infers for the outputs of one node, or an empty result if it cannot infer them."""
    domain, op_type = node.key
    if node.subgraphs():
        return {}
    encoder = _ConstantSerializer()
    small = {name: tensor for name, tensor in constants.items() if tensor.nbytes <= MAX_CONSTANT_BYTES}
    try:
        outputs = shape_inference.infer_node_outputs(
            onnx_schema(domain, op_type, version),
            encoder.node(node),
            {name: encode_type(known) for name, known in types.items()},
            {name: encoder.tensor(tensor.renamed(name)) for name, tensor in small.items()},
            opset_imports=[_opset(domain, version)],
        )
    except Exception:  # ONNX raises several exception types; if it cannot infer a node, the node has no types.
        return {}
    return {name: known for name, proto in outputs.items() if name and (known := decode_type(proto)) is not None}


@cache
def _opset(domain: str, version: int) -> onnx.OperatorSetIdProto:
    return onnx.helper.make_opsetid(domain, version)


class SingleInference:
    """Infers single nodes of a model as `infer_single` does. Equal nodes, as of repeated layers, are inferred once."""

    def __init__(self) -> None:
        self._known: dict[Hashable, dict[int, Type]] = {}

    def __call__(
        self, node: Node, version: int, types: Mapping[str, Type], constants: Mapping[str, OnnxTensor]
    ) -> GraphTypes:
        attributes = tuple([_attribute_content(attribute) for attribute in node.attributes.values()])
        if None in attributes:
            return infer_single(node, version, types, constants)
        if node.key in _READ_TYPES_ONLY:
            constants = {}
        inputs = tuple([(types.get(name), _content(constants.get(name))) for name in node.inputs])
        key = node.key, version, attributes, inputs, tuple(map(bool, node.outputs))
        known = self._known.get(key)
        if known is None:
            found = infer_single(node, version, types, constants)
            known = {index: found[name] for index, name in enumerate(node.outputs) if name in found}
            self._known[key] = known
        return {node.outputs[index]: known_type for index, known_type in known.items()}


def _attribute_content(attribute: Attribute) -> Hashable | None:
    """Return all that inference reads of an attribute, or None for graphs and other values that are not compared."""
    value = attribute.value
    if isinstance(value, list):
        value = tuple(value) if all(isinstance(item, int | float | bytes) for item in value) else None
    elif isinstance(value, OnnxTensor):
        value = _content(value)
    elif not isinstance(value, int | float | bytes):
        value = None
    return None if value is None else (attribute.name, attribute.type, value)


def _content(tensor: OnnxTensor | None) -> Hashable | None:
    """Return all that inference reads of a constant: inference receives no elements of large constants."""
    if tensor is None:
        return None
    if tensor.nbytes > MAX_CONSTANT_BYTES:
        return tensor.type
    if isinstance(tensor.storage, StringStorage):
        return tensor.type, tuple(tensor.storage.strings)
    return tensor.type, tensor.raw().tobytes()


class _ConstantSerializer(Serializer):
    """Writes small tensors inline, regardless of their storage, and larger tensors only as type and shape."""

    def node(self, node: Node) -> onnx.NodeProto:
        # ONNX's inference does not terminate on some malformed Einsum equations, so they are rejected first.
        equation = node.attribute("equation") if node.key == ("", "Einsum") else ""
        if not isinstance(equation, str) or not EQUATION.fullmatch(equation):
            raise malformed(
                f"Einsum node {node.name!r} has the equation {equation!r:.80}",
                "an equation consists of letters, commas, at most one '...' per term, and one '->'",
            )
        return super().node(_without_trees(node) if node.key in _TREE_ENSEMBLES else node)

    def external(self, tensor: OnnxTensor) -> Mapping[str, str] | None:
        return {"location": "left out"} if tensor.nbytes > MAX_CONSTANT_BYTES else None


def _without_trees(node: Node) -> Node:
    """Return a tree ensemble with only the first element of each list that describes its trees."""
    attributes = {
        name: replace(attribute, value=attribute.value[:1])
        if name.startswith(_TREE_LISTS) and isinstance(attribute.value, list)
        else attribute
        for name, attribute in node.attributes.items()
    }
    return replace(node, attributes=attributes)


class _Skeleton(_ConstantSerializer):
    """Writes a model with only the given types for the values between nodes."""

    def __init__(self, known_types: Mapping[Graph, GraphTypes], is_hidden: Callable[[Node], bool]) -> None:
        self._known_types = known_types
        self._is_hidden = is_hidden

    def model(self, model: OnnxModel) -> onnx.ModelProto:
        proto = super().model(model)
        proto.opset_import.append(onnx.helper.make_opsetid(_HIDDEN_DOMAIN, 1))
        return proto

    def function(self, function: Function) -> onnx.FunctionProto:
        proto = super().function(function)
        proto.opset_import.append(onnx.helper.make_opsetid(_HIDDEN_DOMAIN, 1))
        return proto

    def node(self, node: Node) -> onnx.NodeProto:
        if not self._is_hidden(node):
            return super().node(node)
        subgraphs = {name: attribute for name, attribute in node.attributes.items() if attribute.graphs()}
        return super().node(replace(node, domain=_HIDDEN_DOMAIN, attributes=subgraphs))

    def fill_graph(self, proto: onnx.GraphProto, graph: Graph) -> None:
        known_types = self._known_types.get(graph, {})
        outputs = [Value(value.name, known_types.get(value.name)) for value in graph.outputs]
        # Folding leaves constants that no node uses; their conversion would take as long as that of the others.
        used = {value.name for value in (*graph.inputs, *graph.outputs)}.union(*map(used_names, graph.nodes))
        constants = {name: tensor for name, tensor in graph.initializers.items() if name in used}
        name, sparse = graph.name or "graph", graph.sparse_initializers
        super().fill_graph(proto, Graph(name, graph.inputs, outputs, graph.nodes, constants, sparse))
        between = known_types.keys() - {value.name for value in outputs}
        proto.value_info.extend(encode_value(Value(name, known_types[name])) for name in known_types if name in between)


def _collect(graph: Graph, proto: onnx.GraphProto, types_of: dict[Graph, GraphTypes]) -> None:
    types = types_of[graph] = {}
    for item in (*proto.value_info, *proto.output, *proto.input):
        known = decode_type(item.type)
        if known is not None:
            types[item.name] = known
    for node, node_proto in zip(graph.nodes, proto.node, strict=True):
        if not node.subgraphs():
            continue
        by_name = {attribute.name: attribute for attribute in node_proto.attribute}
        for name, attribute in node.attributes.items():
            messages = by_name[name].graphs or [by_name[name].g]
            for subgraph, subgraph_proto in zip(attribute.graphs(), messages, strict=False):
                _collect(subgraph, subgraph_proto, types_of)


def _without_generated(known: Type, declared: set[str]) -> Type:
    """Remove the symbols that ONNX generates for unknown dimensions, because they change at every pass.

    Args:
        declared: symbols that the model itself uses for its inputs.
    """
    if not isinstance(known, ArrayTypes) or known.shape is None:
        return known
    if not any(isinstance(dim, str) and dim not in declared for dim in known.shape):
        return known
    shape = tuple(
        None if isinstance(dim, str) and dim not in declared and _GENERATED.fullmatch(dim) else dim
        for dim in known.shape
    )
    return replace(known, shape=shape)

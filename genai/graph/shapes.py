"""Shape inference: ONNX's own for its operators, our rules for the others, joined into one result.

ONNX infers whole models (with the values of shape computations), but stops at operators that it does not know. So the
two take turns: after each pass of ONNX's, one walk over the nodes applies the rules and carries their results on, and
the next pass starts from there, until nothing new is found. Weights are not copied into the inference.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import onnx
from onnx import shape_inference

from ..errors import GraphError
from .encode import Encoder, encode_value, fill_external
from .ir import Graph, Model, Node, Tensor, Value
from .shape_rules import SHAPE_RULES, NodeTypes, ShapeRule, ShapeRules, shape_rule
from .type_protos import decode_type, encode_type
from .types import Dim, SparseTensorType, TensorType, Type

__all__ = ["NodeTypes", "SHAPE_RULES", "ShapeRule", "ShapeRules", "infer_shapes", "shape_rule"]

# Constants up to this size may be shapes, axes or scales, and take part in the inference.
_MAX_CONSTANT_BYTES = 1024
# Each round types at least one more operator, and nearly always all of them.
_MAX_ROUNDS = 16
# Symbols that ONNX makes up for unknown extents.
_GENERATED = re.compile(r"unk__\d+")

GraphTypes = dict[str, Type]


def infer_shapes(model: Model, rules: ShapeRules = SHAPE_RULES) -> None:
    """Fill `values` of every graph with types, and complete the types of graph outputs, in place.

    What is computed replaces what the model declared for values between nodes, except where an operator is unknown;
    declared symbols stay where only an extent's name is open. Types declared for graph outputs are never overruled.

    Args:
        rules: for operators that ONNX does not define; add to the default with `@shape_rule`.

    Raises:
        GraphError: if ONNX's inference rejects the model.
    """
    inference = _Inference(model, rules)
    for _ in range(_MAX_ROUNDS):
        inference.run_onnx()
        if not inference.run_rules():
            break
    inference.store()


class _Inference:
    """The types found so far, per graph, and the two ways of finding more."""

    def __init__(self, model: Model, rules: ShapeRules) -> None:
        self._model = model
        self._rules = rules
        self._graphs = list(model.graphs())
        self._given = {graph: self._types_of_unknown_operators(graph) for graph in self._graphs}
        self._found: dict[Graph, GraphTypes] = {graph: {} for graph in self._graphs}
        self._proto = _Skeleton(self._given).model(model)
        self._has_rules = any(rules.find(node) for graph in self._graphs for node in graph.nodes)

    def run_onnx(self) -> None:
        """One pass of ONNX's inference over the whole model, with what the rules gave."""
        try:
            result = shape_inference.infer_shapes(self._proto, data_prop=True)
        except Exception as error:  # ONNX raises several kinds, some of them bare.
            raise GraphError(
                f"shapes cannot be inferred: {error!s:.300}",
                "ONNX's shape inference rejects the model",
                "check the model with onnx.checker; export it again",
            ) from error
        self._collect(self._model.graph, result.graph)

    def run_rules(self) -> bool:
        """One walk over the nodes, outer graphs first; True if a rule gave something new."""
        if not self._has_rules:
            return False
        before = {graph: dict(types) for graph, types in self._given.items()}
        for graph in self._graphs:
            changed: set[str] = set()
            for node in graph.nodes:
                self._visit(graph, node, changed)
        if all(_same(before[graph], self._given[graph]) for graph in self._graphs):
            return False
        self._proto = _Skeleton(self._given).model(self._model)
        return True

    def store(self) -> None:
        """Write what was found into the graphs."""
        for graph in self._graphs:
            found = self._given[graph] | self._found[graph]
            made = {name for node in graph.nodes for name in node.outputs if name}
            outputs = {value.name for value in graph.outputs}
            for name in sorted(made & found.keys() - outputs, key=list(found).index):
                declared = graph.values.get(name)
                known = _merged(found[name], declared.type if declared else None)
                if declared is None:
                    graph.values[name] = Value(name, known)
                else:
                    declared.type = known
            for value in graph.outputs:
                if value.name in found:
                    value.type = _completed(value.type, found[value.name])

    def _types_of_unknown_operators(self, graph: Graph) -> GraphTypes:
        """Declared types that nothing can compute: outputs of operators without schema, rule or function."""
        declared = {value.name: value.type for value in (*graph.outputs, *graph.values.values())}
        return {
            name: known
            for node in graph.nodes
            if not self._is_known(node)
            for name in node.outputs
            if (known := declared.get(name)) is not None
        }

    def _is_known(self, node: Node) -> bool:
        domain, op_type = node.key
        known = self._rules.find(node) or self._model.function(node) or onnx.defs.has(op_type, domain)
        return bool(known)

    def _collect(self, graph: Graph, proto: onnx.GraphProto) -> None:
        found = self._found[graph]
        for item in (*proto.value_info, *proto.output, *proto.input):
            known = decode_type(item.type)
            if known is not None:
                found[item.name] = known
        for node, node_proto in zip(graph.nodes, proto.node, strict=True):
            if not any(True for _ in node.subgraphs()):
                continue
            by_name = {attribute.name: attribute for attribute in node_proto.attribute}
            for attribute in node.attributes.values():
                messages = by_name[attribute.name].graphs or [by_name[attribute.name].g]
                for subgraph, subgraph_proto in zip(attribute.graphs(), messages, strict=False):
                    self._collect(subgraph, subgraph_proto)

    def _visit(self, graph: Graph, node: Node, changed: set[str]) -> None:
        """Apply a node's rule, or carry new input types through a standard operator."""
        rule = self._rules.find(node)
        if rule is not None:
            self._apply(rule, graph, node, changed)
        elif any(name in changed for name in node.inputs) and self._is_known(node):
            for name, known in self._through(graph, node).items():
                if name and not _same_type(self._found[graph].get(name), known):
                    self._found[graph][name] = known
                    changed.add(name)

    def _apply(self, rule: ShapeRule, graph: Graph, node: Node, changed: set[str]) -> None:
        inputs = [self._type_of(graph, name) for name in node.inputs]
        constants = [_small_constant(graph, name) for name in node.inputs]
        arrays = [None if tensor is None else tensor.array() for tensor in constants]
        for name, known in zip(node.outputs, rule(NodeTypes(node, inputs, arrays)), strict=False):
            if name and known is not None and not _same_type(self._given[graph].get(name), known):
                self._given[graph][name] = self._found[graph][name] = known
                changed.add(name)

    def _through(self, graph: Graph, node: Node) -> GraphTypes:
        """ONNX's inference for one node; nothing where it has none for it alone."""
        domain, op_type = node.key
        version = self._model.opset_version(domain)
        types = {name: self._type_of(graph, name) for name in node.inputs if name}
        if version is None or any(known is None for known in types.values()) or any(True for _ in node.subgraphs()):
            return {}
        constants = {name: tensor for name in types if (tensor := _small_constant(graph, name)) is not None}
        try:
            schema = onnx.defs.get_schema(op_type, version, domain)
            outputs = shape_inference.infer_node_outputs(
                schema,
                Encoder().node(node),
                {name: encode_type(known) for name, known in types.items()},
                {name: _ConstantEncoder().tensor(tensor.renamed(name)) for name, tensor in constants.items()},
            )
        except Exception:  # A node that ONNX cannot type stays untyped; the next whole pass may know more.
            return {}
        return {name: known for name, proto in outputs.items() if (known := decode_type(proto)) is not None}

    def _type_of(self, graph: Graph, name: str) -> Type | None:
        """A value's type by what was found, or as declared for inputs and constants, looking outwards."""
        scope: Graph | None = graph
        while name and scope is not None:
            found = self._given[scope].get(name) or self._found[scope].get(name)
            if found is not None:
                return found
            if scope.producer(name) is not None:
                return None
            if scope.defines(name):
                return scope.type_of(name)
            scope = scope.outer
        return None


class _ConstantEncoder(Encoder):
    """Small tensors inline, wherever they come from; larger ones only by type and shape."""

    def fill_elements(self, proto: onnx.TensorProto, tensor: Tensor) -> None:
        if tensor.nbytes > _MAX_CONSTANT_BYTES:
            fill_external(proto, {"location": "left out"})
        elif tensor.is_external:
            proto.raw_data = tensor.raw().tobytes()
        else:
            super().fill_elements(proto, tensor)


class _Skeleton(_ConstantEncoder):
    """A model without large weights, whose only types between nodes are those given."""

    def __init__(self, given: Mapping[Graph, GraphTypes]) -> None:
        self._given = given

    def graph(self, graph: Graph) -> onnx.GraphProto:
        proto = onnx.GraphProto()
        self._fill_graph(proto, graph)
        return proto

    def _fill_graph(self, proto: onnx.GraphProto, graph: Graph) -> None:
        bare = Graph(
            graph.name or "graph",
            graph.inputs,
            [Value(value.name) for value in graph.outputs],
            graph.nodes,
            graph.initializers,
            graph.sparse_initializers,
        )
        super()._fill_graph(proto, bare)
        given = self._given.get(graph, {})
        proto.value_info.extend(encode_value(Value(name, known)) for name, known in given.items())


def _small_constant(graph: Graph, name: str) -> Tensor | None:
    tensor = graph.constant_tensor(name) if name else None
    return None if tensor is None or tensor.nbytes > _MAX_CONSTANT_BYTES else tensor


def _merged(found: Type, declared: Type | None) -> Type:
    """What was found, with declared extents where it left them open."""
    if type(found) is not type(declared) or not isinstance(found, TensorType | SparseTensorType):
        return found
    assert isinstance(declared, TensorType | SparseTensorType)
    if declared.dtype is not found.dtype or declared.shape is None:
        return found
    if found.shape is None:
        return declared
    if len(found.shape) != len(declared.shape):
        return found
    shape = tuple(_merged_dim(new, old) for new, old in zip(found.shape, declared.shape, strict=True))
    return type(found)(found.dtype, shape, declared.dim_denotations, declared.denotation)


def _merged_dim(found: Dim, declared: Dim) -> Dim:
    if isinstance(found, int) or _is_open(declared):
        return found
    return declared if _is_open(found) or isinstance(declared, int) else found


def _completed(declared: Type | None, found: Type) -> Type:
    """A declared type, with what was found where it left extents open."""
    if declared is None:
        return _without_generated(found)
    if type(found) is not type(declared) or not isinstance(declared, TensorType | SparseTensorType):
        return declared
    assert isinstance(found, TensorType | SparseTensorType)
    found = _without_generated(found)
    if found.shape is None or (declared.shape is not None and len(found.shape) != len(declared.shape)):
        return declared
    old_shape = declared.shape or (None,) * len(found.shape)
    shape = tuple(new if old is None else old for new, old in zip(found.shape, old_shape, strict=True))
    return type(declared)(declared.dtype, shape, declared.dim_denotations, declared.denotation)


def _without_generated(known: Type) -> Type:
    if not isinstance(known, TensorType | SparseTensorType) or known.shape is None:
        return known
    shape = tuple(None if _is_open(dim) else dim for dim in known.shape)
    return type(known)(known.dtype, shape, known.dim_denotations, known.denotation)


def _is_open(dim: Dim) -> bool:
    return dim is None or (isinstance(dim, str) and _GENERATED.fullmatch(dim) is not None)


def _same_type(first: Type | None, second: Type | None) -> bool:
    """Equality that takes all generated symbols for the same, since every pass makes its own."""
    if first is None or second is None:
        return first is second
    return _without_generated(first) == _without_generated(second)


def _same(first: GraphTypes, second: GraphTypes) -> bool:
    return first.keys() == second.keys() and all(_same_type(first[name], second[name]) for name in first)

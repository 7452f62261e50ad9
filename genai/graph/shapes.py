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
from .type_merge import completed, merged, same_type
from .types import Type

__all__ = ["NodeTypes", "SHAPE_RULES", "ShapeRule", "ShapeRules", "infer_shapes", "shape_rule"]

# Constants up to this size may be shapes, axes or scales, and take part in the inference.
_MAX_CONSTANT_BYTES = 1024
# Each round types at least one more operator, and nearly always all of them.
_MAX_ROUNDS = 16

_RULES_DOMAIN = "genai.shape_rules"
_TERM = r"[A-Za-z ]*(\.\.\.[A-Za-z ]*)?"
_EQUATION = re.compile(rf"{_TERM}(,{_TERM})*(->{_TERM})?")

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


def infer_node(
    node: Node, version: int, types: Mapping[str, Type], constants: Mapping[str, Tensor]
) -> dict[str, Type]:
    """ONNX's inference for one node on its own.

    Args:
        version: of the node's operator set.
        types: of every input.
        constants: the inputs that are constant, for shapes and axes; large ones are left aside.

    Returns:
        Types of the outputs by name; empty where ONNX does not know the operator, needs more, or has subgraphs to see.
    """
    domain, op_type = node.key
    if any(True for _ in node.subgraphs()):
        return {}
    encoder = _ConstantEncoder()
    small = {name: tensor for name, tensor in constants.items() if tensor.nbytes <= _MAX_CONSTANT_BYTES}
    try:
        outputs = shape_inference.infer_node_outputs(
            onnx.defs.get_schema(op_type, version, domain),
            encoder.node(node),
            {name: encode_type(known) for name, known in types.items()},
            {name: encoder.tensor(tensor.renamed(name)) for name, tensor in small.items()},
            opset_imports=[onnx.helper.make_opsetid(domain, version)],
        )
    except Exception:  # ONNX raises several kinds; a node that it cannot type stays untyped.
        return {}
    return {name: known for name, proto in outputs.items() if (known := decode_type(proto)) is not None}


class _Inference:
    """The types found so far, per graph, and the two ways of finding more."""

    def __init__(self, model: Model, rules: ShapeRules) -> None:
        self._model = model
        self._rules = rules
        self._graphs = list(model.graphs())
        self._given = {graph: self._types_of_unknown_operators(graph) for graph in self._graphs}
        self._found: dict[Graph, GraphTypes] = {graph: {} for graph in self._graphs}
        self._proto = _Skeleton(self._given, rules).model(model)
        self._has_rules = any(rules.find(node) for graph in self._graphs for node in graph.nodes)

    def run_onnx(self) -> None:
        """One pass of ONNX's inference over the whole model, with what the rules gave."""
        try:
            result = shape_inference.infer_shapes(self._proto)
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
        self._proto = _Skeleton(self._given, self._rules).model(self._model)
        return True

    def store(self) -> None:
        """Write what was found into the graphs."""
        for graph in self._graphs:
            found = self._given[graph] | self._found[graph]
            made = {name for node in graph.nodes for name in node.outputs if name}
            outputs = {value.name for value in graph.outputs}
            for name in found:
                if name not in made or name in outputs:
                    continue
                declared = graph.values.get(name)
                known = merged(found[name], declared.type if declared else None)
                if declared is None:
                    graph.values[name] = Value(name, known)
                else:
                    declared.type = known
            for value in graph.outputs:
                if value.name in found:
                    value.type = completed(value.type, found[value.name])

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
                if name and not same_type(self._found[graph].get(name), known):
                    self._found[graph][name] = known
                    changed.add(name)

    def _apply(self, rule: ShapeRule, graph: Graph, node: Node, changed: set[str]) -> None:
        inputs = [self._type_of(graph, name) for name in node.inputs]
        constants = [_small_constant(graph, name) for name in node.inputs]
        arrays = [None if tensor is None else tensor.array() for tensor in constants]
        for name, known in zip(node.outputs, rule(NodeTypes(node, inputs, arrays)), strict=False):
            if name and known is not None and not same_type(self._given[graph].get(name), known):
                self._given[graph][name] = self._found[graph][name] = known
                changed.add(name)

    def _through(self, graph: Graph, node: Node) -> GraphTypes:
        """ONNX's inference for one node; nothing where it has none for it alone."""
        domain, op_type = node.key
        version = self._model.opset_version(domain)
        names = {name for name in node.inputs if name}
        types = {name: known for name in names if (known := self._type_of(graph, name)) is not None}
        if version is None or len(types) < len(names):
            return {}
        constants = {name: tensor for name in types if (tensor := graph.constant_tensor(name)) is not None}
        return infer_node(node, version, types, constants)

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

    def node(self, node: Node) -> onnx.NodeProto:
        if node.key == ("", "Einsum"):
            _check_equation(node)
        return super().node(node)

    def fill_elements(self, proto: onnx.TensorProto, tensor: Tensor) -> None:
        if tensor.nbytes > _MAX_CONSTANT_BYTES:
            fill_external(proto, {"location": "left out"})
        elif tensor.is_external:
            proto.raw_data = tensor.raw().tobytes()
        else:
            super().fill_elements(proto, tensor)


class _Skeleton(_ConstantEncoder):
    """A model without large weights, whose only types between nodes are those given.

    Operators with a rule get a domain that ONNX does not know: the rule replaces ONNX's inference, which crashes on
    some of them.
    """

    def __init__(self, given: Mapping[Graph, GraphTypes], rules: ShapeRules) -> None:
        self._given = given
        self._rules = rules

    def model(self, model: Model) -> onnx.ModelProto:
        proto = super().model(model)
        proto.opset_import.append(onnx.helper.make_opsetid(_RULES_DOMAIN, 1))
        return proto

    def node(self, node: Node) -> onnx.NodeProto:
        proto = super().node(node)
        if self._rules.find(node) is not None:
            proto.domain = _RULES_DOMAIN
        return proto

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


def _check_equation(node: Node) -> None:
    """ONNX's inference never ends on some malformed Einsum equations, so they do not reach it."""
    equation = node.attribute("equation")
    if not isinstance(equation, str) or not _EQUATION.fullmatch(equation):
        raise GraphError(
            f"Einsum node {node.name!r} has the equation {equation!r:.80}",
            "an equation is made of letters, commas, at most one '...' per term, and one '->'",
            "export the model again",
        )


def _small_constant(graph: Graph, name: str) -> Tensor | None:
    tensor = graph.constant_tensor(name) if name else None
    return None if tensor is None or tensor.nbytes > _MAX_CONSTANT_BYTES else tensor


def _same(first: GraphTypes, second: GraphTypes) -> bool:
    return first.keys() == second.keys() and all(same_type(first[name], second[name]) for name in first)

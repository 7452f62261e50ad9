"""Shape inference: ONNX's own for most operators, and our rules for the others, with merged results.

ONNX's inference and our rules alternate. After each pass of ONNX's inference over the whole model, one walk over the
nodes evaluates shape computations, applies the rules, and propagates their results from node to node. The next pass
starts with the results that cannot be propagated (into and out of subgraphs and functions). One pass is enough for
nearly every model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import onnx

from ..onnx.ir import Graph, Node, OnnxModel, OnnxTensor, Value
from ..onnx.types import ArrayTypes, Dim, ShapeValue, Type
from ..ops.shape_rules import NodeTypes, ShapeRule, UnknownType, find_shape_rule
from .onnx_inference import MAX_CONSTANT_BYTES, GraphTypes, SingleInference, infer_model, infer_single
from .shape_values import computed_value, constant_value, is_shape_computation

_MAX_EXTENT = 2**63 - 1
# Each round propagates types through one more level of subgraphs or functions that contain operators with rules.
_MAX_ROUNDS = 8


def infer_shapes(model: OnnxModel) -> None:
    """Fill `values` of every graph with types, and complete the types of graph outputs, in place.

    Inferred types replace the types that the model declares for values between nodes, except for outputs of unknown
    operators. Declared symbols and sizes are retained where the inferred dimension is unknown. Declared types of graph
    outputs are never replaced.

    Raises:
        GraphError: ONNX's inference rejects the model, or an attribute has the wrong type for a rule.
    """
    inference = _Inference(model)
    for _ in range(_MAX_ROUNDS):
        inference.run_onnx()
        if not inference.run_rules():
            break
    inference.store()


def infer_node(node: Node, version: int, types: Mapping[str, Type], constants: Mapping[str, OnnxTensor]) -> GraphTypes:
    """Return the types of one node's outputs by name; empty if they cannot be inferred, or for nodes with subgraphs.

    Args:
        version: version of the node's operator set.
        types: type of each input.
        constants: constant inputs, for shapes and axes; large constants are ignored.
    """
    rule = find_shape_rule(*node.key)
    if rule is None:
        return infer_single(node, version, types, constants)
    small = [_small(constants.get(name)) for name in node.inputs]
    inferred = _apply(rule, node, [_possible(types.get(name)) for name in node.inputs], small, [None] * len(small))
    return {name: known for name, known in inferred.items() if known is not None}


class _Inference:
    """The types and shape values found so far, per graph, and the two methods that find further types and values."""

    def __init__(self, model: OnnxModel) -> None:
        self._model = model
        self._graphs = list(model.graphs())
        self._given_types = {graph: self._types_of_unknown_operators(graph) for graph in self._graphs}
        self._inferred: dict[Graph, GraphTypes] = {graph: {} for graph in self._graphs}
        self._values: dict[Graph, dict[str, ShapeValue]] = {graph: {} for graph in self._graphs}
        self._changed: set[str] = set()
        self._left_open = False
        self._infer_single = SingleInference()
        self._has_rules = any(self._rule(node) for graph in self._graphs for node in graph.nodes)

    def run_onnx(self) -> None:
        """Run one pass of ONNX's inference over the whole model, starting from the rules' results."""
        types_of = infer_model(self._model, self._given_types, lambda node: self._rule(node) is not None)
        for graph, types in types_of.items():
            self._inferred[graph].update(types)

    def run_rules(self) -> bool:
        """Walk over the nodes, outer graphs first; return True if a new result could not be propagated."""
        if not self._has_rules:
            return False
        self._changed.clear()
        self._left_open = False
        for graph in self._graphs:
            changed_outside = len(self._changed)
            for node in graph.nodes:
                self._visit(graph, node)
            # Results in a subgraph or function are propagated to the graph that uses it in the next pass.
            if graph is not self._model.graph and len(self._changed) > changed_outside:
                self._left_open = True
        return self._left_open

    def store(self) -> None:
        """Write the results into the graphs."""
        for graph in self._graphs:
            types = self._inferred[graph] | self._given_types[graph]
            produced = {name for node in graph.nodes for name in node.outputs if name}
            outputs = {value.name for value in graph.outputs}
            for name, known in types.items():
                if name not in produced or name in outputs:
                    continue
                declared = graph.values.setdefault(name, Value(name))
                declared.type = merged(known, declared.type)
            for value in graph.outputs:
                if value.name in types:
                    value.type = completed(value.type, types[value.name])

    def _rule(self, node: Node) -> ShapeRule | None:
        return None if self._model.function(node) is not None else find_shape_rule(*node.key)

    def _is_known(self, node: Node) -> bool:
        domain, op_type = node.key
        return bool(self._model.function(node) or find_shape_rule(*node.key) or onnx.defs.has(op_type, domain))

    def _types_of_unknown_operators(self, graph: Graph) -> GraphTypes:
        """Return declared types that cannot be inferred: outputs of operators without a schema, rule or function."""
        declared = {value.name: value.type for value in (*graph.outputs, *graph.values.values())}
        return {
            name: known
            for node in graph.nodes
            if not self._is_known(node)
            for name in node.outputs
            if (known := declared.get(name)) is not None
        }

    def _visit(self, graph: Graph, node: Node) -> None:
        """Apply a node's rule or, if there is none, propagate new types through the node; evaluate shape values."""
        rule = self._rule(node)
        follows_values = rule is not None or is_shape_computation(node)
        if not follows_values and self._changed.isdisjoint(node.inputs):
            return
        types = [_possible(self._type_of(graph, name)) for name in node.inputs]
        values = [self._value_of(graph, name) for name in node.inputs] if follows_values else []
        target, results = self._given_types[graph], dict[str, Type | None]()
        if rule is not None:
            small = [_small(graph.constant_tensor(name) if name else None) for name in node.inputs]
            results = _apply(rule, node, types, small, values)
        elif not self._changed.isdisjoint(node.inputs):
            target, results = self._inferred[graph], {**self._through(graph, node, types)}
            self._left_open |= not results
        for name, known in results.items():
            if known is not None and target.get(name) != known:
                target[name] = known
                self._changed.add(name)
        version = self._model.opset_version(node.domain) or 1
        value = computed_value(node, version, values, types) if follows_values else None
        if value is not None and node.output(0):
            self._values[graph][node.outputs[0]] = value

    def _through(self, graph: Graph, node: Node, types: Sequence[Type | None]) -> GraphTypes:
        """Return the types that ONNX infers for one node; empty if an input is unknown."""
        version = self._model.opset_version(node.domain)
        known = {name: found for name, found in zip(node.inputs, types, strict=True) if name and found is not None}
        if version is None or self._model.function(node) or any(name and name not in known for name in node.inputs):
            return {}
        constants = {name: tensor for name in known if (tensor := graph.constant_tensor(name)) is not None}
        return self._infer_single(node, version, known, constants)

    def _type_of(self, graph: Graph, name: str) -> Type | None:
        """Return a value's inferred type, or the declared type of an input or constant, including outer graphs."""
        scope: Graph | None = graph
        while name and scope is not None:
            known = self._given_types[scope].get(name) or self._inferred[scope].get(name)
            if known is not None:
                return known
            if scope.producer(name) is not None:
                return None
            if scope.defines(name):
                return scope.type_of(name)
            scope = scope.outer
        return None

    def _value_of(self, graph: Graph, name: str) -> ShapeValue | None:
        """Return the dimensions that a value contains, or None; the value may belong to an outer graph."""
        scope: Graph | None = graph
        while name and scope is not None:
            if name in self._values[scope]:
                return self._values[scope][name]
            if scope.defines(name):
                tensor = _small(scope.constant_tensor(name))
                return None if tensor is None else constant_value(tensor.array())
            scope = scope.outer
        return None


def _apply(
    rule: ShapeRule,
    node: Node,
    types: Sequence[Type | None],
    constants: Sequence[OnnxTensor | None],
    values: Sequence[ShapeValue | None],
) -> dict[str, Type | None]:
    arrays = [None if tensor is None else tensor.array() for tensor in constants]
    known = [value or constant_value(array) for value, array in zip(values, arrays, strict=True)]
    try:
        results = rule(NodeTypes(node, types, arrays, known))
    except UnknownType:
        return {}
    return {name: _possible(result) for name, result in zip(node.outputs, results, strict=False) if name}


def _possible(known: Type | None) -> Type | None:
    """Return a type in which numbers that are not valid sizes are replaced by None, whether declared or inferred."""
    if not isinstance(known, ArrayTypes) or known.shape is None:
        return known
    if all(isinstance(dim, str | None) or _is_extent(dim) for dim in known.shape):
        return known
    return replace(known, shape=tuple(dim if isinstance(dim, str) or _is_extent(dim) else None for dim in known.shape))


def _is_extent(dim: object) -> bool:
    return isinstance(dim, int) and 0 <= dim <= _MAX_EXTENT


def _small(tensor: OnnxTensor | None) -> OnnxTensor | None:
    return None if tensor is None or tensor.nbytes > MAX_CONSTANT_BYTES or tensor.segment is not None else tensor


def merged(inferred: Type, declared: Type | None) -> Type:
    """Return the inferred type, with declared sizes and symbols where a dimension is unknown."""
    if (
        not isinstance(inferred, ArrayTypes)
        or not isinstance(declared, ArrayTypes)
        or type(inferred) is not type(declared)
    ):
        return inferred
    if declared.dtype is not inferred.dtype or declared.shape is None:
        return inferred
    if inferred.shape is None:
        return declared
    if len(inferred.shape) != len(declared.shape):
        return inferred
    shape = tuple(_merged_dim(new, old) for new, old in zip(inferred.shape, declared.shape, strict=True))
    return replace(declared, shape=shape)


def completed(declared: Type | None, inferred: Type) -> Type:
    """Return the declared type, with inferred sizes and symbols where a dimension is unknown."""
    if declared is None:
        return inferred
    if not isinstance(inferred, ArrayTypes) or not isinstance(declared, ArrayTypes) or inferred.shape is None:
        return declared
    if declared.shape is None:
        return replace(declared, shape=inferred.shape)
    if len(inferred.shape) != len(declared.shape):
        return declared
    shape = tuple(new if old is None else old for new, old in zip(inferred.shape, declared.shape, strict=True))
    return replace(declared, shape=shape)


def _merged_dim(inferred: Dim, declared: Dim) -> Dim:
    """Prefer a number to a symbol, and a symbol to None; between two numbers or two symbols, the inferred one wins."""
    if inferred is None or (isinstance(inferred, str) and isinstance(declared, int)):
        return declared
    return inferred

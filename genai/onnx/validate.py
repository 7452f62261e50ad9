"""Checks that a model's graphs are valid: each name is defined once and before use, without cycles or recursion."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable
from graphlib import CycleError, TopologicalSorter
from typing import TypeAlias

from ..errors import GraphError, malformed
from .ir import Function, FunctionKey, Graph, Node, OnnxModel, canonical_domain

_Scope: TypeAlias = ChainMap[str, None]
"""The names visible in a graph: its own names, then those of the enclosing graphs."""

# The maximum number of nodes that expanding functions may add. Real models have far fewer; a graph of this size takes
# seconds to compile and run.
MAX_ADDED_NODES = 200_000


def check_model(model: OnnxModel) -> None:
    """Check every graph and function of a model, and sort the nodes of graphs that are not in topological order.

    Raises:
        GraphError: a name is undefined or defined twice, or there is a cycle or a recursive function.
    """
    _check_opset_imports("the model", model.opset_imports)
    _check_graph(model.graph, _Scope())
    for function in model.functions.values():
        _check_opset_imports(f"function {function.name!r}", function.opset_imports)
        _check_graph(function.body, _Scope())
    if not model.functions:
        return
    # Functions that call functions multiply the number of nodes, so nodes are counted before functions are expanded.
    sizes: dict[FunctionKey, int] = {}
    for key in _check_recursion(model.functions):
        sizes[key] = _expanded(model.functions[key].body, sizes)
    if _expanded(model.graph, sizes) > written_nodes(model) + MAX_ADDED_NODES:
        raise too_many_nodes()


def written_nodes(model: OnnxModel) -> int:
    """Return the number of nodes in the model as written, with each function counted once."""
    bodies = [model.graph, *(function.body for function in model.functions.values())]
    return sum(len(inner.nodes) for body in bodies for inner in body.nested())


def _check_opset_imports(owner: str, imports: dict[str, int]) -> None:
    versions: dict[str, int] = {}
    for domain, version in imports.items():
        if versions.setdefault(canonical_domain(domain), version) != version:
            raise GraphError(
                f"{owner} imports two versions of ONNX's own operators, {imports}",
                "the domains '' and 'ai.onnx' are the same",
                "export the model again with one version per domain",
            )


def _check_graph(graph: Graph, outer: _Scope) -> set[str]:
    """Check one graph; return the names that it captures from outer graphs."""
    inputs = _input_names(graph)
    defined = inputs | _produced_names(graph, inputs)
    scope = outer.new_child(dict.fromkeys(defined))
    placed, captured, in_order = set(inputs), set[str](), True
    for node in graph.nodes:
        for name in _checked_uses(node, graph, scope):
            if name not in defined:
                captured.add(name)
            elif name not in placed:
                in_order = False
        placed.update(node.outputs)
    for value in graph.outputs:
        if value.name not in scope:
            raise _undefined(value.name, "an output", graph)
        if value.name not in defined:
            captured.add(value.name)
    if not in_order:
        graph.topological_sort()
    return captured


def _checked_uses(node: Node, graph: Graph, scope: _Scope) -> Iterable[str]:
    if not node.op_type:
        raise GraphError(
            f"a node of graph {graph.name!r} has no operator ({node.inputs} -> {node.outputs})",
            "every node needs an op_type; the file is damaged or is not an ONNX model",
            "export or download the model again",
        )
    for name in node.inputs:
        if name and name not in scope:
            raise _undefined(name, f"an input of {node.op_type} node {node.name!r}", graph)
    uses = {name for name in node.inputs if name}
    for subgraph in node.subgraphs():
        uses |= _check_graph(subgraph, scope)
    return uses


def _input_names(graph: Graph) -> set[str]:
    names: set[str] = set()
    for value in graph.inputs:
        if not value.name or value.name in names:
            raise _redefined(value.name, "inputs", graph)
        names.add(value.name)
    for sparse in graph.sparse_initializers:
        if sparse in graph.initializers:
            raise _redefined(sparse, "initializers", graph)
    return names.union(graph.initializers, graph.sparse_initializers)


def _produced_names(graph: Graph, inputs: set[str]) -> set[str]:
    names: set[str] = set()
    for node in graph.nodes:
        for name in node.outputs:
            if name and (name in names or name in inputs):
                raise _redefined(name, "values", graph)
            names.add(name)
    names.discard("")
    return names


def _check_recursion(functions: dict[FunctionKey, Function]) -> list[FunctionKey]:
    """Return the functions, each after the functions that it calls. Raises GraphError if a function calls itself."""
    try:
        called = {key: functions.keys() & set(_keys(item.body)) for key, item in functions.items()}
        return list(TopologicalSorter(called).static_order())
    except CycleError as error:
        raise malformed(
            f"function {'::'.join(filter(None, error.args[1][0]))!r} calls itself",
            "ONNX functions must not be recursive, directly or through other functions",
        ) from None


def too_many_nodes() -> GraphError:
    """Return the error for functions that expand to too many nodes."""
    return GraphError(
        f"after its functions are expanded, the model has more than {MAX_ADDED_NODES} nodes",
        "functions that call functions multiply the number of nodes",
        "export the model again; do not use a model that you do not trust",
    )


def _expanded(graph: Graph, sizes: dict[FunctionKey, int]) -> int:
    return sum(1 + sizes.get(key, 0) for key in _keys(graph))


def _keys(graph: Graph) -> list[FunctionKey]:
    """Return the function keys that the nodes of a graph may call."""
    return [(*node.key, node.overload) for inner in graph.nested() for node in inner.nodes]


def _undefined(name: str, role: str, graph: Graph) -> GraphError:
    return GraphError(
        f"value {name!r}, {role}, is not defined in graph {graph.name!r} or an enclosing graph",
        "a value must be an input, an initializer or the output of a node",
        "export the model again; the file is damaged or incomplete",
    )


def _redefined(name: str, kind: str, graph: Graph) -> GraphError:
    return malformed(
        f"two {kind} of graph {graph.name!r} have the name {name!r}, or a name is empty", "each value is defined once"
    )

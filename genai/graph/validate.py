"""Checks that what was read is a graph at all: names defined once and before use, no cycles, no recursion."""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import GraphError
from .ir import Function, FunctionKey, Graph, Model, Node, canonical_domain


class _Scope:
    """Names visible in a graph: its own, then those of the graphs around it."""

    def __init__(self, names: set[str], outer: _Scope | None) -> None:
        self.names = names
        self.outer = outer

    def __contains__(self, name: str) -> bool:
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.names:
                return True
            scope = scope.outer
        return False


def check_model(model: Model) -> None:
    """Check every graph and function of a model, and put nodes that come too early into order.

    Raises:
        GraphError: for a name that is undefined or defined twice, a cycle, or a function that calls itself.
    """
    _check_opset_imports("the model", model.opset_imports)
    _check_graph(model.graph, None)
    for function in model.functions.values():
        _check_opset_imports(f"function {function.name!r}", function.opset_imports)
        _check_graph(function.body, None)
    _check_recursion(model.functions)


def _check_opset_imports(what: str, imports: dict[str, int]) -> None:
    versions: dict[str, int] = {}
    for domain, version in imports.items():
        if versions.setdefault(canonical_domain(domain), version) != version:
            raise GraphError(
                f"{what} imports ONNX's own operators in two versions, {imports}",
                "the domains '' and 'ai.onnx' are the same",
                "export the model again with one version per domain",
            )


def _check_graph(graph: Graph, outer: _Scope | None) -> set[str]:
    """Check one graph; returns the names that it takes from outer ones."""
    given = _given_names(graph)
    scope = _Scope(given | _made_names(graph, given), outer)
    placed, captured, in_order = set(given), set[str](), True
    for node in graph.nodes:
        for name in _checked_uses(node, graph, scope):
            if name not in scope.names:
                captured.add(name)
            elif name not in placed:
                in_order = False
        placed.update(node.outputs)
    for value in graph.outputs:
        if value.name not in scope:
            raise _undefined(value.name, "an output", graph)
        if value.name not in scope.names:
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


def _given_names(graph: Graph) -> set[str]:
    names: set[str] = set()
    for value in graph.inputs:
        if not value.name or value.name in names:
            raise _redefined(value.name, "inputs", graph)
        names.add(value.name)
    for sparse in graph.sparse_initializers:
        if sparse in graph.initializers:
            raise _redefined(sparse, "initializers", graph)
    return names.union(graph.initializers, graph.sparse_initializers)


def _made_names(graph: Graph, given: set[str]) -> set[str]:
    made: set[str] = set()
    for node in graph.nodes:
        for name in node.outputs:
            if name and (name in made or name in given):
                raise _redefined(name, "values", graph)
            made.add(name)
    made.discard("")
    return made


def _check_recursion(functions: dict[FunctionKey, Function]) -> None:
    """Depth-first search over calls, without recursion of our own."""
    calls = {key: _called(function.body, functions) for key, function in functions.items()}
    done: set[FunctionKey] = set()
    for first in calls:
        path: list[tuple[FunctionKey, list[FunctionKey]]] = [(first, list(calls[first]))]
        active = {first}
        while path:
            key, left = path[-1]
            following = left.pop() if left else None
            if following is None:
                active.discard(key)
                done.add(key)
                path.pop()
            elif following in active:
                raise GraphError(
                    f"function {'::'.join(filter(None, following))!r} calls itself",
                    "ONNX functions may not be recursive, directly or through others",
                    "export the model again",
                )
            elif following not in done:
                active.add(following)
                path.append((following, list(calls[following])))


def _called(graph: Graph, functions: dict[FunctionKey, Function]) -> set[FunctionKey]:
    keys = {(*node.key, node.overload) for inner in graph.nested() for node in inner.nodes}
    return keys & functions.keys()


def _undefined(name: str, role: str, graph: Graph) -> GraphError:
    return GraphError(
        f"value {name!r}, {role}, is defined nowhere in graph {graph.name!r} or around it",
        "a value must be an input, an initializer or the output of a node",
        "export the model again; the file is damaged or incomplete",
    )


def _redefined(name: str, what: str, graph: Graph) -> GraphError:
    return GraphError(
        f"two {what} of graph {graph.name!r} have the name {name!r}, or one has none",
        "each value is defined once",
        "export the model again",
    )

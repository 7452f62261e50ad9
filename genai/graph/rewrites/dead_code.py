"""Removes what no output needs: nodes, initializers, value types, and functions that nothing calls."""

from __future__ import annotations

from ..ir import Graph, Model
from ..uses import free_names, used_names
from .base import Level


class RemoveDeadCode:
    """Nodes without a wanted output go, then the constants, types and functions that only they used.

    Inputs stay, also unused ones, since callers give them; so do initializers that are an input's default.
    """

    name = "remove_dead_code"
    level = Level.BASIC

    def apply(self, model: Model) -> int:
        needed = _names_needed_for_training(model)
        # Inner graphs first: what their dead nodes capture is then no longer needed outside.
        graphs = list(model.graphs(functions=True))
        changes = sum(_clean(graph, needed) for graph in reversed(graphs))
        return changes + _remove_uncalled_functions(model)


def _clean(graph: Graph, needed_elsewhere: set[str]) -> int:
    needed = needed_elsewhere | {value.name for value in graph.outputs}
    dead = []
    for node in reversed(graph.nodes):
        if any(name in needed for name in node.outputs if name):
            needed |= used_names(node)
        else:
            dead.append(node)
    graph.remove_nodes(dead)
    return len(dead) + _remove_unused_constants(graph, needed)


def _remove_unused_constants(graph: Graph, needed: set[str]) -> int:
    """Remove initializers, then the types and annotations of values that are no more."""
    kept = needed | {value.name for value in graph.inputs}
    kept.update(name for node in graph.nodes for name in node.outputs)
    annotations = [a for a in graph.quantization_annotation if a.tensor_name in kept]
    for annotation in annotations:
        kept.update(annotation.parameters.values())
    unused = [name for name in (*graph.initializers, *graph.sparse_initializers) if name not in kept]
    for name in unused:
        graph.remove_initializer(name)
    for name in graph.values.keys() - kept:
        del graph.values[name]
    graph.quantization_annotation[:] = annotations
    return len(unused)


def _names_needed_for_training(model: Model) -> set[str]:
    needed: set[str] = set()
    for info in model.training_info:
        for graph in filter(None, (info.initialization, info.algorithm)):
            needed |= free_names(graph)
        for pair in (*info.initialization_binding, *info.update_binding):
            needed.update(pair)
    return needed


def _remove_uncalled_functions(model: Model) -> int:
    called = set()
    waiting = [model.graph, *(g for info in model.training_info for g in (info.initialization, info.algorithm) if g)]
    while waiting:
        for graph in waiting.pop().nested():
            for node in graph.nodes:
                function = model.function(node)
                if function is not None and function.key not in called:
                    called.add(function.key)
                    waiting.append(function.body)
    uncalled = model.functions.keys() - called
    for key in uncalled:
        del model.functions[key]
    return len(uncalled)

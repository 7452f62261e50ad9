"""Simplifies graphs without new operators: removes no-ops, duplicates and unused nodes."""

from __future__ import annotations

from typing import Any

from ..onnx.ir import Attribute, DataType, Graph, Node, OnnxModel, OnnxTensor
from ..onnx.node import NEW_EACH_TIME
from ..onnx.types import TensorType
from ..onnx.uses import free_names, used_names
from .base import Level, graph_rule, made_by, model_rule, node_rule, pass_through


@graph_rule(Level.BASIC, functions=True)
def remove_identities(model: OnnxModel, graph: Graph) -> int:
    """Identity(x), Cast(x) to x's own type, Transpose(x) that moves no axis, Dropout(x) outside training -> x."""
    return sum(changes_nothing(graph, node, model) and pass_through(graph, node) for node in list(graph.nodes))


def changes_nothing(graph: Graph, node: Node, model: OnnxModel) -> bool:
    """Return True if a node's first output always equals its first input."""
    if model.function(node) is not None or any(a.ref_attr_name for a in node.attributes.values()):
        return False
    match node.key:
        case ("", "Identity"):
            return True
        case ("", "Cast"):
            known = graph.type_of(node.input(0))
            return isinstance(known, TensorType) and node.attribute("to") == known.dtype != DataType.UNDEFINED
        case ("", "Transpose"):
            return _moves_no_axis(graph, node)
        case ("", "Dropout"):
            return _is_inference(graph, node, model.opset_version() or 1)
    return False


def _moves_no_axis(graph: Graph, node: Node) -> bool:
    permutation = node.attribute("perm")
    if permutation is not None:
        return bool(permutation == sorted(permutation))
    known = graph.type_of(node.input(0))
    return isinstance(known, TensorType) and known.rank is not None and known.rank <= 1


def _is_inference(graph: Graph, node: Node, version: int) -> bool:
    """Return True if a Dropout is in inference mode.

    Before operator set 7, `is_test` determines the mode; before 12, the mode is always inference; then `training_mode`
    determines it.
    """
    if version < 7:
        return bool(node.attribute("is_test", 0))
    if version < 12 or not node.input(2):
        return True
    training = graph.constant(node.input(2))
    return training is not None and not training.any()


@node_rule(Level.BASIC, ("", "Transpose"))
def merge_transposes(graph: Graph, node: Node) -> bool:
    """Transpose(Transpose(x, p), q) -> Transpose(x, p then q). If no axis moves, remove_identities removes it."""
    inner = made_by(graph, node.input(0), "Transpose")
    if inner is None:
        return False
    first, second = inner.attribute("perm"), node.attribute("perm")
    if first is None or second is None or sorted(first) != sorted(second):
        return False
    node.set_attribute("perm", [int(first[axis]) for axis in second])
    node.inputs[:] = list(inner.inputs)
    graph.update(node)
    return True


# Larger constants and lists are not compared, because equal pairs are rare and comparing takes time.
_MAX_COMPARED_BYTES = 1024
_MAX_COMPARED_ITEMS = 128


@graph_rule(Level.BASIC)
def share_subexpressions(model: OnnxModel, graph: Graph) -> int:
    """Keep only the first of several nodes with equal operators, attributes and inputs; merge small constants too."""
    changes = _share_constants(graph)
    seen: dict[Any, Node] = {}
    removed = []
    visible = {value.name for value in graph.outputs}
    for node in list(graph.nodes):
        key = None if not visible.isdisjoint(node.outputs) else _key(model, node)
        if key is None:
            continue
        first = seen.setdefault(key, node)
        if first is node or len(first.outputs) != len(node.outputs):
            continue
        if any(bool(a) != bool(b) for a, b in zip(first.outputs, node.outputs, strict=True)):
            continue
        for old, new in zip(node.outputs, first.outputs, strict=True):
            if old:
                graph.replace_uses(old, new)
                graph.values.pop(old, None)
        removed.append(node)
    graph.remove_nodes(removed)
    return changes + len(removed)


def _share_constants(graph: Graph) -> int:
    seen: dict[Any, str] = {}
    changes = 0
    visible = {value.name for value in (*graph.inputs, *graph.outputs)}
    for name, tensor in list(graph.initializers.items()):
        if name in visible or not graph.consumers(name):
            continue
        key = _tensor_key(tensor)
        first = name if key is None else seen.setdefault(key, name)
        if first != name:
            graph.replace_uses(name, first)
            graph.remove_initializer(name)
            changes += 1
    return changes


def _key(model: OnnxModel, node: Node) -> Any:
    """Return a key that is equal for nodes that compute the same result; None for nodes that cannot be merged."""
    if node.op_type in NEW_EACH_TIME or model.function(node) is not None or node.subgraphs():
        return None
    attributes = tuple(sorted((name, _attribute_key(item)) for name, item in node.attributes.items()))
    if any(key is None for _, key in attributes):
        return None
    return node.key, node.overload, tuple(node.inputs), attributes


def _attribute_key(attribute: Attribute) -> Any:
    value = attribute.value
    if attribute.ref_attr_name:
        return None
    if isinstance(value, OnnxTensor):
        return _tensor_key(value)
    if isinstance(value, list):
        if len(value) > _MAX_COMPARED_ITEMS:
            return None
        return repr(value) if all(isinstance(item, int | float | bytes) for item in value) else None
    return repr(value) if isinstance(value, int | float | bytes) else None


def _tensor_key(tensor: OnnxTensor) -> Any:
    if tensor.nbytes > _MAX_COMPARED_BYTES or tensor.dtype.name == "STRING" or tensor.segment is not None:
        return None
    return tensor.dtype, tensor.shape, tensor.raw().tobytes()


@model_rule(Level.BASIC)
def remove_dead_code(model: OnnxModel) -> int:
    """Remove nodes without a used output, then the constants, types and functions that only those nodes used.

    All inputs are retained, because callers pass them, and so are initializers that are the default of an input.
    """
    needed: set[str] = set()
    for info in model.training_info:
        for graph in filter(None, (info.initialization, info.algorithm)):
            needed |= free_names(graph)
        for pair in (*info.initialization_binding, *info.update_binding):
            needed.update(pair)
    # Inner graphs are cleaned first, because outer graphs then need not keep what only dead inner nodes captured.
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
    """Remove unused initializers, then the types and annotations of values that no longer exist."""
    used = needed | {value.name for value in graph.inputs}
    used.update(name for node in graph.nodes for name in node.outputs)
    annotations = [a for a in graph.quantization_annotation if a.tensor_name in used]
    for annotation in annotations:
        used.update(annotation.parameters.values())
    unused = [name for name in (*graph.initializers, *graph.sparse_initializers) if name not in used]
    for name in unused:
        graph.remove_initializer(name)
    for name in graph.values.keys() - used:
        del graph.values[name]
    graph.quantization_annotation[:] = annotations
    return len(unused)


def _remove_uncalled_functions(model: OnnxModel) -> int:
    called = {key for key, function in model.functions.items() if function.known}
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

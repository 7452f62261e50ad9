"""Computes float16 and bfloat16 graphs in float32: only inputs, outputs and explicit casts keep their type."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.common.host_memory import mapped_array
from genai.kernels.cpu.arrays.halves import from_halves
from genai.ops.registry import find_kernel

from ..onnx.ir import Attribute, Graph, Node, OnnxModel, OnnxTensor, Value, make_node
from ..onnx.node import ML, MS, OURS
from ..onnx.types import DataType, TensorType, Type
from .base import Level, model_rule

_NARROW = (DataType.FLOAT16, DataType.BFLOAT16)
_DOMAINS = ("", MS, OURS, ML)
# Attributes that set the element type of a node's results.
_TYPES = ("to", "dtype", "output_dtype")
# Operators that the rule leaves, so that it changes nothing when it runs again.
_UNCHANGED = (("", "Cast"), ("", "Constant"))
# Number of elements from which the compiled conversion, ten times as fast as NumPy's, outweighs its call.
_LEAST_COMPILED = 1 << 14
# Operators whose results depend on the bits of their inputs.
_READS_BITS = frozenset({"BitCast"})


@model_rule(Level.ALL)
def compute_halves_in_float32(model: OnnxModel) -> int:
    """Convert 16-bit floats to float32 inside a graph, as onnxruntime does on CPUs.

    Results are rounded to 16 bits at the graph's outputs and where the graph casts explicitly, not after every node.
    The graph is unchanged if a part of it cannot be converted: functions, sequences of 16-bit floats, inputs with a
    default, and operators of other domains.
    """
    graphs = list(model.graphs())
    if not any(_is_narrow(known) for graph in graphs for known in _all_types(graph)):
        return 0
    if not any(_computes_narrow(graph, node) for graph in graphs for node in graph.nodes):
        return 0
    if not _is_convertible(model, graphs):
        return 0
    narrow_inputs = [
        value for value in model.graph.inputs if _is_narrow(value.type) and not _is_constant(graphs[0], value)
    ]
    narrow_outputs = [value for value in model.graph.outputs if _is_narrow(value.type)]
    for graph in graphs:
        _widen_types(graph, is_main=graph is model.graph)
        _widen_constants(graph)
    for graph in graphs:
        for node in list(graph.nodes):
            _cast_explicit(graph, node)
    for value in narrow_outputs:
        _cast_output(model.graph, value)
    for value in narrow_inputs:
        _cast_input(model.graph, value)
    for graph in graphs:
        graph.invalidate()
    return 1


def _is_narrow(known: Type | None) -> bool:
    return isinstance(known, TensorType) and known.dtype in _NARROW


def _all_types(graph: Graph) -> Iterator[Type | None]:
    yield from (value.type for value in (*graph.inputs, *graph.outputs, *graph.values.values()))
    yield from (TensorType(tensor.dtype) for tensor in graph.initializers.values())


def _computes_narrow(graph: Graph, node: Node) -> bool:
    """Return True if a node other than a Cast or a Constant reads or writes 16-bit floats."""
    if node.key in _UNCHANGED:
        return False
    return any(_is_narrow(graph.type_of(name)) for name in (*node.inputs, *node.outputs))


def _is_constant(graph: Graph, value: Value) -> bool:
    return value.name in graph.initializers


def _is_convertible(model: OnnxModel, graphs: list[Graph]) -> bool:
    if any(not function.known for function in model.functions.values()):
        return False
    main = model.graph
    if any(_is_narrow(value.type) and main.producer(value.name) is None for value in main.outputs):
        return False
    if main.overridable_initializers and any(_is_narrow(v.type) and _is_constant(main, v) for v in main.inputs):
        return False
    versions = {domain: model.opset_version(domain) or 1 for domain in _DOMAINS}
    for graph in graphs:
        if any("float16" in str(known) for known in _all_types(graph) if not isinstance(known, TensorType | None)):
            return False
        if any(sparse.values.dtype in _NARROW for sparse in graph.sparse_initializers.values()):
            return False
        for node in graph.nodes:
            domain, op_type = node.key
            entry = find_kernel(domain, op_type, versions[domain]) if domain in _DOMAINS else None
            if domain not in _DOMAINS or op_type in _READS_BITS or (entry is not None and entry.source != "ours"):
                return False
    return True


def _widened(known: Type | None) -> Type | None:
    return replace(known, dtype=DataType.FLOAT) if isinstance(known, TensorType) and _is_narrow(known) else known


def _widen_types(graph: Graph, *, is_main: bool) -> None:
    inner = [value for value in graph.inputs if not is_main or _is_constant(graph, value)]
    for value in (*inner, *(() if is_main else graph.outputs), *graph.values.values()):
        value.type = _widened(value.type)


def _widen_constants(graph: Graph) -> None:
    # Only names are listed, so that each narrow tensor is freed before the next one is converted.
    for name in [name for name, tensor in graph.initializers.items() if tensor.dtype in _NARROW]:
        graph.add_initializer(OnnxTensor.from_array(name, _as_float32(graph.initializers[name].array())))
    for node in graph.nodes:
        for name, attribute in node.attributes.items():
            value = attribute.value
            if isinstance(value, OnnxTensor) and value.dtype in _NARROW:
                wide = OnnxTensor.from_array(value.name, value.array().astype(np.float32))
                node.attributes[name] = Attribute.of(name, wide)


def _as_float32(narrow: NDArray[Any]) -> NDArray[np.float32]:
    """Convert an array into a separate mapping, which is returned to the system when the array has been packed."""
    wide: NDArray[np.float32] = mapped_array(4 * narrow.size).view(np.float32).reshape(narrow.shape)
    if narrow.dtype == np.float16 and narrow.size >= _LEAST_COMPILED:
        from_halves(narrow, out=wide)
    else:
        wide[...] = narrow
    return wide


def _cast_explicit(graph: Graph, node: Node) -> None:
    """Cast the results of a node that its attributes declare as 16-bit floats to float32."""
    narrow = next((DataType(value) for name in _TYPES if (value := node.attribute(name)) in _NARROW), None)
    if narrow is None:
        return
    for index, name in enumerate(node.outputs):
        if name:
            inner = graph.fresh_name(f"{name}/{narrow.name.lower()}")
            node.outputs[index] = inner
            graph.update(node)
            cast = make_node("Cast", [inner], [name], name=inner, to=int(DataType.FLOAT))
            graph.nodes.insert(graph.nodes.index(node) + 1, cast)
            graph.invalidate()


def _cast_output(graph: Graph, value: Value) -> None:
    """Compute an output in float32 and convert it at the end."""
    producer = graph.producer(value.name)
    assert producer is not None and isinstance(value.type, TensorType)
    inner = graph.fresh_name(f"{value.name}/float32")
    producer.outputs[:] = [inner if name == value.name else name for name in producer.outputs]
    graph.update(producer)
    graph.replace_uses(value.name, inner)
    graph.values[inner] = replace(value, name=inner, type=_widened(value.type))
    graph.append(make_node("Cast", [inner], [value.name], name=inner, to=int(value.type.dtype)))


def _cast_input(graph: Graph, value: Value) -> None:
    inner = graph.fresh_name(f"{value.name}/float32")
    graph.replace_uses(value.name, inner)
    graph.values[inner] = replace(value, name=inner, type=_widened(value.type))
    cast = make_node("Cast", [value.name], [inner], name=inner, to=int(DataType.FLOAT))
    graph.insert_before(graph.nodes[0], cast)

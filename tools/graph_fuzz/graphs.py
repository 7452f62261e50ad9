"""Random graphs, built node by node. onnxruntime computes each new node, and later nodes may use the results."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from .operators import OPERATORS, Draw, Drawn
from .values import Generator, array, extents, pick

# Versions of ONNX's operator set; onnxruntime does not run older versions.
VERSIONS = range(7, 27)
CPU = "CPUExecutionProvider"
_KINDS = {"f": "f", "i": "i", "u": "i", "b": "b", "O": "s"}


@dataclass
class Graph:
    """A graph under construction.

    Attributes:
        version: version of ONNX's operator set.
        only_constants: True if all inputs of nodes are constants.
        operators: names of the operators to draw.
        nodes: the nodes added so far.
        values: inputs, constants and results, by name.
        constants: names of constants.
        fed: names of inputs.
        made: names of results.
    """

    version: int
    only_constants: bool
    operators: Sequence[str] = tuple(OPERATORS)
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    constants: list[str] = field(default_factory=list)
    fed: list[str] = field(default_factory=list)
    made: list[str] = field(default_factory=list)

    def model(self, nodes: list[onnx.NodeProto], outputs: list[str], fed: list[str]) -> onnx.ModelProto:
        """Return a model of some nodes; values that are neither fed nor computed by nodes become constants."""
        names = {name for node in nodes for name in _names(node)}
        constants = [name for name in self.values if name in names and name not in fed and name not in self.made]
        inputs = [name for name in fed if name in names]
        graph = helper.make_graph(
            nodes,
            "random",
            [_described(name, self.values[name]) for name in inputs],
            [onnx.ValueInfoProto(name=name) for name in outputs],
            [numpy_helper.from_array(self.values[name], name) for name in constants],
        )
        imports = [helper.make_opsetid("", self.version)]
        return helper.make_model(graph, opset_imports=imports, ir_version=7 if self.version < 13 else 10)


def _names(node: onnx.NodeProto) -> list[str]:
    """Return the node's inputs, including the values that its subgraphs read from outside."""
    inner = [name for item in node.attribute for child in item.g.node for name in _names(child)]
    return [*node.input, *inner, *(value.name for item in node.attribute for value in item.g.output)]


def _described(name: str, value: Any) -> onnx.ValueInfoProto:
    if isinstance(value, list):
        kind = helper.np_dtype_to_tensor_dtype(value[0].dtype) if value else onnx.TensorProto.FLOAT
        return helper.make_tensor_sequence_value_info(name, kind, None)
    shape = [None if number % 2 else extent for number, extent in enumerate(value.shape)]
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), shape)


def outcome(
    runtime: str, model: onnx.ModelProto, feed: dict[str, Any], level: int = 99, provider: str = CPU
) -> list[Any] | str:
    """Return the outputs of a model, or the error's text."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    module = import_module(runtime)
    options = module.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.graph_optimization_level = module.GraphOptimizationLevel(level)
    given = {value.name: feed[value.name] for value in model.graph.input}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            session = module.InferenceSession(model.SerializeToString(), options, providers=[provider])
            if provider != CPU:
                session.disable_fallback()
            found: list[Any] = session.run(None, given)
        except Exception as error:
            return f"{type(error).__name__}: {error!s:.300}"
    return found


def draw_node(graph: Graph, rng: Generator) -> tuple[Drawn, list[onnx.NodeProto]] | None:
    """Return a random node that fits the existing values; add its new inputs to the graph."""
    name = pick(rng, *(name for name in graph.operators if OPERATORS[name][0] <= graph.version))

    def take(kind: str, ranks: tuple[int, ...] = (0, 1, 2, 3, 4)) -> Any:
        if kind == "sequence":  # only nodes make sequences, so the graph may have none
            made = [value for value in graph.values.values() if isinstance(value, list)]
            return pick(rng, *made) if made else None
        fitting = [
            value
            for value in graph.values.values()
            if isinstance(value, np.ndarray) and value.ndim in ranks and _kind(value) == kind
        ]
        if fitting and rng.random() < 0.7:
            return fitting[int(rng.integers(max(len(fitting) - 4, 0), len(fitting)))]
        return array(rng, kind, extents(rng, pick(rng, *ranks)))

    drawn = OPERATORS[name][1](Draw(rng, graph.version, take))
    names = [_name_of(graph, value, rng) for value in drawn.inputs]
    number = len(graph.nodes)
    outputs = [f"{drawn.op_type.lower()}_{number}_{index}" for index in range(drawn.outputs)]
    while names and not names[-1]:
        names.pop()
    node = helper.make_node(drawn.op_type, names, outputs, **drawn.attributes)
    return drawn, [node]


def _kind(value: Any) -> str:
    return "q" if value.dtype in (np.uint8, np.int8) else _KINDS.get(value.dtype.kind, "")


def _name_of(graph: Graph, value: Any, rng: Generator) -> str:
    if value is None:
        return ""
    for name, known in graph.values.items():
        if known is value:
            return name
    name = f"v{len(graph.values)}"
    graph.values[name] = np.asarray(value)
    if graph.only_constants or rng.random() < 0.5:
        graph.constants.append(name)
    else:
        graph.fed.append(name)
    return name


def in_control_flow(node: onnx.NodeProto, graph: Graph, results: list[Any], rng: Generator) -> onnx.NodeProto:
    """Wrap the node in a branch of If, or in the body of a Loop if its result has its first input's type and shape."""
    first = graph.values.get(node.input[0]) if node.input else None
    first = first if isinstance(first, np.ndarray) else None
    number, outputs = len(graph.nodes), [name for name in node.output if name]
    inner = onnx.NodeProto()
    inner.CopyFrom(node)
    inner.output[:] = [f"{name}_inner" for name in node.output]
    values = [onnx.ValueInfoProto(name=f"{name}_inner") for name in outputs]
    is_like = (
        len(results) == 1
        and first is not None
        and isinstance(results[0], np.ndarray)
        and (first.dtype, first.shape) == (results[0].dtype, results[0].shape)
    )
    if is_like and rng.random() < 0.5:
        count = _name_of(graph, np.array(int(rng.integers(0, 4)), np.int64), rng)
        inner.input[0] = "carried"
        kind = helper.np_dtype_to_tensor_dtype(first.dtype)
        given = [("turn", 7, []), ("going", 9, []), ("carried", kind, first.shape)]
        body = helper.make_graph(
            [helper.make_node("Identity", ["going"], ["more"]), inner],
            "body",
            [helper.make_tensor_value_info(*item) for item in given],
            [
                helper.make_tensor_value_info("more", 9, []),
                helper.make_tensor_value_info(inner.output[0], kind, first.shape),
            ],
        )
        return helper.make_node("Loop", [count, "", node.input[0]], [f"loop_{number}"], body=body)
    condition = _name_of(graph, np.array(rng.random() < 0.5), rng)
    other = onnx.NodeProto()
    other.CopyFrom(inner)
    other.output[:] = [f"{name}_other" for name in node.output]
    values_of_other = [onnx.ValueInfoProto(name=f"{name}_other") for name in outputs]
    branches = {
        "then_branch": helper.make_graph([inner], "then", [], values),
        "else_branch": helper.make_graph([other], "else", [], values_of_other),
    }
    return helper.make_node("If", [condition], [f"{name}_if" for name in outputs], **branches)


def random_graph(rng: Generator, compare_node: Any, operators: Sequence[str] = tuple(OPERATORS)) -> Graph:
    """Make a graph of one to eight nodes; `compare_node(graph, node, theirs)` is called for each new node."""
    since = min(OPERATORS[name][0] for name in operators)
    versions = [version for version in VERSIONS if version >= since]
    graph = Graph(pick(rng, *versions), only_constants=bool(rng.random() < 0.2), operators=operators)
    for _ in range(int(rng.integers(1, 9))):
        found = draw_node(graph, rng)
        if found is None:
            continue
        _, (node,) = found
        theirs = _alone(graph, node)
        if isinstance(theirs, str):
            compare_node(graph, node, theirs)
            continue
        if rng.random() < 0.12:
            wrapped = in_control_flow(node, graph, theirs, rng)
            again = _alone(graph, wrapped)
            if not isinstance(again, str):
                node, theirs = wrapped, again
        compare_node(graph, node, theirs)
        graph.nodes.append(node)
        for name, value in zip((name for name in node.output if name), theirs, strict=True):
            graph.values[name] = value
            graph.made.append(name)
    return graph


def single(graph: Graph, node: onnx.NodeProto) -> onnx.ModelProto:
    """Return a model of one node whose inputs are all fed."""
    fed = [name for name in dict.fromkeys(_names(node)) if name in graph.values]
    return graph.model([node], [name for name in node.output if name], fed)


def _alone(graph: Graph, node: onnx.NodeProto) -> list[Any] | str:
    return outcome("onnxruntime", single(graph, node), graph.values)

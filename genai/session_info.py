"""A general ONNX model in figures: what `genai info MODEL.onnx` shows."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from .graph.reader import read_model
from .session.metadata import ModelMetadata, NodeArg


def describe_onnx(path: Path) -> dict[str, Any]:
    """Facts about a model file: names to plain values. Nothing is compiled or run.

    Raises:
        ModelFolderError: there is no such file.
        GraphError: it is not an ONNX model.
    """
    model = read_model(path)
    graph, meta = model.graph, ModelMetadata.of(model)
    constants = set(graph.initializers)
    nodes = [node for inner in model.graphs(functions=True) for node in inner.nodes]
    operators = Counter(f"{node.domain}::{node.op_type}" if node.key[0] else node.op_type for node in nodes)
    return {
        "file": str(path),
        "producer": meta.producer_name or None,
        "ir_version": model.ir_version,
        "operator_sets": ", ".join(f"{name or 'ai.onnx'} {version}" for name, version in model.opset_imports.items()),
        "inputs": "; ".join(_argument(NodeArg.of(v)) for v in graph.inputs if v.name not in constants),
        "outputs": "; ".join(_argument(NodeArg.of(value)) for value in graph.outputs),
        "nodes": len(nodes),
        "functions": len(model.functions),
        "parameters": sum(tensor.num_elements for tensor in graph.initializers.values()),
        "weight_bytes": sum(tensor.nbytes for tensor in graph.initializers.values()),
        "operators": ", ".join(f"{name} {count}" for name, count in operators.most_common()),
    }


def _argument(argument: NodeArg) -> str:
    shape = ", ".join(str(dim if dim is not None else "?") for dim in argument.shape)
    return f"{argument.name} {argument.type}[{shape}]"

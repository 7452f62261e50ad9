"""What exporters compute of shapes, said plainly: fixed dimensions as constants, the batch size from the tokens.

torch.onnx cuts packed projections at places that it computes from a shape, and takes the batch size from whatever
input it saw last, a past tensor for example. The row analysis must know both without running the graph.
"""

from __future__ import annotations

import numpy as np

from .ir import Graph, Model, Node, Tensor
from .names import GraphNames
from .rewrites.constant_folding import FoldConstants
from .shapes import infer_shapes


def settle_shapes(model: Model, names: GraphNames) -> None:
    """Simplify a model in place; its shapes are inferred before and after."""
    infer_shapes(model)
    graph = model.graph
    folded = [node for node in list(graph.nodes) if node.op_type in ("Shape", "Gather") and _settle(graph, node, names)]
    if folded:
        graph.remove_nodes(folded)
        FoldConstants().apply(model)
        infer_shapes(model)


def _settle(graph: Graph, node: Node, names: GraphNames) -> bool:
    """Whether the node was replaced by a constant."""
    if node.key == ("", "Gather"):
        shape = graph.producer(node.inputs[0])
        chosen = graph.constant(node.inputs[1])
        if shape is None or shape.key != ("", "Shape") or chosen is None or shape.attributes:
            return False
        dims, places = _dims(graph, shape.inputs[0]), chosen.astype(int)
        if dims is None or not np.all((-len(dims) <= places) & (places < len(dims))):
            return False
        return _replace(graph, node, np.array(dims, object)[places])
    first, end = int(node.attribute("start", 0)), node.attribute("end", None)
    if (first, end) == (0, 1) and graph.is_input(node.inputs[0]):
        if _is_past(node.inputs[0], names):
            node.inputs[0] = names.input_ids
        return False
    dims = _dims(graph, node.inputs[0])
    return dims is not None and _replace(graph, node, np.array(dims, object)[first:end])


def _dims(graph: Graph, name: str) -> tuple[object, ...] | None:
    return getattr(graph.type_of(name), "shape", None)


def _replace(graph: Graph, node: Node, dims: object) -> bool:
    picked = np.asarray(dims, object)
    if graph.is_output(node.outputs[0]) or not all(type(dim) is int for dim in picked.reshape(-1)):
        return False
    graph.add_initializer(Tensor.from_array(node.outputs[0], picked.astype(np.int64)))
    graph.values.pop(node.outputs[0], None)
    return True


def _is_past(name: str, names: GraphNames) -> bool:
    for pattern in (names.past_key, names.past_value):
        before, after = pattern.split("%d")
        if name.startswith(before) and name.endswith(after):
            return True
    return False

"""Mixtures of experts: a router, and one MoE or QMoE operator that computes the chosen experts of each token.

The operators weigh the experts they choose by a softmax over these experts' scores. Other weighings are written
around them: what the operator gives is multiplied with the sum that the weights have in the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.quant.blocks import num_blocks

from .export import Export, hidden_dims
from .graph_writer import BOOL, CONTRIB, INT64, Dims
from .linear import Projection, quantized_matrix, write_float_tensor, write_linear
from .mlp import write_gated_mlp
from .options import BITS
from .spec import Experts
from .weights import row_chunks

# Far below any score, and far from overflow when softmax subtracts from it.
_NEVER = -1e30


def write_experts(export: Export, layer: int, experts: Experts, root: str) -> str:
    """The mixture of one layer on normed vectors; returns what is to be added to the residual stream."""
    graph, size = export.graph, export.spec.hidden_size
    path, source = f"/model/layers.{layer}/moe", f"model.layers.{layer}.mlp"
    router = Projection(f"{path}/router", (f"{source}.gate",), (experts.count,), size)
    scores = write_linear(export, router, root, precision="fp32")
    flat = graph.node(
        "Reshape", [scores, graph.int64([-1, experts.count])], f"{path}/Reshape", ["tokens", experts.count]
    )
    flat, total = _write_routing(export, path, flat, experts)
    output = _write_operator(export, layer, experts, root, flat)
    if total is not None:
        dims: Dims = ["batch_size", "sequence_length", 1]
        shape = graph.node("Shape", [root], f"{path}/Shape", [3], element=INT64)
        tokens = graph.node("Slice", [shape, *map(graph.int64, ([0], [2]))], f"{path}/Slice", [2], element=INT64)
        target = graph.node("Concat", [tokens, graph.int64([1])], f"{path}/Concat", [3], element=INT64, axis=0)
        total = graph.node("Reshape", [total, target], f"{path}/total/Reshape", dims)
        output = graph.node("Mul", [output, total], f"{path}/Mul", hidden_dims(size))
    if experts.shared_intermediate_size:
        shared = _write_shared_expert(export, layer, experts, root)
        output = graph.node("Add", [output, shared], f"{path}/Add", hidden_dims(size))
    return output


def _write_routing(export: Export, path: str, scores: str, experts: Experts) -> tuple[str, str | None]:
    """Scores [tokens, experts] that the operator's softmax turns into weights, and what their sum is if not 1."""
    if experts.routing == "sparse_mixer":
        return _write_sparse_mixer(export, f"{path}/sparse_mixer", scores, experts)
    if experts.normalized:
        return scores, None
    graph = export.graph
    every, few, one = (_rows(width) for width in (experts.count, experts.per_token, 1))
    weights = graph.node("Softmax", [scores], f"{path}/Softmax", every, axis=-1)
    outputs = [f"{path}/TopK/output_0", f"{path}/TopK/output_1"]
    graph.nodes("TopK", [weights, graph.int64([experts.per_token])], outputs, f"{path}/TopK", axis=-1)
    for output, element in zip(outputs, (1, INT64), strict=True):
        graph.value(output, element, few)
    return scores, graph.node("ReduceSum", [outputs[0], graph.int64([-1])], f"{path}/ReduceSum", one, keepdims=1)


def _write_sparse_mixer(export: Export, path: str, scores: str, experts: Experts) -> tuple[str, str]:
    """Each of the two best experts is weighed against those whose scores lie within 2 * jitter of its own."""
    graph, every, one = export.graph, _rows(experts.count), _rows(1)
    outputs = [f"{path}/TopK/output_0", f"{path}/TopK/output_1"]
    graph.nodes("TopK", [scores, graph.int64([2])], outputs, f"{path}/TopK", axis=-1)
    for output, element in zip(outputs, (1, INT64), strict=True):
        graph.value(output, element, ["tokens", 2])
    size = graph.node("Abs", [scores], f"{path}/Abs", every)
    ids = graph.int64(list(range(experts.count)))
    never, masked, taken, weights = graph.float32(_NEVER), scores, [], []
    for rank in range(2):
        step, here = f"{path}/{rank}", [graph.int64([rank]), graph.int64([rank + 1]), graph.int64([1])]
        best = graph.node("Slice", [outputs[0], *here], f"{step}/Slice", one)
        index = graph.node("Slice", [outputs[1], *here], f"{step}/Slice_1", one, element=INT64)
        gap = graph.node("Sub", [best, masked], f"{step}/Sub", every)
        limit = graph.node("Max", [size, best], f"{step}/Max", every)
        ratio = graph.node("Div", [gap, limit], f"{step}/Div", every)
        jitter = graph.float32(2 * experts.sparse_mixer_jitter)
        far = graph.node("Greater", [ratio, jitter], f"{step}/Greater", every, element=BOOL)
        near = graph.node("Where", [far, never, masked], f"{step}/Where", every)
        share = graph.node("Softmax", [near], f"{step}/Softmax", every, axis=-1)
        weights.append(graph.node("ReduceMax", [share, graph.int64([-1])], f"{step}/ReduceMax", one, keepdims=1))
        taken.append(graph.node("Equal", [ids, index], f"{step}/Equal", every, element=BOOL))
        masked = graph.node("Where", [taken[rank], never, masked], f"{step}/Where_1", every)
    routed = never
    for rank in range(2):
        log = graph.node("Log", [weights[rank]], f"{path}/{rank}/Log", one)
        routed = graph.node("Where", [taken[rank], log, routed], f"{path}/{rank}/Where_2", every)
    return routed, graph.node("Add", weights, f"{path}/Add", one)


def _write_operator(export: Export, layer: int, experts: Experts, root: str, scores: str) -> str:
    graph, options, size = export.graph, export.options, export.spec.hidden_size
    name = f"/model/layers.{layer}/moe"
    attributes: dict[str, Any] = {
        "k": experts.per_token,
        "activation_type": "swiglu",
        "activation_alpha": 1.0,
        "activation_beta": 0.0,
        "swiglu_fusion": 1,
        "normalize_routing_weights": 1,
    }
    if options.precision in BITS:
        first = _write_quantized(export, layer, experts, "gate_up_proj")
        second = _write_quantized(export, layer, experts, "down_proj")
        points = [first[2], second[2]] if not options.symmetric else []
        inputs = [root, scores, *first[:2], "", *second[:2], *(["", "", "", ""] if points else []), *points]
        attributes |= {"expert_weight_bits": BITS[options.precision], "block_size": options.block_size}
        if options.accuracy_level:
            attributes["accuracy_level"] = options.accuracy_level
        return graph.node("QMoE", inputs, f"{name}/QMoE", hidden_dims(size), domain=CONTRIB, **attributes)
    matrices = [_write_floats(export, layer, experts, which) for which in ("gate_up_proj", "down_proj")]
    inputs = [root, scores, matrices[0], "", matrices[1]]
    return graph.node("MoE", inputs, f"{name}/MoE", hidden_dims(size), domain=CONTRIB, **attributes)


def _expert_matrices(export: Export, layer: int, experts: Experts, which: str) -> Iterator[tuple[str, NDArray[Any]]]:
    """Each expert's matrix [rows, columns]; rows of gate and up alternate, as the operators want them."""
    hidden, wide = export.spec.hidden_size, experts.intermediate_size
    for expert in range(experts.count):
        source = f"model.layers.{layer}.mlp.experts.{expert}"
        if which == "down_proj":
            name = f"{source}.down_proj.weight"
            yield name, export.weights.tensor(name, (hidden, wide))
            continue
        parts = [export.weights.tensor(f"{source}.{part}_proj.weight", (wide, hidden)) for part in ("gate", "up")]
        yield f"{source}.gate_proj.weight", np.stack(parts, axis=1).reshape(2 * wide, hidden)


def _dims(export: Export, experts: Experts, which: str) -> tuple[int, int, int]:
    hidden, wide = export.spec.hidden_size, experts.intermediate_size
    return (experts.count, hidden, wide) if which == "down_proj" else (experts.count, 2 * wide, hidden)


def _write_floats(export: Export, layer: int, experts: Experts, which: str) -> str:
    def chunks() -> Iterator[NDArray[np.float32]]:
        for name, matrix in _expert_matrices(export, layer, experts, which):
            yield from row_chunks(name, matrix)

    name = f"model.layers.{layer}.moe.experts.{which}.weight"
    return write_float_tensor(export, name, _dims(export, experts, which), chunks(), export.options.precision)


def _write_quantized(export: Export, layer: int, experts: Experts, which: str) -> list[str]:
    """Names of the integers [experts, rows, bytes], the scales [experts, rows, blocks], and the zero points if any."""
    graph, options = export.graph, export.options
    bits = BITS[options.precision]
    count, rows, columns = _dims(export, experts, which)
    blocks = num_blocks(columns, options.block_size)
    sides: tuple[list[NDArray[Any]], list[NDArray[Any]]] = ([], [])

    def chunks() -> Iterator[NDArray[np.uint8]]:
        for name, matrix in _expert_matrices(export, layer, experts, which):
            packed = quantized_matrix(name, matrix, bits, options)
            sides[0].append(packed.scales)
            if packed.zero_points is not None:
                sides[1].append(packed.zero_points)
            yield packed.data

    name = f"model.layers.{layer}.moe.experts.{which}"
    dims = (count, rows, blocks * options.block_size * bits // 8)
    names = [graph.initializer(f"{name}.qweight", dims, np.uint8, chunks())]
    for suffix, arrays in zip(("scales", "zero_points"), sides, strict=True):
        if arrays:
            names.append(graph.array(f"{name}.{suffix}", _stacked(arrays)))
    return names


def _stacked(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    return np.stack(arrays)


def _write_shared_expert(export: Export, layer: int, experts: Experts, root: str) -> str:
    graph, size = export.graph, export.spec.hidden_size
    path, source = f"/model/layers.{layer}/shared_expert", f"model.layers.{layer}.mlp.shared_expert"
    output = write_gated_mlp(export, root, path, source, experts.shared_intermediate_size)
    if not experts.shared_gate:
        return output
    score = Projection(f"{path}_gate", (f"model.layers.{layer}.mlp.shared_expert_gate",), (1,), size)
    gate = graph.node("Sigmoid", [write_linear(export, score, root, precision="fp32")], f"{path}/Sigmoid", _column())
    return graph.node("Mul", [output, gate], f"{path}_gate/Mul", hidden_dims(size))


def _rows(width: int) -> Dims:
    """Dimensions of a value with one row per token, of all sequences together."""
    return ["tokens", width]


def _column() -> Dims:
    return ["batch_size", "sequence_length", 1]

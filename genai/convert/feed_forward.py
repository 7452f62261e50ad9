"""The feed-forward layer: one for all tokens, or a mixture of experts with a few experts per token.

A mixture is a router and one MoE or QMoE operator, which computes the selected experts of each token and weights their
outputs by a softmax over their scores. If the model's weights for the selected experts do not sum to 1, the operator's
output is multiplied by their sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.kernels.weights import pack_bits, uniform_format

from .graph_writer import BOOL, CONTRIB, FLOAT, INT64, Dims, Export, hidden_dims
from .layers import (
    Matrices,
    write_bare_norm,
    write_float_tensor,
    write_linear,
    write_plain_norm,
    write_quantized,
)
from .options import BITS
from .projection import Projection
from .spec import ExpertsSpec
from .weights import Chunks
from .write_prequantized import common_format, expert_block, expert_blocks, expert_integers, in_own_order


def write_feed_forward(export: Export, layer: int, root: str, stream: str) -> str:
    """Write the feed-forward layer of a layer and return its output, to be added to the residual stream.

    Args:
        root: the normalised vectors that an ordinary feed-forward layer reads.
        stream: the residual stream.
    """
    experts = export.spec.routed(layer)
    if experts is not None and experts.beside_mlp:
        return _write_both(export, layer, experts, root, stream)
    return _write_mlp_of(export, layer, root) if experts is None else _write_experts(export, layer, experts, root, root)


def _write_both(export: Export, layer: int, experts: ExpertsSpec, root: str, stream: str) -> str:
    """Write the sum of an ordinary feed-forward layer and a mixture of experts, each with separate norms."""
    path, dims = f"/model/layers.{layer}", hidden_dims(export.spec.hidden_size)
    dense = write_plain_norm(export, _write_mlp_of(export, layer, root), f"{path}/post_feedforward_layernorm_1")
    given = write_plain_norm(export, stream, f"{path}/pre_feedforward_layernorm_2")
    name = f"model.layers.{layer}.mlp.gate.norm"
    weight = export.weights.vector(name, export.spec.hidden_size) * np.float32(export.spec.hidden_size**-0.5)
    routed = write_bare_norm(export, [stream, export.graph.array(name, weight)], f"{path}/moe/router/norm", dims)
    mixed = _write_experts(export, layer, experts, given, routed)
    mixed = write_plain_norm(export, mixed, f"{path}/post_feedforward_layernorm_2")
    return export.graph.node("Add", [dense, mixed], f"{path}/moe/beside/Add", dims)


def _write_mlp_of(export: Export, layer: int, root: str) -> str:
    sparsities = export.spec.sparsities
    return _write_mlp(
        export, root, f"/model/layers.{layer}/mlp", f"model.layers.{layer}.mlp", export.spec.mlp_size(layer),
        sparsity=0.0 if sparsities is None else sparsities[layer],
    )  # fmt: skip


def _write_mlp(export: Export, root: str, path: str, source: str, width: int, *, sparsity: float = 0.0) -> str:
    """Write the up, gate and down projections; `source` is the prefix of their weights and `width` their inner size."""
    spec, graph, wide = export.spec, export.graph, hidden_dims(width)

    def project(which: str, value: str, rows: int, columns: int) -> str:
        projection = Projection(f"{path}/{which}", (f"{source}.{which}",), (rows,), columns)
        return write_linear(export, projection, value, precision=export.options.precision, bias=spec.mlp_bias)

    gate = project("gate_proj", root, width, spec.hidden_size) if spec.gated_mlp else None
    up = project("up_proj", root, width, spec.hidden_size)
    given = gate or up
    if sparsity:
        given = _write_largest(export, f"{path}/sparsity", given, width, sparsity)
    if spec.hidden_activation == "xielu":
        active = _write_xielu(export, f"{path}/act_fn", f"{source}.act_fn", given, width)
    else:
        active = write_activation(export, f"{path}/act_fn", given, width)
    if gate is not None:
        active = graph.node("Mul", [active, up], f"{path}/Mul", wide)
    return project("down_proj", active, spec.hidden_size, width)


def _write_xielu(export: Export, path: str, source: str, root: str, width: int) -> str:
    """Write xIELU (Huang & Schlag 2024), a square above 0 and an exponential below 0, with two learned factors.

    xielu(x) = x / 2 + p * max(x, 0) ** 2 + n * (exp(y) - 1 - y), where y = min(x, 0).
    """
    graph, wide = export.graph, hidden_dims(width)
    above, below = (
        float(np.logaddexp(0.0, export.weights.vector(f"{source}.alpha_{side}", 1)[0])) for side in ("p", "n")
    )
    half = graph.node("Mul", [root, graph.float32(0.5)], f"{path}/Mul_1", wide)
    high = graph.node("Relu", [root], f"{path}/Relu", wide)
    square = graph.node("Mul", [high, high], f"{path}/Mul_2", wide)
    square = graph.node("Mul", [square, graph.float32(above)], f"{path}/Mul_3", wide)
    low = graph.node("Sub", [root, high], f"{path}/Sub_1", wide)
    rest = graph.node("Exp", [low], f"{path}/Exp", wide)
    rest = graph.node("Sub", [rest, low], f"{path}/Sub_2", wide)
    rest = graph.node("Sub", [rest, graph.float32(1.0)], f"{path}/Sub_3", wide)
    rest = graph.node("Mul", [rest, graph.float32(below + 0.5)], f"{path}/Mul_4", wide)
    total = graph.node("Add", [half, square], f"{path}/Add_1", wide)
    return graph.node("Add", [total, rest], f"{path}/Add_2", wide)


def _write_largest(export: Export, path: str, root: str, width: int, sparsity: float) -> str:
    """Write relu(x - cutoff), where a fraction of a row's numbers is below the cutoff if they are normally distributed.

    The cutoff is mean + k * standard deviation of the row.
    """
    graph, wide = export.graph, hidden_dims(width)
    mean = write_mean(export, f"{path}/mean", root, width)
    centred = graph.node("Sub", [root, mean], f"{path}/Sub_1", wide)
    squared = graph.node("Mul", [centred, centred], f"{path}/Mul_1", wide)
    spread = graph.node(
        "Sqrt", [write_mean(export, f"{path}/variance", squared, width)], f"{path}/Sqrt", hidden_dims(1)
    )
    factor = graph.float32(NormalDist().inv_cdf(sparsity))
    cutoff = graph.node("Mul", [spread, factor], f"{path}/Mul_2", hidden_dims(1))
    rest = graph.node("Sub", [centred, cutoff], f"{path}/Sub_2", wide)
    return graph.node("Relu", [rest], f"{path}/Relu", wide)


def write_mean(export: Export, path: str, root: str, width: int) -> str:
    """Write the mean of each row, [batch, tokens, 1]."""
    name = f"model.constants.mean.{width}"
    if not export.graph.has_initializer(name):
        export.graph.array(name, np.full((width, 1), 1 / width, np.float32))
    return export.graph.node("MatMul", [root, name], f"{path}/MatMul", hidden_dims(1))


def write_activation(export: Export, path: str, root: str, width: int) -> str:
    """Write the architecture's activation function for values of this width."""
    graph, wide, kind = export.graph, hidden_dims(width), export.spec.hidden_activation
    if kind == "silu":
        sigmoid = graph.node("Sigmoid", [root], f"{path}/Sigmoid", wide)
        return graph.node("Mul", [root, sigmoid], f"{path}/Mul", wide)
    if kind in ("relu", "relu2"):
        positive = graph.node("Relu", [root], f"{path}/Relu", wide)
        return positive if kind == "relu" else graph.node("Mul", [positive, positive], f"{path}/Mul", wide)
    tanh = kind == "gelu_tanh"
    name = f"{path}/{'FastGelu' if tanh else 'Gelu'}"
    return graph.node("Gelu", [root], name, wide, approximate="tanh" if tanh else "none")


# Far below any score, but not so large in magnitude that subtractions in the softmax overflow.
_NEVER = -1e30


def _write_experts(export: Export, layer: int, experts: ExpertsSpec, root: str, routed: str) -> str:
    """Write a mixture of experts for `root`, with a router that reads `routed`."""
    graph, size = export.graph, export.spec.hidden_size
    path, source = f"/model/layers.{layer}/moe", f"model.layers.{layer}.mlp"
    router = Projection(f"{path}/router", (f"{source}.gate",), (experts.count,), size)
    scores = write_linear(export, router, routed, precision="fp32", bias=experts.biased)
    flat = graph.node(
        "Reshape", [scores, graph.int64([-1, experts.count])], f"{path}/Reshape", ["tokens", experts.count]
    )
    flat, total = _write_routing(export, layer, path, flat, experts)
    given, width = root, experts.width(size)
    if experts.scaled_inputs:
        best = graph.node("ReduceMax", [scores, graph.int64([-1])], f"{path}/best/ReduceMax", hidden_dims(1))
        share = graph.node("Sigmoid", [best], f"{path}/best/Sigmoid", hidden_dims(1))
        given = graph.node("Mul", [given, share], f"{path}/best/Mul", hidden_dims(size))
    if experts.latent_size:
        given = _write_latent(export, layer, "latent_in_proj", root, width, size)
    output = _write_operator(export, layer, experts, given, flat)
    if total is not None:
        shape = graph.node("Shape", [root], f"{path}/Shape", [3], element=INT64)
        tokens = graph.node("Slice", [shape, *map(graph.int64, ([0], [2]))], f"{path}/Slice", [2], element=INT64)
        target = graph.node("Concat", [tokens, graph.int64([1])], f"{path}/Concat", [3], element=INT64, axis=0)
        total = graph.node("Reshape", [total, target], f"{path}/total/Reshape", hidden_dims(1))
        output = graph.node("Mul", [output, total], f"{path}/Mul", hidden_dims(width))
    if experts.routed_scale != 1:
        scale = graph.float32(experts.routed_scale)
        output = graph.node("Mul", [output, scale], f"{path}/scale/Mul", hidden_dims(width))
    if experts.latent_size:
        output = _write_latent(export, layer, "latent_out_proj", output, size, width)
    if experts.shared_intermediate_size:
        shared = _write_shared_expert(export, layer, experts, root)
        output = graph.node("Add", [output, shared], f"{path}/Add", hidden_dims(size))
    return output


def _write_latent(export: Export, layer: int, name: str, root: str, rows: int, columns: int) -> str:
    """Write the projection to the width of the experts, or back from this width."""
    projection = Projection(
        f"/model/layers.{layer}/moe/{name}", (f"model.layers.{layer}.mlp.{name}",), (rows,), columns
    )
    return write_linear(export, projection, root, precision=export.options.precision, bias=export.spec.mlp_bias)


def _write_routing(export: Export, layer: int, path: str, scores: str, experts: ExpertsSpec) -> tuple[str, str | None]:
    """Write the scores [tokens, experts] for the operator's softmax; return them, and the weights' sum if not 1."""
    if experts.routing == "sigmoid" or experts.selection_bias:
        return _write_shares(export, layer, path, scores, experts)
    if experts.routing == "sparse_mixer":
        return _write_sparse_mixer(export, f"{path}/sparse_mixer", scores, experts)
    if experts.normalized and experts.groups == 1:
        return scores, None
    graph, every = export.graph, _rows(experts.count)
    weights = graph.node("Softmax", [scores], f"{path}/Softmax", every, axis=-1)
    if experts.groups > 1:
        penalty = _write_penalties(export, path, weights, experts)
        weights = graph.node("Add", [weights, penalty], f"{path}/groups/Add_1", every)
        scores = graph.node("Add", [scores, penalty], f"{path}/groups/Add_2", every)
        if experts.normalized:
            return scores, None
    best, _ = _write_top_k(export, path, weights, experts.per_token)
    return scores, graph.node("ReduceSum", [best, graph.int64([-1])], f"{path}/ReduceSum", _rows(1), keepdims=1)


def _write_shares(export: Export, layer: int, path: str, scores: str, experts: ExpertsSpec) -> tuple[str, str | None]:
    """Write the logarithms of the shares of the selected experts: their softmax is proportional to the shares.

    The shares are sigmoids, or a softmax over all experts.
    """
    graph, every = export.graph, _rows(experts.count)
    if experts.routing == "sigmoid":
        shares = graph.node("Sigmoid", [scores], f"{path}/Sigmoid", every)
    else:
        shares = graph.node("Softmax", [scores], f"{path}/Softmax", every, axis=-1)
    choice = shares
    if experts.selection_bias:
        name = f"model.layers.{layer}.mlp.gate.selection_bias"
        bias = graph.array(name, export.weights.vector(name, experts.count))
        choice = graph.node("Add", [shares, bias], f"{path}/bias/Add", every)
    if experts.groups > 1:
        penalty = _write_penalties(export, path, choice, experts)
        choice = graph.node("Add", [choice, penalty], f"{path}/groups/Add", every)
    best, _ = _write_top_k(export, path, choice, experts.per_token)
    bounds = [graph.int64([experts.per_token - 1]), graph.int64([experts.per_token]), graph.int64([1])]
    least = graph.node("Slice", [best, *bounds], f"{path}/least/Slice", _rows(1))
    chosen = graph.node("GreaterOrEqual", [choice, least], f"{path}/GreaterOrEqual", every, element=BOOL)
    logs = scores  # they differ from the logarithms of a softmax by the same number for all experts
    if experts.routing == "sigmoid":  # log(sigmoid(x)) = -softplus(-x), which does not underflow
        negated = graph.node("Neg", [scores], f"{path}/Neg_1", every)
        rises = graph.node("Softplus", [negated], f"{path}/Softplus", every)
        logs = graph.node("Neg", [rises], f"{path}/Neg_2", every)
    routed = graph.node("Where", [chosen, logs, graph.float32(_NEVER)], f"{path}/Where_1", every)
    if experts.normalized:
        return routed, None
    selected = graph.node("Where", [chosen, shares, graph.float32(0.0)], f"{path}/Where_2", every)
    return routed, graph.node("ReduceSum", [selected, graph.int64([-1])], f"{path}/ReduceSum", _rows(1), keepdims=1)


def _write_penalties(export: Export, path: str, scores: str, experts: ExpertsSpec) -> str:
    """Write 0 for the experts of the best groups, and a large negative number for all others."""
    graph, count, path = export.graph, experts.groups, f"{path}/groups"
    size = experts.count // count
    groups: Dims = ["tokens", count, size]
    split = graph.node("Reshape", [scores, graph.int64([-1, count, size])], f"{path}/Reshape", groups)
    highest, _ = _write_top_k(export, f"{path}/highest", split, experts.group_scores, (count,))
    total = graph.node("ReduceSum", [highest, graph.int64([-1])], f"{path}/ReduceSum", _rows(count), keepdims=0)
    best, _ = _write_top_k(export, path, total, experts.best_groups)
    bounds = [graph.int64([experts.best_groups - 1]), graph.int64([experts.best_groups]), graph.int64([1])]
    least = graph.node("Slice", [best, *bounds], f"{path}/Slice", _rows(1))
    chosen = graph.node("GreaterOrEqual", [total, least], f"{path}/GreaterOrEqual", _rows(count), element=BOOL)
    penalty = graph.node("Where", [chosen, graph.float32(0.0), graph.float32(_NEVER)], f"{path}/Where", _rows(count))
    name = f"model.constants.groups.{count}.{size}"
    if not graph.has_initializer(name):
        graph.array(name, np.repeat(np.eye(count, dtype=np.float32), size, axis=1))
    return graph.node("MatMul", [penalty, name], f"{path}/MatMul", _rows(experts.count))


def _write_top_k(export: Export, path: str, scores: str, count: int, axes: tuple[int, ...] = ()) -> tuple[str, str]:
    """Write a selection of the highest scores of each token; return these scores and their indices.

    Args:
        axes: sizes of the axes between the tokens and the scores.
    """
    graph, outputs = export.graph, (f"{path}/TopK/output_0", f"{path}/TopK/output_1")
    graph.nodes("TopK", [scores, graph.int64([count])], outputs, f"{path}/TopK", axis=-1)
    for output, element in zip(outputs, (FLOAT, INT64), strict=True):
        graph.value(output, element, ["tokens", *axes, count])
    return outputs


def _write_sparse_mixer(export: Export, path: str, scores: str, experts: ExpertsSpec) -> tuple[str, str]:
    """Write a weight for each of the two best experts: a softmax over the experts with scores within 2 * jitter."""
    graph, every, one_row = export.graph, _rows(experts.count), _rows(1)
    outputs = _write_top_k(export, path, scores, 2)
    size = graph.node("Abs", [scores], f"{path}/Abs", every)
    ids = graph.int64(list(range(experts.count)))
    never, masked, chosen, weights = graph.float32(_NEVER), scores, [], []
    for rank in range(2):
        step, here = f"{path}/{rank}", [graph.int64([rank]), graph.int64([rank + 1]), graph.int64([1])]
        best = graph.node("Slice", [outputs[0], *here], f"{step}/Slice", one_row)
        index = graph.node("Slice", [outputs[1], *here], f"{step}/Slice_1", one_row, element=INT64)
        gap = graph.node("Sub", [best, masked], f"{step}/Sub", every)
        limit = graph.node("Max", [size, best], f"{step}/Max", every)
        ratio = graph.node("Div", [gap, limit], f"{step}/Div", every)
        jitter = graph.float32(2 * experts.sparse_mixer_jitter)
        far = graph.node("Greater", [ratio, jitter], f"{step}/Greater", every, element=BOOL)
        near = graph.node("Where", [far, never, masked], f"{step}/Where", every)
        share = graph.node("Softmax", [near], f"{step}/Softmax", every, axis=-1)
        weights.append(graph.node("ReduceMax", [share, graph.int64([-1])], f"{step}/ReduceMax", one_row, keepdims=1))
        chosen.append(graph.node("Equal", [ids, index], f"{step}/Equal", every, element=BOOL))
        masked = graph.node("Where", [chosen[rank], never, masked], f"{step}/Where_1", every)
    routed = never
    for rank in range(2):
        log = graph.node("Log", [weights[rank]], f"{path}/{rank}/Log", one_row)
        routed = graph.node("Where", [chosen[rank], log, routed], f"{path}/{rank}/Where_2", every)
    return routed, graph.node("Add", weights, f"{path}/Add", one_row)


def _write_operator(export: Export, layer: int, experts: ExpertsSpec, root: str, scores: str) -> str:
    graph, options, size = export.graph, export.options, experts.width(export.spec.hidden_size)
    name, parts = f"/model/layers.{layer}/moe", _matrices(experts)
    attributes: dict[str, Any] = {
        "k": experts.per_token,
        "activation_type": experts.activation,
        "activation_alpha": experts.alpha,
        "activation_beta": experts.beta,
        **({"swiglu_limit": experts.limit} if experts.limit < math.inf else {}),
        **({"swiglu_fusion": 1} if experts.gated else {}),
        "normalize_routing_weights": 1,
    }
    biases = [_write_expert_biases(export, layer, experts, which) if experts.biased else "" for which in parts]
    names = [name for which in parts for name in _expert_names(layer, experts, which)]
    kinds = export.weights.kinds(names)
    if options.precision == "kept" and any(kind.names for kind in kinds):
        level = {"accuracy_level": options.accuracy_level} if options.accuracy_level else {}
        weight_format = common_format(export, names)
        if weight_format is None:
            weight_format = uniform_format(8, expert_block(kinds))
            whole = [_write_integers(export, layer, experts, which, weight_format.block_size) for which in parts]
        else:
            whole = [_write_blocks(export, layer, experts, which) for which in parts]
        inputs = _inputs([root, scores], whole, biases)
        attributes |= {"expert_weight_bits": weight_format.bits, "block_size": weight_format.block_size, **level}
        return graph.node("QMoE", inputs, f"{name}/QMoE", hidden_dims(size), domain=CONTRIB, **attributes)
    first, second = (_write_matrices(export, layer, experts, which) for which in parts)
    if options.precision not in BITS:
        inputs = [root, scores, *first, biases[0], *second, *filter(None, biases[1:])]
        return graph.node("MoE", inputs, f"{name}/MoE", hidden_dims(size), domain=CONTRIB, **attributes)
    inputs = _inputs([root, scores], [first, second], biases)
    attributes |= {"expert_weight_bits": BITS[options.precision], **options.product_attributes}
    return graph.node("QMoE", inputs, f"{name}/QMoE", hidden_dims(size), domain=CONTRIB, **attributes)


def _inputs(names: list[str], matrices: list[list[str]], biases: list[str]) -> list[str]:
    """Return QMoE's inputs: integers, scales and biases of two layers, three empty inputs, then the zero points."""
    first, second = matrices
    points = [*first[2:], *second[2:]]
    return [
        *names,
        *first[:2],
        biases[0],
        *second[:2],
        *([biases[1], "", "", ""] if points or biases[1] else []),
        *points,
    ]


def _matrices(experts: ExpertsSpec) -> tuple[str, str]:
    """Return the names of the two matrices of all experts; the first contains the gates, if there are any."""
    return "gate_up_proj" if experts.gated else "up_proj", "down_proj"


def _write_expert_biases(export: Export, layer: int, experts: ExpertsSpec, which: str) -> str:
    """Write a layer's biases [experts, rows]; the biases of gate and up are interleaved in the order of their rows."""
    size = experts.width(export.spec.hidden_size) if which == "down_proj" else experts.intermediate_size
    names = [name.removesuffix(".weight") + ".bias" for name in _expert_names(layer, experts, which)]
    vectors = np.stack([export.weights.vector(name, size) for name in names])
    rows = vectors.reshape(experts.count, -1, size).swapaxes(1, 2).reshape(experts.count, -1)
    return export.graph.array(f"model.layers.{layer}.moe.experts.{which}.bias", np.ascontiguousarray(rows))


def _expert_names(layer: int, experts: ExpertsSpec, which: str) -> Iterator[str]:
    for expert in range(experts.count):
        for part in ("gate_proj", "up_proj") if which == "gate_up_proj" else (which,):
            yield f"model.layers.{layer}.mlp.experts.{expert}.{part}.weight"


def _stored_experts(
    export: Export, layer: int, experts: ExpertsSpec, which: str
) -> tuple[tuple[int, int], Matrices]:  # the shape of a matrix, and all matrices as they are stored
    hidden, wide = experts.width(export.spec.hidden_size), experts.intermediate_size
    shape = (hidden, wide) if which == "down_proj" else (wide, hidden)
    return shape, ((one, in_own_order(export, one, shape)) for one in _expert_names(layer, experts, which))


def _factors(export: Export, layer: int, experts: ExpertsSpec, which: str) -> NDArray[np.float32]:
    """Return each expert's learned factor, which is part of the matrix of its output."""
    if not experts.scaled or which != "down_proj":
        return np.ones(experts.count, np.float32)
    return export.weights.vector(f"model.layers.{layer}.mlp.experts.scale", experts.count)


def _write_blocks(export: Export, layer: int, experts: ExpertsSpec, which: str) -> list[str]:
    """Write experts whose blocks the operator supports; return the same names as `_write_matrices`."""
    (rows, _), matrices = _stored_experts(export, layer, experts, which)
    parts = 2 if which == "gate_up_proj" else 1
    name, beside = f"model.layers.{layer}.moe.experts.{which}", ([], [])  # type: tuple[str, tuple[list[Any], list[Any]]]
    converted = (expert_blocks(pair) for pair in zip(*[iter(matrices)] * parts, strict=True))
    first, factors = next(converted), _factors(export, layer, experts, which)

    def integers() -> Iterator[NDArray[np.uint8]]:
        for weight, factor in zip(chain([first], converted), factors, strict=True):
            beside[0].append(weight.scales * factor)
            if weight.offsets is not None:
                beside[1].append(pack_bits(weight.offsets, weight.format.bits))
            yield weight.data

    export.graph.initializer(
        f"{name}.qweight", (experts.count, parts * rows, first.data.shape[1]), np.uint8, integers()
    )
    written = [f"{name}.qweight", export.graph.array(f"{name}.scales", np.stack(beside[0]))]
    return [*written, *(export.graph.array(f"{name}.zero_points", np.stack(beside[1])) for _ in beside[1][:1])]


def _write_integers(export: Export, layer: int, experts: ExpertsSpec, which: str, block_size: int) -> list[str]:
    """Write quantised experts as 8-bit integers; return the names of the integers and of the scales."""
    (rows, columns), matrices = _stored_experts(export, layer, experts, which)
    name, graph, scales = f"model.layers.{layer}.moe.experts.{which}", export.graph, []
    parts, factors = 2 if which == "gate_up_proj" else 1, _factors(export, layer, experts, which)

    def integers() -> Iterator[NDArray[np.uint8]]:
        converted = expert_integers(export, matrices, block_size)
        for pair, factor in zip(zip(*[converted] * parts, strict=True), factors, strict=True):
            codes, floats = (np.stack(arrays, axis=1).reshape(parts * rows, -1) for arrays in zip(*pair, strict=True))
            scales.append(floats * factor)
            yield codes

    graph.initializer(f"{name}.qweight", (experts.count, parts * rows, columns), np.uint8, integers())
    return [f"{name}.qweight", graph.array(f"{name}.scales", np.stack(scales))]


def _expert_matrices(export: Export, layer: int, experts: ExpertsSpec, which: str) -> Matrices:
    """Yield each expert's matrix [rows, columns]; the rows of gate and up are interleaved, as the operators expect."""
    hidden, wide = experts.width(export.spec.hidden_size), experts.intermediate_size
    factors = _factors(export, layer, experts, which)
    for expert in range(experts.count):
        source = f"model.layers.{layer}.mlp.experts.{expert}"
        if which == "down_proj":
            name = f"{source}.down_proj.weight"
            matrix = export.weights.tensor(name, (hidden, wide))
            yield name, matrix.astype(np.float32) * factors[expert] if experts.scaled else matrix
            continue
        if which == "up_proj":
            name = f"{source}.up_proj.weight"
            yield name, export.weights.tensor(name, (wide, hidden))
            continue
        parts = [export.weights.tensor(f"{source}.{part}_proj.weight", (wide, hidden)) for part in ("gate", "up")]
        yield f"{source}.gate_proj.weight", np.stack(parts, axis=1).reshape(2 * wide, hidden)


def _write_matrices(export: Export, layer: int, experts: ExpertsSpec, which: str) -> list[str]:
    """Write experts as floats, or as integers [experts, rows, bytes], scales [experts, rows, blocks] and zero points.

    Returns the names of the initializers.
    """
    options, hidden, wide = export.options, experts.width(export.spec.hidden_size), experts.intermediate_size
    rows, columns = {"down_proj": (hidden, wide), "up_proj": (wide, hidden)}.get(which, (2 * wide, hidden))
    name = f"model.layers.{layer}.moe.experts.{which}"

    def matrices() -> Matrices:
        return _expert_matrices(export, layer, experts, which)

    if options.precision not in BITS:
        precision = options.precision
        if precision == "kept":
            narrow = export.weights.kinds(_expert_names(layer, experts, which)) == {np.dtype(np.float16)}
            precision = "fp16" if narrow else "fp32"
        chunks = Chunks(matrices)
        dims = (experts.count, rows, columns)
        return [write_float_tensor(export, f"{name}.weight", dims, chunks, precision)]
    bits = BITS[options.precision]
    row_bytes = -(-columns * bits // 8)  # the operator expects rows whose last block is not padded
    names = [f"{name}.{part}" for part in ("qweight", "scales", "zero_points")]
    return write_quantized(export, names, (experts.count, rows, row_bytes), matrices(), bits, np.stack, row_bytes)


def _write_shared_expert(export: Export, layer: int, experts: ExpertsSpec, root: str) -> str:
    graph, size = export.graph, export.spec.hidden_size
    path, source = f"/model/layers.{layer}/shared_expert", f"model.layers.{layer}.mlp.shared_expert"
    output = _write_mlp(export, root, path, source, experts.shared_intermediate_size)
    if not experts.shared_gate:
        return output
    score = Projection(f"{path}_gate", (f"model.layers.{layer}.mlp.shared_expert_gate",), (1,), size)
    gate = graph.node(
        "Sigmoid", [write_linear(export, score, root, precision="fp32")], f"{path}/Sigmoid", hidden_dims(1)
    )
    return graph.node("Mul", [output, gate], f"{path}_gate/Mul", hidden_dims(size))


def _rows(width: int) -> Dims:
    """Return the dimensions of a value with one row for each token of all sequences."""
    return ["tokens", width]

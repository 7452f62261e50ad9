"""Recurrent parts in place of attention.

The parts are gated short convolutions, linear attention with the gated delta rule, and Mamba-2.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from .graph_writer import CONTRIB, FLOAT, Dims, Export, hidden_dims
from .layers import write_bare_norm, write_linear, write_split
from .options import Precision
from .projection import Projection
from .spec import DecoderSpec, DeltaNetSpec, MambaSpec, ShortConvSpec
from .weights import require_finite

# As in transformers, which adds this number to the sum of the squares of a query or key.
_L2_EPSILON = 1e-6
# The projections of decays and betas have one row per head, and errors in decays add up over the tokens.
_EXACT: Precision = "fp32"


def state_dims(spec: DecoderSpec) -> Iterator[tuple[str, Dims]]:
    """Yield the name (without "past." or "present.") and the dimensions of each state."""
    part = spec.recurrent
    if part is None:
        return
    channels, sizes = spec.hidden_size, ()  # type: int, tuple[int, ...]
    if isinstance(part, DeltaNetSpec):
        channels = 2 * part.key_width + part.value_width
        sizes = part.value_heads, part.key_size, part.value_size
    elif isinstance(part, MambaSpec):
        channels, sizes = part.channels, (part.heads, part.state_size, part.head_size)
    for layer in part.layers:
        yield f"{layer}.conv", ["batch_size", channels, part.kernel - 1]
        if sizes:
            yield f"{layer}.recurrent", ["batch_size", *sizes]


def write_recurrent(export: Export, layer: int, root: str) -> str:
    """Write the recurrent part of one layer and return its output, to be added to the residual stream."""
    part = export.spec.recurrent
    if isinstance(part, ShortConvSpec):
        return _write_short_conv(export, part, layer, root)
    if isinstance(part, MambaSpec):
        return (_write_mamba_1 if part.rank else _write_mamba)(export, part, layer, root)
    assert isinstance(part, DeltaNetSpec)
    return (_write_kimi_delta if part.gate_rank else _write_delta_net)(export, part, layer, root)


def _write_short_conv(export: Export, part: ShortConvSpec, layer: int, root: str) -> str:
    """Write out_proj(c * convolution(b * x)), where in_proj gives b, c and x."""
    graph, hidden, precision = export.graph, export.spec.hidden_size, export.options.precision
    path, source = f"/model/layers.{layer}/conv", f"model.layers.{layer}.conv"
    projection = Projection(f"{path}/in_proj", (f"{source}.in_proj",), (3 * hidden,), hidden)
    parts = write_linear(export, projection, root, precision=precision, bias=part.biased)
    before, after, x = write_split(export, f"{path}/Split", parts, (hidden, hidden, hidden))
    gated = graph.node("Mul", [before, x], f"{path}/Mul_1", hidden_dims(hidden))
    mixed = _write_convolution(export, path, f"{source}.conv", layer, gated, hidden, part.kernel, biased=part.biased)
    mixed = graph.node("Mul", [after, mixed], f"{path}/Mul_2", hidden_dims(hidden))
    projection = Projection(f"{path}/out_proj", (f"{source}.out_proj",), (hidden,), hidden)
    return write_linear(export, projection, mixed, precision=precision, bias=part.biased)


def _write_delta_net(export: Export, part: DeltaNetSpec, layer: int, root: str) -> str:
    graph, hidden, precision = export.graph, export.spec.hidden_size, export.options.precision
    path, source = f"/model/layers.{layer}/linear_attn", f"model.layers.{layer}.linear_attn"
    keys, values, heads = part.key_width, part.value_width, part.value_heads
    channels = 2 * keys + values

    def linear(name: str, rows: int, precision: Precision) -> str:
        projection = Projection(f"{path}/{name}_proj", (f"{source}.in_proj_{name}",), (rows,), hidden)
        return write_linear(export, projection, root, precision=precision)

    mixed, z = linear("qkv", channels, precision), linear("z", values, precision)
    b, a = linear("b", heads, _EXACT), linear("a", heads, _EXACT)
    mixed = _write_convolution(export, path, f"{source}.conv1d", layer, mixed, channels, part.kernel, silu=True)
    query, key, value = write_split(export, f"{path}/split_qkv/Split", mixed, (keys, keys, values))
    query = _write_unit_heads(export, part, f"{path}/q_l2norm", query, scale=part.key_size**-0.5)
    key = _write_unit_heads(export, part, f"{path}/k_l2norm", key)
    decay, beta = _write_gates(export, part, path, source, a, b)
    attended = f"{path}/LinearAttention/output_0"
    graph.nodes(
        "LinearAttention", [query, key, value, f"past.{layer}.recurrent", decay, beta],
        [attended, f"present.{layer}.recurrent"], f"{path}/LinearAttention", domain=CONTRIB, q_num_heads=part.key_heads,
        kv_num_heads=heads, update_rule="gated_delta", scale=1.0,
    )  # fmt: skip
    graph.value(attended, FLOAT, hidden_dims(values))
    weight = graph.array(f"{source}.norm.weight", export.weights.vector(f"{source}.norm.weight", part.value_size))
    normed = graph.node(
        "GatedRMSNorm", [attended, weight, z], f"{path}/GatedRMSNorm", hidden_dims(values), domain=CONTRIB,
        epsilon=float(export.spec.rms_norm_eps),
    )  # fmt: skip
    if part.tiled and part.key_heads != part.value_heads:
        normed = _write_tiled(export, part, f"{path}/Gather", normed)
    return write_linear(
        export, Projection(f"{path}/out_proj", (f"{source}.out_proj",), (hidden,), values), normed, precision=precision
    )


def _write_kimi_delta(export: Export, part: DeltaNetSpec, layer: int, root: str) -> str:
    """Write Kimi Delta Attention: the gated delta rule with one decay for each element of a key."""
    graph, hidden, precision = export.graph, export.spec.hidden_size, export.options.precision
    path, source = f"/model/layers.{layer}/linear_attn", f"model.layers.{layer}.linear_attn"
    widths = (part.key_width, part.key_width, part.value_width)

    def linear(name: str, value: str, rows: int, columns: int, precision: Precision) -> str:
        projection = Projection(f"{path}/{name}_proj", (f"{source}.{name}_proj",), (rows,), columns)
        return write_linear(export, projection, value, precision=precision)

    def through_rank(name: str, width: int, precision: Precision) -> str:
        low = linear(f"{name}_a", root, part.gate_rank, hidden, precision)
        return linear(f"{name}_b", low, width, part.gate_rank, precision)

    names = tuple(f"{source}.{name}_proj" for name in "qkv")
    mixed = write_linear(export, Projection(f"{path}/qkv_proj", names, widths, hidden), root, precision=precision)
    kernels = [
        _kernels(export, f"{source}.{name}_conv1d", width, part.kernel)
        for name, width in zip("qkv", widths, strict=True)
    ]
    mixed = _write_kernels(export, path, f"{source}.conv1d", layer, mixed, np.concatenate(kernels), silu=True)
    query, key, value = write_split(export, f"{path}/split_qkv/Split", mixed, widths)
    query = _write_unit_heads(export, part, f"{path}/q_l2norm", query, scale=part.key_size**-0.5)
    key = _write_unit_heads(export, part, f"{path}/k_l2norm", key)
    decay = _write_decays(export, part, path, source, through_rank("f", part.key_width, _EXACT))
    beta = linear("b", root, part.value_heads, hidden, _EXACT)
    beta = graph.node("Sigmoid", [beta], f"{path}/b_proj/Sigmoid", hidden_dims(part.value_heads))
    attended = f"{path}/LinearAttention/output_0"
    graph.nodes(
        "LinearAttention", [query, key, value, f"past.{layer}.recurrent", decay, beta],
        [attended, f"present.{layer}.recurrent"], f"{path}/LinearAttention", domain=CONTRIB, q_num_heads=part.key_heads,
        kv_num_heads=part.value_heads, update_rule="gated_delta", scale=1.0,
    )  # fmt: skip
    dims = hidden_dims(part.value_width)
    graph.value(attended, FLOAT, dims)
    normed = _write_head_norm(export, part, f"{path}/o_norm", f"{source}.o_norm.weight", attended)
    share = graph.node("Sigmoid", [through_rank("g", part.value_width, precision)], f"{path}/g_proj/Sigmoid", dims)
    gated = graph.node("Mul", [normed, share], f"{path}/g_proj/Mul", dims)
    return linear("o", gated, hidden, part.value_width, precision)


def _write_decays(export: Export, part: DeltaNetSpec, path: str, source: str, root: str) -> str:
    """Write the logarithms of the decays, -exp(A_log of the head) * softplus(root + dt_bias)."""
    graph, dims = export.graph, hidden_dims(part.key_width)
    bias = graph.array(f"{source}.dt_bias", export.weights.vector(f"{source}.dt_bias", part.key_width))
    shifted = graph.node("Add", [root, bias], f"{path}/f_proj/Add", dims)
    step = graph.node("Softplus", [shifted], f"{path}/f_proj/Softplus", dims)
    rates = _head_rates(export, source, part.value_heads)
    scale = graph.array(f"{source}.neg_exp_A", np.repeat(rates, part.key_size))
    return graph.node("Mul", [step, scale], f"{path}/f_proj/Mul", dims)


def _head_rates(export: Export, source: str, heads: int) -> NDArray[np.float32]:
    """Return -exp(A_log), the rates of the decay of each head."""
    name = f"{source}.A_log"
    return _negative_rates(name, export.weights.vector(name, heads))


def _negative_rates(name: str, logs: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return -exp(logs). Raise InputError if a result exceeds the range of float32."""
    with np.errstate(over="ignore"):
        rates = -np.exp(logs.astype(np.float64)).astype(np.float32)
    if not np.isfinite(rates).all():
        raise InputError(
            f"{name} contains the value {logs.max():g}",
            "the exponential of the value, which is the rate of a state's decay, exceeds the range of float32",
            "check the training run or the download that produced these weights",
        )
    return rates


def _write_head_norm(export: Export, part: DeltaNetSpec, path: str, source: str, root: str) -> str:
    """Write the RMS norm of each value head, with one weight vector for all heads."""
    graph, size = export.graph, part.value_size
    rows: Dims = ["batch_size", "sequence_length * linear_num_value_heads", size]
    split = graph.node("Reshape", [root, graph.int64([0, -1, size])], f"{path}/Reshape_1", rows)
    weight = graph.array(source, export.weights.vector(source, size))
    normed = write_bare_norm(export, [split, weight], path, rows)
    wide = hidden_dims(part.value_width)
    return graph.node("Reshape", [normed, graph.int64([0, -1, part.value_width])], f"{path}/Reshape_2", wide)


def _write_tiled(export: Export, part: DeltaNetSpec, name: str, root: str) -> str:
    """Write the value heads in the order of the columns of out_proj; see DeltaNetSpec.tiled."""
    order = "model.constants.tiled_heads"
    if not export.graph.has_initializer(order):
        columns = np.arange(part.value_width, dtype=np.int64)
        groups = columns.reshape(part.key_heads, part.value_heads // part.key_heads, part.value_size)
        export.graph.array(order, groups.swapaxes(0, 1).reshape(-1))
    return export.graph.node("Gather", [root, order], name, hidden_dims(part.value_width), axis=2)


def _write_mamba(export: Export, part: MambaSpec, layer: int, root: str) -> str:
    """Write Mamba-2 as linear attention: C are the queries, B the keys, and x * dt the values."""
    graph, hidden, precision = export.graph, export.spec.hidden_size, export.options.precision
    path, source = f"/model/layers.{layer}/mamba", f"model.layers.{layer}.mamba"
    width, states = part.width, part.groups * part.state_size
    names = f"{source}.in_proj_gate", f"{source}.in_proj_conv"
    both = Projection(f"{path}/in_proj", names, (width, part.channels), hidden)
    mixed = write_linear(export, both, root, precision=precision, bias=part.biased)
    gate, mixed = write_split(export, f"{path}/in_proj/Split", mixed, (width, part.channels))
    steps = Projection(f"{path}/dt_proj", (f"{source}.in_proj_dt",), (part.heads,), hidden)
    step = write_linear(export, steps, root, precision=_EXACT, bias=part.biased)
    mixed = _write_convolution(
        export, path, f"{source}.conv1d", layer, mixed, part.channels, part.kernel, silu=True, biased=part.conv_biased
    )
    x, key, query = write_split(export, f"{path}/split_xbc/Split", mixed, (width, states, states))
    step, decay = _write_steps(export, part, path, source, step)
    value = graph.node(
        "Mul", [x, _write_per_head(export, part, f"{path}/dt", step)], f"{path}/x/Mul", hidden_dims(width)
    )
    attended = f"{path}/LinearAttention/output_0"
    graph.nodes(
        "LinearAttention", [query, key, value, f"past.{layer}.recurrent", decay],
        [attended, f"present.{layer}.recurrent"], f"{path}/LinearAttention", domain=CONTRIB, q_num_heads=part.groups,
        kv_num_heads=part.heads, update_rule="gated", scale=1.0,
    )  # fmt: skip
    graph.value(attended, FLOAT, hidden_dims(width))
    return _write_mamba_end(export, part, layer, x, attended, gate)


def _write_mamba_end(export: Export, part: MambaSpec, layer: int, x: str, attended: str, gate: str) -> str:
    """Write what follows the scan: the skipped connection, the gate, the norm and the projection."""
    path, source = f"/model/layers.{layer}/mamba", f"model.layers.{layer}.mamba"
    graph, dims = export.graph, hidden_dims(part.width)
    skip = np.repeat(export.weights.vector(f"{source}.D", part.heads), part.head_size)
    skipped = graph.node("Mul", [x, graph.array(f"{source}.D", skip)], f"{path}/D/Mul", dims)
    total = graph.node("Add", [attended, skipped], f"{path}/D/Add", dims)
    normed = _write_gated_norm(export, part, path, source, total, gate)
    output = Projection(f"{path}/out_proj", (f"{source}.out_proj",), (export.spec.hidden_size,), part.width)
    return write_linear(export, output, normed, precision=export.options.precision, bias=part.biased)


def _write_mamba_1(export: Export, part: MambaSpec, layer: int, root: str) -> str:
    """Write Mamba-1 as linear attention with heads of one element, and a decay for each row of a state."""
    graph, precision = export.graph, export.options.precision
    path, source = f"/model/layers.{layer}/mamba", f"model.layers.{layer}.mamba"
    width, sizes = part.width, (part.rank, part.state_size, part.state_size)
    names = f"{source}.in_proj_conv", f"{source}.in_proj_gate"
    both = Projection(f"{path}/in_proj", names, (width, width), export.spec.hidden_size)
    mixed = write_linear(export, both, root, precision=precision, bias=part.biased)
    mixed, gate = write_split(export, f"{path}/in_proj/Split", mixed, (width, width))
    x = _write_convolution(
        export, path, f"{source}.conv1d", layer, mixed, width, part.kernel, silu=True, biased=part.conv_biased
    )
    projection = Projection(f"{path}/x_proj", (f"{source}.x_proj",), (sum(sizes),), width)
    parts = list(write_split(
        export, f"{path}/x_proj/Split", write_linear(export, projection, x, precision=precision), sizes
    ))  # fmt: skip
    for index, name in enumerate(("dt", "b", "c") if part.part_norms else ()):
        weight = export.weights.vector(f"{source}.{name}_layernorm.weight", sizes[index])
        inputs = [parts[index], graph.array(f"{source}.{name}_layernorm.weight", weight)]
        parts[index] = write_bare_norm(export, inputs, f"{path}/{name}_layernorm", hidden_dims(sizes[index]))
    projection = Projection(f"{path}/dt_proj", (f"{source}.dt_proj",), (width,), part.rank)
    step = write_linear(export, projection, parts[0], precision=_EXACT, bias=True)
    step = graph.node("Softplus", [step], f"{path}/dt/Softplus", hidden_dims(width))
    value = graph.node("Mul", [x, step], f"{path}/x/Mul", hidden_dims(width))
    attended = f"{path}/LinearAttention/output_0"
    graph.nodes(
        "LinearAttention",
        [parts[2], parts[1], value, f"past.{layer}.recurrent", _write_state_decays(export, part, path, source, step)],
        [attended, f"present.{layer}.recurrent"], f"{path}/LinearAttention", domain=CONTRIB, q_num_heads=1,
        kv_num_heads=width, update_rule="gated", scale=1.0,
    )  # fmt: skip
    graph.value(attended, FLOAT, hidden_dims(width))
    return _write_mamba_end(export, part, layer, x, attended, gate)


def _write_state_decays(export: Export, part: MambaSpec, path: str, source: str, step: str) -> str:
    """Write the logarithm of the decay of each state of each element, -exp(A_log) * dt."""
    graph, count, name = export.graph, part.state_size, f"model.constants.states.{part.width}.{part.state_size}"
    if not graph.has_initializer(name):
        graph.array(name, np.repeat(np.arange(part.width, dtype=np.int64), count))
    dims = hidden_dims(part.width * count)
    steps = graph.node("Gather", [step, name], f"{path}/A/Gather", dims, axis=2)
    logs = export.weights.tensor(f"{source}.A_log", (part.width, count)).astype(np.float32)
    require_finite(f"{source}.A_log", logs)
    scale = graph.array(f"{source}.neg_exp_A", _negative_rates(f"{source}.A_log", logs).reshape(-1))
    return graph.node("Mul", [steps, scale], f"{path}/A/Mul", dims)


def _write_steps(export: Export, part: MambaSpec, path: str, source: str, root: str) -> tuple[str, str]:
    """Write dt = softplus(root + dt_bias), and the logarithm of the decay, -exp(A_log) * dt."""
    graph, heads, dims = export.graph, part.heads, hidden_dims(part.heads)
    bias = graph.array(f"{source}.dt_bias", export.weights.vector(f"{source}.dt_bias", heads))
    shifted = graph.node("Add", [root, bias], f"{path}/dt/Add", dims)
    step = graph.node("Softplus", [shifted], f"{path}/dt/Softplus", dims)
    rates = _head_rates(export, source, heads)
    scale = graph.array(f"{source}.neg_exp_A", rates)
    return step, graph.node("Mul", [step, scale], f"{path}/A/Mul", dims)


def _write_per_head(export: Export, part: MambaSpec, path: str, root: str) -> str:
    """Write the number of each head for every element of the head."""
    name = f"model.constants.heads.{part.heads}.{part.head_size}"
    if not export.graph.has_initializer(name):
        export.graph.array(name, np.repeat(np.arange(part.heads, dtype=np.int64), part.head_size))
    return export.graph.node("Gather", [root, name], f"{path}/Gather", hidden_dims(part.width), axis=2)


def _write_gated_norm(export: Export, part: MambaSpec, path: str, source: str, root: str, gate: str) -> str:
    """Write root * silu(gate), and the RMS norm of this product or of root over each group."""
    graph, dims = export.graph, hidden_dims(part.width)
    if part.norm == "before":
        root = _write_group_norm(export, part, path, source, root)
    share = graph.node("Sigmoid", [gate], f"{path}/gate/Sigmoid", dims)
    active = graph.node("Mul", [gate, share], f"{path}/gate/Mul_1", dims)
    gated = graph.node("Mul", [active, root], f"{path}/gate/Mul_2", dims)
    return _write_group_norm(export, part, path, source, gated) if part.norm == "gated" else gated


def _write_group_norm(export: Export, part: MambaSpec, path: str, source: str, root: str) -> str:
    graph, dims, size = export.graph, hidden_dims(part.width), part.width // part.groups
    weight = graph.array(f"{source}.norm.weight", export.weights.vector(f"{source}.norm.weight", part.width))
    if part.groups == 1:
        return write_bare_norm(export, [root, weight], f"{path}/norm", dims)
    name = f"model.constants.ones.{size}"
    if not graph.has_initializer(name):
        graph.array(name, np.ones(size, np.float32))
    rows: Dims = ["batch_size", "sequence_length * mamba_n_groups", size]
    split = graph.node("Reshape", [root, graph.int64([0, -1, size])], f"{path}/norm/Reshape_1", rows)
    normed = write_bare_norm(export, [split, name], f"{path}/norm", rows)
    joined = graph.node("Reshape", [normed, graph.int64([0, -1, part.width])], f"{path}/norm/Reshape_2", dims)
    return graph.node("Mul", [joined, weight], f"{path}/norm/Mul", dims)


def _write_gates(export: Export, part: DeltaNetSpec, path: str, source: str, a: str, b: str) -> tuple[str, str]:
    """Write decay = -exp(A_log) * softplus(a + dt_bias), and beta = sigmoid(b)."""
    graph, heads, name = export.graph, part.value_heads, f"{path}/LinearAttentionGate"
    bias = graph.array(f"{source}.dt_bias", export.weights.vector(f"{source}.dt_bias", heads))
    rates = _head_rates(export, source, heads)
    scale = graph.array(f"{source}.neg_exp_A", rates)
    outputs = f"{name}/output_0", f"{name}/output_1"
    graph.nodes("LinearAttentionGate", [a, bias, scale, b], list(outputs), name, domain=CONTRIB)
    for output in outputs:
        graph.value(output, FLOAT, hidden_dims(heads))
    return outputs


def _write_convolution(
    export: Export, path: str, source: str, layer: int, root: str, channels: int, kernel: int, *, silu: bool = False,
    biased: bool = False,
) -> str:  # fmt: skip
    """Write a causal depthwise convolution. The operator has channels first, as onnxruntime-genai expects its state."""
    weight = _kernels(export, source, channels, kernel)
    return _write_kernels(export, path, source, layer, root, weight, silu=silu, biased=biased)


def _kernels(export: Export, source: str, channels: int, kernel: int) -> NDArray[np.float32]:
    """Return the kernels of a convolution, [channels, 1, kernel]."""
    weight = export.weights.tensor(f"{source}.weight", (channels, 1, kernel)).astype(np.float32)
    require_finite(f"{source}.weight", weight)
    return weight


def _write_kernels(
    export: Export, path: str, source: str, layer: int, root: str, weight: NDArray[np.float32], *, silu: bool = False,
    biased: bool = False,
) -> str:  # fmt: skip
    graph, name, channels = export.graph, f"{path}/CausalConvWithState", len(weight)
    first: Dims = ["batch_size", channels, "sequence_length"]
    bias = graph.array(f"{source}.bias", export.weights.vector(f"{source}.bias", channels)) if biased else ""
    turned = graph.node("Transpose", [root], f"{path}/Transpose_1", first, perm=[0, 2, 1])
    inputs = [turned, graph.array(f"{source}.weight", weight), bias, f"past.{layer}.conv"]
    output, activation = f"{name}/output_0", "silu" if silu else "none"
    graph.nodes(
        "CausalConvWithState", inputs, [output, f"present.{layer}.conv"], name, domain=CONTRIB, activation=activation,
        ndim=1,
    )  # fmt: skip
    graph.value(output, FLOAT, first)
    return graph.node("Transpose", [output], f"{path}/Transpose_2", hidden_dims(channels), perm=[0, 2, 1])


def _write_unit_heads(export: Export, part: DeltaNetSpec, path: str, root: str, *, scale: float = 1.0) -> str:
    """Write scale * x / sqrt(sum of x ** 2 + epsilon) for each head of queries or keys, as an RMS norm."""
    graph, size, wide = export.graph, part.key_size, hidden_dims(part.key_width)
    dims: Dims = ["batch_size", "sequence_length * linear_num_key_heads", size]
    heads = graph.node("Reshape", [root, graph.int64([0, -1, size])], f"{path}/Reshape_1", dims)
    name = f"model.constants.unit.{size}.{scale:.9g}"
    if not graph.has_initializer(name):
        graph.array(name, np.full(size, scale * size**-0.5, np.float32))
    normed = graph.node(
        "SimplifiedLayerNormalization", [heads, name], f"{path}/LayerNorm", dims, axis=-1, stash_type=1,
        epsilon=_L2_EPSILON / size,
    )  # fmt: skip
    return graph.node("Reshape", [normed, graph.int64([0, -1, part.key_width])], f"{path}/Reshape_2", wide)

"""The tensors of a decoder, by their names in Llama, Qwen and Gemma 2, and the size of its model folder."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from genai.kernels.weights import num_blocks
from genai.quant.block_types import type_of

from .options import BITS, ExportOptions, Precision
from .rope_scaling import LongRope
from .spec import AltUpSpec, DecoderSpec, DeltaNetSpec, ExpertsSpec, LatentSpec, MambaSpec, ShortConvSpec

Shape = tuple[int, ...]
TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Endings of the names of small matrices that are stored as float32 with every precision.
EXACT = (
    "mlp.gate.weight", "in_proj_a.weight", "in_proj_b.weight", "modality_router.weight", "prediction_coefs.weight",
    "correction_coefs.weight", "in_proj_dt.weight", "linear_attn.f_a_proj.weight", "linear_attn.f_b_proj.weight",
    "linear_attn.b_proj.weight", "mamba.dt_proj.weight", "mamba.A_log",
)  # fmt: skip


def tensor_shapes(spec: DecoderSpec) -> dict[str, Shape]:
    """Return the names and shapes of all tensors, in the order of the layers, and then those of the MTP head."""
    head = {} if spec.mtp is None else {mtp_name(name): shape for name, shape in _tensors(spec.mtp)}
    return dict(_tensors(spec)) | head


def mtp_name(name: str) -> str:
    """Return the name of an MTP head's tensor; the embeddings and the LM head are those of the decoder."""
    return f"mtp.{name.removeprefix('model.')}" if name.startswith("model.") and name != TABLE else name


def _tensors(spec: DecoderSpec) -> Iterator[tuple[str, Shape]]:
    table = (spec.vocab_size, spec.hidden_size)
    yield TABLE, table
    if spec.reads_vectors:
        yield "model.pre_fc_norm_embedding.weight", (spec.hidden_size,)
        yield "model.pre_fc_norm_hidden.weight", (spec.hidden_size,)
        yield "model.fc.weight", (spec.hidden_size, 2 * spec.hidden_size)
    if spec.position_embeddings:
        yield "model.embed_positions.weight", (spec.context_length, spec.hidden_size)
    if (inputs := spec.per_layer_inputs) is not None:
        width = spec.num_layers * inputs.size
        for name, rows in inputs.table(spec.vocab_size).items():
            yield f"{name}.weight", (rows, width)
        yield "model.per_layer_model_projection.weight", (width, spec.hidden_size)
        yield "model.per_layer_projection_norm.weight", (inputs.size,)
    for stream in range(spec.altup.streams - 1 if spec.altup is not None else 0):
        for name in ("altup_projections", "altup_unembed_projections"):
            yield f"model.{name}.{stream}.weight", (spec.hidden_size, spec.hidden_size)
    for layer in range(spec.num_layers):
        for name, shape in _layer(spec, layer):
            yield f"model.layers.{layer}.{name}", shape
    yield from _learned(spec, "model.norm")
    if not spec.tie_word_embeddings:
        yield "lm_head.weight", table
    if spec.head_bias:
        yield "lm_head.bias", (spec.vocab_size,)


def _layer(spec: DecoderSpec, layer: int) -> Iterator[tuple[str, Shape]]:
    if spec.feed_forward_layers is not None:
        yield from _learned(spec, "input_layernorm")
        yield from _mixer(spec, layer) if spec.has_mixer(layer) else _feed_forward(spec, layer)
        return
    if spec.pre_norms:
        yield from _learned(spec, "input_layernorm")
    if spec.post_norms or (spec.pre_norms and not spec.shared_norm):
        yield from _learned(spec, "post_attention_layernorm")
    if spec.post_norms and spec.pre_norms:
        yield from _learned(spec, "pre_feedforward_layernorm")
    if spec.post_norms:
        yield from _learned(spec, "post_feedforward_layernorm")
    yield from _mixer(spec, layer)
    yield from _feed_forward(spec, layer)
    if (inputs := spec.per_layer_inputs) is not None:
        yield "per_layer_input_gate.weight", (inputs.size, spec.hidden_size)
        yield "per_layer_projection.weight", (spec.hidden_size, inputs.size)
        yield "post_per_layer_input_norm.weight", (spec.hidden_size,)
    if spec.altup is not None:
        yield from _altup(spec.altup, spec.hidden_size)
    if spec.layer_scales:
        yield "layer_scalar", (1,)


def _feed_forward(spec: DecoderSpec, layer: int) -> Iterator[tuple[str, Shape]]:
    experts = spec.routed(layer)
    if experts is None or experts.beside_mlp:
        yield from _mlp(spec, "mlp", spec.mlp_size(layer))
    if experts is not None:
        yield from _experts(spec, experts)


def _mixer(spec: DecoderSpec, layer: int) -> Iterator[tuple[str, Shape]]:
    """Yield the tensors of attention and of a recurrent part."""
    if spec.has_recurrence(layer):
        yield from _recurrent(spec)
    if spec.is_recurrent(layer):
        return
    yield from _attention(spec.at(layer), layer) if spec.latent is None else _latent(spec, spec.latent)


def _altup(altup: AltUpSpec, hidden: int) -> Iterator[tuple[str, Shape]]:
    count = altup.streams
    if altup.scaled:
        yield "altup.correct_output_scale", (hidden,)
    yield "altup.router_norm.weight", (hidden,)
    yield "altup.modality_router.weight", (count, hidden)
    yield "altup.prediction_coefs.weight", (count * count, count)
    yield "altup.correction_coefs.weight", (count, count)
    yield "laurel.linear_left.weight", (altup.laurel_rank, hidden)
    yield "laurel.linear_right.weight", (hidden, altup.laurel_rank)
    yield "laurel.post_laurel_norm.weight", (hidden,)


def _recurrent(spec: DecoderSpec) -> Iterator[tuple[str, Shape]]:
    hidden, part = spec.hidden_size, spec.recurrent
    if isinstance(part, ShortConvSpec):
        yield from _linear("conv.in_proj", 3 * hidden, hidden, part.biased)
        yield "conv.conv.weight", (hidden, 1, part.kernel)
        if part.biased:
            yield "conv.conv.bias", (hidden,)
        yield from _linear("conv.out_proj", hidden, hidden, part.biased)
    elif isinstance(part, DeltaNetSpec) and part.gate_rank:
        yield from _kimi_delta(part, hidden)
    elif isinstance(part, DeltaNetSpec):
        channels = 2 * part.key_width + part.value_width
        yield "linear_attn.in_proj_qkv.weight", (channels, hidden)
        yield "linear_attn.in_proj_z.weight", (part.value_width, hidden)
        yield "linear_attn.in_proj_b.weight", (part.value_heads, hidden)
        yield "linear_attn.in_proj_a.weight", (part.value_heads, hidden)
        yield "linear_attn.conv1d.weight", (channels, 1, part.kernel)
        yield "linear_attn.A_log", (part.value_heads,)
        yield "linear_attn.dt_bias", (part.value_heads,)
        yield "linear_attn.norm.weight", (part.value_size,)
        yield "linear_attn.out_proj.weight", (hidden, part.value_width)
    elif isinstance(part, MambaSpec) and part.rank:
        yield from _mamba_1(part, hidden)
    elif isinstance(part, MambaSpec):
        for name, rows in (("gate", part.width), ("conv", part.channels), ("dt", part.heads)):
            yield from _linear(f"mamba.in_proj_{name}", rows, hidden, part.biased)
        yield "mamba.conv1d.weight", (part.channels, 1, part.kernel)
        if part.conv_biased:
            yield "mamba.conv1d.bias", (part.channels,)
        for name in ("A_log", "D", "dt_bias"):
            yield f"mamba.{name}", (part.heads,)
        if part.norm != "none":
            yield "mamba.norm.weight", (part.width,)
        yield from _linear("mamba.out_proj", hidden, part.width, part.biased)


def _mamba_1(part: MambaSpec, hidden: int) -> Iterator[tuple[str, Shape]]:
    for name in ("conv", "gate"):
        yield from _linear(f"mamba.in_proj_{name}", part.width, hidden, part.biased)
    yield "mamba.conv1d.weight", (part.width, 1, part.kernel)
    if part.conv_biased:
        yield "mamba.conv1d.bias", (part.width,)
    sizes = {"dt": part.rank, "b": part.state_size, "c": part.state_size}
    yield "mamba.x_proj.weight", (sum(sizes.values()), part.width)
    yield from _linear("mamba.dt_proj", part.width, part.rank, True)
    yield "mamba.A_log", (part.width, part.state_size)
    yield "mamba.D", (part.width,)
    for name, size in sizes.items() if part.part_norms else ():
        yield f"mamba.{name}_layernorm.weight", (size,)
    yield from _linear("mamba.out_proj", hidden, part.width, part.biased)


def _kimi_delta(part: DeltaNetSpec, hidden: int) -> Iterator[tuple[str, Shape]]:
    widths = {"q": part.key_width, "k": part.key_width, "v": part.value_width}
    for name, width in widths.items():
        yield f"linear_attn.{name}_proj.weight", (width, hidden)
        yield f"linear_attn.{name}_conv1d.weight", (width, 1, part.kernel)
    for name, width in (("f", part.key_width), ("g", part.value_width)):
        yield f"linear_attn.{name}_a_proj.weight", (part.gate_rank, hidden)
        yield f"linear_attn.{name}_b_proj.weight", (width, part.gate_rank)
    yield "linear_attn.b_proj.weight", (part.value_heads, hidden)
    yield "linear_attn.A_log", (part.value_heads,)
    yield "linear_attn.dt_bias", (part.key_width,)
    yield "linear_attn.o_norm.weight", (part.value_size,)
    yield "linear_attn.o_proj.weight", (hidden, part.value_width)


def _attention(spec: DecoderSpec, layer: int) -> Iterator[tuple[str, Shape]]:
    """Yield the tensors of a layer's attention; `spec` has the layer's sizes."""
    hidden, queries, keys = spec.hidden_size, spec.query_size, spec.key_value_size
    cached = spec.cache_layer(layer) == layer
    own = [("k", keys), ("v", keys)][: 1 if spec.reuses_keys(layer) else 2] if cached else []
    for name, rows in (("q", queries), *own):
        yield from _linear(f"self_attn.{name}_proj", rows, hidden, spec.qkv_bias)
    if spec.attention_gate:
        yield from _linear("self_attn.gate_proj", queries, hidden, spec.qkv_bias)
    yield from _linear("self_attn.o_proj", hidden, queries, spec.o_bias)
    if spec.sinks:
        yield "self_attn.sinks", (spec.num_attention_heads,)
    norms = (("q_norm", queries), ("k_norm", keys))[: 2 if cached else 1]
    for name, width in norms if spec.qk_norm and spec.qk_norm_weights else ():
        size = spec.head_size if spec.qk_norm_scope == "head" else width
        yield f"self_attn.{name}.weight", (size,)
        if spec.qk_norm_biases:
            yield f"self_attn.{name}.bias", (size,)


def _latent(spec: DecoderSpec, latent: LatentSpec) -> Iterator[tuple[str, Shape]]:
    """Yield the tensors of latent attention, with a separate matrix for the keys and for the values of each head."""
    hidden, heads, columns = spec.hidden_size, spec.num_attention_heads, spec.hidden_size
    if latent.query_rank:
        columns = latent.query_rank
        yield from _linear("self_attn.q_a_proj", columns, hidden, latent.biased)
        yield "self_attn.q_a_layernorm.weight", (columns,)
    yield "self_attn.q_nope_proj.weight", (heads * latent.nope_size, columns)
    yield "self_attn.q_rope_proj.weight", (heads * latent.rope_size, columns)
    yield from _linear("self_attn.kv_a_proj", latent.row_size, hidden, latent.biased)
    yield "self_attn.kv_a_layernorm.weight", (latent.rank,)
    for head in range(heads):
        yield f"self_attn.k_up.{head}.weight", (latent.rank, latent.nope_size)
        yield f"self_attn.v_up.{head}.weight", (latent.value_size, latent.rank)
    yield from _linear("self_attn.o_proj", hidden, heads * latent.value_size, latent.biased)


def _learned(spec: DecoderSpec, norm: str) -> Iterator[tuple[str, Shape]]:
    if spec.norm_weights:
        yield f"{norm}.weight", (spec.hidden_size,)
    if spec.norm_biases:
        yield f"{norm}.bias", (spec.hidden_size,)


def _mlp(spec: DecoderSpec, path: str, width: int) -> Iterator[tuple[str, Shape]]:
    for name in ("gate_proj", "up_proj") if spec.gated_mlp else ("up_proj",):
        yield from _linear(f"{path}.{name}", width, spec.hidden_size, spec.mlp_bias)
    if spec.hidden_activation == "xielu":
        yield f"{path}.act_fn.alpha_p", (1,)
        yield f"{path}.act_fn.alpha_n", (1,)
    yield from _linear(f"{path}.down_proj", spec.hidden_size, width, spec.mlp_bias)


def _experts(spec: DecoderSpec, experts: ExpertsSpec) -> Iterator[tuple[str, Shape]]:
    hidden, wide, given = spec.hidden_size, experts.intermediate_size, experts.width(spec.hidden_size)
    yield from _linear("mlp.gate", experts.count, hidden, experts.biased)
    shapes = {"gate": (wide, given), "up": (wide, given), "down": (given, wide)}
    for expert in range(experts.count):
        for name, shape in shapes.items():
            if experts.gated or name != "gate":
                yield from _linear(f"mlp.experts.{expert}.{name}_proj", *shape, experts.biased)
    if experts.latent_size:
        yield from _linear("mlp.latent_in_proj", given, hidden, spec.mlp_bias)
        yield from _linear("mlp.latent_out_proj", hidden, given, spec.mlp_bias)
    if experts.shared_intermediate_size:
        yield from _mlp(spec, "mlp.shared_expert", experts.shared_intermediate_size)
    if experts.selection_bias:
        yield "mlp.gate.selection_bias", (experts.count,)
    if experts.scaled:
        yield "mlp.experts.scale", (experts.count,)
    if experts.beside_mlp:
        yield "mlp.gate.norm", (hidden,)
        for norm in ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2"):
            yield f"{norm}.weight", (hidden,)
    if experts.shared_gate:
        yield "mlp.shared_expert_gate.weight", (1, hidden)


def _linear(name: str, rows: int, columns: int, biased: bool) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (rows, columns)
    if biased:
        yield f"{name}.bias", (rows,)


# Graph, configuration and alignment.
_BESIDE_WEIGHTS = 1 << 20


def folder_bytes(spec: DecoderSpec, options: ExportOptions, kind: Callable[[str], np.dtype[Any]]) -> int:
    """Return a slightly high estimate of the folder's size on disk in bytes, without the tokenizer's files.

    Args:
        kind: returns the stored dtype of a tensor by name, for weights that keep their format.
    """
    weights = sum(
        _prequantized_bytes(name, kind(name), shape)
        if options.precision == "kept"
        else _tensor_bytes(spec, options, name, shape)
        for name, shape in tensor_shapes(spec).items()
    )
    rotated = max(spec.rotary_size, spec.local_rotary_size) if any(map(spec.rotated, range(spec.num_layers))) else 0
    tables = 2 * 4 * spec.context_length * (rotated // 2)
    scaling = spec.query_scaling
    rotated_queries = scaling is not None and scaling.rotated
    copies = 2 if isinstance(spec.rope_scaling, LongRope) or spec.local_rope_theta or rotated_queries else 1
    factors = 4 * spec.context_length if scaling is not None and not scaling.rotated else 0
    return weights + copies * tables + factors + _BESIDE_WEIGHTS


def _prequantized_bytes(name: str, stored: np.dtype[Any], shape: Shape) -> int:
    """Return the size of a tensor that keeps its format, assuming 32-bit scales for all blocks."""
    kind = type_of(np.empty(0, stored))
    if kind is None or len(shape) < 2:
        return math.prod(shape) * (2 if stored == np.float16 and len(shape) > 1 else 4)
    if ".experts." in name and not kind.is_uniform:  # written as 8-bit integers
        return math.prod(shape) * 10 // 8
    return int(math.prod(shape) * kind.format.bits_per_weight(shape[-1], 32) / 8)


def _tensor_bytes(spec: DecoderSpec, options: ExportOptions, name: str, shape: Shape) -> int:
    if len(shape) != 2 or name.endswith(EXACT):
        return 4 * math.prod(shape)
    if name == "lm_head.weight":
        return _matrix_bytes(shape, options.head, options)
    if name == TABLE:
        precision = options.embedding(tied=spec.tie_word_embeddings)
        apart = spec.tie_word_embeddings and precision != options.head
        head = _matrix_bytes(shape, options.head, options) if apart else 0
        return head + _matrix_bytes(shape, precision, options)
    if name.startswith("model.embed_tokens_per_layer"):
        return _matrix_bytes(shape, options.embedding_precision or options.precision, options)
    return _matrix_bytes(shape, options.precision, options)


def _matrix_bytes(shape: Shape, precision: Precision, options: ExportOptions) -> int:
    rows, columns = shape
    if precision not in BITS:
        return rows * columns * (2 if precision == "fp16" else 4)
    blocks = num_blocks(columns, options.block_size)
    points = 0 if options.symmetric else 1
    return rows * blocks * (options.block_size * BITS[precision] // 8 + 4 + points)

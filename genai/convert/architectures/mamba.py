"""Decoders with Mamba-1 (Jamba, Mamba) or Mamba-2 (Granite 4, Bamba, Falcon H1, Mamba 2 and Nemotron-H)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import UnsupportedModelError
from ..hf_config import HFConfig
from ..spec import DecoderSpec, ExpertsSpec, MambaSpec
from . import common
from .common import Rule, architecture, decoder
from .llama import GRANITE_EXPERTS, GRANITE_SHARED, multipliers


def rows_of(first: str) -> common.TensorView:
    """Return a view of the rows of the gate, of the convolution's input ("conv") or of the time steps ("dt")."""

    def view(spec: DecoderSpec, tensor: NDArray[Any]) -> NDArray[Any]:
        part = spec.recurrent
        assert isinstance(part, MambaSpec)
        start, count = {
            "gate": (0, part.width), "conv": (part.width, part.channels), "dt": (part.width + part.channels, part.heads)
        }[first]  # fmt: skip
        return tensor[start : start + count]

    return view


_IN_PROJECTION = tuple(
    Rule(rf"mamba\.in_proj_{part}\.", "mamba.in_proj.", rows_of(part)) for part in ("gate", "conv", "dt")
)

# Names of checkpoints that consist of Mamba layers.
_BACKBONE = (
    Rule(r"^model\.embed_tokens", "backbone.embeddings"),
    Rule(r"^model\.norm\.", "backbone.norm_f."),
    Rule(r"^model\.layers", "backbone.layers"),
    Rule(r"\.input_layernorm", ".norm"),
)


def _mamba(config: HFConfig, layers: tuple[int, ...], *, width: int | None = None, **fields: Any) -> MambaSpec | None:
    """Return the sizes of Mamba-2, or None if no layer has it; `width` is the combined width of the heads, if known."""
    config.get("mamba_expand")
    heads = config.integer("mamba_n_heads", default=128)
    width = width or config.integer("mamba_expand", default=2) * config.integer("hidden_size")
    size = width // heads if config.get("mamba_d_head") in (None, "auto") else config.integer("mamba_d_head")
    if size * heads != width:
        raise config.wrong("mamba_d_head", size, f"{width} / {heads}, the width of Mamba-2 divided by its heads")
    _check_steps(config)
    config.get("mamba_chunk_size")  # it does not change results
    part = MambaSpec(
        layers=layers, heads=heads, head_size=size, groups=config.integer("mamba_n_groups", default=1),
        state_size=config.integer("mamba_d_state", default=256), kernel=config.integer("mamba_d_conv", default=4),
        biased=config.flag("mamba_proj_bias"), conv_biased=config.flag("mamba_conv_bias", default=True),
        **fields,
    )  # fmt: skip
    return part if layers else None


def _check_steps(config: HFConfig) -> None:
    """Raise UnsupportedModelError if config.json limits the time steps."""
    limits = config.get("time_step_limit")
    if limits not in (None, [0.0, math.inf], [0.0, {"__float__": "Infinity"}]):  # the last is transformers' form
        raise UnsupportedModelError(
            f"config.json: time_step_limit is {limits!r:.40}",
            "the time steps of Mamba-2 are not clipped",
            "use a checkpoint with the limits 0 and Infinity",
        )


@architecture("Granite 4", *GRANITE_EXPERTS, *_IN_PROJECTION, *GRANITE_SHARED)
def granitemoehybrid(config: HFConfig) -> DecoderSpec:
    """Granite 4: Mamba-2 in most layers, and a shared expert; some sizes have neither Mamba-2 nor other experts."""
    count = config.num_layers
    kinds = config.layers("layer_types", count) or config.layers("layers_block_type", count) or ["mamba"] * count
    layers = common.layers_of("mamba", "linear_attention", kinds=kinds, others=("attention", "full_attention"))
    width = config.integer("shared_intermediate_size", default=1024)
    experts = None
    if config.integer("num_local_experts", default=8, least=0):
        experts = common.mixtral_experts(config, shared_intermediate_size=width)
    config.get("num_experts_per_tok")  # checkpoints without experts have it, too
    position = config.get("position_embedding_type")
    if position not in (None, "rope", "nope"):
        raise config.wrong("position_embedding_type", position, "rope, nope or null")
    return decoder(
        config, intermediate_size=width, experts=experts, recurrent=_mamba(config, layers),
        rope_layers=None if position == "rope" else (), **multipliers(config), **common.attention_biases(config),
    )  # fmt: skip


@architecture(
    "Bamba",
    *_IN_PROJECTION,
    Rule(r"post_attention_layernorm", "pre_ff_layernorm"),
    Rule(r"mlp\.", "feed_forward."),
    Rule(r"^model\.norm\.", "model.final_layernorm."),
)
def bamba(config: HFConfig) -> DecoderSpec:
    """Bamba (IBM): Mamba-2 in most layers; attention rotates half of each head."""
    attention = config.numbers("attn_layer_indices")
    if not all(0 <= layer < config.num_layers for layer in attention):
        raise config.wrong("attn_layer_indices", attention, f"a list of layers from 0 to {config.num_layers - 1}")
    layers = tuple(layer for layer in range(config.num_layers) if layer not in attention)
    return decoder(config, epsilon=1e-5, partial=0.5, recurrent=_mamba(config, layers), **common.given_biases(config))


# Our matrices, and their factors in config.json: the first key of each pair, or an element of a list.
_SCALED = {
    "self_attn.q_proj": (("attention_in_multiplier", 0),),
    "self_attn.k_proj": (("attention_in_multiplier", 0), ("key_multiplier", 0)),
    "self_attn.v_proj": (("attention_in_multiplier", 0),),
    "self_attn.o_proj": (("attention_out_multiplier", 0),),
    "mlp.gate_proj": (("mlp_multipliers", 0),),
    "mlp.down_proj": (("mlp_multipliers", 1),),
    "mamba.in_proj_gate": (("ssm_in_multiplier", 0), ("ssm_multipliers", 0)),
    "mamba.in_proj_dt": (("ssm_in_multiplier", 0), ("ssm_multipliers", 4)),
    "mamba.in_proj_conv.x": (("ssm_in_multiplier", 0), ("ssm_multipliers", 1)),
    "mamba.in_proj_conv.B": (("ssm_in_multiplier", 0), ("ssm_multipliers", 2)),
    "mamba.in_proj_conv.C": (("ssm_in_multiplier", 0), ("ssm_multipliers", 3)),
    "mamba.out_proj": (("ssm_out_multiplier", 0),),
}


def _scales(config: HFConfig) -> tuple[tuple[str, float], ...]:
    """Return the factors of the matrices of Falcon H1."""

    def factor(key: str, index: int) -> float:
        value = config.get(key)
        if not isinstance(value, list):
            return config.number(key, default=1.0)
        if not all(type(one) in (int, float) for one in value) or len(value) != (5 if key[0] == "s" else 2):
            raise config.wrong(key, value, "a list with a number for each part")
        return float(value[index])

    return tuple((name, math.prod(factor(*one) for one in parts)) for name, parts in _SCALED.items())


def _scaled(name: str, view: common.TensorView | None = None) -> common.TensorView:
    """Return a view of a matrix times its factor."""

    def scaled(spec: DecoderSpec, tensor: NDArray[Any]) -> NDArray[Any]:
        factors = dict(spec.matrix_scales)
        part = tensor if view is None else view(spec, tensor)
        if name != "mamba.in_proj_conv":
            return part * np.float32(factors[name])
        assert isinstance(spec.recurrent, MambaSpec)
        states = spec.recurrent.groups * spec.recurrent.state_size
        numbers = [factors[f"{name}.{which}"] for which in "xBC"]
        rows = np.repeat(np.array(numbers, np.float32), [spec.recurrent.width, states, states])
        return part * rows.reshape(-1, *[1] * (part.ndim - 1))

    return scaled


# Biases of attention and of the feed-forward layer are part of what is scaled, too.
_FALCON_H1 = (
    *(
        Rule(rf"{ours}\.{part}_proj", f"{theirs}.{part}_proj", _scaled(f"{ours}.{part}_proj"), floats=True)
        for ours, theirs, parts in (("self_attn", "self_attn", "qkvo"), ("mlp", "feed_forward", ("gate", "down")))
        for part in parts
    ),
    Rule(r"mlp\.up_proj", "feed_forward.up_proj"),
    *(
        Rule(
            rf"mamba\.in_proj_{part}\.", "mamba.in_proj.", _scaled(f"mamba.in_proj_{part}", rows_of(part)), floats=True
        )
        for part in ("gate", "conv", "dt")
    ),
    Rule(r"mamba\.out_proj", "mamba.out_proj", _scaled("mamba.out_proj"), floats=True),
    Rule(r"post_attention_layernorm", "pre_ff_layernorm"),
    Rule(r"^model\.norm\.", "model.final_layernorm."),
)


@architecture("Falcon H1", *_FALCON_H1, unused=r"\.mup_vector$")
def falcon_h1(config: HFConfig) -> DecoderSpec:
    """Falcon H1 (TII): Mamba-2 beside the attention of every layer, and factors for most matrices."""
    common.refuse_flags(
        config,
        "attention_bias",
        "mamba_proj_bias",
        "projectors_bias",
        why="the factors of the matrices do not apply to their biases",
        fix="use a checkpoint without these biases",
    )
    norm = "before" if config.flag("mamba_norm_before_gate", default=True) else "gated"
    norm = norm if config.flag("mamba_rms_norm") else "none"
    width = config.integer("mamba_d_ssm", default=1024) if config.get("mamba_d_ssm") is not None else None
    mamba = _mamba(config, tuple(range(config.num_layers)), width=width, norm=norm, beside_attention=True)
    return decoder(
        config, epsilon=1e-5, recurrent=mamba, matrix_scales=_scales(config),
        embedding_scale=config.number("embedding_multiplier", default=1.0),
        logit_scale=config.number("lm_head_multiplier", default=1.0),
    )  # fmt: skip


# Keys of Mamba-2 for training, and for sizes that other keys determine.
_MAMBA2_IGNORED = (
    "chunk_size norm_before_gate pad_vocab_size_multiple rescale_prenorm_residual residual_in_fp32 rms_norm "
    "time_step_floor time_step_max time_step_min time_step_rank"
).split()
# The states of recurrent layers have no limit of tokens. This is llama.cpp's number for such models.
_UNLIMITED = 1 << 20


@architecture("Mamba 2, Codestral Mamba", *_IN_PROJECTION, *_BACKBONE, Rule(r"\.mamba\.", ".mixer."))
def mamba2(config: HFConfig) -> DecoderSpec:
    """Mamba 2: each layer consists of Mamba-2; there is no attention and no feed-forward layer."""
    _check_steps(config)
    for name in _MAMBA2_IGNORED:
        config.get(name)
    heads, size = config.integer("num_heads", default=128), config.integer("head_dim", default=64)
    width = config.integer("expand", default=2) * config.integer("hidden_size")
    if heads * size != width:
        raise config.wrong("head_dim", size, f"{width} / {heads}, the width of Mamba-2 divided by its heads")
    mamba = MambaSpec(
        layers=tuple(range(config.num_layers)), heads=heads, head_size=size,
        groups=config.integer("n_groups", default=8), state_size=config.integer("state_size", default=128),
        kernel=config.integer("conv_kernel", default=4), biased=config.flag("use_bias"),
        conv_biased=config.flag("use_conv_bias", default=True),
    )  # fmt: skip
    return decoder(
        config, epsilon=1e-5, heads=heads, recurrent=mamba, feed_forward_layers=(), rope_layers=(),
        intermediate_size=width, context_length=config.integer("max_position_embeddings", default=_UNLIMITED),
    )  # fmt: skip


# Keys of Nemotron-H for training and for other runtimes.
_IGNORED = (
    "chunk_size expand mamba_ssm_cache_dtype moe_shared_expert_overlap mtp_layers_block_type n_shared_experts "
    "rescale_prenorm_residual time_step_floor time_step_max time_step_min use_mamba_kernels"
).split()
# Keys of experts, which checkpoints without experts also have.
_OF_EXPERTS = (
    "moe_intermediate_size moe_latent_size moe_shared_expert_intermediate_size n_group n_routed_experts norm_topk_prob "
    "num_experts_per_tok routed_scaling_factor topk_group"
).split()
_BLOCKS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}


def _blocks(config: HFConfig) -> list[str]:
    """Return the kind of each layer of Nemotron-H, which older files give as letters."""
    pattern, kinds = config.get("hybrid_override_pattern"), config.get("layers_block_type", "layer_types")
    config.get("num_hidden_layers")
    if kinds is None:
        if not isinstance(pattern, str) or not pattern or set(pattern) - set(_BLOCKS):
            raise config.wrong("hybrid_override_pattern", pattern, f"a text of the letters {' '.join(_BLOCKS)}")
        kinds = [_BLOCKS[letter] for letter in pattern]
    if not isinstance(kinds, list) or not kinds or not all(isinstance(kind, str) for kind in kinds):
        raise config.wrong("layers_block_type", kinds, "a list with the kind of each layer")
    kinds = [{"mamba": "linear_attention", "attention": "full_attention"}.get(kind, kind) for kind in kinds]
    if other := sorted(set(kinds) - set(_BLOCKS.values())):
        raise UnsupportedModelError(
            f"layers_block_type in config.json contains {other[0]!r}", "the kind is not known",
            "use a checkpoint whose layers are Mamba-2, attention, feed-forward layers and experts",
        )  # fmt: skip
    return kinds


def _experts(config: HFConfig, act: str) -> ExpertsSpec:
    """Return the experts of Nemotron 3, which have no gates."""
    if act != "relu2":
        raise config.wrong("mlp_hidden_act", act, "relu2, because other experts without gates are not supported")
    latent = config.get("moe_latent_size")
    return ExpertsSpec(
        count=config.integer("n_routed_experts", default=8), per_token=config.integer("num_experts_per_tok", default=2),
        intermediate_size=config.integer("moe_intermediate_size", default=7688), routing="sigmoid",
        normalized=config.flag("norm_topk_prob", default=True), selection_bias=True, activation="relu2",
        routed_scale=config.number("routed_scaling_factor", default=1.0),
        shared_intermediate_size=config.integer("moe_shared_expert_intermediate_size", default=7688),
        latent_size=0 if latent is None else config.integer("moe_latent_size"),
        **common.expert_groups(config, scores=2),
    )  # fmt: skip


@architecture(
    "Nemotron-H, Nemotron 3",
    *_IN_PROJECTION,
    *_BACKBONE,
    *common.SIGMOID_ROUTER,
    Rule(r"mlp\.latent_in_proj", "mlp.fc1_latent_proj"),
    Rule(r"mlp\.latent_out_proj", "mlp.fc2_latent_proj"),
    Rule(r"\.(?:self_attn|mamba|mlp)\.", ".mixer."),
    unused=r"^mtp\.",  # heads that predict further tokens
)
def nemotron_h(config: HFConfig) -> DecoderSpec:
    """Nemotron-H and Nemotron Nano 2 (NVIDIA): each layer is Mamba-2, attention or a feed-forward layer.

    In Nemotron 3, experts without gates replace the feed-forward layers.
    """
    kinds = _blocks(config)
    layers = {kind: tuple(layer for layer, one in enumerate(kinds) if one == kind) for kind in _BLOCKS.values()}
    _check_steps(config)
    for name in _IGNORED + ([] if layers["moe"] else _OF_EXPERTS):
        config.get(name)
    if (own := config.text("mamba_hidden_act", default="silu")) != "silu":
        raise config.wrong("mamba_hidden_act", own, "silu")
    mamba = MambaSpec(
        layers=layers["linear_attention"], heads=config.integer("mamba_num_heads", default=128),
        head_size=config.integer("mamba_head_dim", default=64), groups=config.integer("n_groups", default=8),
        state_size=config.integer("ssm_state_size", default=128), kernel=config.integer("conv_kernel", default=4),
        biased=config.flag("use_bias"), conv_biased=config.flag("use_conv_bias", default=True),
    )  # fmt: skip
    act = common.activation(config.text("mlp_hidden_act", default="relu2"))
    return decoder(
        config, epsilon=1e-5, head_size=128, num_layers=len(kinds), rope_layers=(), gated_mlp=False,
        feed_forward_layers=tuple(sorted((*layers["mlp"], *layers["moe"]))),
        experts=_experts(config, act) if layers["moe"] else None, dense_layers=layers["mlp"] if layers["moe"] else (),
        recurrent=mamba if mamba.layers else None, hidden_activation=act, mlp_bias=config.flag("mlp_bias"),
    )  # fmt: skip


# --- Mamba-1 ---------------------------------------------------------------------------------------------------------

_IN_PROJECTION_1 = (
    Rule(r"mamba\.in_proj_conv\.", "mamba.in_proj.", lambda spec, x: x[: len(x) // 2]),
    Rule(r"mamba\.in_proj_gate\.", "mamba.in_proj.", lambda spec, x: x[len(x) // 2 :]),
)
# Keys that select an implementation, or that affect training only.
_KERNELS = "num_logits_to_keep use_associative_scan use_mamba_kernels use_mambapy".split()


@architecture(
    "Jamba",
    *_IN_PROJECTION_1,
    Rule(r"post_attention_layernorm", "pre_ff_layernorm"),
    Rule(r"mlp\.gate\.", "mlp.router."),
    Rule(r"mlp\.", "feed_forward."),
    Rule(r"^model\.norm\.", "model.final_layernorm."),
)
def jamba(config: HFConfig) -> DecoderSpec:
    """Jamba (AI21): Mamba-1 in most layers, attention without rotation in the others, and experts in every second."""
    count, hidden = config.num_layers, config.integer("hidden_size")
    for name in _KERNELS:
        config.get(name)

    def every(part: str, period: int, first: int, names: str, other: str, name: str) -> list[str]:
        period = config.integer(f"{part}_layer_period", default=period)
        first = config.integer(f"{part}_layer_offset", default=first, least=0)
        kinds = config.layers(names, count) or [name if layer % period == first else other for layer in range(count)]
        if wrong := [kind for kind in kinds if kind not in (name, other)]:
            raise config.wrong(names, wrong[0], f"{name} or {other}")
        return kinds

    kinds = every("attn", 8, 4, "layer_types", "linear_attention", "full_attention")
    blocks = every("expert", 2, 1, "mlp_layer_types", "dense", "sparse")
    mamba = MambaSpec(
        layers=tuple(layer for layer, kind in enumerate(kinds) if kind == "linear_attention"),
        heads=config.integer("mamba_expand", default=2) * hidden, head_size=1,
        state_size=config.integer("mamba_d_state", default=16), kernel=config.integer("mamba_d_conv", default=4),
        biased=config.flag("mamba_proj_bias"), conv_biased=config.flag("mamba_conv_bias", default=True), norm="none",
        rank=_time_step_rank(config, "mamba_dt_rank", hidden), part_norms=True,
    )  # fmt: skip
    experts = ExpertsSpec(
        count=config.integer("num_experts", "num_local_experts", default=16), normalized=False,
        per_token=config.integer("num_experts_per_tok", default=2),
        intermediate_size=config.integer("intermediate_size", default=14336),
    )  # fmt: skip
    return decoder(
        config, rope_layers=(), recurrent=mamba if mamba.layers else None,
        experts=experts if experts.count > 1 and "sparse" in blocks else None,
        dense_layers=tuple(layer for layer, kind in enumerate(blocks) if kind == "dense") if experts.count > 1 else (),
    )  # fmt: skip


def _time_step_rank(config: HFConfig, name: str, hidden: int) -> int:
    return math.ceil(hidden / 16) if config.get(name) in (None, "auto") else config.integer(name)


# Keys of Mamba for training, and for sizes that other keys determine.
_MAMBA_IGNORED = (
    "intermediate_size rescale_prenorm_residual residual_in_fp32 time_step_floor time_step_init_scheme time_step_max "
    "time_step_min time_step_scale use_mambapy"
).split()


@architecture("Mamba", *_IN_PROJECTION_1, *_BACKBONE, Rule(r"\.mamba\.", ".mixer."))
def mamba(config: HFConfig) -> DecoderSpec:
    """Mamba: each layer consists of Mamba-1; there is no attention and no feed-forward layer."""
    for name in (*_MAMBA_IGNORED, *_KERNELS):
        config.get(name)
    if (act := config.text("hidden_act", default="silu")) != "silu":
        raise config.wrong("hidden_act", act, "silu")
    hidden = config.integer("hidden_size")
    width = config.integer("expand", default=2) * hidden
    part = MambaSpec(
        layers=tuple(range(config.num_layers)), heads=width, head_size=1, norm="none",
        state_size=config.integer("state_size", default=16), kernel=config.integer("conv_kernel", default=4),
        biased=config.flag("use_bias"), conv_biased=config.flag("use_conv_bias", default=True),
        rank=_time_step_rank(config, "time_step_rank", hidden),
    )  # fmt: skip
    return decoder(
        config, epsilon=1e-5, heads=1, tied=True, recurrent=part, feed_forward_layers=(), rope_layers=(),
        intermediate_size=width, context_length=config.integer("max_position_embeddings", default=_UNLIMITED),
    )  # fmt: skip

"""Decoders with multi-head latent attention: DeepSeek V2 and V3, GLM 4.7 Flash, Youtu-LLM, MiniCPM 3."""

from __future__ import annotations

import math
from typing import Any

from numpy.typing import NDArray

from ..hf_config import HFConfig, rope_values
from ..rope_scaling import yarn_magnitude
from ..spec import DecoderSpec, DeltaNetSpec, ExpertsSpec, LatentSpec
from . import common
from .common import LAST_LAYER, SIGMOID_ROUTER, Rule, architecture, decoder, sigmoid_fields


def _of_heads(*, rotated: bool) -> common.TensorView:
    """Return a view of the rows of all query heads that are rotated, or of those that are not."""

    def view(spec: DecoderSpec, tensor: NDArray[Any]) -> NDArray[Any]:
        assert spec.latent is not None
        size = spec.latent.nope_size
        heads = tensor.reshape(spec.num_attention_heads, size + spec.latent.rope_size, *tensor.shape[1:])
        return (heads[:, size:] if rotated else heads[:, :size]).reshape(-1, *tensor.shape[1:])

    return view


def _of_head(spec: DecoderSpec, tensor: NDArray[Any], head: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the rows of one head's keys and of its values, from the matrix of all heads."""
    assert spec.latent is not None
    rows: NDArray[Any] = tensor.reshape(spec.num_attention_heads, -1, *tensor.shape[1:])[head]
    return rows[: spec.latent.nope_size], rows[spec.latent.nope_size :]


def _has_query_rank(spec: DecoderSpec) -> bool:
    return spec.latent is not None and bool(spec.latent.query_rank)


LATENT = (
    Rule(r"self_attn\.q_nope_proj", "self_attn.q_proj", _of_heads(rotated=False)),
    Rule(r"self_attn\.q_rope_proj", "self_attn.q_proj", _of_heads(rotated=True)),
    Rule(r"self_attn\.q_proj", "self_attn.q_b_proj", when=_has_query_rank),
    Rule(r"self_attn\.kv_a_proj\.", "self_attn.kv_a_proj_with_mqa."),
    Rule(r"self_attn\.k_up\.(\d+)", "self_attn.kv_b_proj", lambda spec, x, h: _of_head(spec, x, h)[0].T, floats=True),
    Rule(r"self_attn\.v_up\.(\d+)", "self_attn.kv_b_proj", lambda spec, x, h: _of_head(spec, x, h)[1]),
)


def _latent(config: HFConfig, *, query_rank: int, value_size: int | None = None) -> LatentSpec:
    """Return the sizes of latent attention; `query_rank` and `value_size` are defaults."""
    if config.get("v_head_dim") is not None or value_size is None:
        value_size = config.integer("v_head_dim")
    return LatentSpec(
        rank=config.integer("kv_lora_rank"), rope_size=config.integer("qk_rope_head_dim"),
        nope_size=config.integer("qk_nope_head_dim"), value_size=value_size,
        query_rank=config.optional_integer("q_lora_rank", query_rank) or 0, biased=config.flag("attention_bias"),
    )  # fmt: skip


def _decoder(config: HFConfig, latent: LatentSpec, *, interleaved: bool, **fields: Any) -> DecoderSpec:
    heads = config.integer("num_attention_heads", "n_head")
    given = config.integer("num_key_value_heads", default=heads)
    if given not in (1, heads):
        raise config.wrong("num_key_value_heads", given, f"{heads}, because every head of latent attention has a key")
    config.get("head_dim", "qk_head_dim")  # they follow from the other sizes
    scale = (latent.nope_size + latent.rope_size) ** -0.5
    values = rope_values(config)
    if values.get("rope_type", "type") not in (None, "default"):
        magnitude = values.number("mscale_all_dim", default=0.0)
        if magnitude:  # YaRN also scales the scores
            scale *= yarn_magnitude(values.number("factor", positive=True), magnitude) ** 2
    return decoder(config, latent=latent, attention_scale=scale, rope_interleaved=interleaved, **fields)


def _check_routing(config: HFConfig, scores: str, methods: tuple[str, ...]) -> None:
    """Raise ConfigError if config.json names another routing than that of the architecture."""
    for name, known in (("scoring_func", (scores,)), ("topk_method", methods), ("moe_layer_freq", (1,))):
        value = config.get(name)
        if value is not None and value not in known:
            raise config.wrong(name, value, " or ".join(map(str, known)))
    for name in ("aux_loss_alpha", "seq_aux", "ep_size"):  # they affect training only
        config.get(name)


def _softmax_experts(config: HFConfig) -> dict[str, Any]:
    """Return the fields for experts that are weighted by a softmax, and selected from groups in some models."""
    common.refuse_flags(
        config,
        "norm_topk_prob",
        why="the weights of the experts of DeepSeek V2 are scaled, and not normalised",
        fix="set norm_topk_prob to false in config.json, if the model was trained so",
    )
    _check_routing(config, "softmax", ("greedy", "group_limited_greedy"))
    method = config.text("topk_method", default="greedy")
    groups = common.expert_groups(config, scores=1) if method == "group_limited_greedy" else {}
    width = config.integer("moe_intermediate_size", default=1407)
    experts = ExpertsSpec(
        count=config.integer("n_routed_experts", default=64), per_token=config.integer("num_experts_per_tok"),
        intermediate_size=width, normalized=False, routed_scale=config.number("routed_scaling_factor", default=1.0),
        shared_intermediate_size=width * config.integer("n_shared_experts", default=2, least=0), **groups,
    )  # fmt: skip
    dense = config.integer("first_k_dense_replace", default=0, least=0)
    return {"experts": experts, "dense_layers": tuple(range(min(dense, config.num_layers)))}


@architecture("DeepSeek V2", *LATENT, Rule(r"mlp\.shared_expert\.", "mlp.shared_experts."))
def deepseek_v2(config: HFConfig) -> DecoderSpec:
    """DeepSeek V2 and V2 Lite: latent attention, and experts that are weighted by a softmax."""
    return _decoder(config, _latent(config, query_rank=1536), interleaved=True, **_softmax_experts(config))


def _third(config: HFConfig, query_rank: int, **fields: Any) -> DecoderSpec:
    interleaved = config.flag("rope_interleave", default=True)
    return _decoder(config, _latent(config, query_rank=query_rank), interleaved=interleaved, **fields)


# The last layer of these checkpoints predicts further tokens.
@architecture("DeepSeek V3, R1; Moonlight", *LATENT, *SIGMOID_ROUTER, mtp=LAST_LAYER)
def deepseek_v3(config: HFConfig) -> DecoderSpec:
    """DeepSeek V3: latent attention, and experts that are weighted by sigmoids and selected from groups."""
    _check_routing(config, "sigmoid", ("noaux_tc",))
    return _third(config, 1536, **sigmoid_fields(config, dense=3, normalized=True))


@architecture("GLM 4.7 Flash", *LATENT, *SIGMOID_ROUTER, mtp=LAST_LAYER)
def glm4_moe_lite(config: HFConfig) -> DecoderSpec:
    """GLM 4.7 Flash: DeepSeek V3's structure."""
    _check_routing(config, "sigmoid", ("noaux_tc",))
    experts = common.listed_dense_layers(config, sigmoid_fields(config, dense=1, normalized=True))
    return _third(config, 768, epsilon=1e-5, **experts)


@architecture("Youtu-LLM", *LATENT)
def youtu(config: HFConfig) -> DecoderSpec:
    """Youtu-LLM (Tencent): DeepSeek V3's attention with ordinary feed-forward layers."""
    config.get("embedding_initializer_range")
    return _third(config, 1536, tied=True)


@architecture("MiniCPM 3", *LATENT)
def minicpm3(config: HFConfig) -> DecoderSpec:
    """MiniCPM 3 (OpenBMB): DeepSeek V2's attention, and factors of the embeddings, the updates and the logits."""
    hidden, count = config.integer("hidden_size"), config.num_layers
    latent = _latent(config, query_rank=768, value_size=hidden // config.integer("num_attention_heads"))
    base = config.optional_integer("dim_model_base", 256) or hidden
    depth = config.number("scale_depth", default=1.4 if "scale_depth" not in config.values else math.sqrt(count))
    return _decoder(
        config, latent, interleaved=False, epsilon=1e-5, tied=True, logit_scale=base / hidden,
        embedding_scale=config.number("scale_emb", default=12.0), residual_scale=depth / math.sqrt(count),
    )  # fmt: skip


def _of_layers(config: HFConfig, values: HFConfig) -> list[Any]:
    """Return the kind of each layer of Kimi Linear, which published files list by numbers that start at 1."""
    count, full = config.num_layers, values.numbers("full_attn_layers")
    if (kinds := config.layers("layer_types", count)) is not None:
        return kinds
    if values.get("full_attn_layers") is None:
        return ["full_attention" if layer and layer % 4 == 0 else "linear_attention" for layer in range(count)]
    linear = values.numbers("kda_layers")
    if sorted([*full, *linear]) != list(range(1, count + 1)):
        raise values.wrong("kda_layers", linear, f"the layers from 1 to {count} that full_attn_layers does not contain")
    return ["full_attention" if layer in full else "linear_attention" for layer in range(1, count + 1)]


def _kimi_delta(config: HFConfig) -> DeltaNetSpec:
    given = config.get("linear_attn_config")
    if not isinstance(given, dict | None):
        raise config.wrong("linear_attn_config", given, "a JSON object")
    values = HFConfig(given or {}, part="linear_attn_config")
    heads = values.integer("num_heads", default=config.integer("linear_num_heads", default=32))
    size = values.integer("head_dim", default=config.integer("linear_head_dim", default=128))
    kernel = config.integer("linear_conv_kernel_dim", default=4)
    return DeltaNetSpec(
        layers=common.layers_of("linear_attention", kinds=_of_layers(config, values)),
        key_heads=heads, value_heads=heads,
        kernel=values.integer("short_conv_kernel_size", default=kernel), key_size=size, value_size=size, gate_rank=size,
    )  # fmt: skip


# Keys of Kimi Linear whose values are the same in all published files, or that do not affect the logits.
_KIMI_IGNORED = (
    "num_nextn_predict_layers",
    "use_grouped_topk",
    "rope_theta",
    "rope_parameters",
)


@architecture(
    "Kimi Linear",
    Rule(r"linear_attn\.A_log", "linear_attn.A_log", common.flat),
    Rule(r"linear_attn\.", "self_attn."),
    *LATENT,
    Rule(r"mlp\.gate\.selection_bias", "mlp.gate.e_score_correction_bias"),
    Rule(r"mlp\.shared_expert\.", "block_sparse_moe.shared_experts."),
    *common.MIXTRAL_EXPERTS,
    # transformers gives the feed-forward layers of the first layers the same prefix as those with experts.
    variants=((r"block_sparse_moe\.gate_proj", Rule(r"mlp\.(gate|up|down)_proj", r"block_sparse_moe.\1_proj")),),
)
def kimi_linear(config: HFConfig) -> DecoderSpec:
    """Kimi Linear (Moonshot AI): Kimi Delta Attention, and latent attention without rotation in every fourth layer."""
    for name in _KIMI_IGNORED:
        config.get(name)
    for name, known in (("moe_router_activation_func", "sigmoid"), ("mla_use_nope", True), ("moe_layer_freq", 1)):
        if config.get(name) not in (None, known):
            raise config.wrong(name, config.get(name), str(known).lower())
    experts = common.listed_dense_layers(config, sigmoid_fields(config, dense=1, normalized=True))
    return _decoder(
        config, _latent(config, query_rank=0), interleaved=False, epsilon=1e-5, rope_layers=(),
        recurrent=_kimi_delta(config), **experts,
        context_length=config.integer("max_position_embeddings", "model_max_length", default=1 << 20),
    )  # fmt: skip

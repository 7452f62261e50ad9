"""Llama, and models of the same structure with other sizes, norms or windows (Qwen, Gemma, OLMo)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import UnsupportedModelError
from ..hf_config import HFConfig, rope_values
from ..rope_scaling import QueryScaling
from ..spec import DecoderSpec, ExpertsSpec
from . import common
from .common import Rule, architecture, decoder


@architecture("Llama 1-3.3")
def llama(config: HFConfig) -> DecoderSpec:
    """Llama 1 to 3.3 (Meta), and the many models that adopted its architecture."""
    return decoder(config, family="llama", **common.given_biases(config))


@architecture("InternLM 3")
def internlm3(config: HFConfig) -> DecoderSpec:
    """InternLM 3 (Shanghai AI Laboratory): Llama with two flags for biases."""
    others = config.flag("bias", "mlp_bias")
    return decoder(
        config, epsilon=1e-5, head_size=128, qkv_bias=config.flag("qkv_bias", "attention_bias"), o_bias=others,
        mlp_bias=others,
    )  # fmt: skip


@architecture(
    "Hunyuan 1 (dense)",
    Rule(r"self_attn\.q_norm", "self_attn.query_layernorm"),
    Rule(r"self_attn\.k_norm", "self_attn.key_layernorm"),
)
def hunyuan_v1_dense(config: HFConfig) -> DecoderSpec:
    """Hunyuan 0.5B to 7B (Tencent): queries and keys are normalised after the rotation, whose base is stretched."""
    common.refuse_flags(
        config,
        "use_cla",
        why="layers of Hunyuan that attend to the keys and values of other layers are not supported",
        fix="use a checkpoint without them",
    )
    for name in ("attention_head_dim", "eod_token_id", "use_qk_norm", "use_rotary_pos_emb"):
        config.get(name)
    spec = decoder(config, epsilon=1e-5, qk_norm=True, rotated_norms=True, **common.attention_biases(config))
    values, size = rope_values(config), spec.head_size
    if values.get("rope_type", "type") != "dynamic" or values.get("alpha") is None or size <= 2:
        return spec
    # With a fixed alpha, the rotation does not depend on the length, although the type is "dynamic".
    length = config.integer("max_position_embeddings", default=2048)
    base = spec.rope_theta * values.number("alpha", positive=True) ** (size / (size - 2))
    return replace(spec, rope_theta=base, rope_scaling=None, context_length=length)


@architecture("Seed-OSS")
def seed_oss(config: HFConfig) -> DecoderSpec:
    """Seed-OSS (ByteDance): biases of queries, keys and values."""
    return decoder(
        config, head_size=128, qkv_bias=config.flag("attention_bias", default=True),
        o_bias=config.flag("attention_out_bias"), mlp_bias=config.flag("mlp_bias"),
    )  # fmt: skip


@architecture("Arcee (AFM)")
def arcee(config: HFConfig) -> DecoderSpec:
    """Arcee Foundation Models: squared ReLU without a gate."""
    activation = common.activation(config.text("hidden_act", default="relu2"))
    return decoder(
        config, epsilon=1e-5, gated_mlp=False, hidden_activation=activation, **common.given_biases(config)
    )  # fmt: skip


@architecture("Helium")
def helium(config: HFConfig) -> DecoderSpec:
    """Helium (Kyutai): interleaved rotation."""
    return decoder(config, theta=1e5, epsilon=1e-8, head_size=128, rope_interleaved=True, **common.given_biases(config))


@architecture(
    "Apertus",
    Rule(r"input_layernorm", "attention_layernorm"),
    Rule(r"post_attention_layernorm", "feedforward_layernorm"),
    unused=r"\.act_fn\.(beta|eps)$",
)
def apertus(config: HFConfig) -> DecoderSpec:
    """Apertus (Swiss AI): a feed-forward layer without a gate, with a learned activation."""
    named = config.text("hidden_act", default="xielu")
    activation = named if named == "xielu" else common.activation(named)
    return decoder(
        config, theta=12e6, epsilon=1e-5, gated_mlp=False, hidden_activation=activation, qk_norm=True,
        **common.attention_biases(config),
    )  # fmt: skip


@architecture("Mistral")
def mistral(config: HFConfig) -> DecoderSpec:
    """Mistral 7B and its successors: a sliding window in every layer or in none."""
    return decoder(config, family="mistral", **common.window_fields(config, window=4096))


@architecture("Ministral 8B")
def ministral(config: HFConfig) -> DecoderSpec:
    """Mistral with a sliding window in some of its layers."""
    return decoder(config, family="mistral", **common.window_fields(config, window=4096))


@architecture("Ministral 3")
def ministral3(config: HFConfig) -> DecoderSpec:
    """Mistral with queries that are scaled by their positions."""
    spec = decoder(config, theta=1e6, epsilon=1e-5, head_size=128, **common.window_fields(config))
    values = rope_values(config)
    beta = values.number("llama_4_scaling_beta", default=0.0)
    if not beta:
        return spec
    length = values.integer("original_max_position_embeddings", default=spec.context_length)
    return replace(spec, query_scaling=QueryScaling(beta=beta, length=length))


@architecture("Mixtral", *common.MIXTRAL_EXPERTS)
def mixtral(config: HFConfig) -> DecoderSpec:
    """Mistral with two of several experts per token."""
    experts = common.mixtral_experts(config)
    return decoder(config, theta=1e6, epsilon=1e-5, experts=experts, **common.window_fields(config))


@architecture("ERNIE 4.5")
def ernie4_5(config: HFConfig) -> DecoderSpec:
    """ERNIE 4.5, dense: interleaved rotation."""
    both = common.biases(bias := config.flag("use_bias"), bias)
    return decoder(
        config, family="ernie4_5", theta=500000.0, epsilon=1e-5, tied=True, head_size=128, rope_interleaved=True, **both
    )


@architecture(
    "ERNIE 4.5 MoE",
    Rule(r"mlp\.gate\.selection_bias", "mlp.moe_statics.e_score_correction_bias", common.flat),
    Rule(r"mlp\.shared_expert\.", "mlp.shared_experts."),
    unused=r"^model\.mtp_",
)
def ernie4_5_moe(config: HFConfig) -> DecoderSpec:
    """ERNIE 4.5 with experts that are weighted by a softmax and selected with learned biases."""
    count, width = config.num_layers, config.integer("moe_intermediate_size", default=1536)
    common.refuse_flags(
        config,
        "use_bias",
        why="experts without biases beside feed-forward layers with biases are not supported",
        fix="use a checkpoint without biases",
    )
    experts = ExpertsSpec(
        count=config.integer("moe_num_experts", default=64), per_token=config.integer("moe_k", default=6),
        intermediate_size=width, selection_bias=True,
        shared_intermediate_size=width * config.integer("moe_num_shared_experts", default=2, least=0),
    )  # fmt: skip
    first, last = config.integer("moe_layer_start_index", default=1, least=0), config.get("moe_layer_end_index")
    last = count - 1 if last in (None, -1) else config.integer("moe_layer_end_index", least=0)
    every = config.integer("moe_layer_interval", default=1)
    config.get("moe_norm_min")  # far below any sum of the weights of selected experts
    dense = tuple(layer for layer in range(count) if (layer + 1) % every or not first <= layer <= last)
    return decoder(
        config, theta=500000.0, epsilon=1e-5, tied=True, rope_interleaved=True, experts=experts, dense_layers=dense
    )


@architecture("EXAONE 4")
def exaone4(config: HFConfig) -> DecoderSpec:
    """EXAONE 4: norms after each part; if some layers have a window, only those layers rotate."""
    windows = common.window_fields(config, pattern=4, window=4096)
    rotated = windows.get("sliding_layers")
    return decoder(config, epsilon=1e-5, pre_norms=False, post_norms=True, qk_norm=True, rope_layers=rotated, **windows)


@architecture(
    "K-EXAONE",
    Rule(r"mlp\.gate\.selection_bias", "mlp.e_score_correction_bias"),
    Rule(r"mlp\.shared_expert\.", "mlp.shared_experts."),
    unused=r"^mtp\.",
    may_join_experts=True,
)
def exaone_moe(config: HFConfig) -> DecoderSpec:
    """K-EXAONE: experts that are weighted by sigmoids; if sliding_window is set, only layers with a window rotate."""
    window = config.optional_integer("sliding_window", 4096)
    width = config.integer("moe_intermediate_size")
    experts = common.sigmoid_experts(
        config, dense=config.integer("first_k_dense_replace", default=1, least=0), selection_bias=True,
        normalized=config.flag("norm_topk_prob", default=True),
        shared_intermediate_size=width * config.integer("num_shared_experts", default=1, least=0),
    )  # fmt: skip
    return decoder(
        config, epsilon=1e-5, qk_norm=True,
        rope_layers=None if window is None else common.sliding_layers(config, pattern=4),
        **common.window_fields(config, pattern=4, window=4096), **common.listed_dense_layers(config, experts),
    )  # fmt: skip


@architecture("GLM 4 (2024)", *common.PACKED_GATE_UP)
def glm(config: HFConfig) -> DecoderSpec:
    """GLM 4 of June 2024: half of each head is rotated, in interleaved pairs."""
    return decoder(
        config, partial=0.5, epsilon=1.5625e-7, head_size=128, qkv_bias=config.flag("attention_bias", default=True),
        rope_interleaved=True,
    )  # fmt: skip


@architecture(
    "GLM 4",
    # GLM's post_attention_layernorm is our pre_feedforward_layernorm.
    Rule(r"post_attention_layernorm", "post_self_attn_layernorm"),
    Rule(r"pre_feedforward_layernorm", "post_attention_layernorm"),
    Rule(r"post_feedforward_layernorm", "post_mlp_layernorm"),
    *common.PACKED_GATE_UP,
)
def glm4(config: HFConfig) -> DecoderSpec:
    """GLM 4 (0414): norms before and after each part; half of each head is rotated, in interleaved pairs."""
    return decoder(
        config,
        partial=0.5,
        epsilon=1.5625e-7,
        head_size=128,
        qkv_bias=config.flag("attention_bias", default=True),
        post_norms=True,
        rope_interleaved=True,
    )


# The last layers of these checkpoints predict further tokens.
@architecture("GLM 4.5 (MoE)", *common.SIGMOID_ROUTER, mtp=common.LAST_LAYER)
def glm4_moe(config: HFConfig) -> DecoderSpec:
    """GLM 4.5 to 4.7: experts that are weighted by sigmoids, and a shared expert; half of each head is rotated."""
    return decoder(
        config, partial=0.5, epsilon=1e-5, qkv_bias=config.flag("attention_bias"), qk_norm=config.flag("use_qk_norm"),
        **common.sigmoid_fields(config, dense=1, normalized=True),
    )  # fmt: skip


@architecture("dots.llm1", *common.SIGMOID_ROUTER)
def dots1(config: HFConfig) -> DecoderSpec:
    """dots.llm1: experts that are weighted by sigmoids, shared experts, and norms over query and key heads."""
    windows, first = common.window_fields(config, window=4096), config.integer("max_window_layers", default=62, least=0)
    if windows and config.get("layer_types") is None:
        layers = tuple(range(first, config.num_layers))
        windows = {**windows, "sliding_layers": layers} if layers else {}
    return decoder(
        config, qk_norm=True, **common.attention_biases(config), **windows,
        **common.sigmoid_fields(config, dense=0, normalized=False),
    )  # fmt: skip


@architecture("SmolLM 3")
def smollm3(config: HFConfig) -> DecoderSpec:
    """SmolLM 3: no rotation in every fourth layer."""
    count = config.num_layers
    rotated = config.layers("no_rope_layers", count)
    if rotated is None:
        every = config.integer("no_rope_layer_interval", default=4)
        rotated = [(layer + 1) % every for layer in range(count)]
    windows = _windows(config, [layer for layer, flag in enumerate(rotated) if not flag], default=None)
    return decoder(
        config,
        family="smollm3",
        theta=2e6,
        tied=True,
        rope_layers=tuple(layer for layer, flag in enumerate(rotated) if flag),
        **common.given_biases(config),
        **windows,
    )


@architecture("OLMo 1")
def olmo(config: HFConfig) -> DecoderSpec:
    """OLMo 1: layer norms without learned weights; queries, keys and values may be clamped."""
    return decoder(
        config,
        family="olmo",
        epsilon=1e-5,
        qkv_clip=config.number("clip_qkv", default=0.0),
        **common.attention_biases(config),
        **common.layer_norms(biased=False, norm_weights=False),
    )


@architecture("OLMoE")
def olmoe(config: HFConfig) -> DecoderSpec:
    """OLMoE: experts in every layer, and norms over all queries and all keys."""
    if config.get("clip_qkv") is not None:
        raise UnsupportedModelError(
            f"config.json sets clip_qkv to {config.get('clip_qkv')}",
            "queries and keys would have to be clamped after their norms",
            "use a checkpoint that does not clamp them",
        )
    experts = ExpertsSpec(
        count=config.integer("num_experts", default=64), per_token=config.integer("num_experts_per_tok", default=8),
        intermediate_size=config.integer("intermediate_size"), normalized=config.flag("norm_topk_prob"),
    )  # fmt: skip
    return decoder(
        config, epsilon=1e-5, qk_norm=True, qk_norm_scope="all", experts=experts, **common.attention_biases(config)
    )


@architecture("OLMo 2")
def olmo2(config: HFConfig) -> DecoderSpec:
    """OLMo 2: norms after each part instead of before it, and over all queries and all keys.

    In GGUF files this architecture also covers OLMo 3, in which three of four layers have a window and an unscaled
    rotation.
    """
    return _olmo2(config)


@architecture("OLMo 3")
def olmo3(config: HFConfig) -> DecoderSpec:
    """OLMo 3: OLMo 2 with a window and an unscaled rotation in three of four layers."""
    return _olmo2(config, window=4096)


def _olmo2(config: HFConfig, window: int | None = None) -> DecoderSpec:
    windows = common.window_fields(config, pattern=4, window=window)
    spec = decoder(
        config,
        pre_norms=False,
        post_norms=True,
        qk_norm=True,
        qk_norm_scope="all",
        epsilon=1e-5,
        rope_kind="full_attention",
        **common.attention_biases(config),
        **windows,
    )
    local = rope_values(config, "sliding_attention").number("rope_theta", default=spec.rope_theta, positive=True)
    return replace(spec, local_rope_theta=local) if windows else spec


def multipliers(config: HFConfig) -> dict[str, Any]:
    """Return the scales of embeddings, attention scores, residual updates and logits."""
    return {
        "embedding_scale": config.number("embedding_multiplier", default=1.0),
        "attention_scale": config.number("attention_multiplier", default=1.0),
        "residual_scale": config.number("residual_multiplier", default=1.0),
        "logit_scale": 1 / config.number("logits_scaling", default=1.0, positive=True),
    }


@architecture("Granite 3")
def granite(config: HFConfig) -> DecoderSpec:
    return decoder(config, family="granite", **multipliers(config), **common.given_biases(config))


GRANITE_EXPERTS = (
    # All experts are in one tensor [experts, rows, columns], with gate and up concatenated along the rows.
    Rule(r"mlp\.experts\.(\d+)\.gate_proj", "block_sparse_moe.input_linear", lambda spec, x, e: np.split(x[e], 2)[0]),
    Rule(r"mlp\.experts\.(\d+)\.up_proj", "block_sparse_moe.input_linear", lambda spec, x, e: np.split(x[e], 2)[1]),
    Rule(r"mlp\.experts\.(\d+)\.down_proj", "block_sparse_moe.output_linear", lambda spec, x, e: x[e]),
    Rule(r"mlp\.gate\.", "block_sparse_moe.router.layer."),
)


@architecture("Granite 3 MoE", *GRANITE_EXPERTS)
def granitemoe(config: HFConfig) -> DecoderSpec:
    """Granite 3 with experts that are stored in one tensor per layer."""
    experts = common.mixtral_experts(config)
    return decoder(config, experts=experts, **multipliers(config), **common.attention_biases(config))


def _half(half: int) -> common.TensorView:
    return lambda spec, tensor: tensor[len(tensor) // 2 * half :][: len(tensor) // 2]


GRANITE_SHARED = (
    Rule(r"mlp\.(?:shared_expert\.)?gate_proj", "shared_mlp.input_linear", _half(0)),
    Rule(r"mlp\.(?:shared_expert\.)?up_proj", "shared_mlp.input_linear", _half(1)),
    Rule(r"mlp\.(?:shared_expert\.)?down_proj", "shared_mlp.output_linear"),
)


@architecture("Granite 3 MoE with a shared expert", *GRANITE_EXPERTS, *GRANITE_SHARED)
def granitemoeshared(config: HFConfig) -> DecoderSpec:
    """Granite 3 MoE with a shared expert, the predecessor of Granite 4."""
    width = config.integer("shared_intermediate_size", default=0, least=0)
    experts = common.mixtral_experts(config, shared_intermediate_size=width)
    return decoder(config, experts=experts, **multipliers(config), **common.attention_biases(config))


def _cohere_fields(config: HFConfig) -> dict[str, Any]:
    """Return the fields that both generations of Cohere's models share."""
    return {
        "tied": True,
        "epsilon": 1e-5,
        "parallel": True,
        "shared_norm": True,
        "rope_interleaved": True,
        "logit_scale": config.number("logit_scale", default=0.0625),
        **common.layer_norms(biased=False),
        **common.attention_biases(config),
    }


@architecture("Command R", Rule(r"self_attn\.[qk]_norm", r"\g<0>", common.flat))
def cohere(config: HFConfig) -> DecoderSpec:
    qk_norm = config.flag("use_qk_norm")
    return decoder(config, **_cohere_fields(config), theta=500000.0, qk_norm=qk_norm, qk_norm_scope="heads")


@architecture("Command R7B, A")
def cohere2(config: HFConfig) -> DecoderSpec:
    """Command R7B and A: three of four layers have a window and rotation; the fourth has neither."""
    windows = common.window_fields(config, pattern=4, window=4096)
    return decoder(config, **_cohere_fields(config), rope_layers=common.sliding_layers(config, pattern=4), **windows)


def _gemma_fields(config: HFConfig, family: str) -> dict[str, Any]:
    """Return the fields that all Gemma models share. In the first checkpoints "gelu" means its tanh approximation."""
    named = config.text("hidden_activation", "hidden_act", default="gelu")
    return {
        "family": family,
        "tied": True,
        "head_size": 256,
        "hidden_activation": common.activation("gelu_pytorch_tanh" if named == "gelu" else named),
        "norm_weight_offset": 1.0,
        "embedding_scale": config.integer("hidden_size") ** 0.5,
        **common.attention_biases(config),
    }


def _later_fields(config: HFConfig, cap: float, logit_cap: float) -> dict[str, Any]:
    """Return the fields added by Gemma 2; `cap` and `logit_cap` are defaults."""
    return {
        "post_norms": True,
        "attention_scale": config.number("query_pre_attn_scalar", default=256, positive=True) ** -0.5,
        "attention_softcap": config.optional_number("attn_logit_softcapping", cap),
        "logit_softcap": config.optional_number("final_logit_softcapping", logit_cap),
    }


@architecture("Gemma 1")
def gemma(config: HFConfig) -> DecoderSpec:
    return decoder(config, **_gemma_fields(config, "gemma"))


@architecture("Gemma 2")
def gemma2(config: HFConfig) -> DecoderSpec:
    """Gemma 2: norms before and after each part, soft caps, a window in every other layer."""
    windows = common.window_fields(config, pattern=2, window=4096)
    return decoder(config, **_gemma_fields(config, "gemma2"), **windows, **_later_fields(config, 50.0, 30.0))


@architecture("Gemma 3 (text)")
def gemma3_text(config: HFConfig) -> DecoderSpec:
    """Gemma 3: five of six layers have a window and a separate rotation base; the sixth has full attention."""
    local = rope_values(config, "sliding_attention").get("rope_theta")
    return decoder(
        config,
        theta=1e6,
        rope_kind="full_attention",
        **_gemma_fields(config, "gemma3_text"),
        **common.window_fields(config, pattern=6, window=4096),
        qk_norm=True,
        local_rope_theta=config.number("rope_local_base_freq", default=local or 10000.0),
        **_later_fields(config, 0.0, 0.0),
    )


def _windows(config: HFConfig, layers: Sequence[int], default: int | None = 4096) -> dict[str, Any]:
    """Return the window fields if use_sliding_window is set; `layers` have the window if layer_types is missing."""
    fields = common.window_fields(config, window=default)
    if not config.flag("use_sliding_window"):
        return {}
    if fields and config.get("layer_types") is None:
        return {**fields, "sliding_layers": tuple(layers)} if layers else {}
    return fields


def _upper_windows(config: HFConfig) -> dict[str, Any]:
    """Return the window fields for the layers starting at max_window_layers."""
    return _windows(config, range(_max_window_layers(config), config.num_layers))


def _max_window_layers(config: HFConfig) -> int:
    return config.integer("max_window_layers", default=28, least=0)


@architecture("Qwen 2, 2.5")
def qwen2(config: HFConfig) -> DecoderSpec:
    return decoder(config, family="qwen2", qkv_bias=True, **_upper_windows(config))


@architecture("Qwen 3")
def qwen3(config: HFConfig) -> DecoderSpec:
    """Qwen 3: a norm over each query head and each key head."""
    return decoder(config, family="qwen3", qk_norm=True, **common.attention_biases(config), **_upper_windows(config))


@architecture("Qwen 1.5 and 2 MoE")
def qwen2_moe(config: HFConfig) -> DecoderSpec:
    """Qwen 1.5 and 2 MoE: a gated shared expert, and a window in every other layer below max_window_layers."""
    shared = config.integer("shared_expert_intermediate_size", least=0)
    experts = common.expert_fields(config, shared_intermediate_size=shared, shared_gate=True)
    windows = _windows(config, range(0, min(_max_window_layers(config), config.num_layers), 2))
    return decoder(config, qkv_bias=config.flag("qkv_bias", default=True), **experts, **windows)


@architecture("Qwen 3 MoE")
def qwen3_moe(config: HFConfig) -> DecoderSpec:
    windows = common.window_fields(config, window=4096)
    used = windows if config.flag("use_sliding_window") else {}
    return decoder(config, qk_norm=True, **common.attention_biases(config), **common.expert_fields(config), **used)


@architecture("Qwen 3-VL MoE (text)", *common.EXPERTS_TOGETHER)
def qwen3_vl_moe_text(config: HFConfig) -> DecoderSpec:
    """Qwen 3 MoE with the experts of a layer in one tensor, and with weights of experts that always add up to 1."""
    spec = qwen3_moe(config)
    return spec if spec.experts is None else replace(spec, experts=replace(spec.experts, normalized=True))


def _of_expert(part: int | None) -> common.TensorView:
    """Return a view of one expert's gate (0), up (1) or down (None) matrix, which is stored as [inputs, outputs]."""

    def view(spec: DecoderSpec, tensor: NDArray[Any], expert: int) -> NDArray[Any]:
        matrix: NDArray[Any] = tensor[expert] if tensor.dtype.names else tensor[expert].T
        return matrix if part is None else np.split(matrix, 2)[part]

    return view


def _llama4_layers(config: HFConfig) -> dict[str, Any]:
    """Return the fields for the layers of Llama 4 with rotation, with chunks, and with experts."""
    count = config.num_layers
    flags = config.numbers("no_rope_layers")  # 1 for a layer that rotates; longer lists occur
    every = config.integer("no_rope_layer_interval", default=4)
    if flags and len(flags) < count:
        raise config.wrong("no_rope_layers", flags, f"a list with a number for each of the {count} layers")
    rotated = tuple(layer for layer in range(count) if (flags[layer] if flags else (layer + 1) % every))
    chunk, kinds = config.optional_integer("attention_chunk_size", 8192), config.layers("layer_types", count)
    chunked = rotated if kinds is None else common.layers_of("chunked_attention", kinds=kinds)
    if kinds is not None and chunked and chunk is None:
        raise config.wrong(
            "attention_chunk_size",
            config.get("attention_chunk_size"),
            "a number of tokens, because layer_types has chunked layers",
        )
    step, routed = config.integer("interleave_moe_layer_step", default=1), config.numbers("moe_layers")
    if config.get("moe_layers") is None:
        routed = list(range(step - 1, count, step))
    return {
        "rope_layers": rotated, "chunk_size": chunk, "chunked_layers": chunked if chunk else (),
        "dense_layers": tuple(layer for layer in range(count) if layer not in routed),
    }  # fmt: skip


@architecture(
    "Llama 4 (text)",
    Rule(r"mlp\.experts\.(\d+)\.gate_proj\.weight", "mlp.experts.gate_up_proj", _of_expert(0)),
    Rule(r"mlp\.experts\.(\d+)\.up_proj\.weight", "mlp.experts.gate_up_proj", _of_expert(1)),
    Rule(r"mlp\.experts\.(\d+)\.down_proj\.weight", "mlp.experts.down_proj", _of_expert(None)),
    Rule(r"mlp\.gate\.", "mlp.router."),
    Rule(r"\.mlp\.", ".feed_forward."),
)
def llama4_text(config: HFConfig) -> DecoderSpec:
    """Llama 4 (Meta): most layers attend to chunks, the other layers do not rotate, and each token has one expert."""
    if (act := config.text("hidden_act", default="silu")) != "silu":
        raise config.wrong("hidden_act", act, "silu")
    width = config.integer("intermediate_size", default=8192)
    experts = ExpertsSpec(
        count=config.integer("num_local_experts", default=16), intermediate_size=width,
        per_token=config.integer("num_experts_per_tok", default=1), scaled_inputs=True, shared_intermediate_size=width,
    )  # fmt: skip
    queries = QueryScaling(
        beta=config.number("attn_scale", default=0.1), length=config.integer("floor_scale", default=8192), first=1,
        rotated=False,
    )  # fmt: skip
    tuned = config.get("attn_temperature_tuning")  # the first checkpoints have the number 4
    if not isinstance(tuned, bool | int | None):
        raise config.wrong("attn_temperature_tuning", tuned, "true or false")
    bias = config.flag("attention_bias")
    return decoder(
        config, theta=500000.0, epsilon=1e-5, head_size=128, rope_interleaved=True,
        intermediate_size=config.integer("intermediate_size_mlp", default=16384), experts=experts,
        qk_norm=config.flag("use_qk_norm", default=True), qk_norm_weights=False,
        query_scaling=None if tuned in (False, 0) else queries, **_llama4_layers(config), **common.biases(bias, False),
    )  # fmt: skip


def _one_expert(part: slice) -> common.TensorView:
    """Return a view of one expert's rows, matrix or bias in the tensor of all experts; floats are [inputs, outputs]."""

    def view(spec: DecoderSpec, tensor: NDArray[Any], expert: int) -> NDArray[Any]:
        matrix: NDArray[Any] = tensor[expert]
        return (matrix if tensor.dtype.names or matrix.ndim == 1 else matrix.T)[part]

    return view


_GATE, _UP, _ALL = slice(0, None, 2), slice(1, None, 2), slice(None)


@architecture(
    "gpt-oss",
    *(
        rule
        for part, together, rows in (("gate", "gate_up", _GATE), ("up", "gate_up", _UP), ("down", "down", _ALL))
        for rule in (
            Rule(rf"mlp\.experts\.(\d+)\.{part}_proj\.weight", f"mlp.experts.{together}_proj", _one_expert(rows)),
            Rule(rf"mlp\.experts\.(\d+)\.{part}_proj\.bias", f"mlp.experts.{together}_proj_bias", _one_expert(rows)),
        )
    ),
    Rule(r"mlp\.gate\.", "mlp.router."),
)
def gpt_oss(config: HFConfig) -> DecoderSpec:
    """gpt-oss: experts with biases and clamped activations, attention sinks, a window in every other layer."""
    experts = common.mixtral_experts(
        config, biased=True, beta=1.0, alpha=config.number("swiglu_alpha", default=1.702, positive=True),
        limit=config.number("swiglu_limit", default=7.0, positive=True),
    )  # fmt: skip
    bias = config.flag("attention_bias", default=True)
    windows = common.window_fields(config, pattern=2, window=128)
    return decoder(
        config, theta=150000.0, epsilon=1e-5, head_size=64, sinks=True, experts=experts, **common.biases(bias, False),
        **windows,
    )  # fmt: skip

"""llama.cpp's architectures by their names: conversion of metadata to config.json's keys, and tensor names.

The tensors in a file take precedence over a family's defaults: the decoder has biases, query and key norms and a
separate head if the file has their tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError, UnsupportedModelError
from ...weight_files.gguf import GgufModel
from ..architectures import find
from ..architectures.common import Architecture, MtpHead, Rule, flat
from ..hf_config import HFConfig
from ..rope import scaled_frequencies
from ..rope_scaling import FrequencyFactors, LongRope, RopeScaling, YarnScaling, yarn_magnitude
from ..spec import DecoderSpec
from . import experts, gemma, latent, recurrent, xielu
from .metadata import Metadata

Values = dict[str, Any]
TABLE, HEAD = "token_embd.weight", "output.weight"
# Tensors that are not weights: divisors of the rotation's frequencies.
ROPE_FREQS, ROPE_LONG, ROPE_SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TENSORS = (ROPE_FREQS, ROPE_LONG, ROPE_SHORT)
# Keys that change nothing for a decoder, or that the tensors already determine.
_HARMLESS = (
    "vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "attention.group_norm_groups", "expert_group_count",
    "expert_group_used_count", "rope.scaling.yarn_log_multiplier", "expert_shared_count", "attention.value_length",
    "attention.max_alibi_bias", "expert_feed_forward_length", "expert_shared_feed_forward_length",
    "expert_weights_norm", "sampling", "interleave_moe_layer_step", "n_deepstack_layers",
)  # fmt: skip


@dataclass(frozen=True)
class GgufArchitecture:
    """llama.cpp's version of one of our architectures.

    Attributes:
        model_type: our name.
        values: returns additional values for config.json.
        permuted: True if the rows of queries and keys are in ggml's order, which is for a rotation of neighbouring
            elements.
        rules: rules for tensors with unusual names.
        adapted: returns the decoder with the parts that only GGUF files have.
        unused: regular expression for the names of tensors that do not affect the logits.
        tensors: returns further tensors, which are metadata in files.
        hybrid: True if some layers have no attention, and therefore no key/value heads.
        latent: True if keys and values are latent rows, of other sizes than the heads.
        varies: True if layers differ in the width of the feed-forward layer and in the number of key/value heads, which
            `values` then returns.
    """

    model_type: str
    values: Callable[[Metadata, GgufModel], Values] = lambda data, model: {}
    permuted: bool = False
    rules: tuple[Rule, ...] = ()
    adapted: Callable[[DecoderSpec, GgufModel], DecoderSpec] = lambda spec, model: spec
    unused: str = ""
    tensors: Callable[[Metadata, GgufModel], dict[str, NDArray[Any]]] = lambda data, model: {}
    hybrid: bool = False
    latent: bool = False
    varies: bool = False


def _experts(data: Metadata, model: GgufModel) -> Values:
    """Return the configuration of the experts under Mixtral's keys."""
    used = data.integer("expert_used_count")
    width = data.optional_integer("expert_feed_forward_length") or data.integer("feed_forward_length")
    count = data.integer("expert_count")
    return {"num_local_experts": count, "num_experts_per_tok": used, "intermediate_size": width}


def _qwen_experts(data: Metadata, model: GgufModel) -> Values:
    mixture = _experts(data, model)
    shared = "blk.0.ffn_up_shexp.weight"
    return {
        "num_experts": mixture["num_local_experts"],
        "num_experts_per_tok": mixture["num_experts_per_tok"],
        "moe_intermediate_size": mixture["intermediate_size"],
        "norm_topk_prob": data.architecture == "qwen3moe",
        **({"shared_expert_intermediate_size": model.info(shared).shape[0]} if shared in model else {}),
    }


def _ernie_experts(data: Metadata, model: GgufModel) -> Values:
    return {
        "moe_num_experts": data.integer("expert_count"),
        "moe_k": data.integer("expert_used_count"),
        "moe_intermediate_size": data.integer("expert_feed_forward_length"),
        "moe_num_shared_experts": data.optional_integer("expert_shared_count"),
        "moe_layer_start_index": data.optional_integer("leading_dense_block_count"),
        "moe_layer_interval": data.integer("interleave_moe_layer_step", 1),
    }


def _multipliers(data: Metadata, model: GgufModel) -> Values:
    # llama.cpp treats missing keys as 0.
    values = {
        "attention_multiplier": data.number("attention.scale", 0.0) or _head_size(data) ** -0.5,
        "embedding_multiplier": data.number("embedding_scale", 0.0) or 1.0,
        "residual_multiplier": data.number("residual_scale", 0.0) or 1.0,
        "logits_scaling": data.number("logit_scale", 1.0),
    }
    shared = {"shared_intermediate_size": data.optional_integer("expert_shared_feed_forward_length")}
    return {**values, **({**_experts(data, model), **shared} if data.architecture == "granitemoe" else {})}


def _minicpm(data: Metadata, model: GgufModel) -> Values:
    """Return the multipliers of MiniCPM under Granite's keys; early files lack them."""
    return {
        "attention_multiplier": _head_size(data) ** -0.5,
        "embedding_multiplier": data.number("embedding_scale", 12.0),
        "residual_multiplier": data.number("residual_scale", 1.4 / data.integer("block_count") ** 0.5),
        "logits_scaling": data.number("logit_scale", data.integer("embedding_length") / 256),
    }


def _granite_hybrid(data: Metadata, model: GgufModel) -> Values:
    return {**_multipliers(data, model), **recurrent.granite_hybrid(data, model)}


# Architectures that were trained with YaRN bounds that are not rounded to whole dimensions. Files do not contain this.
_EXACT_YARN_BOUNDS = ("gpt-oss",)
# The 27B models derive the scale of the scores from hidden_size / heads; all other models use the head size.
_LAYERS_27B = {"gemma2": 46, "gemma3": 62}


def _later_gemma(data: Metadata, model: GgufModel) -> Values:
    heads, size = data.integer("attention.head_count"), data.integer("attention.key_length", 256)
    large = data.integer("block_count") == _LAYERS_27B[data.architecture]
    return {
        "query_pre_attn_scalar": data.integer("embedding_length") // heads if large else size,
        "attn_logit_softcapping": 0.0 if _is_gemma3(data) else data.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": data.number(
            "final_logit_softcapping", 30.0 if data.architecture == "gemma2" else 0.0
        ),
        **({"rope_local_base_freq": data.number("rope.freq_base_swa", 10000.0)} if _is_gemma3(data) else {}),
    }


def _is_gemma3(data: Metadata) -> bool:
    return data.architecture == "gemma3"


def _pictures(data: Metadata, model: GgufModel) -> Values:
    """Check that all rotated pairs turn with a token's position in texts.

    llama.cpp does not turn the pairs 61 and 62 of Qwen3-VL, which transformers does.
    """
    recurrent.check_sections(data, interleaved=False)
    return _qwen_experts(data, model) if data.architecture == "qwen3vlmoe" else {}


def _hunyuan(data: Metadata, model: GgufModel) -> Values:
    alpha, size = data.number("rope.scaling.alpha", 0.0), _head_size(data)
    if alpha <= 0 or size <= 2:
        return {}
    return {"rope_theta": data.number("rope.freq_base", 10000.0) * alpha ** (size / (size - 2))}


def _glm_experts(data: Metadata, model: GgufModel) -> Values:
    recurrent.check_sections(data, interleaved=False)
    return {**experts.sigmoids(data, model), "use_qk_norm": "blk.0.attn_q_norm.weight" in model}


def _ministral(data: Metadata, model: GgufModel) -> Values:
    """Return the scaling of queries by their positions, which is part of the rotation's configuration."""
    beta = data.number("attention.temperature_scale", 0.0)
    if not beta:
        return {}
    length = data.optional_integer("rope.scaling.original_context_length") or data.integer("context_length")
    given = _rope(data, model, _head_size(data) // 2).get("rope_scaling", {})
    own = {"llama_4_scaling_beta": beta, "original_max_position_embeddings": length}
    return {"rope_scaling": {**given, **own}}


def _falcon(data: Metadata, model: GgufModel) -> Values:
    apart = "blk.0.attn_norm_2.weight" in model
    kv_heads = data.integer("attention.head_count_kv", 1)
    return {
        "new_decoder_architecture": True, "num_kv_heads": kv_heads, "num_ln_in_parallel_attn": 2 if apart else 1,
        "ffn_hidden_size": data.integer("feed_forward_length"),
    }  # fmt: skip


def _parallel(data: Metadata, model: GgufModel) -> Values:
    default = "blk.0.ffn_norm.weight" not in model
    return {
        "use_parallel_residual": data.flag("use_parallel_residual", default),
        "qk_layernorm": "blk.0.attn_q_norm.weight" in model,
    }


def _cohere(data: Metadata, model: GgufModel) -> Values:
    return {"logit_scale": data.number("logit_scale", 1.0), "use_qk_norm": "blk.0.attn_q_norm.weight" in model}


def _clip(data: Metadata, model: GgufModel) -> Values:
    return {"clip_qkv": data.number("attention.clamp_kqv")} if data.get("attention.clamp_kqv") is not None else {}


def _norms_apart(spec: DecoderSpec) -> bool:
    return spec.parallel and not spec.shared_norm


_FALCON = (
    Rule(r"input_layernorm", "attn_norm_2", when=_norms_apart),
    Rule(r"post_attention_layernorm", "attn_norm", when=_norms_apart),
)
_POST_ATTENTION = (Rule(r"post_attention_layernorm", "post_attention_norm"),)
_GPT_OSS = (
    *_POST_ATTENTION,
    Rule(r"self_attn\.sinks", "attn_sinks.weight"),
)
ARCHITECTURES: Mapping[str, GgufArchitecture] = {
    "llama": GgufArchitecture("llama", permuted=True),
    "llama4": GgufArchitecture("llama4_text", experts.llama4),
    "qwen2": GgufArchitecture("qwen2"),
    "qwen2moe": GgufArchitecture("qwen2_moe", _qwen_experts),
    "qwen3": GgufArchitecture("qwen3"),
    "qwen3moe": GgufArchitecture("qwen3_moe", _qwen_experts),
    "gemma": GgufArchitecture("gemma"),
    "gemma2": GgufArchitecture("gemma2", _later_gemma),
    "gemma3": GgufArchitecture("gemma3_text", _later_gemma),
    "gemma3n": GgufArchitecture(
        "gemma3n_text", gemma.gemma3n, rules=gemma.GEMMA3N, adapted=gemma.laurel, unused=gemma.UNUSED, varies=True
    ),
    "gemma4": GgufArchitecture(
        "gemma4_text", gemma.gemma4, rules=gemma.GEMMA4, adapted=gemma.as_in_file, unused=gemma.UNUSED, varies=True
    ),
    "qwen2vl": GgufArchitecture("qwen2", _pictures),
    "qwen3vl": GgufArchitecture("qwen3", _pictures),
    "qwen3vlmoe": GgufArchitecture("qwen3_vl_moe_text", _pictures),
    "mistral3": GgufArchitecture("ministral3", _ministral, permuted=True),
    "arcee": GgufArchitecture("arcee", permuted=True),
    "apertus": GgufArchitecture("apertus", rules=xielu.RULES, tensors=xielu.activations),
    "seed_oss": GgufArchitecture("seed_oss", rules=_POST_ATTENTION),
    "hunyuan-dense": GgufArchitecture("hunyuan_v1_dense", _hunyuan),
    "glm4moe": GgufArchitecture("glm4_moe", _glm_experts, rules=(*_POST_ATTENTION, *recurrent.SELECTION)),
    "dots1": GgufArchitecture("dots1", experts.sigmoids, rules=recurrent.SELECTION, adapted=experts.with_selection),
    "exaone-moe": GgufArchitecture(
        "exaone_moe", experts.sigmoids, rules=recurrent.SELECTION, adapted=experts.with_selection
    ),
    "phi2": GgufArchitecture("phi"),
    "phi3": GgufArchitecture("phi3"),
    "olmo": GgufArchitecture("olmo", _clip, permuted=True),
    "olmo2": GgufArchitecture("olmo2"),
    "granite": GgufArchitecture("granite", _multipliers, permuted=True),
    "granitemoe": GgufArchitecture("granitemoeshared", _multipliers, permuted=True),
    "starcoder2": GgufArchitecture("starcoder2"),
    "gpt2": GgufArchitecture("gpt2", lambda data, model: {"n_inner": data.integer("feed_forward_length")}),
    "gptneox": GgufArchitecture("gpt_neox", _parallel),
    "falcon": GgufArchitecture("falcon", _falcon, rules=_FALCON),
    "stablelm": GgufArchitecture("stablelm", _parallel),
    "command-r": GgufArchitecture("cohere", _cohere),
    "cohere2": GgufArchitecture("cohere2", _cohere),
    "glm4": GgufArchitecture("glm4"),
    "exaone4": GgufArchitecture("exaone4"),
    "smollm3": GgufArchitecture("smollm3", permuted=True),
    "nemotron": GgufArchitecture("nemotron"),
    "ernie4_5": GgufArchitecture("ernie4_5"),
    "gpt-oss": GgufArchitecture("gpt_oss", _experts, rules=_GPT_OSS),
    "minicpm": GgufArchitecture("granite", _minicpm, permuted=True),
    "minicpm3": GgufArchitecture("minicpm3", latent.sizes, latent=True),
    "deepseek2": GgufArchitecture("deepseek_v3", latent.deepseek2, adapted=latent.as_in_file, latent=True),
    "granitehybrid": GgufArchitecture(
        "granitemoehybrid", _granite_hybrid, permuted=True, rules=recurrent.MAMBA, hybrid=True
    ),
    "ernie4_5-moe": GgufArchitecture("ernie4_5_moe", _ernie_experts, rules=recurrent.SELECTION),
    "olmoe": GgufArchitecture("olmoe", lambda data, model: {**_qwen_experts(data, model), "norm_topk_prob": False}),
    "falcon-h1": GgufArchitecture("falcon_h1", recurrent.falcon_h1, rules=recurrent.FALCON_H1, hybrid=True),
    "nemotron_h": GgufArchitecture("nemotron_h", recurrent.nemotron_h, rules=recurrent.NEMOTRON, hybrid=True),
    "nemotron_h_moe": GgufArchitecture("nemotron_h", recurrent.nemotron_h, rules=recurrent.NEMOTRON, hybrid=True),
    "lfm2": GgufArchitecture("lfm2", recurrent.lfm2, rules=recurrent.LFM2, hybrid=True),
    "lfm2moe": GgufArchitecture("lfm2_moe", recurrent.lfm2_moe, rules=recurrent.LFM2, hybrid=True),
    "jamba": GgufArchitecture("jamba", recurrent.jamba, rules=recurrent.MAMBA_1, hybrid=True),
    "kimi-linear": GgufArchitecture("kimi_linear", latent.kimi_linear, hybrid=True, latent=True),
    "mamba": GgufArchitecture("mamba", recurrent.mamba, rules=recurrent.MAMBA_1),
    "mamba2": GgufArchitecture("mamba2", recurrent.mamba2, rules=recurrent.MAMBA),
    "qwen3next": GgufArchitecture("qwen3_next", recurrent.delta_net, rules=recurrent.QWEN3_NEXT, hybrid=True),
    "qwen35": GgufArchitecture(
        "qwen3_5_text", recurrent.delta_net, rules=recurrent.QWEN3_5, adapted=recurrent.tiled, hybrid=True
    ),
    "qwen35moe": GgufArchitecture(
        "qwen3_5_moe_text", recurrent.delta_net, rules=recurrent.QWEN3_5, adapted=recurrent.tiled, hybrid=True
    ),
}


def gguf_architecture_of(model: GgufModel) -> GgufArchitecture:
    """Return the entry for a file's architecture. Raise UnsupportedModelError if it is not supported."""
    name = model.architecture
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{model.path}: the architecture {name!r:.60} is not supported",
            f"the supported architectures are {', '.join(ARCHITECTURES)}",
            "use a model with a supported architecture",
        )
    if name == "llama" and Metadata(model.metadata, name, model.path).optional_integer("expert_count"):
        return GgufArchitecture("mixtral", _experts, permuted=True)
    if name == "deepseek2":
        kind = latent.family(Metadata(model.metadata, name, model.path), model)
        return replace(ARCHITECTURES[name], model_type=kind, rules=latent.rules(model))
    if name in ("minicpm3", "kimi-linear"):
        return replace(ARCHITECTURES[name], rules=latent.rules(model))
    return ARCHITECTURES[name]


def tensors_of(model: GgufModel) -> dict[str, NDArray[Any]]:
    """Return the tensors that are metadata in a file, by their names."""
    return gguf_architecture_of(model).tensors(Metadata(model.metadata, model.architecture, model.path), model)


def config_of(model: GgufModel, tokens: Values) -> tuple[HFConfig, list[str]]:
    """Return the equivalent of config.json, and the metadata keys that are ignored.

    Args:
        tokens: ids of special tokens, by the names of their keys in config.json.
    """
    architecture, data = gguf_architecture_of(model), Metadata(model.metadata, model.architecture, model.path)
    if TABLE not in model:
        raise InputError(
            f"{model.path}: the tensor {TABLE!r} is missing", "a decoder needs token embeddings",
            "use the GGUF file of the language model, not of the vision encoder (mmproj)",
        )  # fmt: skip
    if not data.flag("attention.causal", True):
        raise UnsupportedModelError(
            f"{model.path}: {model.architecture}.attention.causal is false", "only causal attention is supported",
            "use another model",
        )  # fmt: skip
    heads, hidden = _query_heads(data), data.integer("embedding_length")
    size = _head_size(data)
    if (other := data.integer("attention.value_length", size)) != size and not architecture.latent:
        raise UnsupportedModelError(
            f"{model.path}: keys have {size} elements per head, but values have {other}",
            "keys and values must have the same head size", "use another model",
        )  # fmt: skip
    some = architecture.hybrid
    sizes = {} if architecture.varies else {
        "intermediate_size": data.optional_integer("feed_forward_length", some=some) or 4 * hidden,
        "num_key_value_heads": data.integer("attention.head_count_kv", heads, some=some),
    }  # fmt: skip
    epsilon = data.get("attention.layer_norm_rms_epsilon")
    name = "attention.layer_norm_rms_epsilon" if epsilon is not None else "attention.layer_norm_epsilon"
    rotated = data.optional_integer("rope.dimension_count") or size
    values: Values = {
        "model_type": architecture.model_type,
        "hidden_size": hidden,
        "num_hidden_layers": recurrent.without_drafts(data),
        **sizes,
        "num_attention_heads": heads,
        "head_dim": size,
        "max_position_embeddings": data.integer("context_length"),
        "vocab_size": model.info(TABLE).shape[0],
        "rms_norm_eps": data.number(name, 1e-5),
        "tie_word_embeddings": HEAD not in model,
        "sliding_window": data.optional_integer("attention.sliding_window"),
        "partial_rotary_factor": rotated / size,
        **_rope(data, model, rotated // 2),
        **_pattern(data),
        **architecture.values(data, model),
        **tokens,
    }
    if architecture.model_type == "gpt2":  # it has no rotary embedding
        del values["partial_rotary_factor"]
    known = tuple(f"{model.architecture}.{key}" for key in _HARMLESS)
    config = HFConfig(values)
    assert config.model_type  # mark the key as read
    config.get(*experts.ALIASES)
    return config, [key for key in data.unread if not key.startswith(known)]


def _query_heads(data: Metadata) -> int:
    """Return the number of query heads. Files without attention contain 0; other heads replace them."""
    if data.architecture in ("mamba", "mamba2"):
        data.optional_integer("attention.head_count")
        return 1 if data.architecture == "mamba" else data.integer("ssm.time_step_rank")
    return data.integer("attention.head_count")


def _head_size(data: Metadata) -> int:
    heads, hidden = _query_heads(data), data.integer("embedding_length")
    return data.integer("attention.key_length", max(hidden // heads, 1))


def _pattern(data: Metadata) -> Values:
    """Return the layers with a window: all layers except every n-th layer, or a list."""
    value = data.get("attention.sliding_window_pattern")
    if isinstance(value, np.ndarray):
        flags = value.tolist()[: recurrent.without_drafts(data)]
        return {"layer_types": ["sliding_attention" if flag else "full_attention" for flag in flags]}
    return {} if value is None else {"sliding_window_pattern": data.integer("attention.sliding_window_pattern")}


def _rope(data: Metadata, model: GgufModel, pairs: int) -> Values:
    """Return rope_theta, and the rope scaling for positions beyond the original context length."""
    values: Values = {"rope_theta": data.number("rope.freq_base", 10000.0)}
    context = data.integer("context_length")
    kind = data.text("rope.scaling.type", "linear")
    original = data.optional_integer("rope.scaling.original_context_length") or context
    factor = data.number("rope.scaling.factor", data.number("rope.scale_linear", 1.0)) or 1.0
    magnitude = data.number("rope.scaling.attn_factor", 1.0) * data.number("rope.scaling.yarn_attn_factor", 1.0)
    bounds = {
        "beta_fast": data.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": data.number("rope.scaling.yarn_beta_slow", 1.0),
    }
    if ROPE_LONG in model or ROPE_SHORT in model:
        factors = [_divisors(model, name, pairs) for name in (ROPE_SHORT, ROPE_LONG)]
        scaling: Values = {"type": "longrope", "short_factor": factors[0], "long_factor": factors[1]}
        scaling["attention_factor"] = magnitude
        return {**values, "rope_scaling": scaling, "original_max_position_embeddings": original}
    if kind == "none" or (factor == 1 and kind in ("linear", "yarn")):
        return values
    if kind == "yarn":
        magnitude *= _yarn_growth(data, factor)
        scaling = {"type": "yarn", "factor": factor, "attention_factor": magnitude, **bounds}
        scaling["truncate"] = data.architecture not in _EXACT_YARN_BOUNDS
        return {**values, "rope_scaling": {**scaling, "original_max_position_embeddings": original}}
    if kind == "linear":
        return {**values, "rope_scaling": {"type": "linear", "factor": factor}}
    raise UnsupportedModelError(
        f"{model.path}: {model.architecture}.rope.scaling.type is {kind!r:.40}",
        f"the supported types are none, linear, yarn, and longrope with the tensors {ROPE_LONG} and {ROPE_SHORT}",
        "convert the model again with a current convert_hf_to_gguf.py",
    )


def _yarn_growth(data: Metadata, factor: float) -> float:
    """Return the factor of cosines and sines with YaRN."""
    own = latent.log_multiplier(data) if data.architecture in ("deepseek2", "mistral3") else 0.0
    if data.architecture == "mistral3" and own:
        return yarn_magnitude(factor) / yarn_magnitude(factor, own)
    return 1.0 if own else yarn_magnitude(factor)


def _scaling(data: Metadata, model: GgufModel, spec: DecoderSpec) -> RopeScaling | None:
    """Return the configuration's scaling, with the divisors and the magnitude for which config.json has no keys."""
    scaling = spec.rope_scaling
    has_own = isinstance(scaling, YarnScaling | LongRope)  # these already include the magnitude
    magnitude = 1.0 if has_own else data.number("rope.scaling.attn_factor", 1.0)
    if ROPE_FREQS not in model and magnitude == 1:
        return scaling
    pairs = spec.rotary_size // 2
    divisors = np.array(_divisors(model, ROPE_FREQS, pairs) if ROPE_FREQS in model else [1.0] * pairs)
    if scaling is not None:
        plain, _ = scaled_frequencies(replace(spec, rope_scaling=None))
        scaled, factor = scaled_frequencies(spec)
        divisors, magnitude = divisors * (plain / scaled), magnitude * factor
    return FrequencyFactors(divisors=tuple(divisors.tolist()), attention_factor=magnitude)


def _rotates_nothing(data: Metadata) -> bool:
    """Return True if rotation is disabled. Granite uses a key for this that has another meaning in other models."""
    return data.architecture in ("granite", "granitemoe", "granitehybrid") and not data.flag(
        "rope.scaling.finetuned", True
    )


def _divisors(model: GgufModel, name: str, pairs: int) -> list[float]:
    """Read a tensor of positive numbers, one per rotated pair."""
    if name not in model or model[name].dtype != np.float32 or model[name].shape != (pairs,):
        actual = f"{model.info(name).kind} {list(model.info(name).shape)}" if name in model else "not present"
        raise InputError(
            f"{model.path}: tensor {name!r} is {actual}",
            f"the expected tensor is F32 [{pairs}], with one number for each rotated pair", "convert the model again",
        )  # fmt: skip
    values = model[name]
    if not (np.isfinite(values) & (values > 0)).all():
        raise InputError(
            f"{model.path}: tensor {name!r} contains numbers that are not positive and finite",
            "rotation frequencies are divided by these numbers", "download the file again",
        )  # fmt: skip
    return [float(value) for value in values]


def architecture_of(model: GgufModel) -> Architecture:
    """Return our architecture with llama.cpp's tensor names and the optional parts whose tensors the file has."""
    architecture, data = gguf_architecture_of(model), Metadata(model.metadata, model.architecture, model.path)
    known = find(architecture.model_type)

    def has(name: str, part: str) -> bool:
        return f"blk.0.{name}.{part}" in model

    def describe(config: HFConfig) -> DecoderSpec:
        spec = known.describe(config)
        return replace(
            architecture.adapted(spec, model),
            # In families that add 1 to their norm weights, convert_hf_to_gguf.py has already added it.
            norm_weight_offset=0.0,
            rope_scaling=_scaling(data, model, spec),
            rope_layers=() if _rotates_nothing(data) else spec.rope_layers,
            norm_biases="output_norm.bias" in model,
            qkv_bias=has("attn_q", "bias") or has("attn_qkv", "bias"),
            o_bias=has("attn_output", "bias"),
            mlp_bias=has("ffn_down", "bias"),
            head_bias="output.bias" in model,
        )

    is_packed = has("attn_qkv", "weight") and not architecture.hybrid  # linear attention has a tensor of that name
    packed = _PACKED_QKV if is_packed else _QKV[architecture.permuted]
    gate = _PACKED_GATE_UP if known.model_type in _GATE_BESIDE_UP else ()
    experts = _EXPERTS_APART if has("ffn_gate.0", "weight") else _EXPERTS
    if has("ffn_gate_up_exps", "weight"):
        experts = (*gemma.EXPERTS_JOINED, *_EXPERTS)
    drafts = range(recurrent.without_drafts(data), data.integer("block_count"))
    rules = (*_OUTSIDE, *architecture.rules, *_LAYERS, *packed, *experts, *gate, *_FEED_FORWARD)
    unused = [rf"^blk\.({'|'.join(map(str, drafts))})\." if drafts else "", architecture.unused]
    head = _mtp_head(drafts[0], model) if drafts and known.mtp is not None else None
    return Architecture(known.model_type, known.title, describe, rules, "|".join(filter(None, unused)), mtp=head)


def _mtp_head(layer: int, model: GgufModel) -> MtpHead:
    """Return the MTP head that is stored as a further layer."""
    path = f"blk.{layer}."
    names = {
        "fc": "eh_proj",
        "pre_fc_norm_embedding": "enorm",
        "pre_fc_norm_hidden": "hnorm",
        "norm": "shared_head_norm",
    }
    stored = {ours: f"{path}nextn.{name}." for ours, name in names.items()} | {"layers.0": path}
    if f"{path}nextn.shared_head_norm.weight" not in model:
        stored["norm"] = "output_norm."
    return MtpHead(lambda spec, layer: "", stored)


# Architectures without a separate gate tensor: the gate's rows precede those of "up" in one tensor.
_GATE_BESIDE_UP = ("phi3", "glm4")


def _neighbours(heads: str) -> Callable[..., NDArray[Any]]:
    """Return a view that undoes ggml's order of each head's rows: the first elements of all pairs, then the second."""

    def view(spec: DecoderSpec, tensor: NDArray[Any]) -> NDArray[Any]:
        count = getattr(spec, heads)
        pairs = tensor.reshape(count, len(tensor) // count // 2, 2, *tensor.shape[1:])
        return pairs.swapaxes(1, 2).reshape(tensor.shape)

    return view


_OUTSIDE = (
    Rule(r"^model\.embed_tokens\.", "token_embd."),
    Rule(r"^model\.embed_positions\.", "position_embd."),
    Rule(r"^model\.norm\.", "output_norm."),
    Rule(r"^lm_head\.", "output."),
)
_LAYERS = (
    Rule(r"input_layernorm", "attn_norm"),
    Rule(r"post_attention_layernorm", "post_attention_norm", when=lambda spec: spec.post_norms),
    Rule(r"post_attention_layernorm", "ffn_norm"),
    Rule(r"pre_feedforward_layernorm", "ffn_norm"),
    Rule(r"post_feedforward_layernorm", "post_ffw_norm"),
    Rule(r"self_attn\.o_proj", "attn_output"),
    Rule(r"self_attn\.q_norm", "attn_q_norm", flat),
    Rule(r"self_attn\.k_norm", "attn_k_norm", flat),
)
_QKV = {
    False: tuple(Rule(rf"self_attn\.{part}_proj", f"attn_{part}") for part in "qkv"),
    True: (
        Rule(r"self_attn\.q_proj", "attn_q", _neighbours("num_attention_heads")),
        Rule(r"self_attn\.k_proj", "attn_k", _neighbours("num_key_value_heads")),
        Rule(r"self_attn\.v_proj", "attn_v"),
    ),
}
_PACKED_QKV = (
    Rule(r"self_attn\.q_proj", "attn_qkv", lambda spec, x: x[: spec.query_size]),
    Rule(r"self_attn\.k_proj", "attn_qkv", lambda spec, x: x[spec.query_size :][: spec.key_value_size]),
    Rule(r"self_attn\.v_proj", "attn_qkv", lambda spec, x: x[spec.query_size + spec.key_value_size :]),
)
_PARTS = ("gate", "up", "down")
_EXPERTS = tuple(
    Rule(rf"mlp\.experts\.(\d+)\.{part}_proj", f"ffn_{part}_exps", lambda spec, x, expert: x[expert]) for part in _PARTS
)
# The tensor names in the earliest files with experts.
_EXPERTS_APART = tuple(Rule(rf"mlp\.experts\.(\d+)\.{part}_proj", rf"ffn_{part}.\1") for part in _PARTS)
_PACKED_GATE_UP = (
    Rule(r"mlp\.gate_proj", "ffn_up", lambda spec, x: x[: len(x) // 2]),
    Rule(r"mlp\.up_proj", "ffn_up", lambda spec, x: x[len(x) // 2 :]),
)
_FEED_FORWARD = (
    Rule(r"mlp\.shared_expert_gate\.", "ffn_gate_inp_shexp.", lambda spec, x: x.reshape(1, -1)),
    Rule(r"mlp\.gate\.", "ffn_gate_inp."),
    *(Rule(rf"mlp\.shared_expert\.{part}_proj", f"ffn_{part}_shexp") for part in _PARTS),
    *(Rule(rf"mlp\.{part}_proj", f"ffn_{part}") for part in _PARTS),
    Rule(r"^model\.layers\.", "blk."),
)

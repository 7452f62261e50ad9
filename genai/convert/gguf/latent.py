"""llama.cpp's metadata and tensors of latent attention.

They are DeepSeek V2 and V3, Kimi K2, GLM 4.7 Flash, Youtu-LLM, MiniCPM 3 and Kimi Linear.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from ...errors import UnsupportedModelError
from ...weight_files.gguf import GgufModel
from ..architectures.common import Rule
from ..architectures.latent import LATENT
from ..rope_scaling import YarnScaling
from ..spec import DecoderSpec
from . import experts, recurrent
from .metadata import Metadata

Values = dict[str, Any]
# Early files of GLM 4.7 Flash, which this number of layers and of tokens identify, lack expert_gating_func.
_GLM_LAYERS, _GLM_TOKENS = (47, 48), 154880


def family(data: Metadata, model: GgufModel) -> str:
    """Return our architecture for a file: they differ in how experts are weighted."""
    if data.optional_integer("leading_dense_block_count") >= recurrent.without_drafts(data):
        return "youtu"
    kind = data.optional_integer("expert_gating_func")
    if not kind:
        is_glm = data.integer("block_count") in _GLM_LAYERS and model.info("token_embd.weight").shape[0] == _GLM_TOKENS
        kind = experts.SIGMOID if is_glm else experts.SOFTMAX
    if kind not in (experts.SOFTMAX, experts.SIGMOID):
        raise data.wrong("expert_gating_func", kind, "1 (softmax) or 2 (sigmoid)")
    return "deepseek_v3" if kind == experts.SIGMOID else "deepseek_v2"


def sizes(data: Metadata, model: GgufModel) -> Values:
    """Return the configuration of latent attention; the size of a value defaults to hidden_size / heads."""
    if data.number("attention.temperature_scale", 0.0):
        raise UnsupportedModelError(
            f"{model.path}: {data.architecture}.attention.temperature_scale is set",
            "queries of latent attention cannot be scaled by their positions", "use another model",
        )  # fmt: skip
    rotated = data.integer("rope.dimension_count")
    key, value = (data.optional_integer(f"attention.{part}_length_mla") for part in ("key", "value"))
    key = key or data.integer("attention.key_length")
    default = max(data.integer("embedding_length") // data.integer("attention.head_count"), 1)
    value = value or data.integer("attention.value_length", default)
    if key <= rotated:
        raise data.wrong("attention.key_length_mla", key, f"a number greater than rope.dimension_count = {rotated}")
    has_rank = _has(model, "attn_q_a")
    return {
        "kv_lora_rank": data.integer("attention.kv_lora_rank"), "qk_rope_head_dim": rotated,
        "q_lora_rank": data.integer("attention.q_lora_rank") if has_rank else 0,
        "qk_nope_head_dim": key - rotated, "v_head_dim": value, "partial_rotary_factor": 1.0,
    }  # fmt: skip


def deepseek2(data: Metadata, model: GgufModel) -> Values:
    """Return the configuration of latent attention, and of experts if there are any."""
    values, kind = sizes(data, model), family(data, model)
    if kind == "youtu":
        return values
    found = experts.routed(data)
    if kind == "deepseek_v2":
        found |= {"norm_topk_prob": False, **({"topk_method": "group_limited_greedy"} if "n_group" in found else {})}
    return values | found


def kimi_linear(data: Metadata, model: GgufModel) -> Values:
    """Return the configuration of Kimi Linear, whose other layers have latent attention."""
    return {**sizes(data, model), **recurrent.kimi_linear(data, model)}


def as_in_file(spec: DecoderSpec, model: GgufModel) -> DecoderSpec:
    """Return the decoder with llama.cpp's scale of the scores, and with the parts of the router that a file has."""
    data = Metadata(model.metadata, model.architecture, model.path)
    spec, scaling = experts.with_selection(spec, model), spec.rope_scaling
    if isinstance(scaling, YarnScaling) and spec.attention_scale is not None:
        growth = 1 + log_multiplier(data) * math.log(scaling.factor)
        spec = replace(spec, attention_scale=spec.attention_scale * (growth * (scaling.attention_factor or 1.0)) ** 2)
    if spec.experts is not None:
        spec = replace(spec, experts=replace(spec.experts, normalized=data.flag("expert_weights_norm", False)))
    return spec


def log_multiplier(data: Metadata) -> float:
    """Return the growth of the scores by the logarithm of YaRN's factor: a tenth of mscale_all_dim."""
    return data.number("rope.scaling.yarn_log_multiplier", 0.0)


def rules(model: GgufModel) -> tuple[Rule, ...]:
    """Return the rules for a file, which has the matrices of keys and values apart or, if it is old, in one tensor."""
    apart = (
        Rule(r"self_attn\.k_up\.(\d+)", "attn_k_b", lambda spec, x, head: x[head]),
        Rule(r"self_attn\.v_up\.(\d+)", "attn_v_b", lambda spec, x, head: x[head]),
    )
    own = recurrent.KIMI_LINEAR if model.architecture == "kimi-linear" else ()
    return (*(apart if _has(model, "attn_k_b") else ()), *own, *LATENT, *_NAMES, *recurrent.SELECTION)


def _has(model: GgufModel, name: str) -> bool:
    """Return True if a layer has a matrix. In some models, only some layers have attention."""
    return any(one.endswith(f".{name}.weight") for one in model)


_NAMES = (
    Rule(r"self_attn\.(q_a|q_b)_proj", r"attn_\1"),
    Rule(r"self_attn\.kv_b_proj", "attn_kv_b"),
    Rule(r"self_attn\.kv_a_proj_with_mqa", "attn_kv_a_mqa"),
    Rule(r"self_attn\.(q_a|kv_a)_layernorm", r"attn_\1_norm"),
)

"""llama.cpp's metadata of experts that are weighted by sigmoids (DeepSeek V3, GLM 4.5, dots.llm1, K-EXAONE)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...weight_files.gguf import GgufModel
from ..spec import DecoderSpec
from .metadata import Metadata

Values = dict[str, Any]
SOFTMAX, SIGMOID = 1, 2


def with_groups(data: Metadata) -> Values:
    """Return the configuration of experts, of shared experts, and of the groups of which experts are selected."""
    groups = data.optional_integer("expert_group_count")
    shared = data.optional_integer("expert_shared_count")
    return {
        "n_routed_experts": data.integer("expert_count"), "num_experts_per_tok": data.integer("expert_used_count"),
        "moe_intermediate_size": data.integer("expert_feed_forward_length"),
        "n_shared_experts": shared, "num_shared_experts": shared,
        "first_k_dense_replace": data.optional_integer("leading_dense_block_count"),
        "routed_scaling_factor": data.number("expert_weights_scale", 0.0) or 1.0,
        "norm_topk_prob": data.flag("expert_weights_norm", False),
        **({"n_group": groups, "topk_group": data.integer("expert_group_used_count")} if groups > 1 else {}),
    }  # fmt: skip


def sigmoids(data: Metadata, model: GgufModel) -> Values:
    """Return the configuration of experts that are weighted by sigmoids."""
    if (kind := data.optional_integer("expert_gating_func")) not in (0, SIGMOID):
        raise data.wrong("expert_gating_func", kind, f"{SIGMOID} (sigmoid)")
    return {**with_groups(data), "use_qk_norm": "blk.0.attn_q_norm.weight" in model}


def with_selection(spec: DecoderSpec, model: GgufModel) -> DecoderSpec:
    """Return the decoder with biases for the selection of experts only if a file has them."""
    if spec.experts is None:
        return spec
    has_bias = any(name.endswith("exp_probs_b.bias") for name in model)
    return replace(spec, experts=replace(spec.experts, selection_bias=has_bias))

"""llama.cpp's metadata of experts that have a separate width, and of those that are weighted by sigmoids."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...weight_files.gguf import GgufModel
from ..spec import DecoderSpec
from .metadata import Metadata

Values = dict[str, Any]
SOFTMAX, SIGMOID = 1, 2


# Names of the same numbers in config.json; each architecture reads one name.
_COUNTS = {
    "expert_count": ("num_experts", "n_routed_experts"),
    "expert_used_count": ("num_experts_per_tok", "top_k_experts"),
    "expert_shared_count": ("n_shared_experts", "num_shared_experts"),
    "leading_dense_block_count": ("first_k_dense_replace", "num_dense_layers"),
}
ALIASES = tuple(name for names in _COUNTS.values() for name in names)


def routed(data: Metadata) -> Values:
    """Return the configuration of experts, of shared experts, and of the groups of which experts are selected."""
    groups, scale = data.optional_integer("expert_group_count"), data.number("expert_weights_scale", 0.0)
    counts = {"expert_count": data.integer("expert_count"), "expert_used_count": data.integer("expert_used_count")}
    return {
        **{name: counts.get(key, data.optional_integer(key)) for key, names in _COUNTS.items() for name in names},
        "moe_intermediate_size": data.integer("expert_feed_forward_length"),
        "norm_topk_prob": data.flag("expert_weights_norm", False),
        **({"routed_scaling_factor": scale} if scale else {}),
        **({"n_group": groups, "topk_group": data.integer("expert_group_used_count")} if groups > 1 else {}),
    }  # fmt: skip


def sigmoids(data: Metadata, model: GgufModel) -> Values:
    """Return the configuration of experts that are weighted by sigmoids."""
    if (kind := data.optional_integer("expert_gating_func")) not in (0, SIGMOID):
        raise data.wrong("expert_gating_func", kind, f"{SIGMOID} (sigmoid)")
    return routed(data)


def with_selection(spec: DecoderSpec, model: GgufModel) -> DecoderSpec:
    """Return the decoder with biases for the selection of experts only if a file has them."""
    if spec.experts is None:
        return spec
    has_bias = any(name.endswith("exp_probs_b.bias") for name in model)
    return replace(spec, experts=replace(spec.experts, selection_bias=has_bias))

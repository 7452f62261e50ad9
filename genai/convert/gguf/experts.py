"""llama.cpp's metadata of experts that have a separate width, and of those that are weighted by sigmoids."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

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


# llama.cpp's constants for Llama 4, which files do not contain.
_CHUNK, _CHUNKED_OF, _NOT_NORMALIZED = 8192, 4, 128


def llama4(data: Metadata, model: GgufModel) -> Values:
    """Return the configuration of Llama 4. Only models with 128 experts do not normalise queries and keys."""
    if data.get("attention.sliding_window") == 0:
        raise data.wrong("attention.sliding_window", 0, "no value, because Llama 4 attends to chunks")
    every = data.get("attention.sliding_window_pattern")
    layers = data.integer("block_count")
    if not isinstance(every, np.ndarray):
        step = data.integer("attention.sliding_window_pattern", _CHUNKED_OF)
        flags = [layer % step < step - 1 for layer in range(layers)]
    else:
        flags = [bool(flag) for flag in every.tolist()]
        if len(flags) != layers:
            raise data.wrong("attention.sliding_window_pattern", flags, f"a list with {layers} values")
    count = data.integer("expert_count")
    return {
        "num_local_experts": count, "num_experts_per_tok": data.integer("expert_used_count"),
        "intermediate_size": data.integer("expert_feed_forward_length"),
        "intermediate_size_mlp": data.integer("feed_forward_length"),
        "interleave_moe_layer_step": data.integer("interleave_moe_layer_step"),
        "layer_types": ["chunked_attention" if flag else "full_attention" for flag in flags],
        "attention_chunk_size": _CHUNK, "use_qk_norm": count != _NOT_NORMALIZED,
    }  # fmt: skip


def with_selection(spec: DecoderSpec, model: GgufModel) -> DecoderSpec:
    """Return the decoder with biases for the selection of experts only if a file has them."""
    if spec.experts is None:
        return spec
    has_bias = any(name.endswith("exp_probs_b.bias") for name in model)
    return replace(spec, experts=replace(spec.experts, selection_bias=has_bias))

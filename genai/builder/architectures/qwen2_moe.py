"""Qwen 1.5 and 2 with experts: one more expert, behind a gate, sees every token."""

from __future__ import annotations

from typing import Any

from ..architecture import Architecture
from ..hf_config import HFConfig
from ..spec import DecoderSpec, Experts
from .common import decoder, window_fields


def describe(config: HFConfig) -> DecoderSpec:
    experts = Experts(
        count=config.integer("num_experts", "num_local_experts"),
        per_token=config.integer("num_experts_per_tok"),
        intermediate_size=config.integer("moe_intermediate_size"),
        normalized=config.flag("norm_topk_prob"),
        shared_intermediate_size=config.integer("shared_expert_intermediate_size", least=0),
        shared_gate=True,
    )
    dense = dense_layers(config)
    bias = config.flag("qkv_bias", default=True)
    return decoder(config, qkv_bias=bias, experts=experts, dense_layers=dense, **alternating_windows(config))


def alternating_windows(config: HFConfig) -> dict[str, Any]:
    """The window of every other layer below max_window_layers, if use_sliding_window says so."""
    fields, end = window_fields(config, window=4096), config.integer("max_window_layers", default=28, least=0)
    if not config.flag("use_sliding_window"):
        return {}
    if fields and config.get("layer_types") is None:
        layers = tuple(range(0, min(end, config.num_layers), 2))
        return {**fields, "sliding_layers": layers} if layers else {}
    return fields


def dense_layers(config: HFConfig) -> tuple[int, ...]:
    """Layers with an ordinary feed-forward layer."""
    step, listed = config.integer("decoder_sparse_step", default=1), config.numbers("mlp_only_layers")
    return tuple(i for i in range(config.num_layers) if i in listed or (i + 1) % step)


ARCHITECTURE = Architecture("qwen2_moe", "Qwen 1.5 and 2 MoE", describe)

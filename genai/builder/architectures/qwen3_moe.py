"""Qwen 3 with experts."""

from __future__ import annotations

from typing import Any

from ..architecture import Architecture
from ..hf_config import HFConfig
from ..spec import DecoderSpec, Experts
from .common import decoder, window_fields
from .qwen2_moe import dense_layers


def describe(config: HFConfig) -> DecoderSpec:
    experts = Experts(
        count=config.integer("num_experts", "num_local_experts"),
        per_token=config.integer("num_experts_per_tok"),
        intermediate_size=config.integer("moe_intermediate_size"),
        normalized=config.flag("norm_topk_prob"),
    )
    bias = config.flag("attention_bias")
    fields: dict[str, Any] = {
        "qkv_bias": bias,
        "o_bias": bias,
        "experts": experts,
        "dense_layers": dense_layers(config),
    }
    windows = window_fields(config, window=4096)
    return decoder(config, qk_norm=True, **fields, **(windows if config.flag("use_sliding_window") else {}))


ARCHITECTURE = Architecture("qwen3_moe", "Qwen 3 MoE", describe)

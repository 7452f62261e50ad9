"""Qwen 1.5 and 2 with experts: one more expert, behind a gate, sees every token."""

from __future__ import annotations

from ..architecture import Architecture
from ..hf_config import HFConfig
from ..spec import DecoderSpec, Experts
from .common import decoder
from .qwen2 import windows


def describe(config: HFConfig) -> DecoderSpec:
    experts = Experts(
        count=config.integer("num_experts", "num_local_experts"),
        per_token=config.integer("num_experts_per_tok"),
        intermediate_size=config.integer("moe_intermediate_size"),
        normalized=config.flag("norm_topk_prob"),
        shared_intermediate_size=config.integer("shared_expert_intermediate_size"),
        shared_gate=True,
    )
    dense = dense_layers(config)
    bias = config.flag("qkv_bias", default=True)
    return decoder(config, qkv_bias=bias, experts=experts, dense_layers=dense, **windows(config))


def dense_layers(config: HFConfig) -> tuple[int, ...]:
    """Layers with an ordinary feed-forward layer."""
    step, listed = config.integer("decoder_sparse_step", default=1), config.get("mlp_only_layers") or []
    return tuple(i for i in range(config.integer("num_hidden_layers")) if i in listed or (i + 1) % step)


ARCHITECTURE = Architecture("qwen2_moe", "Qwen 1.5 and 2 MoE", describe)

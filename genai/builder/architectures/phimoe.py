"""Phi 3.5 MoE: layer norms, and two experts per token, weighed by SparseMixer."""

from __future__ import annotations

from typing import Any

from ..architecture import Architecture
from ..hf_config import HFConfig
from ..spec import DecoderSpec, Experts
from .common import decoder, layer_norms, window_fields
from .cuts import MIXTRAL_EXPERTS


def describe(config: HFConfig) -> DecoderSpec:
    experts = Experts(
        count=config.integer("num_local_experts"),
        per_token=config.integer("num_experts_per_tok"),
        intermediate_size=config.integer("intermediate_size"),
        routing="sparse_mixer",
        sparse_mixer_jitter=config.number("router_jitter_noise", default=0.01),
    )
    bias = config.flag("attention_bias")
    fields: dict[str, Any] = {
        "qkv_bias": bias,
        "o_bias": bias,
        "head_bias": config.flag("lm_head_bias"),
        "experts": experts,
    }
    return decoder(config, family="phimoe", theta=1e6, epsilon=1e-5, **fields, **layer_norms(), **window_fields(config))


RULES = MIXTRAL_EXPERTS

ARCHITECTURE = Architecture("phimoe", "Phi 3.5 MoE", describe, RULES)

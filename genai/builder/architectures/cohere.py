"""Command R: attention and feed-forward layer side by side, neighbours rotated together, scaled logits."""

from __future__ import annotations

from typing import Any

from ..architecture import Architecture, Rule
from ..hf_config import HFConfig
from ..spec import DecoderSpec
from .common import biases, decoder, layer_norms
from .cuts import flat


def describe(config: HFConfig) -> DecoderSpec:
    return decoder(
        config,
        **cohere_fields(config),
        theta=500000.0,
        qk_norm=config.flag("use_qk_norm"),
        qk_norm_scope="heads",
        **biases(config.flag("attention_bias"), False),
    )


def cohere_fields(config: HFConfig) -> dict[str, Any]:
    """What both generations share."""
    return {
        "tied": True,
        "epsilon": 1e-5,
        "parallel": True,
        "shared_norm": True,
        "rope_interleaved": True,
        "logit_scale": config.number("logit_scale", default=0.0625),
        **layer_norms(biased=False),
    }


RULES = (
    Rule(r"self_attn\.q_norm", "self_attn.q_norm", flat),
    Rule(r"self_attn\.k_norm", "self_attn.k_norm", flat),
)

ARCHITECTURE = Architecture("cohere", "Command R", describe, RULES)

"""Granite 3: Llama with multipliers."""

from __future__ import annotations

from typing import Any

from ..architecture import Architecture
from ..hf_config import HFConfig
from ..spec import DecoderSpec
from .common import biases, decoder


def describe(config: HFConfig) -> DecoderSpec:
    return decoder(
        config,
        family="granite",
        **multipliers(config),
        **biases(config.flag("attention_bias"), config.flag("mlp_bias")),
    )


def multipliers(config: HFConfig) -> dict[str, Any]:
    """Of embeddings, scores, what each part adds, and logits."""
    return {
        "embedding_scale": config.number("embedding_multiplier", default=1.0),
        "attention_scale": config.number("attention_multiplier", default=1.0),
        "residual_scale": config.number("residual_multiplier", default=1.0),
        "logit_scale": 1 / config.number("logits_scaling", default=1.0, positive=True),
    }


ARCHITECTURE = Architecture("granite", "Granite 3", describe)

"""Gemma 1: scaled embeddings, norm weights around 0, one matrix for embeddings and head."""

from __future__ import annotations

from typing import Any

from ..architecture import Architecture
from ..hf_config import HFConfig
from ..spec import DecoderSpec
from .common import activation, biases, decoder


def describe(config: HFConfig) -> DecoderSpec:
    return decoder(config, **gemma_fields(config), **biases(config.flag("attention_bias"), False))


def gemma_fields(config: HFConfig, family: str = "gemma") -> dict[str, Any]:
    """What all Gemmas share. The first checkpoints say gelu and mean its approximation by tanh."""
    named = config.text("hidden_activation", "hidden_act", default="gelu")
    return {
        "family": family,
        "tied": True,
        "head_size": 256,
        "hidden_activation": activation("gelu_pytorch_tanh" if named == "gelu" else named),
        "norm_weight_offset": 1.0,
        "embedding_scale": config.integer("hidden_size") ** 0.5,
    }


ARCHITECTURE = Architecture("gemma", "Gemma 1", describe)

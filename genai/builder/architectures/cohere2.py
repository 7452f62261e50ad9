"""Command R7B and A: three layers with a window and rotation to one that sees everything and rotates nothing."""

from __future__ import annotations

from ..architecture import Architecture
from ..hf_config import HFConfig
from ..spec import DecoderSpec
from .cohere import cohere_fields
from .common import biases, decoder, sliding_layers, window_fields


def describe(config: HFConfig) -> DecoderSpec:
    return decoder(
        config,
        **cohere_fields(config),
        rope_layers=sliding_layers(config, pattern=4),
        **biases(config.flag("attention_bias"), False),
        **window_fields(config, pattern=4, window=4096),
    )


ARCHITECTURE = Architecture("cohere2", "Command R7B, A", describe)

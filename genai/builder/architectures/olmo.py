"""OLMo 1: layer norms that learn nothing; queries, keys and values may be clipped."""

from __future__ import annotations

from ..architecture import Architecture
from ..hf_config import HFConfig
from ..spec import DecoderSpec
from .common import biases, decoder, layer_norms


def describe(config: HFConfig) -> DecoderSpec:
    return decoder(
        config,
        family="olmo",
        epsilon=1e-5,
        qkv_clip=config.number("clip_qkv", default=0.0),
        **biases(config.flag("attention_bias"), False),
        **layer_norms(biased=False, norm_weights=False),
    )


ARCHITECTURE = Architecture("olmo", "OLMo 1", describe)

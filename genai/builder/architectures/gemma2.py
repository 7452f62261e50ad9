"""Gemma 2: norms before and after each part, soft caps, a window in every other layer."""

from __future__ import annotations

from ..architecture import Architecture
from ..hf_config import HFConfig
from ..spec import DecoderSpec
from .common import biases, decoder, window_fields
from .gemma import gemma_fields


def describe(config: HFConfig) -> DecoderSpec:
    return decoder(
        config,
        **gemma_fields(config, "gemma2"),
        **biases(config.flag("attention_bias"), False),
        **window_fields(config, pattern=2, window=4096),
        post_norms=True,
        attention_scale=config.number("query_pre_attn_scalar", default=256, positive=True) ** -0.5,
        attention_softcap=config.optional_number("attn_logit_softcapping", 50.0),
        logit_softcap=config.optional_number("final_logit_softcapping", 30.0),
    )


ARCHITECTURE = Architecture("gemma2", "Gemma 2", describe)

"""Gemma 3, text: five layers with a window and a rotation of their own to one that sees everything."""

from __future__ import annotations

from ..architecture import Architecture
from ..hf_config import HFConfig
from ..hf_rope import rope_values
from ..spec import DecoderSpec
from .common import biases, decoder, window_fields
from .gemma import gemma_fields


def describe(config: HFConfig) -> DecoderSpec:
    local = rope_values(config, "sliding_attention").get("rope_theta")
    return decoder(
        config,
        theta=1e6,
        rope_kind="full_attention",
        **gemma_fields(config, "gemma3_text"),
        **biases(config.flag("attention_bias"), False),
        **window_fields(config, pattern=6, window=4096),
        qk_norm=True,
        post_norms=True,
        local_rope_theta=config.number("rope_local_base_freq", default=local or 10000.0),
        attention_scale=config.number("query_pre_attn_scalar", default=256, positive=True) ** -0.5,
        attention_softcap=config.optional_number("attn_logit_softcapping"),
        logit_softcap=config.optional_number("final_logit_softcapping"),
    )


ARCHITECTURE = Architecture("gemma3_text", "Gemma 3 (text)", describe)

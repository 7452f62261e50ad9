"""OLMo 2: norms behind each part instead of before it, and over all queries and all keys."""

from __future__ import annotations

from ..architecture import Architecture
from ..hf_config import HFConfig
from ..spec import DecoderSpec
from .common import biases, decoder


def describe(config: HFConfig) -> DecoderSpec:
    return decoder(
        config,
        pre_norms=False,
        post_norms=True,
        qk_norm=True,
        qk_norm_scope="all",
        epsilon=1e-5,
        **biases(config.flag("attention_bias"), False),
    )


ARCHITECTURE = Architecture("olmo2", "OLMo 2", describe)

"""Qwen 3: norms over each query and key head."""

from __future__ import annotations

from ..architecture import Architecture
from ..hf_config import HFConfig
from ..spec import DecoderSpec
from .common import decoder
from .qwen2 import windows


def describe(config: HFConfig) -> DecoderSpec:
    bias = config.flag("attention_bias")
    return decoder(config, family="qwen3", qk_norm=True, qkv_bias=bias, o_bias=bias, **windows(config))


ARCHITECTURE = Architecture("qwen3", "Qwen 3", describe)

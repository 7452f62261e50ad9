"""Llama 1 to 3.3 (Meta), and the many models that took over its form."""

from __future__ import annotations

from ..architecture import Architecture
from ..hf_config import HFConfig
from ..spec import DecoderSpec
from .common import biases, decoder


def describe(config: HFConfig) -> DecoderSpec:
    bias = biases(config.flag("attention_bias"), config.flag("mlp_bias"))
    return decoder(config, family="llama", **bias)


ARCHITECTURE = Architecture("llama", "Llama 1-3.3", describe)

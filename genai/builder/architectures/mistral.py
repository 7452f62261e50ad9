"""Mistral 7B and its successors: Llama with a sliding window in every layer, or in none."""

from __future__ import annotations

from ..architecture import Architecture
from ..hf_config import HFConfig
from ..spec import DecoderSpec
from .common import decoder, window_fields


def describe(config: HFConfig) -> DecoderSpec:
    return decoder(config, family="mistral", **window_fields(config, window=4096))


ARCHITECTURE = Architecture("mistral", "Mistral", describe)

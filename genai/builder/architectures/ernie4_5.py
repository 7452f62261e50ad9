"""ERNIE 4.5, dense: Llama with neighbours rotated together."""

from __future__ import annotations

from typing import Any

from ..architecture import Architecture
from ..hf_config import HFConfig
from ..spec import DecoderSpec
from .common import biases, decoder


def describe(config: HFConfig) -> DecoderSpec:
    bias = config.flag("use_bias")
    fields: dict[str, Any] = {
        "theta": 500000.0,
        "epsilon": 1e-5,
        "tied": True,
        "head_size": 128,
        "rope_interleaved": True,
    }
    return decoder(config, family="ernie4_5", **fields, **biases(bias, bias))


ARCHITECTURE = Architecture("ernie4_5", "ERNIE 4.5", describe)

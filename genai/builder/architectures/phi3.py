"""Phi 3, 3.5 and 4: Llama with packed projections, LongRoPE in those with a long context."""

from __future__ import annotations

from ..architecture import Architecture
from ..hf_config import HFConfig
from ..spec import DecoderSpec
from .common import decoder, window_fields
from .cuts import PACKED_GATE_UP, PACKED_QKV


def describe(config: HFConfig) -> DecoderSpec:
    return decoder(config, family="phi3", partial=1.0, epsilon=1e-5, **window_fields(config))


RULES = (*PACKED_QKV, *PACKED_GATE_UP)

ARCHITECTURE = Architecture("phi3", "Phi 3-4", describe, RULES)

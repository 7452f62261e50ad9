"""Mixtral: Mistral with two of several experts per token."""

from __future__ import annotations

from ..architecture import Architecture
from ..hf_config import HFConfig
from ..spec import DecoderSpec, Experts
from .common import decoder, window_fields
from .cuts import MIXTRAL_EXPERTS


def describe(config: HFConfig) -> DecoderSpec:
    experts = Experts(
        count=config.integer("num_local_experts"),
        per_token=config.integer("num_experts_per_tok"),
        intermediate_size=config.integer("intermediate_size"),
    )
    return decoder(config, theta=1e6, epsilon=1e-5, experts=experts, **window_fields(config))


RULES = MIXTRAL_EXPERTS

ARCHITECTURE = Architecture("mixtral", "Mixtral", describe, RULES)

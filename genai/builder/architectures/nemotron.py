"""Nemotron 3 and 4, Minitron: layer norms around 0, squared ReLU, half of each head rotated."""

from __future__ import annotations

from ..architecture import Architecture
from ..hf_config import HFConfig
from ..spec import DecoderSpec
from .common import activation, biases, decoder, layer_norms


def describe(config: HFConfig) -> DecoderSpec:
    return decoder(
        config,
        family="nemotron",
        partial=0.5,
        epsilon=1e-5,
        hidden_activation=activation(config.text("hidden_act", default="relu2")),
        gated_mlp=False,
        **biases(config.flag("attention_bias"), config.flag("mlp_bias")),
        **layer_norms(norm_weight_offset=1.0),
    )


ARCHITECTURE = Architecture("nemotron", "Nemotron, Minitron", describe)

"""StarCoder 2: layer norms, everything biased, a sliding window."""

from __future__ import annotations

from ..architecture import Architecture, Rule
from ..hf_config import HFConfig
from ..spec import DecoderSpec
from .common import activation, biases, decoder, layer_norms, window_fields


def describe(config: HFConfig) -> DecoderSpec:
    bias = config.flag("use_bias", default=True)
    return decoder(
        config,
        tied=True,
        epsilon=1e-5,
        hidden_activation=activation(config.text("hidden_act", default="gelu_pytorch_tanh")),
        gated_mlp=False,
        **biases(bias, bias),
        **layer_norms(),
        **window_fields(config),
    )


RULES = (Rule(r"mlp\.up_proj", "mlp.c_fc"), Rule(r"mlp\.down_proj", "mlp.c_proj"))

ARCHITECTURE = Architecture("starcoder2", "StarCoder 2", describe, RULES)

"""Phi 1, 1.5 and 2: attention and feed-forward layer side by side, behind one layer norm."""

from __future__ import annotations

from ..architecture import Architecture, Rule
from ..hf_config import HFConfig
from ..spec import DecoderSpec
from .common import activation, biases, decoder, layer_norms


def describe(config: HFConfig) -> DecoderSpec:
    qk_norm = config.flag("qk_layernorm")
    return decoder(
        config,
        family="phi",
        partial=0.5,
        epsilon=1e-5,
        hidden_activation=activation(config.text("hidden_act", default="gelu_new")),
        gated_mlp=False,
        parallel=True,
        shared_norm=True,
        head_bias=True,
        qk_norm=qk_norm,
        qk_norm_biases=qk_norm,
        **biases(True, True),
        **layer_norms(),
    )


RULES = (
    Rule(r"self_attn\.o_proj", "self_attn.dense"),
    Rule(r"self_attn\.([qk])_norm", r"self_attn.\1_layernorm"),
    Rule(r"mlp\.up_proj", "mlp.fc1"),
    Rule(r"mlp\.down_proj", "mlp.fc2"),
    Rule(r"^model\.norm", "model.final_layernorm"),
)

ARCHITECTURE = Architecture("phi", "Phi 1-2", describe, RULES)

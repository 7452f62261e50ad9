"""GLM 4 (0414): norms before and after each part, half of each head rotated, neighbours together."""

from __future__ import annotations

from ..architecture import Architecture, Rule
from ..hf_config import HFConfig
from ..spec import DecoderSpec
from .common import decoder
from .cuts import PACKED_GATE_UP


def describe(config: HFConfig) -> DecoderSpec:
    return decoder(
        config,
        partial=0.5,
        epsilon=1.5625e-7,
        head_size=128,
        qkv_bias=config.flag("attention_bias", default=True),
        post_norms=True,
        rope_interleaved=True,
    )


# What we call pre_feedforward_layernorm has the name that ours after attention would have.
RULES = (
    Rule(r"post_attention_layernorm", "post_self_attn_layernorm"),
    Rule(r"pre_feedforward_layernorm", "post_attention_layernorm"),
    Rule(r"post_feedforward_layernorm", "post_mlp_layernorm"),
    *PACKED_GATE_UP,
)

ARCHITECTURE = Architecture("glm4", "GLM 4", describe, RULES)

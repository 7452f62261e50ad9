"""StableLM 3B, 1.6B and 12B: layer norms, a quarter of each head rotated."""

from __future__ import annotations

from ..architecture import Architecture, Rule
from ..hf_config import HFConfig
from ..spec import DecoderSpec
from .common import decoder, layer_norms


def describe(config: HFConfig) -> DecoderSpec:
    parallel = config.flag("use_parallel_residual")
    return decoder(
        config,
        partial=0.25,
        epsilon=1e-5,
        qkv_bias=config.flag("use_qkv_bias"),
        qk_norm=config.flag("qk_layernorm"),
        qk_norm_scope="heads",
        parallel=parallel,
        shared_norm=parallel,
        **layer_norms(),
    )


# A norm of its own for each head.
RULES = (
    Rule(r"self_attn\.q_norm", "self_attn.q_layernorm.norms.{}", stack=lambda spec: spec.num_attention_heads),
    Rule(r"self_attn\.k_norm", "self_attn.k_layernorm.norms.{}", stack=lambda spec: spec.num_key_value_heads),
)

ARCHITECTURE = Architecture("stablelm", "StableLM", describe, RULES)

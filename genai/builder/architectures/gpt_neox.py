"""GPT-NeoX and Pythia: both parts side by side behind norms of their own, a quarter of each head rotated."""

from __future__ import annotations

from ..architecture import Architecture, Rule
from ..hf_config import HFConfig
from ..spec import DecoderSpec
from .common import activation, biases, decoder, layer_norms
from .cuts import group_keys, group_queries, group_values


def describe(config: HFConfig) -> DecoderSpec:
    return decoder(
        config,
        num_key_value_heads=config.integer("num_attention_heads"),
        partial=0.25,
        epsilon=1e-5,
        hidden_activation=activation(config.text("hidden_act", default="gelu")),
        gated_mlp=False,
        parallel=config.flag("use_parallel_residual", default=True),
        **biases(config.flag("attention_bias", default=True), True),
        **layer_norms(),
    )


RULES = (
    Rule(r"^model\.embed_tokens", "gpt_neox.embed_in"),
    Rule(r"^model\.norm", "gpt_neox.final_layer_norm"),
    Rule(r"^model\.layers", "gpt_neox.layers"),
    Rule(r"^lm_head", "embed_out"),
    Rule(r"self_attn\.q_proj", "attention.query_key_value", group_queries),
    Rule(r"self_attn\.k_proj", "attention.query_key_value", group_keys),
    Rule(r"self_attn\.v_proj", "attention.query_key_value", group_values),
    Rule(r"self_attn\.o_proj", "attention.dense"),
    Rule(r"mlp\.up_proj", "mlp.dense_h_to_4h"),
    Rule(r"mlp\.down_proj", "mlp.dense_4h_to_h"),
)

ARCHITECTURE = Architecture("gpt_neox", "GPT-NeoX, Pythia", describe, RULES)

"""Falcon 7B, 40B and 180B: both parts side by side, packed projections; those with ALiBi are refused."""

from __future__ import annotations

from ...errors import UnsupportedModelError
from ..architecture import Architecture, Rule
from ..hf_config import HFConfig
from ..spec import DecoderSpec
from .common import activation, biases, decoder, layer_norms
from .cuts import group_keys, group_queries, group_values


def describe(config: HFConfig) -> DecoderSpec:
    if config.flag("alibi"):
        raise UnsupportedModelError(
            "Falcon with ALiBi (alibi is true)",
            "attention with a bias per distance is not known here",
            "use a Falcon with rotary embeddings, such as 7B or 40B",
        )
    heads, hidden = config.integer("num_attention_heads", "n_head"), config.integer("hidden_size")
    new = config.flag("new_decoder_architecture")
    parallel = config.flag("parallel_attn", default=True) or new
    one_head = config.flag("multi_query", default=True) and not new
    bias = config.flag("bias")
    listed = config.integer("num_kv_heads", "n_head_kv", default=heads)
    kv_heads = listed if new else heads
    return decoder(
        config,
        tied=True,
        epsilon=1e-5,
        intermediate_size=config.integer("ffn_hidden_size", default=4 * hidden),
        num_key_value_heads=1 if one_head else kv_heads,
        hidden_activation=activation(config.text("activation", default="gelu")),
        gated_mlp=False,
        parallel=parallel,
        shared_norm=parallel and not two_norms(config),
        **biases(bias, bias),
        **layer_norms(),
    )


def two_norms(config: HFConfig) -> bool:
    """Whether attention and feed-forward layer have norms of their own."""
    count = config.integer("num_ln_in_parallel_attn", default=2)
    return config.flag("new_decoder_architecture") and count == 2


RULES = (
    Rule(r"input_layernorm", "ln_attn", when=lambda spec: spec.parallel and not spec.shared_norm),
    Rule(r"post_attention_layernorm", "ln_mlp", when=lambda spec: spec.parallel and not spec.shared_norm),
    Rule(r"^model\.embed_tokens", "transformer.word_embeddings"),
    Rule(r"^model\.norm", "transformer.ln_f"),
    Rule(r"^model\.layers", "transformer.h"),
    Rule(r"self_attn\.q_proj", "self_attention.query_key_value", group_queries),
    Rule(r"self_attn\.k_proj", "self_attention.query_key_value", group_keys),
    Rule(r"self_attn\.v_proj", "self_attention.query_key_value", group_values),
    Rule(r"self_attn\.o_proj", "self_attention.dense"),
    Rule(r"mlp\.up_proj", "mlp.dense_h_to_4h"),
    Rule(r"mlp\.down_proj", "mlp.dense_4h_to_h"),
)

ARCHITECTURE = Architecture("falcon", "Falcon", describe, RULES)

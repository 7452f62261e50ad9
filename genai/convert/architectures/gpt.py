"""GPT-2, Phi and similar models: most have layer norms and an activation without a gate."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from ...errors import UnsupportedModelError
from ..hf_config import HFConfig
from ..spec import DecoderSpec
from . import common
from .common import Rule, TensorView, architecture, decoder


def _part(index: int) -> TensorView:
    """Return a view of queries, keys or values in a matrix [inputs, 3 * outputs] or in a bias."""

    def view(spec: DecoderSpec, tensor: NDArray[Any], *numbers: int) -> NDArray[Any]:
        size = spec.query_size
        return tensor.T[index * size : (index + 1) * size]

    return view


@architecture(
    "GPT-2",
    Rule(r"^model\.embed_tokens", "transformer.wte"),
    Rule(r"^model\.embed_positions", "transformer.wpe"),
    Rule(r"^model\.norm", "transformer.ln_f"),
    Rule(r"^model\.layers", "transformer.h"),
    Rule(r"input_layernorm", "ln_1"),
    Rule(r"post_attention_layernorm", "ln_2"),
    *(Rule(rf"self_attn\.{name}_proj", "attn.c_attn", _part(index)) for index, name in enumerate("qkv")),
    Rule(r"self_attn\.o_proj", "attn.c_proj", common.transposed),
    Rule(r"mlp\.up_proj", "mlp.c_fc", common.transposed),
    Rule(r"mlp\.down_proj", "mlp.c_proj", common.transposed),
)
def gpt2(config: HFConfig) -> DecoderSpec:
    """GPT-2: learned positions, biases everywhere, matrices stored as [inputs, outputs]."""
    if config.flag("scale_attn_by_inverse_layer_idx") or not config.flag("scale_attn_weights", default=True):
        raise UnsupportedModelError(
            "config.json sets scale_attn_by_inverse_layer_idx to true or scale_attn_weights to false",
            "attention scores can only be scaled by 1 / sqrt(head size)",
            "use another checkpoint",
        )
    hidden = config.integer("n_embd", "hidden_size")
    return decoder(
        config,
        num_key_value_heads=config.integer("n_head", "num_attention_heads"),
        tied=True,
        intermediate_size=config.integer("n_inner", default=4 * hidden),
        position_embeddings=True,
        **common.biases(True, True),
        **common.gpt_fields(config, "activation_function", default="gelu_new"),
    )


def _packed_by_group(attention: str) -> tuple[Rule, ...]:
    """Return rules for projections that are named and packed as in GPT-NeoX and Falcon."""
    return (
        Rule(r"self_attn\.q_proj", f"{attention}.query_key_value", common.of_group(slice(-2))),
        Rule(r"self_attn\.k_proj", f"{attention}.query_key_value", common.of_group(-2)),
        Rule(r"self_attn\.v_proj", f"{attention}.query_key_value", common.of_group(-1)),
        Rule(r"self_attn\.o_proj", f"{attention}.dense"),
        Rule(r"mlp\.up_proj", "mlp.dense_h_to_4h"),
        Rule(r"mlp\.down_proj", "mlp.dense_4h_to_h"),
    )


@architecture(
    "GPT-NeoX, Pythia",
    Rule(r"^model\.embed_tokens", "gpt_neox.embed_in"),
    Rule(r"^model\.norm", "gpt_neox.final_layer_norm"),
    Rule(r"^model\.layers", "gpt_neox.layers"),
    Rule(r"^lm_head", "embed_out"),
    *_packed_by_group("attention"),
)
def gpt_neox(config: HFConfig) -> DecoderSpec:
    """GPT-NeoX: parallel parts with separate norms; a quarter of each head is rotated."""
    return decoder(
        config,
        num_key_value_heads=config.integer("num_attention_heads"),
        partial=0.25,
        parallel=config.flag("use_parallel_residual", default=True),
        **common.biases(config.flag("attention_bias", default=True), True),
        **common.gpt_fields(config, "hidden_act", default="gelu"),
    )


def _norms_apart(spec: DecoderSpec) -> bool:
    return spec.parallel and not spec.shared_norm


@architecture(
    "Falcon",
    Rule(r"input_layernorm", "ln_attn", when=_norms_apart),
    Rule(r"post_attention_layernorm", "ln_mlp", when=_norms_apart),
    Rule(r"^model\.embed_tokens", "transformer.word_embeddings"),
    Rule(r"^model\.norm", "transformer.ln_f"),
    Rule(r"^model\.layers", "transformer.h"),
    *_packed_by_group("self_attention"),
)
def falcon(config: HFConfig) -> DecoderSpec:
    """Falcon 7B, 40B and 180B: parallel parts, packed projections; models with ALiBi are rejected."""
    common.refuse_flags(
        config,
        "alibi",
        why="ALiBi, an attention bias that depends on the distance between tokens, is not supported",
        fix="use a Falcon model with rotary embeddings, such as Falcon 7B or 40B",
    )
    heads, hidden = config.integer("num_attention_heads", "n_head"), config.integer("hidden_size")
    new = config.flag("new_decoder_architecture")
    parallel = config.flag("parallel_attn", default=True) or new
    one_head = config.flag("multi_query", default=True) and not new
    bias = config.flag("bias")
    kv_heads = config.integer("num_kv_heads", "n_head_kv", default=heads)
    return decoder(
        config,
        tied=True,
        intermediate_size=config.integer("ffn_hidden_size", default=4 * hidden),
        num_key_value_heads=1 if one_head else kv_heads if new else heads,
        parallel=parallel,
        shared_norm=parallel and not (config.integer("num_ln_in_parallel_attn", default=2) == 2 and new),
        **common.biases(bias, bias),
        **common.gpt_fields(config, "activation", default="gelu"),
    )


@architecture("Nemotron, Minitron")
def nemotron(config: HFConfig) -> DecoderSpec:
    """Nemotron 3 and 4, Minitron: layer norms with weights around 0, squared ReLU; half of each head is rotated."""
    return decoder(
        config,
        family="nemotron",
        partial=0.5,
        **common.given_biases(config),
        **common.gpt_fields(config, "hidden_act", default="relu2", norm_weight_offset=1.0),
    )


@architecture(
    "StableLM",
    # Each head has a separate norm.
    Rule(r"self_attn\.q_norm", "self_attn.q_layernorm.norms.{}", stack=lambda spec: spec.num_attention_heads),
    Rule(r"self_attn\.k_norm", "self_attn.k_layernorm.norms.{}", stack=lambda spec: spec.num_key_value_heads),
)
def stablelm(config: HFConfig) -> DecoderSpec:
    """StableLM 3B, 1.6B and 12B: a gated feed-forward layer; a quarter of each head is rotated."""
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
        **common.layer_norms(),
    )


@architecture("StarCoder 2", Rule(r"mlp\.up_proj", "mlp.c_fc"), Rule(r"mlp\.down_proj", "mlp.c_proj"))
def starcoder2(config: HFConfig) -> DecoderSpec:
    """StarCoder 2: biases everywhere, a sliding window."""
    bias = config.flag("use_bias", default=True)
    return decoder(
        config,
        tied=True,
        **common.biases(bias, bias),
        **common.gpt_fields(config, "hidden_act", default="gelu_pytorch_tanh"),
        **common.window_fields(config),
    )


@architecture(
    "Phi 1-2",
    Rule(r"self_attn\.o_proj", "self_attn.dense"),
    Rule(r"self_attn\.([qk])_norm", r"self_attn.\1_layernorm"),
    Rule(r"mlp\.up_proj", "mlp.fc1"),
    Rule(r"mlp\.down_proj", "mlp.fc2"),
    Rule(r"^model\.norm", "model.final_layernorm"),
)
def phi(config: HFConfig) -> DecoderSpec:
    """Phi 1, 1.5 and 2: attention and a feed-forward layer in parallel after one shared layer norm."""
    qk_norm = config.flag("qk_layernorm")
    return decoder(
        config,
        family="phi",
        partial=0.5,
        parallel=True,
        shared_norm=True,
        head_bias=True,
        qk_norm=qk_norm,
        qk_norm_biases=qk_norm,
        **common.biases(True, True),
        **common.gpt_fields(config, "hidden_act", default="gelu_new"),
    )


@architecture("Phi 3-4", *common.PACKED_QKV, *common.PACKED_GATE_UP)
def phi3(config: HFConfig) -> DecoderSpec:
    """Phi 3, 3.5 and 4: Llama with packed projections, and with LongRoPE in models with a long context."""
    return decoder(config, family="phi3", partial=1.0, epsilon=1e-5, **common.window_fields(config))


@architecture("Phi 3.5 MoE", *common.MIXTRAL_EXPERTS)
def phimoe(config: HFConfig) -> DecoderSpec:
    """Phi 3.5 MoE: layer norms, and two experts per token with SparseMixer weights."""
    jitter = config.number("router_jitter_noise", default=0.01)
    bias = config.flag("attention_bias")
    return decoder(
        config,
        family="phimoe",
        theta=1e6,
        epsilon=1e-5,
        qkv_bias=bias,
        o_bias=bias,
        head_bias=config.flag("lm_head_bias"),
        experts=common.mixtral_experts(config, routing="sparse_mixer", sparse_mixer_jitter=jitter),
        **common.layer_norms(),
        **common.window_fields(config),
    )

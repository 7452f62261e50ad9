"""Tiny configurations, one or more per architecture and RoPE scaling, as arguments of transformers' classes.

Sizes are deliberately unusual, and there are enough layers to include every kind of layer.
"""

from __future__ import annotations

from typing import Any

VOCAB = 101

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 54,
    "intermediate_size": 75,
    "num_hidden_layers": 7,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# 6 heads of 14 elements, 84 in all, with a hidden size of 54.
HEADS: dict[str, Any] = {**SMALL, "head_dim": 14}
# For classes that derive the head size from the hidden size: 6 heads of 10 elements.
DERIVED: dict[str, Any] = {**SMALL, "hidden_size": 60}
GRANITE = {"embedding_multiplier": 3.0, "residual_multiplier": 0.6, "attention_multiplier": 0.2, "logits_scaling": 1.7}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 37}


_ROUTED = {
    **EXPERTS, "n_routed_experts": 5, "n_shared_experts": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 1.7,
}  # fmt: skip


# Five heads; latent rows have 22 + 10 elements, and query heads 14 + 10.
_LATENT: dict[str, Any] = {
    **SMALL, "hidden_size": 50, "num_attention_heads": 5, "num_key_value_heads": 5, "kv_lora_rank": 22,
    "q_lora_rank": 27, "qk_rope_head_dim": 10, "qk_nope_head_dim": 14, "v_head_dim": 12,
}  # fmt: skip
_GROUPED = {**_ROUTED, "n_routed_experts": 9, "n_group": 3, "topk_group": 2}


def _rope(rope_type: str, theta: float = 10000.0, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": theta, **more}}


_LONG = {
    "original_max_position_embeddings": 24,
    "short_factor": [1.0 + 0.1 * i for i in range(5)],
    "long_factor": [1.5 + 0.7 * i for i in range(5)],
}

_PICTURES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
_QWEN_PICTURES: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 60,
}
TEN = {**DERIVED, "head_dim": 20}
_DELTA_NET: dict[str, Any] = {
    **SMALL, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 10,
    "linear_value_head_dim": 18, "linear_conv_kernel_dim": 4,
    **_rope("default", 1e6, partial_rotary_factor=0.25, mrope_section=[1, 1, 0]),
}  # fmt: skip
_DELTA_EXPERTS = {**_DELTA_NET, **EXPERTS, "num_experts": 5, "shared_expert_intermediate_size": 41}
# A prompt has several chunks, and queries of several steps.
_LLAMA4: dict[str, Any] = {
    "intermediate_size_mlp": 83, "attention_chunk_size": 12, "floor_scale": 9, "attn_scale": 0.3,
}  # fmt: skip
_MAMBA: dict[str, Any] = {
    **DERIVED, "mamba_n_heads": 6, "mamba_d_head": 20, "mamba_expand": 2, "mamba_d_state": 18, "mamba_n_groups": 3,
}  # fmt: skip
_LFM = {**DERIVED, "layer_types": [*["conv", "conv", "full_attention"] * 2, "conv"], "conv_L_cache": 3}


_GEMMA4: dict[str, Any] = {
    **HEADS, "num_hidden_layers": 8, "sliding_window": 9, "global_head_dim": 10, "hidden_size_per_layer_input": 0,
    "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2 + ["sliding_attention", "full_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 50000.0},
    },
}  # fmt: skip


_GEMMA3N: dict[str, Any] = {
    **HEADS, "num_hidden_layers": 8, "intermediate_size": [75] * 5 + [60] * 3, "sliding_window": 9,
    "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2 + ["sliding_attention", "full_attention"],
    "num_kv_shared_layers": 3, "hidden_size_per_layer_input": 10, "vocab_size_per_layer_input": 67,
    "altup_num_inputs": 3, "laurel_rank": 11, "activation_sparsity_pattern": [0.8] * 3 + [0.0] * 5,
    "final_logit_softcapping": 3.0,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
        "full_attention": {"rope_type": "default", "rope_theta": 50000.0},
    },
}  # fmt: skip


def _nested(text: dict[str, Any], kind: str = "", pictures: dict[str, Any] = _PICTURES, **more: Any) -> dict[str, Any]:
    named = {"model_type": kind} if kind else {}
    return {"text_config": text, "vision_config": {**named, **pictures}, **more}


# name -> (model_type, arguments)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {**HEADS, "attention_bias": True, "mlp_bias": True}),
    "llama_tied": ("llama", {**DERIVED, "tie_word_embeddings": True}),
    "llama_linear": ("llama", {**HEADS, **_rope("linear", factor=3.0)}),
    "llama_dynamic": ("llama", {**HEADS, "max_position_embeddings": 24, **_rope("dynamic", factor=4.0)}),
    "llama_llama3": (
        "llama",
        {
            **HEADS,
            **_rope(
                "llama3",
                500.0,
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=32,
            ),
        },
    ),
    "llama_yarn": ("llama", {**HEADS, **_rope("yarn", factor=4.0, original_max_position_embeddings=32)}),
    "mistral": ("mistral", {**HEADS, "sliding_window": 9}),
    "gpt_oss": (
        "gpt_oss",
        {
            **HEADS,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": 9,
            "swiglu_limit": 0.5,
            **_rope("yarn", factor=4.0, original_max_position_embeddings=32, truncate=False),
        },
    ),
    "mixtral": ("mixtral", {**HEADS, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen2": ("qwen2", {**DERIVED, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 4}),
    "qwen3": ("qwen3", HEADS),
    "qwen2_moe": (
        "qwen2_moe",
        {
            **DERIVED,
            **EXPERTS,
            "num_experts": 5,
            "shared_expert_intermediate_size": 41,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
        },
    ),
    "qwen2_moe_windows": (
        "qwen2_moe",
        {
            **DERIVED,
            **EXPERTS,
            "num_experts": 5,
            "shared_expert_intermediate_size": 41,
            "norm_topk_prob": True,
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 5,
        },
    ),
    "qwen3_moe": ("qwen3_moe", {**HEADS, **EXPERTS, "num_experts": 6, "norm_topk_prob": True, "mlp_only_layers": [2]}),
    "phi": ("phi", {**DERIVED, "num_attention_heads": 3, "num_key_value_heads": 3, "partial_rotary_factor": 0.5}),
    "phi_qk_norm": ("phi", {**DERIVED, "qk_layernorm": True, "partial_rotary_factor": 0.4}),
    "phi3": ("phi3", {**DERIVED, "sliding_window": 11}),
    "phi3_longrope": ("phi3", {**DERIVED, "original_max_position_embeddings": 24, **_rope("longrope", **_LONG)}),
    "phi3_partial": (
        "phi3",
        {
            **DERIVED,
            "tie_word_embeddings": True,
            "original_max_position_embeddings": 24,
            "partial_rotary_factor": 0.6,
            **_rope("longrope", **{**_LONG, "short_factor": [1.0, 1.1, 1.3], "long_factor": [1.5, 2.0, 4.0]}),
        },
    ),
    "phimoe": (
        "phimoe",
        {
            **DERIVED,
            "num_local_experts": 5,
            "attention_bias": True,
            "lm_head_bias": True,
            "sliding_window": None,
            # More than the number of tokens: transformers 5.23 uses the short factors for every length.
            "original_max_position_embeddings": 96,
            **_rope("longrope", **{**_LONG, "original_max_position_embeddings": 96}, short_mscale=1.2, long_mscale=1.3),
        },
    ),
    "gemma": ("gemma", HEADS),
    "gemma2": (
        "gemma2",
        {
            **HEADS,
            "sliding_window": 9,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3_text": (
        "gemma3_text",
        {
            **HEADS,
            "num_hidden_layers": 8,
            "sliding_window": 9,
            "query_pre_attn_scalar": 20,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            },
        },
    ),
    "gemma4_text": ("gemma4_text", {**_GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    "gemma4": (
        "gemma4",
        _nested(
            {
                **_GEMMA4,
                "num_kv_shared_layers": 3,
                "use_double_wide_mlp": True,
                "hidden_size_per_layer_input": 10,
                "vocab_size_per_layer_input": VOCAB,
                "final_logit_softcapping": 3.0,
            },
            pictures={**_PICTURES, "num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 4},
        ),
    ),
    "gemma4_moe": (
        "gemma4_text",
        {**_GEMMA4, "enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 37},
    ),
    "gemma4_unified": (
        "gemma4_unified",
        _nested(_GEMMA4, pictures={"patch_size": 4, "mm_embed_dim": 16, "mm_posemb_size": 4, "output_proj_dims": 54}),
    ),
    "gemma3n": ("gemma3n", {"text_config": {**_GEMMA3N, "model_type": "gemma3n_text"}}),
    "gemma3n_text": ("gemma3n_text", {**_GEMMA3N, "altup_active_idx": 1, "altup_correct_scale": False}),
    "smollm3": ("smollm3", {**DERIVED, "no_rope_layer_interval": 3}),
    "smollm3_windows": ("smollm3", {**DERIVED, "use_sliding_window": True, "sliding_window": 9}),
    "olmo": ("olmo", {**DERIVED, "clip_qkv": 1.1}),
    "olmo2": ("olmo2", DERIVED),
    "olmo3": (
        "olmo3",
        {
            **DERIVED,
            "sliding_window": 9,
            "rope_parameters": {
                "full_attention": _rope("yarn", factor=4.0, original_max_position_embeddings=32)["rope_parameters"],
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "seed_oss": ("seed_oss", {**HEADS, "attention_out_bias": True}),
    "arcee": ("arcee", {**DERIVED, "mlp_bias": True}),
    "granite": ("granite", {**DERIVED, **GRANITE}),
    "granitemoe": ("granitemoe", {**DERIVED, **GRANITE, "num_local_experts": 5, "num_experts_per_tok": 3}),
    "cohere": ("cohere", {**DERIVED, "use_qk_norm": True, "logit_scale": 0.3}),
    "cohere2": ("cohere2", {**DERIVED, "sliding_window": 9, "logit_scale": 0.3}),
    "stablelm": ("stablelm", {**DERIVED, "use_qkv_bias": True, "partial_rotary_factor": 0.4}),
    "stablelm_parallel": (
        "stablelm",
        {**DERIVED, "use_parallel_residual": True, "qk_layernorm": True, "partial_rotary_factor": 0.4},
    ),
    "falcon": ("falcon", {**DERIVED, "multi_query": True, "parallel_attn": True}),
    "falcon_grouped": ("falcon", {**DERIVED, "new_decoder_architecture": True, "num_kv_heads": 3, "bias": True}),
    "falcon_one_norm": (
        "falcon",
        {**DERIVED, "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "falcon_sequential": ("falcon", {**DERIVED, "multi_query": False, "parallel_attn": False, "bias": True}),
    "gpt2": (
        "gpt2",
        {
            "vocab_size": VOCAB,
            "n_embd": 60,
            "n_layer": 7,
            "n_head": 6,
            "n_positions": 128,
            "n_inner": 75,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "gpt_neox": ("gpt_neox", {**DERIVED, "rotary_pct": 0.4}),
    "gpt_neox_sequential": ("gpt_neox", {**DERIVED, "use_parallel_residual": False, "rotary_pct": 0.4}),
    "starcoder2": ("starcoder2", {**DERIVED, "sliding_window": 9}),
    "nemotron": ("nemotron", {**DERIVED, "partial_rotary_factor": 0.4}),
    "ernie4_5": ("ernie4_5", {**HEADS, "use_bias": True}),
    "glm4": ("glm4", {**HEADS, "head_dim": 20, "partial_rotary_factor": 0.5, "attention_bias": True}),
    "ministral": (
        "ministral",
        {
            **HEADS,
            "sliding_window": 9,
            "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2 + ["full_attention"],
        },
    ),
    "ministral3": (
        "ministral3",
        {**TEN, **_rope("yarn", 1e6, factor=4.0, original_max_position_embeddings=16, llama_4_scaling_beta=0.4)},
    ),
    "gemma3": (
        "gemma3",
        _nested(
            {**HEADS, "sliding_window": 9, "query_pre_attn_scalar": 20}, "siglip_vision_model", mm_tokens_per_image=4
        ),
    ),
    "mistral3": ("mistral3", _nested({"model_type": "mistral", **TEN, "sliding_window": 9}, "pixtral")),
    "mistral3_ministral3": (
        "mistral3",
        _nested(
            {
                "model_type": "ministral3",
                **TEN,
                **_rope(
                    "yarn",
                    1e6,
                    factor=8.0,
                    original_max_position_embeddings=16,
                    mscale=1.0,
                    mscale_all_dim=1.0,
                    llama_4_scaling_beta=0.1,
                ),
            },
            "pixtral",
        ),
    ),
    "qwen2_vl": (
        "qwen2_vl",
        _nested(
            {**DERIVED, **_rope("default", mrope_section=[1, 2, 2])},
            pictures={"depth": 1, "embed_dim": 16, "num_heads": 2, "patch_size": 4, "hidden_size": 60, "mlp_ratio": 1},
        ),
    ),
    "qwen2_5_vl": (
        "qwen2_5_vl",
        _nested(
            {**DERIVED, **_rope("default", 1e6, mrope_section=[2, 1, 2])},
            pictures={**_QWEN_PICTURES, "fullatt_block_indexes": [0]},
        ),
    ),
    "qwen3_vl": (
        "qwen3_vl",
        _nested(
            {**TEN, **_rope("default", 5e6, mrope_section=[4, 3, 3])},
            pictures={**_QWEN_PICTURES, "deepstack_visual_indexes": [0]},
        ),
    ),
    "qwen3_vl_moe": (
        "qwen3_vl_moe",
        _nested(
            {**TEN, **EXPERTS, "num_experts": 5, **_rope("default", 5e6, mrope_section=[4, 3, 3])},
            pictures={**_QWEN_PICTURES, "deepstack_visual_indexes": [0]},
        ),
    ),
    "llava": ("llava", _nested({"model_type": "llama", **TEN}, "clip_vision_model")),
    "llava_next": (
        "llava_next",
        _nested({"model_type": "mistral", **TEN, "sliding_window": None}, "clip_vision_model"),
    ),
    "llava_onevision": ("llava_onevision", _nested({"model_type": "qwen2", **DERIVED}, "siglip_vision_model")),
    "internvl": (
        "internvl",
        _nested(
            {"model_type": "qwen2", **DERIVED},
            "internvl_vision",
            {**_PICTURES, "image_size": [8, 8], "patch_size": [4, 4]},
        ),
    ),
    "aya_vision": (
        "aya_vision",
        _nested({"model_type": "cohere2", **DERIVED, "sliding_window": 9}, "siglip_vision_model"),
    ),
    "idefics3": ("idefics3", _nested({"model_type": "llama", **DERIVED})),
    "smolvlm": (
        "smolvlm",
        _nested({"model_type": "llama", **DERIVED, "tie_word_embeddings": True}, tie_word_embeddings=True),
    ),
    "lfm2": ("lfm2", {**_LFM, "block_auto_adjust_ff_dim": False}),
    "lfm2_biased": (
        "lfm2",
        {
            **_LFM,
            "conv_bias": True,
            "conv_L_cache": 5,
            "block_multiple_of": 7,
            "block_ffn_dim_multiplier": 1.3,
            "tie_word_embeddings": False,
        },
    ),
    "lfm2_moe": ("lfm2_moe", {**_LFM, **EXPERTS, "num_experts": 5, "routed_scaling_factor": 1.7}),
    "lfm2_vl": (
        "lfm2_vl",
        {"text_config": {**_LFM, "model_type": "lfm2", "block_multiple_of": 7}},
    ),
    "glm4_moe": (
        "glm4_moe",
        {
            **HEADS,
            "head_dim": 20,
            **_ROUTED,
            "use_qk_norm": True,
            "attention_bias": True,
            **_rope("default", partial_rotary_factor=0.5),
        },
    ),
    "dots1": ("dots1", {**DERIVED, **_ROUTED, "sliding_window": None}),
    "qwen3_5_text": ("qwen3_5_text", _DELTA_NET),
    "qwen3_5": ("qwen3_5", _nested({**_DELTA_NET, "tie_word_embeddings": True}, pictures=_QWEN_PICTURES)),
    "qwen3_5_moe": ("qwen3_5_moe", _nested(_DELTA_EXPERTS, pictures=_QWEN_PICTURES)),
    "qwen3_next": ("qwen3_next", {**_DELTA_EXPERTS, "decoder_sparse_step": 2, "attention_bias": True}),
    "helium": ("helium", {**DERIVED, "head_dim": 10}),
    "apertus": (
        "apertus",
        {
            **DERIVED,
            **_rope(
                "llama3",
                500.0,
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=32,
            ),
        },
    ),
    "olmoe": ("olmoe", {**DERIVED, "num_experts": 5, "num_experts_per_tok": 2}),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {
            **DERIVED,
            "moe_num_experts": 5,
            "moe_k": 2,
            "moe_intermediate_size": 37,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 5,
            "moe_layer_interval": 2,
            "moe_num_shared_experts": 2,
        },
    ),
    "falcon_h1": (
        "falcon_h1",
        {
            **_MAMBA,
            "mamba_d_ssm": 60,
            "mamba_d_head": 10,
            "key_multiplier": 0.8,
            "attention_in_multiplier": 1.1,
            "attention_out_multiplier": 0.9,
            "mlp_multipliers": [0.7, 1.2],
            "ssm_in_multiplier": 1.3,
            "ssm_out_multiplier": 0.6,
            "ssm_multipliers": [0.9, 0.8, 1.1, 1.2, 0.7],
            "embedding_multiplier": 1.5,
            "lm_head_multiplier": 0.5,
        },
    ),
    "falcon_h1_normed": ("falcon_h1", {**_MAMBA, "mamba_d_ssm": 60, "mamba_d_head": 10, "mamba_rms_norm": True}),
    "nemotron_h": (
        "nemotron_h",
        {
            **HEADS,
            "layers_block_type": ["linear_attention", "mlp", "linear_attention", "full_attention", "mlp"],
            "mamba_num_heads": 6,
            "mamba_head_dim": 10,
            "n_groups": 3,
            "ssm_state_size": 18,
            "use_bias": True,
        },
    ),
    "jamba": (
        "jamba",
        {
            **DERIVED,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "attn_layer_period": 3,
            "attn_layer_offset": 2,
            "expert_layer_period": 3,
            "expert_layer_offset": 1,
            "mamba_d_state": 11,
            "mamba_d_conv": 3,
            "mamba_proj_bias": True,
        },
    ),
    "mamba": (
        "mamba",
        {
            "vocab_size": VOCAB,
            "hidden_size": 36,
            "num_hidden_layers": 3,
            "state_size": 11,
            "use_bias": True,
            "conv_kernel": 3,
        },
    ),
    "mamba2": (
        "mamba2",
        {
            "vocab_size": VOCAB,
            "hidden_size": 36,
            "num_hidden_layers": 3,
            "num_heads": 6,
            "head_dim": 12,
            "n_groups": 3,
            "state_size": 18,
            "use_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "nemotron_h_experts": (
        "nemotron_h",
        {
            **HEADS,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "moe"],
            "mamba_num_heads": 6,
            "mamba_head_dim": 10,
            "n_groups": 3,
            "ssm_state_size": 18,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 34,
            "moe_shared_expert_intermediate_size": 45,
            "moe_latent_size": 28,
            "routed_scaling_factor": 2.5,
            "n_group": 4,
            "topk_group": 2,
        },
    ),
    "llama4_text": (
        "llama4_text",
        {
            **HEADS,
            **_LLAMA4,
            "num_local_experts": 5,
            "interleave_moe_layer_step": 2,
            "attention_bias": True,
            **_rope(
                "llama3",
                5e5,
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=32,
            ),
        },
    ),
    "llama4": (
        "llama4",
        {
            "text_config": {
                **HEADS,
                **_LLAMA4,
                "model_type": "llama4_text",
                "num_hidden_layers": 4,
                "num_local_experts": 3,
                "use_qk_norm": False,
                "no_rope_layers": [1, 0, 1, 0],
                "attention_chunk_size": 17,
            }
        },
    ),
    "glm": ("glm", {**HEADS, "head_dim": 20, "attention_bias": True, **_rope("default", partial_rotary_factor=0.5)}),
    "internlm3": ("internlm3", {**HEADS, "attention_bias": True, "mlp_bias": True}),
    "granitemoeshared": (
        "granitemoeshared",
        {**DERIVED, **GRANITE, "num_local_experts": 5, "num_experts_per_tok": 3, "shared_intermediate_size": 41},
    ),
    "granitemoehybrid": (
        "granitemoehybrid",
        {
            **_MAMBA,
            **GRANITE,
            "layer_types": [*["linear_attention", "linear_attention", "full_attention"] * 2, "linear_attention"],
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "shared_intermediate_size": 41,
            "mamba_proj_bias": True,
        },
    ),
    "granitemoehybrid_dense": (
        "granitemoehybrid",
        {
            **DERIVED,
            **GRANITE,
            "layer_types": ["full_attention"] * 7,
            "num_local_experts": 0,
            "shared_intermediate_size": 41,
            "position_embedding_type": "rope",
            "mamba_n_heads": 6,
        },
    ),
    "bamba": (
        "bamba",
        {**_MAMBA, "hidden_size": 72, "mamba_d_head": 24, "attn_layer_indices": [2, 5], "mamba_n_groups": 1},
    ),
    "deepseek_v2": (
        "deepseek_v2",
        {**_LATENT, **_GROUPED, "q_lora_rank": None, "topk_method": "group_limited_greedy"},
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {
            **_LATENT,
            **_GROUPED,
            "attention_bias": True,
            **_rope("yarn", factor=4.0, original_max_position_embeddings=32, mscale=0.7, mscale_all_dim=0.9),
        },
    ),
    "glm4_moe_lite": ("glm4_moe_lite", {**_LATENT, **_ROUTED, "rope_interleave": False}),
    "kimi_linear": (
        "kimi_linear",
        {
            **_LATENT,
            **_GROUPED,
            "q_lora_rank": None,
            "num_local_experts": 9,
            "linear_num_heads": 3,
            "linear_head_dim": 10,
            "linear_conv_kernel_dim": 3,
            "layer_types": [*["linear_attention", "linear_attention", "full_attention"] * 2, "linear_attention"],
            "pad_token_id": None,
        },
    ),
    # The class sets the embedding of a padding token to 0 when it loads a checkpoint.
    "youtu": ("youtu", {**_LATENT, "pad_token_id": None}),
    "minicpm3": (
        "minicpm3",
        {
            **_LATENT,
            "v_head_dim": None,
            "scale_emb": 3.0,
            "scale_depth": 1.7,
            "dim_model_base": 20,
            "original_max_position_embeddings": 24,
            **_rope("longrope", **_LONG),
        },
    ),
    "exaone4": ("exaone4", {**HEADS, "sliding_window": 9, "sliding_window_pattern": 4}),
    "exaone_moe": (
        "exaone_moe",
        {
            **HEADS,
            **EXPERTS,
            "num_experts": 9,
            "num_shared_experts": 2,
            "n_group": 3,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
            "sliding_window": 9,
            "sliding_window_pattern": 4,
        },
    ),
    "hunyuan_v1_dense": (
        "hunyuan_v1_dense",
        {**HEADS, "attention_bias": True, **_rope("dynamic", alpha=50.0, factor=1.0, mscale=1.0, mscale_all_dim=1.0)},
    ),
}

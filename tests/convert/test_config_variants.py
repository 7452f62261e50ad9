"""config.json as publishers, older libraries and nobody at all would write it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from genai.convert import plan_build
from genai.convert.architectures import MODEL_TYPES, find
from genai.convert.hf_config import HFConfig
from genai.convert.nested import text_part
from genai.convert.rope_scaling import LongRope
from genai.convert.spec import DecoderSpec
from genai.convert.tensors import tensor_shapes
from genai.errors import ConfigError, GenaiError, InputError, UnsupportedModelError

SIZES = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
}
NASTY = [None, 0, -1, 1, 7, 10**12, 10**400, math.nan, math.inf, 0.5, "8", "", True, [], [1], ["x"], {}, {"a": {}}]
ROPE = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "rope_theta": 1e4,
}


def describe(model_type: str, **values: Any) -> DecoderSpec:
    return find(model_type).describe(HFConfig({"model_type": model_type, **SIZES, **values}))


def attempt(config: dict[str, Any]) -> None:
    """A decoder, or an error of ours with three parts; quickly, whatever the numbers."""
    try:
        text = text_part(HFConfig(config))
        spec = find(text.model_type).describe(text)
    except GenaiError as error:
        assert error.why
        assert error.fix
    else:
        assert len(tensor_shapes(spec)) < 1_000_000


@pytest.mark.parametrize("name", sorted(path.stem for path in (Path(__file__).parent / "goldens").iterdir()))
def test_any_value_of_any_key(name: str, golden: Any) -> None:
    config = golden(name).config
    inner = config.get("text_config", {})
    for key in (*config, "mlp_only_layers", "decoder_sparse_step", "sliding_window_pattern", "no_rope_layer_interval"):
        if key != "model_type":
            for value in NASTY:
                attempt({**config, key: value})
    for key in inner:
        for value in NASTY:
            attempt({**config, "text_config": {**inner, key: value}})


@pytest.mark.parametrize("rope_type", ["default", "linear", "dynamic", "llama3", "yarn", "longrope", "su"])
def test_any_value_of_the_rope_scaling(rope_type: str) -> None:
    keys = (*ROPE, "mscale", "mscale_all_dim", "attention_factor", "beta_fast", "truncate", "short_mscale", "type")
    for key in keys:
        for value in NASTY:
            scaling = {**ROPE, "rope_type": rope_type, key: value}
            attempt({"model_type": "llama", **SIZES, "rope_scaling": scaling})
            attempt(
                {"model_type": "gemma3_text", **SIZES, "head_dim": 16, "rope_parameters": {"full_attention": scaling}}
            )


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"hidden_size": 10**12}, "hidden_size is 1000000000000"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps is nan"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"max_position_embeddings": 1 << 30}, "context_length is 1073741824"),
    ],
)
def test_absurd_sizes(changes: dict[str, Any], text: str) -> None:
    with pytest.raises((ConfigError, InputError), match=text):
        describe("llama", **changes)


def test_absurd_numbers_of_experts() -> None:
    with pytest.raises(InputError, match="all layers together have 800000 experts"):
        describe("mixtral", num_local_experts=100_000, num_experts_per_tok=2)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"is_causal": False}, "is_causal"),
        ({"add_cross_attention": True}, "add_cross_attention"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}, "rope_parameters for 'full_attention'"),
    ],
)
def test_what_would_change_the_mathematics_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(UnsupportedModelError, match=text):
        describe("llama", **changes)


def test_defaults_of_each_type() -> None:
    """What transformers takes where config.json is silent (its configuration classes)."""
    assert describe("cohere").rope_theta == 500000.0
    assert describe("cohere2").rope_theta == 10000.0
    gemma = describe("gemma2")
    assert (gemma.attention_softcap, gemma.logit_softcap, gemma.sliding_window) == (50.0, 30.0, 4096)
    assert describe("gemma2", attn_logit_softcapping=None).attention_softcap == 0
    assert describe("glm4").rms_norm_eps == 1.5625e-7
    assert describe("gpt_neox").hidden_activation == "gelu"
    assert (describe("phi").hidden_activation, describe("phi").rms_norm_eps) == ("gelu_tanh", 1e-5)
    assert describe("stablelm").rms_norm_eps == 1e-5
    assert describe("starcoder2").hidden_activation == "gelu_tanh"
    for model_type in ("mistral", "gemma2", "gemma3_text", "cohere2", "exaone4"):
        assert describe(model_type).sliding_window == 4096
        assert describe(model_type, sliding_window=None).sliding_window is None


def test_windows_of_mixtures() -> None:
    window = {"sliding_window": 16, "use_sliding_window": True, "num_experts_per_tok": 2, "num_experts": 4}
    window |= {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    assert describe("qwen2_moe", **window, max_window_layers=5).sliding_layers == (0, 2, 4)
    every = describe("qwen3_moe", **window, max_window_layers=5)
    assert (every.sliding_window, every.sliding_layers) == (16, None)
    assert describe("smollm3", sliding_window=16, use_sliding_window=True).sliding_layers == (3, 7)


def test_rope_scaling_comes_before_rope_parameters() -> None:
    both = {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}}
    assert describe("llama", **both).rope_scaling is not None
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 128}
    phi = describe("phi3", original_max_position_embeddings=64, rope_scaling={"type": "longrope", **factors})
    assert isinstance(phi.rope_scaling, LongRope)
    assert phi.rope_scaling.original_max_position_embeddings == 64


@pytest.mark.parametrize("kind", ["llama3", "yarn", "longrope"])
def test_the_original_length_next_to_the_context_length(kind: str) -> None:
    """transformers 5 reads this number first, and the scaling's own number only if the first is missing."""
    scaling = {**ROPE, "rope_type": kind}
    for inside in ({}, {"original_max_position_embeddings": 128}):
        spec = describe("llama", original_max_position_embeddings=32, rope_scaling={**scaling, **inside})
        assert spec.rope_scaling is not None
        assert getattr(spec.rope_scaling, "original_max_position_embeddings", None) == 32
    del scaling["original_max_position_embeddings"]
    spec = describe("llama", original_max_position_embeddings=32, rope_scaling=scaling)
    assert getattr(spec.rope_scaling, "original_max_position_embeddings", None) == 32


def test_tokens_beyond_the_vocabulary() -> None:
    """A token for padding that the model does not have is as good as none; an end that never comes is not."""
    spec = describe("llama", pad_token_id=100, bos_token_id=[200, 7])
    assert (spec.pad_token_id, spec.bos_token_id) == (None, 7)
    with pytest.raises(InputError, match="eos_token_ids contains 100"):
        describe("llama", eos_token_id=100)


# As published; sizes, names of repositories and what only training reads are left out.
PUBLISHED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Llama 2": ("llama", {"rope_scaling": None, "pretraining_tp": 1}, {"rope_theta": 10000.0, "qkv_bias": False}),
    "Llama 3.2": (
        "llama",
        {
            "attention_bias": False,
            "mlp_bias": False,
            "head_dim": 32,
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
            "eos_token_id": [2, 3, 4],
            "rope_scaling": {
                "factor": 32.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 64,
                "rope_type": "llama3",
            },
        },
        {"rope_theta": 500000.0, "tie_word_embeddings": True, "head_size": 32, "eos_token_ids": (2, 3, 4)},
    ),
    "Mistral 0.1": ("mistral", {"sliding_window": 32}, {"sliding_window": 32, "sliding_layers": None}),
    "Mistral 0.3": ("mistral", {"sliding_window": None, "rope_theta": 1e6}, {"sliding_window": None}),
    "Qwen 2.5": (
        "qwen2",
        {"use_sliding_window": False, "sliding_window": 128, "max_window_layers": 6, "use_mrope": False},
        {"sliding_window": None, "qkv_bias": True, "o_bias": False},
    ),
    "Phi 2": (
        "phi",
        {"partial_rotary_factor": 0.5, "hidden_act": "gelu_new", "layer_norm_eps": 1e-5, "qk_layernorm": False},
        {"rotary_size": 8, "parallel": True, "head_bias": True, "hidden_activation": "gelu_tanh"},
    ),
    "Phi 3.5 MoE": (
        "phimoe",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "attention_bias": True,
            "lm_head_bias": True,
            "original_max_position_embeddings": 64,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0] * 8,
                "long_factor": [2.0] * 8,
                "short_mscale": 1.25,
                "long_mscale": 1.5,
                "original_max_position_embeddings": 64,
            },
            "sliding_window": 256,
        },
        {"head_bias": True, "o_bias": True, "sliding_window": 256},
    ),
    "Gemma 1": ("gemma", {"head_dim": 32, "hidden_act": "gelu"}, {"hidden_activation": "gelu_tanh", "head_size": 32}),
    "Gemma 3 1B": (
        "gemma3_text",
        {
            "head_dim": 32,
            "rope_local_base_freq": 10000,
            "rope_theta": 1000000,
            "sliding_window": 32,
            "sliding_window_pattern": 6,
            "rope_scaling": None,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        },
        {"rope_theta": 1e6, "local_rope_theta": 1e4, "sliding_layers": (0, 1, 2, 3, 4, 6, 7), "attention_softcap": 0},
    ),
    "Command R7B": (
        "cohere2",
        {
            "layer_switch": 4,
            "order_of_interleaved_layers": "local_attn_first",
            "position_embedding_type": "rope_gptj",
            "rotary_pct": 1.0,
            "sliding_window": 32,
            "sliding_window_pattern": 4,
            "use_parallel_block": True,
            "logit_scale": 0.25,
        },
        {"logit_scale": 0.25, "rope_layers": (0, 1, 2, 4, 5, 6), "parallel": True, "tie_word_embeddings": True},
    ),
    "StableLM 2": (
        "stablelm",
        {"partial_rotary_factor": 0.25, "use_qkv_bias": True, "layer_norm_eps": 1e-5, "norm_eps": 1e-5},
        {"rotary_size": 4, "qkv_bias": True, "parallel": False},
    ),
    "Falcon 7B": (
        "falcon",
        {"multi_query": True, "parallel_attn": True, "bias": False, "alibi": False, "new_decoder_architecture": False},
        {"num_key_value_heads": 1, "shared_norm": True, "tie_word_embeddings": True, "intermediate_size": 256},
    ),
    "Falcon 40B": (
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "parallel_attn": True, "bias": False},
        {"num_key_value_heads": 2, "shared_norm": False, "parallel": True},
    ),
    "Falcon 11B": (
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1, "ffn_hidden_size": 96},
        {"shared_norm": True, "intermediate_size": 96},
    ),
    "Pythia": (
        "gpt_neox",
        {"hidden_act": "gelu", "rotary_pct": 0.25, "rotary_emb_base": 5000, "use_parallel_residual": True},
        {"rotary_size": 4, "rope_theta": 5000.0, "parallel": True, "qkv_bias": True},
    ),
    "Minitron": (
        "nemotron",
        {"hidden_act": "relu2", "norm_eps": 1e-5, "partial_rotary_factor": 0.5, "head_dim": 32},
        {"rotary_size": 16, "norm_weight_offset": 1.0, "gated_mlp": False},
    ),
    "ERNIE 4.5 0.3B": (
        "ernie4_5",
        {"use_bias": False, "head_dim": 32, "rope_theta": 500000.0, "compression_ratio": 1.0},
        {"head_size": 32, "rope_interleaved": True, "qkv_bias": False, "tie_word_embeddings": True},
    ),
    "GLM 4 0414": (
        "glm4",
        {"attention_bias": True, "head_dim": 32, "partial_rotary_factor": 0.5, "eos_token_id": [2, 3]},
        {"rotary_size": 16, "qkv_bias": True, "o_bias": False, "rope_interleaved": True},
    ),
    "EXAONE 4 32B": (
        "exaone4",
        {
            "sliding_window": 32,
            "sliding_window_pattern": "LLLG",
            "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 2,
        },
        {"sliding_layers": (0, 1, 2, 4, 5, 6), "rope_layers": (0, 1, 2, 4, 5, 6)},
    ),
    "EXAONE 4 1.2B": (
        "exaone4",
        {"sliding_window": None, "sliding_window_pattern": None, "layer_types": ["full_attention"] * 8},
        {"sliding_window": None, "rope_layers": None},
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_as_published(name: str) -> None:
    model_type, values, wanted = PUBLISHED[name]
    spec = describe(model_type, torch_dtype="bfloat16", use_cache=True, auto_map={"AutoConfig": "x.Y"}, **values)
    assert {key: getattr(spec, key) for key in wanted} == wanted


def test_published_types_all_exist() -> None:
    assert {model_type for model_type, _, _ in PUBLISHED.values()} <= set(MODEL_TYPES)


def test_keys_that_nobody_reads_are_named(golden: Any, letter_tokenizer: Path, tmp_path: Path) -> None:
    folder = golden("llama").write_checkpoint(tmp_path / "hf", letter_tokenizer)
    assert plan_build(folder).remarks == []
    (folder / "generation_config.json").write_text('{"eos_token_id": 1}')
    assert plan_build(folder).remarks == []
    more = {"torch_dtype": "bfloat16", "unsloth_version": "2025.1", "scale_emb": 12, "mup": None, "off": False}
    (folder / "config.json").write_text(json.dumps({**golden("llama").config, **more}))
    assert plan_build(folder).remarks == [
        "config.json has keys that the llama architecture ignores: scale_emb, unsloth_version"
    ]


def test_every_key_that_transformers_writes_is_read(golden_names: list[str], golden: Any) -> None:
    for name in golden_names:
        config = text_part(HFConfig(golden(name).config))
        find(config.model_type).describe(config)
        assert config.unread == [], name

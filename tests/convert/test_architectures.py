"""Configurations in the words of older libraries, the registry, and the page that lists what is known."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from genai.convert.architectures import MODEL_TYPES, find
from genai.convert.hf_config import HFConfig
from genai.convert.nested import text_part
from genai.convert.rope_scaling import DynamicScaling, LinearScaling, LongRope, YarnScaling
from genai.convert.spec import DecoderSpec
from genai.errors import ConfigError, InputError, UnsupportedModelError

ROOT = Path(__file__).resolve().parents[2]
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


def describe(model_type: str, **values: Any) -> DecoderSpec:
    return find(model_type).describe(HFConfig({"model_type": model_type, **SIZES, **values}))


def test_every_file_is_registered() -> None:
    files = {path.stem for path in (ROOT / "genai" / "convert" / "architectures").glob("*.py")}
    families = {find(model_type).describe.__module__.rpartition(".")[2] for model_type in MODEL_TYPES}
    assert files - {"__init__", "common"} == families


def test_defaults_that_a_configuration_leaves_out() -> None:
    assert describe("gemma", head_dim=None).head_size == 256
    assert describe("gemma").tie_word_embeddings
    assert not describe("llama").tie_word_embeddings
    assert describe("llama", num_key_value_heads=None).num_key_value_heads == 4
    assert describe("phi", num_key_value_heads=4).partial_rotary_factor == 0.5
    assert describe("stablelm").partial_rotary_factor == 0.25
    assert describe("gpt_neox", rotary_pct=0.5).rotary_size == 8
    assert describe("smollm3").rope_theta == 2e6


def test_special_tokens() -> None:
    spec = describe("llama", eos_token_id=[5, 6, 5], bos_token_id=None, pad_token_id=-1)
    assert (spec.eos_token_ids, spec.bos_token_id, spec.pad_token_id) == ((5, 6), None, None)
    config = HFConfig({"model_type": "llama", **SIZES}, {"eos_token_id": [7, 2]})
    assert find("llama").describe(config).eos_token_ids == (7, 2)


def test_windows_by_pattern() -> None:
    assert describe("gemma2", sliding_window=16).sliding_layers == (0, 2, 4, 6)
    assert describe("gemma3_text", sliding_window=16).sliding_layers == (0, 1, 2, 3, 4, 6, 7)
    assert describe("gemma3_text", sliding_window=16, sliding_window_pattern=2).sliding_layers == (0, 2, 4, 6)
    cohere = describe("cohere2", sliding_window=16)
    assert cohere.sliding_layers == cohere.rope_layers == (0, 1, 2, 4, 5, 6)
    exaone = describe("exaone4", sliding_window=16)
    assert exaone.rope_layers == exaone.sliding_layers == (0, 1, 2, 4, 5, 6)
    assert describe("exaone4", sliding_window=None).rope_layers is None
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    exaone = describe("exaone_moe", **experts, sliding_window=16, layer_types=["full_attention"] * 8)
    assert (exaone.rope_layers, exaone.sliding_window) == ((), None)
    assert describe("exaone_moe", **experts, sliding_window=None).rope_layers is None
    assert describe("mistral", sliding_window=16).sliding_layers is None


def test_qwen_windows() -> None:
    assert describe("qwen2", sliding_window=16).sliding_window is None
    upper = describe("qwen2", sliding_window=16, use_sliding_window=True, max_window_layers=6)
    assert (upper.sliding_window, upper.sliding_layers) == (16, (6, 7))
    none = describe("qwen2", sliding_window=16, use_sliding_window=True, max_window_layers=8)
    assert none.sliding_window is None


def test_rope_of_older_libraries() -> None:
    gemma = describe(
        "gemma3_text",
        sliding_window=16,
        rope_theta=1e6,
        rope_local_base_freq=500.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    assert (gemma.rope_theta, gemma.local_rope_theta, gemma.rope_scaling) == (1e6, 500.0, LinearScaling(factor=8.0))
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    qwen = describe("qwen2", rope_theta=1e6, rope_scaling=scaling)
    assert qwen.rope_scaling == YarnScaling(factor=4.0, original_max_position_embeddings=256)
    assert qwen.context_length == 1024
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    phi = describe("phi3", original_max_position_embeddings=64, rope_scaling={"type": "su", **factors})
    assert isinstance(phi.rope_scaling, LongRope)
    assert phi.rope_scaling.original_max_position_embeddings == 64


def test_rope_of_hunyuan() -> None:
    """A fixed alpha stretches the base, and the length does not change the rotation."""
    scaling = {"type": "dynamic", "factor": 4.0, "alpha": 1000.0}
    hunyuan = describe("hunyuan_v1_dense", rope_theta=1e4, rope_scaling=scaling)
    assert (hunyuan.rope_scaling, hunyuan.context_length) == (None, 256)
    assert hunyuan.rope_theta == pytest.approx(1e4 * 1000 ** (hunyuan.head_size / (hunyuan.head_size - 2)))
    del scaling["alpha"]
    assert isinstance(describe("hunyuan_v1_dense", rope_scaling=scaling).rope_scaling, DynamicScaling)
    with pytest.raises(ConfigError, match="alpha of the RoPE scaling is -1"):
        describe("hunyuan_v1_dense", rope_scaling={**scaling, "alpha": -1.0})
    with pytest.raises(UnsupportedModelError, match="use_cla"):
        describe("hunyuan_v1_dense", use_cla=True)


def test_layers_with_experts_may_be_listed() -> None:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    assert describe("exaone_moe", **experts).dense_layers == (0,)
    assert describe("exaone_moe", **experts, mlp_layer_types=["sparse", "dense"] * 4).dense_layers == (1, 3, 5, 7)
    with pytest.raises(ConfigError, match="mlp_layer_types is 'moe'"):
        describe("exaone_moe", **experts, mlp_layer_types=["moe"] * 8)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("zamba", "Mamba-1"),
        ("recurrent_gemma", "RG-LRU"),
        ("zamba2", "share one attention layer"),
        ("minimax", "lightning attention"),
        ("deepseek_v4", "hyper-connections"),
    ],
)
def test_what_is_not_built_is_named(model_type: str, reason: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        find(model_type)
    assert model_type in caught.value.what and reason in caught.value.why and caught.value.fix


def test_experts_in_groups() -> None:
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    assert describe("glm4_moe", **experts).dense_layers == (0,)
    for name in ("glm4_moe", "dots1"):
        found = describe(name, **experts, n_group=4, topk_group=3).experts
        assert found is not None and (found.groups, found.best_groups, found.group_scores) == (4, 3, 2)
        with pytest.raises(InputError, match="8 experts are in 3 groups"):
            describe(name, **experts, n_group=3)
        with pytest.raises(InputError, match="6 experts per token are selected from 1 groups of 4"):
            describe(name, **{**experts, "num_experts_per_tok": 6}, n_group=2)
    windows = describe("dots1", **experts, sliding_window=16, max_window_layers=6)
    assert windows.sliding_layers == (6, 7)
    assert describe("dots1", **experts).sliding_window is None


def test_smollm_layers_without_rotation() -> None:
    assert describe("smollm3").rope_layers == (0, 1, 2, 4, 5, 6)
    assert describe("smollm3", no_rope_layers=[1, 0] * 4).rope_layers == (0, 2, 4, 6)


def test_page_lists_every_architecture_with_its_error(golden_names: list[str], golden: Any) -> None:
    page = (ROOT / "docs" / "reference" / "architectures.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| (\w+) \| ([\w ]+) \| (\S+) \| (\S+) \|$", page, re.M)
    assert [row[1] for row in rows] == golden_names
    named = {text_part(HFConfig(golden(name).config)).model_type for name in golden_names}
    assert {row[0] for row in rows} == {golden(name).config["model_type"] for name in golden_names}
    assert named == set(MODEL_TYPES)
    assert all(float(error) <= 2e-4 for row in rows for error in row[3:])

"""Latent attention: configurations that contradict themselves, and key/value matrices that are already quantised."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from genai.convert import DecoderSpec
from genai.convert.architectures import find
from genai.convert.hf_config import HFConfig
from genai.convert.spec import LatentSpec
from genai.errors import GenaiError, InputError


def describe(golden: Any, name: str, **changes: Any) -> DecoderSpec:
    return find(name).describe(HFConfig({**golden(name).config, **changes}))


@pytest.mark.parametrize(
    ("name", "changes", "match"),
    [
        ("deepseek_v3", {"qk_rope_head_dim": 9}, "rope_size of latent attention is 9"),
        ("deepseek_v3", {"kv_lora_rank": 0}, "kv_lora_rank is 0"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads is 2"),
        ("deepseek_v3", {"n_group": 2}, "9 experts are in 2 groups"),
        ("deepseek_v3", {"topk_group": 4}, "3 groups, of which 4 are selected"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob to true"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense", "moe"] * 3 + ["dense"]}, "mlp_layer_types is 'moe'"),
        ("youtu", {"q_lora_rank": -1}, "q_lora_rank is -1"),
    ],
)
def test_contradictory_config(golden: Any, name: str, changes: dict[str, Any], match: str) -> None:
    with pytest.raises(GenaiError) as caught:
        describe(golden, name, **changes)
    assert match in caught.value.what and caught.value.why and caught.value.fix


def test_published_forms(golden: Any) -> None:
    """DeepSeek V3's YaRN does not scale cosines and sines, but scores; GLM 4.7 Flash lists the layers with experts."""
    yarn = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 1.0}
    spec = describe(golden, "deepseek_v3", rope_parameters=None, rope_scaling=yarn, rope_theta=1e4)
    assert spec.rope_scaling is not None and getattr(spec.rope_scaling, "attention_factor", None) == 1
    assert spec.attention_scale == pytest.approx(24**-0.5 * 1.3688879454113936**2)
    kinds = ["dense", "sparse", "dense", *["sparse"] * 4]
    assert describe(golden, "glm4_moe_lite", mlp_layer_types=kinds).dense_layers == (0, 2)
    assert describe(golden, "deepseek_v2", topk_method="greedy").experts.groups == 1


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"head_size": 24}, "one key/value head of 12 \\+ 4 elements"),
        ({"num_key_value_heads": 2}, "num_key_value_heads is 2"),
        ({"latent": LatentSpec(rank=12, rope_size=4, nope_size=0, value_size=6)}, "nope_size of latent attention is 0"),
        ({"latent": LatentSpec(rank=12, rope_size=4, nope_size=8, value_size=6, query_rank=-1)}, "query_rank"),
    ],
)
def test_contradictory_specification(tiny: DecoderSpec, changes: dict[str, Any], match: str) -> None:
    given = {"latent": LatentSpec(rank=12, rope_size=4, nope_size=8, value_size=6), "num_key_value_heads": 1}
    with pytest.raises(InputError, match=match):
        replace(tiny, **{**given, **changes})

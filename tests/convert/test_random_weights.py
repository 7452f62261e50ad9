"""Random weights: every tensor a decoder reads, the same ones forever."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from genai.convert import DecoderSpec
from tools.random_weights import RandomWeights


def test_a_tensor_depends_on_seed_and_name_alone(tiny: DecoderSpec) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    tensor = RandomWeights(tiny, seed=3)[name]
    np.testing.assert_array_equal(RandomWeights(replace(tiny, qkv_bias=True, num_layers=5), seed=3)[name], tensor)
    assert not np.array_equal(RandomWeights(tiny, seed=4)[name], tensor)
    assert not np.array_equal(RandomWeights(tiny, seed=3)["model.layers.0.mlp.up_proj.weight"], tensor)


def test_golden_values(tiny: DecoderSpec) -> None:
    """Numbers that other tools may rely on."""
    weights = RandomWeights(tiny, seed=0)
    np.testing.assert_allclose(weights["model.norm.weight"][:3], GOLDEN_NORM, rtol=1e-6)
    np.testing.assert_allclose(weights["lm_head.weight"][0, :3], GOLDEN_HEAD, rtol=1e-6)


GOLDEN_NORM = [0.90706015, 1.0775052, 1.1109858]
GOLDEN_HEAD = [0.10078388, 0.17357676, -0.27817181]


def test_names_follow_the_architecture(tiny: DecoderSpec) -> None:
    plain = set(RandomWeights(tiny))
    assert len(plain) == 1 + 2 * 9 + 2
    assert set(RandomWeights(replace(tiny, tie_word_embeddings=True))) == plain - {"lm_head.weight"}
    normed = set(RandomWeights(replace(tiny, qk_norm=True))) - plain
    assert normed == {f"model.layers.{i}.self_attn.{n}_norm.weight" for i in range(2) for n in "qk"}
    assert len(set(RandomWeights(replace(tiny, qkv_bias=True, o_bias=True, mlp_bias=True))) - plain) == 14
    assert len(set(RandomWeights(replace(tiny, post_norms=True))) - plain) == 4


def test_scales(tiny: DecoderSpec) -> None:
    spec = replace(tiny, hidden_size=256, norm_weight_offset=1.0)
    weights = RandomWeights(spec)
    assert abs(weights["model.layers.0.self_attn.q_proj.weight"].std() * 16 - 1) < 0.05
    assert abs(weights["model.norm.weight"].mean()) < 0.1
    assert all(tensor.dtype == np.float32 for tensor in weights.values())

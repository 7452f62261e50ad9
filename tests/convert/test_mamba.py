"""Mamba-2: configurations that contradict themselves, and the forms in which checkpoints are published."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from genai.convert import DecoderSpec, build_model
from genai.convert.architectures import find
from genai.convert.hf_config import HFConfig
from genai.convert.spec import MambaSpec
from genai.errors import GenaiError, InputError


def describe(golden: Any, name: str, **changes: Any) -> DecoderSpec:
    config = golden(name).config
    return find(config["model_type"]).describe(HFConfig({**config, **changes}))


@pytest.mark.parametrize(
    ("name", "changes", "match"),
    [
        ("granitemoehybrid", {"mamba_d_head": 19}, "mamba_d_head is 19"),
        ("granitemoehybrid", {"mamba_n_groups": 4}, "6 heads in 4 groups"),
        ("granitemoehybrid", {"mamba_d_state": 0}, "mamba_d_state is 0"),
        ("granitemoehybrid", {"mamba_d_state": 1 << 30}, "6 heads of 1073741824 x 20"),
        ("granitemoehybrid", {"mamba_d_conv": 1}, "kernels of 1"),
        ("granitemoehybrid", {"layer_types": ["rwkv"] * 7}, "contains 'rwkv'"),
        ("granitemoehybrid", {"position_embedding_type": "alibi"}, "position_embedding_type is 'alibi'"),
        ("granitemoehybrid", {"layer_types": ["mamba", None] + ["attention"] * 5}, "contains None"),
        ("bamba", {"attn_layer_indices": [1, 99]}, "attn_layer_indices is [1, 99]"),
        ("bamba", {"time_step_limit": [0.0, 0.1]}, "time_step_limit is [0.0, 0.1]"),
        ("nemotron_h", {"layers_block_type": ["rwkv", "mlp"]}, "contains 'rwkv'"),
        ("nemotron_h_experts", {"mlp_hidden_act": "silu"}, "mlp_hidden_act is 'silu'"),
        ("jamba", {"mamba_dt_rank": "wide"}, "mamba_dt_rank is 'wide'"),
        ("jamba", {"mamba_d_state": 0}, "mamba_d_state is 0"),
        ("jamba", {"attn_layer_period": 0}, "attn_layer_period is 0"),
        ("jamba", {"layer_types": ["mamba"] * 7}, "layer_types is 'mamba'"),
        ("jamba", {"mlp_layer_types": ["dense"]}, "mlp_layer_types is"),
        ("jamba", {"num_experts_per_tok": 6}, "6 of 5 experts"),
        ("mamba", {"conv_kernel": 1}, "kernels of 1"),
        ("mamba", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("nemotron_h_experts", {"moe_latent_size": 0}, "moe_latent_size is 0"),
        ("nemotron_h_experts", {"moe_latent_size": "wide"}, "moe_latent_size is 'wide'"),
        ("nemotron_h_experts", {"num_experts_per_tok": 9}, "9"),
        ("nemotron_h", {"layers_block_type": ["mlp", "mlp"]}, "every layer consists of a feed-forward layer"),
        ("nemotron_h", {"layers_block_type": []}, "layers_block_type is []"),
        (
            "nemotron_h",
            {"layers_block_type": None, "hybrid_override_pattern": "M-X"},
            "hybrid_override_pattern is 'M-X'",
        ),
        ("mamba2", {"head_dim": 10}, "head_dim is 10"),
        ("mamba2", {"n_groups": 4}, "6 heads in 4 groups"),
        ("mamba2", {"time_step_limit": [0.1, 1.0]}, "time_step_limit is [0.1, 1.0]"),
        ("falcon_h1", {"ssm_multipliers": [1.0]}, "ssm_multipliers is [1.0]"),
        ("falcon_h1", {"projectors_bias": True}, "projectors_bias to true"),
    ],
)
def test_contradictory_config(golden: Any, name: str, changes: dict[str, Any], match: str) -> None:
    with pytest.raises(GenaiError) as caught:
        describe(golden, name, **changes)
    assert match in caught.value.what and caught.value.why and caught.value.fix


def test_published_forms(golden: Any) -> None:
    """Granite 4 names its layers as its authors did, and Nemotron-H by letters."""
    kinds = ["mamba", "mamba", "attention"] * 2 + ["mamba"]
    published = describe(
        golden, "granitemoehybrid", layer_types=kinds, mamba_d_head="auto", time_step_limit=[0.0, math.inf],
        position_embedding_type="nope",
    )  # fmt: skip
    assert published == describe(golden, "granitemoehybrid")
    assert not published.is_recurrent(2) and not published.rotated(2)
    letters = {"layers_block_type": None, "hybrid_override_pattern": "M-M*-", "num_hidden_layers": 5}
    assert describe(golden, "nemotron_h", **letters) == describe(golden, "nemotron_h")
    assert describe(golden, "falcon_h1", mamba_d_ssm=None, mamba_d_head=20).recurrent.width == 120


def test_layers_outside_the_decoder(tiny: DecoderSpec) -> None:
    with pytest.raises(InputError, match="layer 7 consists of a feed-forward layer"):
        replace(tiny, feed_forward_layers=(7,))
    part = MambaSpec(layers=(2,), kernel=4, heads=2, head_size=8, state_size=8)
    with pytest.raises(InputError, match="layer 2 is recurrent"):
        replace(tiny, recurrent=part)


def test_heads_of_odd_size(golden: Any) -> None:
    """Mamba-2 rotates nothing, so its heads need not have pairs of elements."""
    spec = describe(golden, "mamba2", hidden_size=45, num_heads=6, head_dim=15)
    assert isinstance(spec.recurrent, MambaSpec) and spec.recurrent.head_size == 15


@pytest.mark.parametrize("name", ["mamba", "mamba2", "kimi_linear", "qwen3_5_text"])
def test_decays_that_overflow(golden: Any, name: str, letter_tokenizer: Path, tmp_path: Path) -> None:
    folder = golden(name).write_checkpoint(tmp_path / "checkpoint", letter_tokenizer)
    tensors = load_file(folder / "model.safetensors")
    first = next(key for key in sorted(tensors) if key.endswith("A_log"))
    tensors[first] = np.full_like(tensors[first], 800)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(InputError, match=r"A_log contains the value 800"):
        build_model(folder, tmp_path / "built")

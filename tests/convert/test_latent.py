"""Latent attention: configurations that contradict themselves, and key/value matrices that are already quantised."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from genai.convert import DecoderSpec, plan_build
from genai.convert.architectures import find
from genai.convert.build import execute
from genai.convert.hf_config import HFConfig
from genai.convert.spec import DeltaNetSpec, LatentSpec
from genai.convert.weights import Weights
from genai.errors import GenaiError, InputError
from genai.lowering.flatten import attention_layers
from genai.models.config import Config
from genai.models.decoder_graph import read_decoder, read_decoder_file
from genai.quant.block_types import dequantize
from tools.quantised_checkpoints import convert


def describe(golden: Any, name: str, **changes: Any) -> DecoderSpec:
    return find(name).describe(HFConfig({**golden(name).config, **changes}))


_KIMI: dict[str, Any] = {
    "linear_attn_config": {
        "full_attn_layers": [3], "kda_layers": [1, 2], "head_dim": 10, "num_heads": 3, "short_conv_kernel_size": 3,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "changes", "match"),
    [
        ("deepseek_v3", {"qk_rope_head_dim": 9}, "rope_size of latent attention is 9"),
        ("deepseek_v3", {"kv_lora_rank": 0}, "kv_lora_rank is 0"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads is 2"),
        ("deepseek_v3", {"n_group": 2}, "9 experts are in 2 groups"),
        ("deepseek_v3", {"topk_group": 4}, "3 groups, of which 4 are selected"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob to true"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense", "moe"] * 3 + ["dense"]}, "mlp_layer_types is 'moe'"),
        ("kimi_linear", {"linear_attn_config": 3}, "linear_attn_config is 3"),
        ("kimi_linear", {**_KIMI, "layer_types": None, "mlp_layer_types": None, "num_hidden_layers": 4}, "kda_layers"),
        ("kimi_linear", {"layer_types": ["mamba"] * 7}, "layer_types in config.json contains 'mamba'"),
        ("kimi_linear", {"linear_head_dim": 0}, "linear_head_dim is 0"),
        ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope is False"),
        ("kimi_linear", {"moe_router_activation_func": "softmax"}, "moe_router_activation_func is 'softmax'"),
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
    kimi = {**_KIMI, "layer_types": None, "mlp_layer_types": None, "num_hidden_layers": 3, "linear_head_dim": None}
    spec = describe(golden, "kimi_linear", **kimi, linear_num_heads=None)
    assert isinstance(spec.recurrent, DeltaNetSpec) and spec.recurrent == replace(
        describe(golden, "kimi_linear").recurrent, layers=(0, 1)
    )
    kinds = ["dense", "sparse", "dense", *["sparse"] * 4]
    assert describe(golden, "glm4_moe_lite", mlp_layer_types=kinds).dense_layers == (0, 2)
    assert describe(golden, "deepseek_v2", topk_method="greedy").experts.groups == 1


@pytest.mark.parametrize("form", ["awq", "gptq_act_order"])
def test_quantised_matrices(form: str, golden: Any, letter_tokenizer: Path, tmp_path: Path) -> None:
    """The matrices of keys are transposed, so they become floats; those of values are kept as they are."""
    sizes = {
        "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 64, "q_lora_rank": 64,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 32, "num_hidden_layers": 1,
        "intermediate_size": 96, "head_dim": 16, "qk_head_dim": 32,
    }  # fmt: skip
    config = {**golden("youtu").config, **sizes}
    spec = find("youtu").describe(HFConfig(config))
    shapes = {
        name: shape for name, shape in golden("youtu").shapes.items() if "layers" not in name or "layers.0." in name
    }
    own = {"embed_tokens": (101, 64), "gate_proj": (96, 64), "up_proj": (96, 64), "down_proj": (64, 96),
           "q_a_proj": (64, 64), "q_b_proj": (64, 64), "kv_a_proj_with_mqa": (80, 64), "kv_b_proj": (96, 64),
           "o_proj": (64, 64)}  # fmt: skip
    shapes = {name: own.get(name.split(".")[-2], (64,)) for name in shapes}
    floats = replace(golden("youtu"), config=config, shapes=shapes).write_checkpoint(tmp_path / "hf", letter_tokenizer)
    plan = plan_build(convert(floats, tmp_path / form, form))
    weights, name = Weights(plan.weights), "model.layers.0.self_attn.kv_b_proj.weight"
    whole, order = dequantize(plan.checkpoint[name]), plan.checkpoint.order(name)
    whole = (whole if order is None else whole[:, np.argsort(order)]).reshape(2, 48, 64)
    for head in range(2):
        keys = weights.tensor(f"model.layers.0.self_attn.k_up.{head}.weight", (64, 16))
        values = weights.tensor(f"model.layers.0.self_attn.v_up.{head}.weight", (32, 64))
        np.testing.assert_array_equal(keys, whole[head, :16].T)
        np.testing.assert_array_equal(values, whole[head, 16:])
    assert spec.latent == plan.spec.latent and (order is None) == (form == "awq")
    execute(plan, tmp_path / "model")
    assert any("kept exactly" in line for line in plan.prequantized)


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


@pytest.mark.parametrize(
    ("name", "options"),
    [("deepseek_v2", {}), ("deepseek_v3", {"fused_rope": False}), ("minicpm3", {}), ("youtu", {"precision": "int8"})],
)
def test_rows_are_stored_once(golden: Any, golden_folder: Any, name: str, options: dict[str, Any]) -> None:
    """In every form of the graph: rotation inside or before attention, and long and short tables."""
    config, spec = Config(golden_folder(name, **options)), describe(golden, name)
    read = read_decoder(config, kv_dtype="fp16")
    assert spec.latent is not None and read.flat is not None
    assert read.kv_bytes_per_token["fp16"] == 2 * spec.num_layers * spec.latent.row_size
    twice = read_decoder(config, kv_dtype="fp16", stores_values=True)
    assert twice.kv_bytes_per_token["fp16"] == 2 * read.kv_bytes_per_token["fp16"]


def test_rows_whose_rotated_part_is_used_have_values(golden: Any, golden_folder: Any) -> None:
    """The first numbers of a value are not rotated, so keys cannot replace a value of which they are used."""
    config = Config(golden_folder("deepseek_v2"))
    model = read_decoder_file(config)
    split = next(node for node in model.graph.nodes if node.name.endswith("attn/heads/Split"))
    (used,) = (node for node in model.graph.consumers(split.outputs[1]))
    sizes = model.graph.constant(split.input(1))
    first, second = int(sizes[0]), int(sizes[1])
    assert first < second
    split.inputs[1] = model.graph.add_constant("sizes", np.array([second, first] * (len(sizes) // 2), np.int64))
    used.inputs = [split.outputs[0] if name == split.outputs[1] else name for name in used.inputs]
    model.graph.invalidate()
    read = read_decoder(config, model=model)
    assert read.flat is not None
    assert [layer.is_latent for layer in attention_layers(read.flat.layers)].count(False) == 1


def test_kimi_linear_as_published(golden: Any, letter_tokenizer: Path, tmp_path: Path) -> None:
    """transformers gives the tensors of the first layer another prefix than the published files."""
    saved = golden("kimi_linear").write_checkpoint(tmp_path / "saved", letter_tokenizer)
    published = tmp_path / "published"
    shutil.copytree(saved, published)
    (file,) = published.glob("*.safetensors")
    tensors = {
        re.sub(r"block_sparse_moe\.(gate|up|down)_proj", r"mlp.\1_proj", name): tensor
        for name, tensor in load_file(file).items()
    }
    assert "model.layers.0.mlp.gate_proj.weight" in tensors
    save_file(tensors, file)
    expected, found = (plan_build(folder).weights for folder in (saved, published))
    for name in ("gate", "up", "down"):
        tensor = f"model.layers.0.mlp.{name}_proj.weight"
        np.testing.assert_array_equal(found[tensor], expected[tensor])

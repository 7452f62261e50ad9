"""Checkpoints that hold a text decoder and a reader of pictures: names, configurations and what is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from genai.convert import plan_build
from genai.convert.architectures import find
from genai.convert.build import BuildPlan
from genai.convert.hf_config import HFConfig
from genai.convert.nested import NESTED_TYPES, text_part
from genai.convert.rope_scaling import QueryScaling
from genai.convert.spec import DecoderSpec
from genai.errors import ConfigError, InputError, UnsupportedModelError
from tools.quantised_checkpoints import write

SIZES = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}


def describe(**config: Any) -> DecoderSpec:
    text = text_part(HFConfig(config))
    return find(text.model_type).describe(text)


@pytest.fixture
def qwen(golden: Any, letter_tokenizer: Path, tmp_path: Path) -> Path:
    folder: Path = golden("qwen2_5_vl").write_checkpoint(tmp_path / "qwen", letter_tokenizer)
    return folder


def renamed(folder: Path, *pairs: tuple[str, str]) -> BuildPlan:
    tensors = load_file(folder / "model.safetensors")
    for old, new in pairs:
        tensors = {new + name.removeprefix(old) if name.startswith(old) else name: x for name, x in tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return plan_build(folder)


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", "model."])
def test_each_prefix_of_the_decoder_names_the_same_tensors(qwen: Path, prefix: str) -> None:
    before = dict(plan_build(qwen).weights)
    head = "language_model.lm_head." if prefix == "language_model.model." else "lm_head."
    plan = renamed(qwen, ("model.", prefix), ("lm_head.", head), ("visual.", "model.visual."))
    assert all(np.array_equal(before[name], tensor) for name, tensor in plan.weights.items())


def test_the_user_learns_once_that_pictures_are_not_read(qwen: Path) -> None:
    assert plan_build(qwen).remarks == ["only the text decoder of this qwen2_5_vl model is used: pictures are not read"]


def test_unknown_tensors_are_an_error_as_in_other_checkpoints(qwen: Path) -> None:
    with pytest.raises(InputError, match=r"1 tensors that its configuration does not use, such as 'memory_tower.ln_q"):
        renamed(qwen, ("visual.merger.ln_q.", "memory_tower.ln_q."))


def test_two_names_of_one_tensor(qwen: Path) -> None:
    tensors = load_file(qwen / "model.safetensors")
    tensors["language_model.model.norm.weight"] = tensors["model.norm.weight"]
    save_file(tensors, qwen / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=r"both are|'language_model.model.norm.weight' and 'model.norm.weight'"):
        plan_build(qwen)


@pytest.mark.parametrize("inner", [7, "text", [], True])
def test_text_config_that_is_no_object(qwen: Path, inner: Any) -> None:
    config = json.loads((qwen / "config.json").read_text())
    (qwen / "config.json").write_text(json.dumps({**config, "text_config": inner}))
    with pytest.raises(ConfigError, match="text_config is"):
        plan_build(qwen)


def test_errors_name_the_part_of_the_file() -> None:
    with pytest.raises(ConfigError, match="vocab_size of text_config is 'many'"):
        describe(model_type="gemma3", text_config={**SIZES, "vocab_size": "many"}, eos_token_id=1)
    with pytest.raises(ConfigError, match="has no num_hidden_layers of text_config"):
        describe(model_type="internvl", text_config={"model_type": "qwen2", "num_attention_heads": 4}, eos_token_id=1)


def test_unknown_decoder_inside() -> None:
    with pytest.raises(UnsupportedModelError, match="model_type 'chatglm' is not supported"):
        describe(model_type="llava", text_config={"model_type": "chatglm"}, eos_token_id=1)


def test_gemma_3_as_published() -> None:
    """Published files omit what equals the defaults of transformers."""
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    spec = describe(model_type="gemma3", text_config=text, eos_token_id=[1, 106], vision_config={"hidden_size": 1152})
    assert (spec.vocab_size, spec.num_attention_heads, spec.num_key_value_heads, spec.head_size) == (262208, 8, 4, 256)
    assert (spec.eos_token_ids, spec.sliding_window, spec.context_length) == ((1, 106), 1024, 131072)


def test_llava_as_published() -> None:
    text = {"model_type": "llama", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "vocab_size": 32064}
    spec = describe(model_type="llava", text_config=text, eos_token_id=2)
    assert (spec.hidden_size, spec.num_layers, spec.vocab_size, spec.context_length) == (4096, 32, 32064, 4096)


def test_qwen_2_vl_as_published() -> None:
    """transformers 4 wrote the sizes of the decoder next to the keys about pictures."""
    flat = {"model_type": "qwen2_vl", **SIZES, "vision_config": {"depth": 1}, "vision_start_token_id": 7}
    flat |= {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, "rope_theta": 1e6, "eos_token_id": 2}
    spec = describe(**flat)
    assert (spec.hidden_size, spec.rope_theta, spec.rope_scaling, spec.qkv_bias) == (64, 1e6, None, True)
    text = text_part(HFConfig(flat))
    find(text.model_type).describe(text)
    assert text.unread == []


def test_ministral_3_scales_queries_by_position() -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "llama_4_scaling_beta": 0.1}
    spec = describe(model_type="ministral3", **SIZES, rope_parameters=rope, eos_token_id=2)
    assert spec.query_scaling == QueryScaling(beta=0.1, length=64)
    assert describe(model_type="ministral3", **SIZES, rope_parameters=rope | {"llama_4_scaling_beta": None},
                    eos_token_id=2).query_scaling is None  # fmt: skip
    with pytest.raises(InputError, match=r"the beta -1.0 and the length 64"):
        describe(model_type="ministral3", **SIZES, rope_parameters=rope | {"llama_4_scaling_beta": -1}, eos_token_id=2)


@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        ("mllama", "attend to pictures"),
        ("paligemma", "in both directions"),
    ],
)
def test_what_cannot_be_converted_is_refused_by_its_reason(model_type: str, why: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        find(model_type)
    assert why in caught.value.why


@pytest.mark.parametrize("form", ["awq", "w4a16", "mlx"])
def test_quantised_decoders_inside(form: str, tmp_path: Path) -> None:
    folder, _ = write(tmp_path, form, "llama")
    alone = dict(plan_build(folder).weights)
    config = json.loads((folder / "config.json").read_text())
    outer = {key: config.pop(key) for key in list(config) if key.startswith("quantization")}
    (folder / "config.json").write_text(json.dumps({"model_type": "llava", **outer, "text_config": config}))
    plan = renamed(folder, ("model.", "model.language_model."))
    assert plan.remarks == ["only the text decoder of this llava model is used: pictures are not read"]
    assert all(np.array_equal(alone[name], tensor) for name, tensor in plan.weights.items())


def test_experts_stored_in_either_order(golden: Any, letter_tokenizer: Path, tmp_path: Path) -> None:
    """transformers 5 writes matrices [outputs, inputs]; published files of Qwen 3-VL hold [inputs, outputs]."""
    folder = golden("qwen3_vl_moe").write_checkpoint(tmp_path / "experts", letter_tokenizer)
    before = {name: np.array(tensor) for name, tensor in plan_build(folder).weights.items()}
    tensors = load_file(folder / "model.safetensors")
    swapped = {name: np.ascontiguousarray(x.swapaxes(1, 2)) for name, x in tensors.items() if ".experts." in name}
    save_file(tensors | swapped, folder / "model.safetensors", {"format": "pt"})
    assert all(np.array_equal(before[name], tensor) for name, tensor in plan_build(folder).weights.items())


def test_every_nested_type_is_on_the_page() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/reference/architectures.md").read_text(encoding="utf-8")
    assert [name for name in NESTED_TYPES if f"| `{name}` |" not in page] == []

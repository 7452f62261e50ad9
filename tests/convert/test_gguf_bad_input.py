"""What a GGUF file may say wrongly: each ends in a typed error with all its parts, before anything is written."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from genai.convert import ExportOptions, build_model, plan_build
from genai.convert.build import execute
from genai.convert.gguf.latent import family
from genai.convert.gguf.metadata import Metadata
from genai.errors import ChatTemplateError, ConfigError, GenaiError, InputError, TokenizerError, UnsupportedModelError
from genai.onnx.reader import read_model
from genai.weight_files.gguf import GgufModel

gguf = pytest.importorskip("gguf")
from tools import gguf_models  # noqa: E402
from tools.gguf_models import SHAPES, VOCAB, write_model  # noqa: E402

T = "tokenizer.ggml."
# Changes of metadata (None = the key is missing), the error, and what it says.
METADATA: dict[str, tuple[dict[str, Any], type[GenaiError], str]] = {
    "no width": ({"llama.embedding_length": None}, ConfigError, "has no llama.embedding_length"),
    "text as a number": ({"llama.block_count": "two"}, ConfigError, "llama.block_count is 'two'"),
    "no layers": ({"llama.block_count": 0}, ConfigError, "block_count is 0"),
    "2^32 layers": ({"llama.block_count": 2**32 - 1}, GenaiError, "num_hidden_layers|block_count|num_layers"),
    "a context of 2^32": ({"llama.context_length": 2**32 - 1}, GenaiError, "max_position_embeddings|context_length"),
    "no heads": ({"llama.attention.head_count": None}, ConfigError, "has no llama.attention.head_count"),
    "keys unlike values": (
        {"llama.attention.value_length": 32},
        UnsupportedModelError,
        "64 elements per head, but values have 32",
    ),
    "layers unlike": ({"llama.feed_forward_length": [512, 256]}, UnsupportedModelError, "differs from layer to layer"),
    "epsilon of text": ({"llama.attention.layer_norm_rms_epsilon": "x"}, ConfigError, "layer_norm_rms_epsilon is 'x'"),
    "not causal": ({"llama.attention.causal": False}, UnsupportedModelError, "attention.causal is false"),
    "another scaling": ({"llama.rope.scaling.type": "warp"}, UnsupportedModelError, "rope.scaling.type is 'warp'"),
    "more layers than there are": ({"llama.block_count": 3}, InputError, "lacks 9 tensors"),
    "fewer layers than there are": ({"llama.block_count": 1}, InputError, "has 9 tensors .* does not use"),
    "another width": ({"llama.feed_forward_length": 300}, InputError, r"shape \[512, 256\], expected \[300, 256\]"),
    "no vocabulary": ({T + "tokens": None}, TokenizerError, "the vocabulary is missing"),
    "no kind of vocabulary": ({T + "model": None}, TokenizerError, "the vocabulary is missing"),
    "an unknown tokenizer": ({T + "model": "rwkv"}, UnsupportedModelError, "tokenizer type 'rwkv' is not supported"),
    "an unknown pre-tokenizer": ({T + "pre": "qwen-2"}, UnsupportedModelError, "pre is 'qwen-2'"),
    "more tokens than vectors": ({T + "tokens": [f"t{i}" for i in range(VOCAB + 1)]}, TokenizerError, "289 tokens"),
    "a token twice": ({T + "tokens": ["a", "b", "a"]}, TokenizerError, "two tokens have the text 'a'"),
    "an empty token": ({T + "tokens": ["a", ""]}, TokenizerError, "token 1 is ''"),
    "types of others": ({T + "token_type": [1, 1]}, TokenizerError, "token_type has the wrong type or length"),
    "a type that is none": ({T + "token_type": [9] * VOCAB}, TokenizerError, "token_type contains an unknown number"),
    "no merges": ({T + "merges": None}, TokenizerError, "merges has 0 entries"),
    "merges of numbers": ({T + "merges": [1, 2]}, TokenizerError, "merges is "),
    "no scores": ({T + "model": "llama"}, TokenizerError, "scores is missing"),
    "an end outside": ({T + "eos_token_id": VOCAB}, TokenizerError, f"eos_token_id is {VOCAB}"),
    "a beginning of text": ({T + "bos_token_id": "<s>"}, TokenizerError, "bos_token_id is '<s>'"),
    "a flag of text": ({T + "add_bos_token": "yes"}, TokenizerError, "add_bos_token is 'yes'"),
    "a template of numbers": ({"tokenizer.chat_template": 5}, ChatTemplateError, "chat_template is 5"),
    "a template without end": ({"tokenizer.chat_template": "x" * (2**20 + 1)}, ChatTemplateError, "chat_template is"),
}


@pytest.mark.parametrize("name", METADATA)
def test_metadata(name: str, tmp_path: Path) -> None:
    changes, error, message = METADATA[name]
    source = write_model(tmp_path / "a.gguf", SHAPES["llama"], **changes)
    with pytest.raises(error, match=message) as caught:
        build_model(source, tmp_path / "model")
    assert caught.value.why and caught.value.fix
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.gguf"]


HYBRIDS: dict[str, tuple[str, dict[str, Any], type[GenaiError], str]] = {
    "drafts only": ("qwen35", {"nextn_predict_layers": 4}, ConfigError, "nextn_predict_layers is 4"),
    "heads that differ": (
        "lfm2", {"attention.head_count_kv": [0, 1, 2, 0]}, UnsupportedModelError, "head_count_kv differs from layer",
    ),
    "a part of a head": ("qwen35", {"ssm.inner_size": 130}, ConfigError, "ssm.inner_size is 130"),
    "no state size": ("qwen35", {"ssm.state_size": None}, ConfigError, "has no qwen35.ssm.state_size"),
    "no kernel": ("lfm2", {"shortconv.l_cache": None}, ConfigError, "has no lfm2.shortconv.l_cache"),
    "another kernel": ("lfm2", {"shortconv.l_cache": 4}, InputError, r"shape \[256, 1, 3\], expected \[256, 1, 4\]"),
    "pairs outside": (
        "qwen35", {"rope.dimension_sections": [4, 2, 2, 0]}, ConfigError, r"dimension_sections is \[4, 2, 2, 0\]",
    ),
    "sections of text": ("qwen35", {"rope.dimension_sections": "x"}, ConfigError, "dimension_sections is 'x'"),
    "key heads that do not divide": ("qwen35", {"ssm.group_count": 3}, GenaiError, "group_count|key_heads|key heads"),
    "no width of the shared expert": (
        "qwen35moe", {"expert_shared_feed_forward_length": None}, ConfigError, "has no .*shared_feed_forward_length",
    ),
    "a list that is too short": ("lfm2", {"attention.head_count_kv": [0, 0]}, GenaiError, "layer_types|head_count_kv"),
    "no attention at all": ("lfm2", {"attention.head_count_kv": [0, 0, 0, 0]}, GenaiError, "head_count_kv"),
    "fewer sections": ("qwen35", {"rope.dimension_sections": [3, 3]}, ConfigError, "dimension_sections is"),
    "no multiple of the hidden size": ("mamba2", {"ssm.inner_size": 520}, ConfigError, "ssm.inner_size is 520"),
    "groups without a number": (
        "nemotron_h_moe", {"expert_group_count": 2}, ConfigError, "has no nemotron_h_moe.expert_group_used_count",
    ),
    "norms of Falcon Mamba": ("mamba", {"ssm.dt_b_c_rms": True}, UnsupportedModelError, "dt_b_c_rms is true"),
    "another inner size": ("mamba", {"ssm.inner_size": 300}, ConfigError, "inner_size is 300"),
    "no inner size": ("jamba", {"ssm.inner_size": None}, ConfigError, "has no jamba.ssm.inner_size"),
    "no number of experts": ("jamba", {"expert_count": None}, ConfigError, "has no jamba.expert_count"),
    "another rank": ("jamba", {"ssm.time_step_rank": 8}, InputError, r"expected \[40, 512\]"),
    "no size of heads": ("kimi-linear", {"kda.head_dim": None}, ConfigError, "has no kimi-linear.kda.head_dim"),
    "another size of heads": ("kimi-linear", {"kda.head_dim": 16}, InputError, r"expected \[64, 256\]"),
    "experts of a softmax": ("kimi-linear", {"expert_gating_func": 1}, ConfigError, "expert_gating_func is 1"),
    "no chunks": ("llama4", {"attention.sliding_window": 0}, ConfigError, "sliding_window is 0"),
    "chunks of other layers": (
        "llama4", {"attention.sliding_window_pattern": [True] * 3}, ConfigError, "sliding_window_pattern is ",
    ),
    "two scaled experts": ("llama4", {"expert_used_count": 2}, InputError, "2 experts per token scale their inputs"),
    "another latent width": ("nemotron_h_moe", {"moe_latent_size": 64}, InputError, r"expected \[64, 256\]"),
    "more attention": ("qwen35", {"attention.recurrent_layers": [False] * 4}, InputError, "lacks .* tensors"),
}  # fmt: skip


PATTERN = "attention.sliding_window_pattern"
HYBRIDS |= {
    "no list of windows": ("gemma4", {PATTERN: 2}, ConfigError, f"{PATTERN} is 2"),
    "a list of windows that is too short": ("gemma3n", {PATTERN: [True]}, ConfigError, PATTERN),
    "a head in part": (
        "gemma4", {"rope.dimension_count_swa": 32}, ConfigError, "rope.dimension_count_swa is 32",
    ),
    "heads that differ between layers without a window": (
        "gemma4", {"attention.head_count_kv": [2, 1, 2, 2]}, ConfigError, r"head_count_kv is \[2, 1, 2, 2\]",
    ),
    "no heads in a layer": ("gemma4", {"attention.head_count_kv": [2, 0, 2, 0]}, ConfigError, "a positive integer for"),
    "no layers with keys": ("gemma4", {"attention.shared_kv_layers": 4}, ConfigError, "shared_kv_layers is 4"),
    "keys of a shared window": ("gemma4", {"attention.shared_kv_layers": 3}, GenaiError, "without|window"),
    "widths of another layer": ("gemma4", {"feed_forward_length": [512] * 3}, ConfigError, "feed_forward_length is"),
    "inputs of another size": ("gemma3n", {"embedding_length_per_layer_input": 64}, InputError, r"expected \[288, 320"),
    "another stream": ("gemma3n", {"altup.active_idx": 4}, ConfigError, "altup.active_idx is 4"),
    "other streams": ("gemma3n", {"altup.num_inputs": 3}, InputError, r"expected \[3, 256\]|shape"),
    "no activations": ("gemma3n", {"activation_sparsity_scale": [99.0] * 5}, ConfigError, "leave some activations"),
    "no latent rank": ("deepseek2", {"attention.kv_lora_rank": None}, ConfigError, "has no .*attention.kv_lora_rank"),
    "another latent rank": ("deepseek2", {"attention.kv_lora_rank": 32}, InputError, r"shape .*, expected "),
    "only rotated keys": ("deepseek2", {"attention.key_length_mla": 16}, ConfigError, "key_length_mla is 16"),
    "another gate": ("deepseek2", {"expert_gating_func": 3}, ConfigError, "expert_gating_func is 3"),
    "queries by position": (
        "deepseek2", {"attention.temperature_scale": 0.1}, UnsupportedModelError, "temperature_scale is set",
    ),
    "values of another size": ("minicpm3", {"attention.value_length": 32}, InputError, r"expected \[256, 128\]|shape"),
    "sections of too few pairs": ("qwen3vl", {"rope.dimension_sections": [8, 8, 8, 0]}, ConfigError, "32 pairs"),
    "experts of a softmax": ("dots1", {"expert_gating_func": 1}, ConfigError, "expert_gating_func is 1"),
    "sections of two": ("glm4moe", {"rope.dimension_sections": [8, 8]}, ConfigError, "dimension_sections is"),
    "groups of unlike sizes": ("exaone-moe", {"expert_group_count": 3}, GenaiError, "4 experts are in 3 groups"),
    "a factor of text": ("mistral3", {"attention.temperature_scale": "x"}, ConfigError, "temperature_scale is 'x'"),
    "sparsity of one layer": ("gemma3n", {"activation_sparsity_scale": [1.0]}, ConfigError, "a number for each"),
}  # fmt: skip


@pytest.mark.parametrize("name", HYBRIDS)
def test_metadata_of_hybrids(name: str, tmp_path: Path) -> None:
    shape, changes, error, message = HYBRIDS[name]
    source = write_model(tmp_path / "a.gguf", SHAPES[shape], **{f"{shape}.{key}": v for key, v in changes.items()})
    with pytest.raises(error, match=message) as caught:
        build_model(source, tmp_path / "model")
    assert caught.value.why and caught.value.fix


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("xielu.beta", [0.5, 0.25], r"xielu.beta is 0.25"),
        ("xielu.eps", 0.1, r"xielu.eps is 0.1"),
        ("xielu.alpha_p", [0.8], r"xielu.alpha_p is \[0.8"),
        ("xielu.alpha_n", None, r"has no xielu.alpha_n"),
    ],
)
def test_learned_activations(key: str, value: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        plan_build(write_model(tmp_path / "a.gguf", SHAPES["apertus"], **{key: value}))
    assert caught.value.why and caught.value.fix


def test_rates_of_decay_are_negative(tmp_path: Path) -> None:
    source = write_with(tmp_path / "a.gguf", {"blk.0.ssm_a": np.ones(4, np.float32)}, "qwen35", "qwen35")
    with pytest.raises(InputError, match="numbers that are not negative"):
        build_model(source, tmp_path / "model")


def test_early_files_of_glm_4_7_flash_have_sigmoids(tmp_path: Path) -> None:
    """As in llama.cpp, their number of layers and of tokens tell."""
    values = {"deepseek2.expert_gating_func": None, "deepseek2.block_count": 47}
    model = GgufModel(write_model(tmp_path / "a.gguf", replace(SHAPES["deepseek2"], layers=1, dense=1), **values))
    data = Metadata(model.metadata, "deepseek2", model.path)
    assert family(data, model) == "deepseek_v2"
    data.values |= {"deepseek2.block_count": 48, "deepseek2.nextn_predict_layers": 1}
    flash = SimpleNamespace(info=lambda name: SimpleNamespace(shape=(154880, 2048)))
    assert family(data, flash) == "deepseek_v3"  # type: ignore[arg-type]


def test_gemma_4_has_frequencies_and_tokens_for_bytes(tmp_path: Path) -> None:
    source = write_with(tmp_path / "a.gguf", {"rope_freqs.weight": None}, "gemma4", "gemma4")
    with pytest.raises(InputError, match=r"tensor 'rope_freqs\.weight' is missing"):
        plan_build(source)
    with pytest.raises(TokenizerError, match="256 of the 256 tokens for bytes are missing, starting with <0x00>"):
        plan_build(write_model(tmp_path / "b.gguf", SHAPES["llama"], **{T + "model": "gemma4"}))


def test_layers_that_only_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    more = {"qwen35.block_count": 5, "qwen35.nextn_predict_layers": 1}
    draft = {"blk.4.nextn.eh_proj.weight": np.ones((256, 512), np.float32)}
    source = write_with(tmp_path / "a.gguf", draft, "qwen35", "qwen35", **more)
    assert plan_build(source).spec.num_layers == 4
    other = {"blk.5.nextn.eh_proj.weight": np.ones((256, 512), np.float32)}
    source = write_with(tmp_path / "b.gguf", other, "qwen35", "qwen35", **more)
    with pytest.raises(InputError, match=r"does not use, such as 'blk\.5\.nextn\.eh_proj\.weight'"):
        plan_build(source)


@pytest.mark.parametrize(
    "name", ["qwen35", *(pytest.param(name, marks=pytest.mark.drawn(6)) for name in ("glm4moe", "deepseek2"))]
)
def test_the_mtp_head_of_a_file(name: str, tmp_path: Path) -> None:
    """The layer of the head is a copy of a layer with attention, and all other tensors have different numbers."""
    shape, random = SHAPES[name], np.random.default_rng(5)
    count, source = shape.layers, shape.layers - (2 if name == "qwen35" else 1)
    layer = dict(gguf_models.tensors(shape, gguf_models.normal(np.random.RandomState(0))))
    copied, path = f"blk.{source}.", f"blk.{count}."
    tensors = {name.replace(copied, path): array for name, array in layer.items() if name.startswith(copied)}
    sizes = {"eh_proj": (256, 512), "enorm": (256,), "hnorm": (256,), "shared_head_norm": (256,)}
    parts = {name: random.standard_normal(size, np.float32) for name, size in sizes.items()}
    tensors |= {f"{path}nextn.{name}.weight": array for name, array in parts.items()}
    more = {f"{name}.block_count": count + 1, f"{name}.nextn_predict_layers": 1}
    file = write_with(tmp_path / "a.gguf", tensors, shape.arch, name, **more)
    folder = build_model(file, tmp_path / "model", ExportOptions(precision="kept", mtp=True))
    written = [read_model(folder / name).graph.initializers for name in ("model.onnx", "mtp.onnx")]
    decoder, head = ({name: tensor.array() for name, tensor in tensors.items()} for tensors in written)
    for ours, part in {"pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm"}.items():
        np.testing.assert_array_equal(head[f"model.{ours}.weight"], parts[part])
    np.testing.assert_array_equal(head["model.fc.MatMul.weight"], parts["eh_proj"].T)
    np.testing.assert_array_equal(head["model.layers.1.final_norm_layernorm.weight"], parts["shared_head_norm"])
    same = [name for name in head if name.startswith("model.layers.0.")]
    assert len(same) > 5
    for ours in same:
        np.testing.assert_array_equal(head[ours], decoder[ours.replace("layers.0.", f"layers.{source}.")])
    for changed, value, error in (
        (f"{path}nextn.hnorm.weight", None, InputError),
        (f"{path}nextn.embed_tokens.weight", 2 * layer["token_embd.weight"], UnsupportedModelError),
    ):
        file = write_with(tmp_path / f"{changed}.gguf", tensors | {changed: value}, shape.arch, name, **more)
        with pytest.raises(error, match=re.escape(changed)):
            plan_build(file, ExportOptions(precision="kept", mtp=True))
        assert plan_build(file).spec.mtp is None


def write_with(path: Path, tensors: dict[str, Any], arch: str = "llama", shape: str = "llama", **changes: Any) -> Path:
    """A model with some tensors replaced, added, or (None) left out."""
    writer = gguf.GGUFWriter(str(path), arch)
    for key, value in (gguf_models.metadata(SHAPES[shape]) | changes).items():
        gguf_models.add_value(writer, key, value)
    found = dict(gguf_models.tensors(SHAPES[shape], gguf_models.normal(np.random.RandomState(0)))) | tensors
    for name, values in found.items():
        if values is not None:
            writer.add_tensor(name, values)
    gguf_models.close(writer)
    return path


def test_an_unknown_architecture(tmp_path: Path) -> None:
    source = write_with(tmp_path / "a.gguf", {}, arch="llamma")
    with pytest.raises(UnsupportedModelError, match="architecture 'llamma' is not supported") as caught:
        plan_build(source)
    assert caught.value.fix == "use a model with a supported architecture"  # not a similar name: the weights differ


TENSORS: dict[str, tuple[dict[str, Any], str]] = {
    "no embeddings": ({"token_embd.weight": None}, "tensor 'token_embd.weight' is missing"),
    "no norm": ({"blk.1.attn_norm.weight": None}, "lacks 1 tensors .* 'blk.1.attn_norm.weight'"),
    "one that nobody knows": (
        {"blk.0.magic.weight": np.ones(4, np.float32)},
        "does not use, such as 'blk.0.magic.weight'",
    ),
    "too few divisors": ({"rope_freqs.weight": np.ones(4, np.float32)}, r"is F32 \[4\]"),
    "divisors of half": ({"rope_freqs.weight": np.ones(32, np.float16)}, r"is F16 \[32\]"),
    "a divisor of 0": ({"rope_freqs.weight": np.zeros(32, np.float32)}, "numbers that are not positive"),
    "one list of two": (
        {"rope_factors_long.weight": np.ones(32, np.float32)},
        "'rope_factors_short.weight' is not present",
    ),
    "NaN in a norm": ({"output_norm.weight": np.full(256, np.nan, np.float32)}, "model.norm.weight contains NaN"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors(name: str, tmp_path: Path) -> None:
    changes, message = TENSORS[name]
    with pytest.raises(InputError, match=message) as caught:
        build_model(write_with(tmp_path / "a.gguf", changes), tmp_path / "model")
    assert caught.value.why and caught.value.fix
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.gguf"]


def test_scales_that_are_no_numbers(tmp_path: Path) -> None:
    """Refused; with --force their blocks are zeros, and the tensor is named."""
    source = write_model(tmp_path / "a.gguf", SHAPES["llama"], "Q4_0")
    from genai.weight_files.gguf import GgufFile

    place = GgufFile(source).tensors["blk.0.ffn_up.weight"].first
    content = bytearray(source.read_bytes())
    content[place : place + 2] = np.array([np.inf], np.float16).tobytes()
    source.write_bytes(content)
    with pytest.raises(InputError, match=r"mlp.up_proj.weight contains NaN or infinite"):
        build_model(source, tmp_path / "model")
    plan = plan_build(source, force=True)
    execute(plan, tmp_path / "model")
    assert plan.weights.replaced == ["blk.0.ffn_up.weight"]


def test_a_hostile_template_is_kept_as_text_and_runs_within_limits(tmp_path: Path) -> None:
    """It cannot reach files or take for ever; see tests/text/test_template_sandbox.py for all that is tried."""
    import genai

    for number, template in enumerate(("{{ ''.__class__.__mro__ }}", "{% for i in range(10**9) %}x{% endfor %}")):
        source = write_model(tmp_path / f"{number}.gguf", SHAPES["llama"], **{"tokenizer.chat_template": template})
        with genai.LLM(build_model(source, tmp_path / str(number))) as llm, pytest.raises(ChatTemplateError):
            llm.render("hi")


def test_unknown_keys_are_named(tmp_path: Path) -> None:
    source = write_model(tmp_path / "a.gguf", SHAPES["llama"], **{"llama.attention.temperature_scale": 0.1})
    assert plan_build(source).remarks == ["a.gguf contains keys that are ignored: llama.attention.temperature_scale"]


@pytest.mark.parametrize("key", ["split.count", "split.no", "general.type"])
def test_a_list_in_the_place_of_one_value(key: str, tmp_path: Path) -> None:
    source = write_model(tmp_path / "a.gguf", SHAPES["llama"], **{key: [1, 2]})
    with pytest.raises(InputError, match=rf"{key} is a list, \[.*1.*") as caught:
        plan_build(source)
    assert caught.value.why and caught.value.fix


def test_the_same_token_at_the_end_of_many(tmp_path: Path) -> None:
    """It is found in one pass, not by looking for each token among all."""
    count = 200_000
    tokens = [f"t{number}" for number in range(count - 1)]
    writer = gguf.GGUFWriter(str(tmp_path / "a.gguf"), "llama")
    writer.add_array(T + "tokens", [*tokens, tokens[-1]])
    writer.add_string(T + "model", "gpt2")
    writer.add_tensor("token_embd.weight", np.zeros((count, 1), np.float32))
    gguf_models.close(writer)
    with pytest.raises(TokenizerError, match="two tokens have the text 't199998'"):
        plan_build(tmp_path / "a.gguf")

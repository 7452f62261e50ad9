"""Checkpoint folders as they come, and as they should not come: every fault is named before anything is written."""

from __future__ import annotations

import json
import math
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import genai
from genai.convert import build_model, plan_build
from genai.convert.options import ExportOptions
from genai.engine.decoder import compute as compute_pending
from genai.errors import ConfigError, GenaiError, InputError, ModelFolderError, TokenizerError, UnsupportedModelError
from genai.weight_files.safetensors import SafetensorsFile, read_safetensors

FP32 = ExportOptions(precision="fp32")
WEIGHTS = "model.safetensors"


@pytest.fixture
def checkpoint(golden: Any, letter_tokenizer: Path, tmp_path: Path) -> Path:
    return golden("llama_tied").write_checkpoint(tmp_path / "hf", letter_tokenizer)


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def change_tensors(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    tensors = {name: tensor.copy() for name, tensor in load_file(folder / WEIGHTS).items()}
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def refuse(folder: Path, error: type[GenaiError], text: str) -> None:
    """The build raises, and leaves nothing."""
    before = sorted(folder.parent.iterdir())
    with pytest.raises(error) as raised:
        build_model(folder, folder.parent / "out", FP32)
    assert text in str(raised.value)
    assert raised.value.why
    assert raised.value.fix
    assert sorted(folder.parent.iterdir()) == before


def shard(folder: Path) -> dict[str, str]:
    """Split the weights into two files; returns the index's weight_map."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = sorted(tensors)
    places = {name: f"model-0000{1 + (i >= len(names) // 2)}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(places.values()):
        save_file({name: tensors[name] for name in names if places[name] == file}, folder / file)
    write_index(folder, places)
    return places


def write_index(folder: Path, places: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def same_files(one: Path, two: Path) -> bool:
    return all((one / name).read_bytes() == (two / name).read_bytes() for name in ("model.onnx", "model.onnx.data"))


def test_shards_give_the_same_folder(checkpoint: Path, tmp_path: Path) -> None:
    whole = build_model(checkpoint, tmp_path / "whole", FP32)
    shard(checkpoint)
    assert same_files(whole, build_model(checkpoint, tmp_path / "shards", FP32))


def test_a_checkpoint_of_the_base_model_alone(golden: Any, letter_tokenizer: Path, tmp_path: Path) -> None:
    """GPT-2's own files leave "transformer." out, and hold masks."""
    folder = golden("gpt2").write_checkpoint(tmp_path / "hf", letter_tokenizer)
    whole = build_model(folder, tmp_path / "whole", FP32)
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(folder / WEIGHTS).items()}
    tensors["h.0.attn.bias"] = np.ones((1, 1, 4, 4), np.float32)
    save_file(tensors, folder / WEIGHTS)
    assert same_files(whole, build_model(folder, tmp_path / "bare", FP32))


def test_configurations_of_older_libraries(golden: Any, letter_tokenizer: Path, tmp_path: Path) -> None:
    """rope_theta and rope_scaling before they became rope_parameters; a tied head stored all the same."""
    folder = golden("llama_llama3").write_checkpoint(tmp_path / "hf", letter_tokenizer)
    new = build_model(folder, tmp_path / "new", FP32)
    config = json.loads((folder / "config.json").read_text())
    scaling = config.pop("rope_parameters")
    config |= {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}
    (folder / "config.json").write_text(json.dumps(config))
    assert same_files(new, build_model(folder, tmp_path / "old", FP32))


def test_a_tied_head_may_be_stored(checkpoint: Path, tmp_path: Path) -> None:
    bare = build_model(checkpoint, tmp_path / "bare", FP32)
    change_tensors(checkpoint, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"]}))
    assert same_files(bare, build_model(checkpoint, tmp_path / "stored", FP32))


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float64])
def test_float_types(checkpoint: Path, tmp_path: Path, dtype: Any) -> None:
    tensors = {name: tensor.astype(dtype) for name, tensor in load_file(checkpoint / WEIGHTS).items()}
    save_file(tensors, checkpoint / WEIGHTS)
    narrow = build_model(checkpoint, tmp_path / "narrow", FP32)
    save_file({name: tensor.astype(np.float32) for name, tensor in tensors.items()}, checkpoint / WEIGHTS)
    assert same_files(narrow, build_model(checkpoint, tmp_path / "wide", FP32))


def test_generation_config(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [5, 2], "do_sample": True, "temperature": 0.6, "top_k": 20})
    )
    config = json.loads((build_model(checkpoint, tmp_path / "out", FP32) / "genai_config.json").read_text())
    assert config["model"]["eos_token_id"] == [5, 2]
    assert (config["search"]["do_sample"], config["search"]["temperature"], config["search"]["top_k"]) == (
        True,
        0.6,
        20,
    )
    assert config["search"]["top_p"] == 1.0


def test_fp16_weights(checkpoint: Path, golden: Any, tmp_path: Path) -> None:
    wide, narrow = (
        build_model(checkpoint, tmp_path / name, ExportOptions(precision=name)) for name in ("fp32", "fp16")
    )
    sizes = [(folder / "model.onnx.data").stat().st_size for folder in (wide, narrow)]
    assert sizes[1] < 0.6 * sizes[0]
    logits = []
    for folder in (wide, narrow):
        with genai.Model(folder) as model:
            sequence = model.decoder.open()
            sequence.append(golden("llama_tied").tokens)
            logits.append(compute_pending(model.decoder, [sequence], all_rows=True)[0])
    assert 0 < np.abs(logits[0] - logits[1]).max() < 0.02 * np.abs(logits[0]).max()


def test_progress_tells_every_byte(checkpoint: Path, tmp_path: Path) -> None:
    seen: list[int] = []
    plan = plan_build(checkpoint, progress=seen.append)
    assert plan.read_bytes == sum(tensor.nbytes for tensor in load_file(checkpoint / WEIGHTS).values())
    build_model(checkpoint, tmp_path / "out", progress=seen.append)
    assert sum(seen) == plan.read_bytes


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8", "int4"])
@pytest.mark.parametrize("name", ["llama_tied", "phi", "mixtral", "gpt2", "gemma3_text"])
def test_size_is_known_before(name: str, precision: Any, golden: Any, letter_tokenizer: Path, tmp_path: Path) -> None:
    folder = golden(name).write_checkpoint(tmp_path / "hf", letter_tokenizer)
    options = ExportOptions(precision=precision)
    plan = plan_build(folder, options)
    written = sum(file.stat().st_size for file in build_model(folder, tmp_path / "out", options).iterdir())
    assert written <= plan.written_bytes
    assert plan.written_bytes - (1 << 20) <= 1.2 * written


# --- faults ------------------------------------------------------------------------------------------------------


def test_not_a_folder(tmp_path: Path) -> None:
    refuse(tmp_path / "nowhere", ModelFolderError, "nowhere: not a checkpoint")
    (tmp_path / "notes.txt").write_text("?")
    refuse(tmp_path / "notes.txt", ModelFolderError, "notes.txt: not a checkpoint")


@pytest.mark.parametrize("text", ["{", "[]", '"llama"', "[" * 100_000, "\x00"])
def test_config_is_no_object(checkpoint: Path, text: str) -> None:
    (checkpoint / "config.json").write_text(text)
    refuse(checkpoint, InputError, "config.json")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"hidden_size": "60"}, "hidden_size is '60'"),
        ({"hidden_size": None}, "no hidden_size"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"eos_token_id": None}, "no eos_token_id"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "RoPE scaling type 'spiral' is not supported"),
        ({"rope_parameters": {"rope_type": "mrope"}}, "RoPE scaling type 'mrope' is not supported"),
        ({"rope_parameters": {"rope_type": "linear"}}, "no factor of the RoPE scaling"),
        ({"rope_parameters": 7}, "rope_parameters is 7"),
        ({"attention_bias": "no"}, "attention_bias is 'no'"),
    ],
)
def test_config_values(checkpoint: Path, changes: dict[str, Any], text: str) -> None:
    change_config(checkpoint, **changes)
    refuse(checkpoint, ConfigError, text)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"temperature": math.nan}, "generation_config.json: temperature = nan"),
        ({"top_p": 2.0}, "generation_config.json: top_p = 2.0"),
        ({"repetition_penalty": 0}, "generation_config.json: repetition_penalty = 0"),
    ],
)
def test_generation_config_that_cannot_be_obeyed(checkpoint: Path, values: dict[str, Any], text: str) -> None:
    (checkpoint / "generation_config.json").write_text(json.dumps(values))
    refuse(checkpoint, ConfigError, text)
    (checkpoint / "generation_config.json").write_text('{"top_p": "much"}')
    refuse(checkpoint, TokenizerError, "generation_config.json: top_p = 'much'")
    (checkpoint / "generation_config.json").write_text("[]")
    refuse(checkpoint, InputError, "generation_config.json: the JSON value is a list")


def test_unknown_architecture(checkpoint: Path) -> None:
    # No similar type is suggested: the weights of gemma9 are not those of gemma.
    for unknown in ("lama", "gemma9"):
        change_config(checkpoint, model_type=unknown)
        refuse(checkpoint, UnsupportedModelError, "use a checkpoint of a supported type, or add a type")
    change_config(checkpoint, model_type="../../etc/passwd")
    refuse(checkpoint, UnsupportedModelError, "the supported types are apertus, arcee,")


def test_unknown_parts(golden: Any, letter_tokenizer: Path, tmp_path: Path) -> None:
    falcon = golden("falcon").write_checkpoint(tmp_path / "falcon", letter_tokenizer)
    change_config(falcon, alibi=True)
    refuse(falcon, UnsupportedModelError, "ALiBi")
    gpt2 = golden("gpt2").write_checkpoint(tmp_path / "gpt2", letter_tokenizer)
    change_config(gpt2, scale_attn_by_inverse_layer_idx=True)
    refuse(gpt2, UnsupportedModelError, "sets scale_attn_by_inverse_layer_idx to true")
    gemma = golden("gemma2").write_checkpoint(tmp_path / "gemma", letter_tokenizer)
    change_config(gemma, layer_types=["chunked_attention"] * 7)
    refuse(gemma, UnsupportedModelError, "chunked_attention")
    change_config(gemma, layer_types=["full_attention"] * 3)
    refuse(gemma, ConfigError, "layer_types")
    change_config(gemma, layer_types=None, hidden_activation="mish")
    refuse(gemma, UnsupportedModelError, "'mish'")


def test_missing_shard(checkpoint: Path) -> None:
    places = shard(checkpoint)
    (checkpoint / sorted(set(places.values()))[1]).unlink()
    refuse(checkpoint, ModelFolderError, "1 of 2 shards are missing: model-00002")


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "..", "a\\b", ""])
def test_path_traversal(checkpoint: Path, name: str) -> None:
    places = shard(checkpoint)
    write_index(checkpoint, {**places, "model.norm.weight": name})
    refuse(checkpoint, InputError, "contains the file name")


@pytest.mark.parametrize("places", [None, {}, [], {"model.norm.weight": 3}])
def test_index_without_a_map(checkpoint: Path, places: Any) -> None:
    shard(checkpoint)
    write_index(checkpoint, places)
    refuse(checkpoint, InputError, "weight_map")


def test_a_tensor_in_two_shards(checkpoint: Path) -> None:
    places = shard(checkpoint)
    one, two = sorted(set(places.values()))
    save_file(load_file(checkpoint / one), checkpoint / two)
    refuse(checkpoint, InputError, "is in model-00001")


class Exploding:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/pickle_was_opened",)


def test_pickles_are_never_opened(checkpoint: Path) -> None:
    (checkpoint / WEIGHTS).unlink()
    (checkpoint / "pytorch_model.bin").write_bytes(pickle.dumps(Exploding()))
    refuse(checkpoint, ModelFolderError, "pytorch_model.bin, which is a pickle")
    assert not Path("/tmp/pickle_was_opened").exists()
    (checkpoint / "pytorch_model.bin").unlink()
    refuse(checkpoint, ModelFolderError, "neither model.safetensors")


# NumPy represents at most 64 sizes, whose product without zeros, in bytes, fits in 63 bits.
SHAPES = [
    [1] * 64, [1] * 65, [1] * 1000, [0, 2**60], [0, 2**61], [0, 2**62, 2**62], [2**63, 0], [2**64 - 1, 0], [0] * 65,
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{len(shape)}x{shape[-1]}")
@pytest.mark.parametrize("mapped", [True, False])
def test_shapes_that_numpy_cannot_represent(tmp_path: Path, shape: list[int], mapped: bool) -> None:
    size = 4 * math.prod(shape)
    header = json.dumps({"w" * 300: {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}}).encode()
    path = tmp_path / WEIGHTS
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(size))

    def read() -> Any:
        file = SafetensorsFile(path)
        return {name: file.read(name) for name in file.tensors} if mapped else read_safetensors(path)

    try:
        np.empty(math.prod(shape), np.float32).reshape(shape)
    except (ValueError, OverflowError):
        with pytest.raises(InputError, match="at most 64 sizes are supported") as caught:
            read()
        assert len(str(caught.value)) < 1500 and caught.value.fix
    else:
        assert [list(array.shape) for array in read().values()] == [shape]


def test_missing_tensor(checkpoint: Path) -> None:
    change_tensors(checkpoint, lambda tensors: tensors.pop("model.layers.3.mlp.up_proj.weight"))
    lacking = "lacks 1 tensors that its configuration requires, such as 'model.layers.3.mlp.up_proj"
    refuse(checkpoint, InputError, lacking)


def test_left_over_tensor(checkpoint: Path) -> None:
    """A bias that config.json does not speak of would silently be dropped."""
    bias = np.ones(60, np.float32)
    change_tensors(checkpoint, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": bias}))
    refuse(checkpoint, InputError, "has 1 tensors that its configuration does not use")


def test_shapes_that_contradict_the_config(checkpoint: Path, golden: Any, letter_tokenizer: Path) -> None:
    change_config(checkpoint, intermediate_size=76)
    refuse(checkpoint, InputError, "has shape [75, 60], expected [76, 60]")
    phi3 = golden("phi3").write_checkpoint(checkpoint.parent / "phi3", letter_tokenizer)
    change_config(phi3, num_key_value_heads=3)
    refuse(phi3, InputError, "expected [30, 60]")
    neox = golden("gpt_neox").write_checkpoint(checkpoint.parent / "neox", letter_tokenizer)
    change_tensors(
        neox, lambda t: t.update({"gpt_neox.layers.0.attention.query_key_value.weight": np.ones((7, 60), np.float32)})
    )
    refuse(neox, InputError, "model.layers.0.self_attn.q_proj.weight cannot be extracted from")


def test_integer_weights(checkpoint: Path) -> None:
    change_tensors(checkpoint, lambda t: t.update({"model.norm.weight": np.ones(60, np.int8)}))
    refuse(checkpoint, InputError, "model.norm.weight has type int8")


@pytest.mark.parametrize("precision", ["fp32", "int4"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_not_finite(checkpoint: Path, tmp_path: Path, value: float, precision: Any) -> None:
    def spoil(tensors: dict[str, Any]) -> None:
        tensors["model.layers.2.mlp.down_proj.weight"][3, 5] = value

    change_tensors(checkpoint, spoil)
    with pytest.raises(InputError, match=r"model\.layers\.2\.mlp\.down_proj\.weight contains NaN or infinite values"):
        build_model(checkpoint, tmp_path / "out", ExportOptions(precision=precision))
    plan = plan_build(checkpoint, ExportOptions(precision=precision), force=True)
    from genai.convert.build import execute

    execute(plan, tmp_path / "forced")
    assert plan.weights.replaced == ["model.layers.2.mlp.down_proj.weight"]


def test_fp16_overflow(checkpoint: Path, tmp_path: Path) -> None:
    def spoil(tensors: dict[str, Any]) -> None:
        tensors["model.layers.2.mlp.down_proj.weight"][3, 5] = 1e6

    change_tensors(checkpoint, spoil)
    with pytest.raises(InputError, match="the largest float16 number is 65504"):
        build_model(checkpoint, tmp_path / "out", ExportOptions(precision="fp16"))
    assert not (tmp_path / "out").exists()


def test_tied_head_that_differs(checkpoint: Path) -> None:
    def untie(tensors: dict[str, Any]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
        tensors["lm_head.weight"][7, 7] += 1

    change_tensors(checkpoint, untie)
    refuse(checkpoint, InputError, "lm_head.weight differs from model.embed_tokens.weight")


def test_no_tokenizer(checkpoint: Path) -> None:
    (checkpoint / "tokenizer.json").unlink()
    refuse(checkpoint, ModelFolderError, "tokenizer.json is missing, and there is no other tokenizer")
    (checkpoint / "tokenizer.model").write_bytes(b"\n")
    refuse(checkpoint, TokenizerError, "is not a SentencePiece model that can be read")
    (checkpoint / "tokenizer.model").unlink()
    (checkpoint / "tekken.json").write_text("{}")
    refuse(checkpoint, TokenizerError, "is not a tekken file that can be read")


def test_tokenizer_that_is_none(checkpoint: Path) -> None:
    (checkpoint / "tokenizer.json").write_text('{"model": 3}')
    refuse(checkpoint, TokenizerError, "is not a usable tokenizer")


def test_tokenizer_larger_than_the_vocabulary(checkpoint: Path) -> None:
    write_added_token(checkpoint, special=False)
    refuse(checkpoint, InputError, "the tokenizer has the token id 101, but the model's largest token id is 100")


def test_a_special_token_beyond_the_vocabulary_is_said(checkpoint: Path) -> None:
    """Gemma 3's text models share a tokenizer with those that see images."""
    write_added_token(checkpoint, special=True)
    assert plan_build(checkpoint).remarks == ["the special token '<extra>' (101) is not in the model's vocabulary"]


def write_added_token(folder: Path, *, special: bool) -> None:
    from tokenizers import AddedToken, Tokenizer, models

    tokenizer = Tokenizer(models.BPE({f"t{i}": i for i in range(101)}, []))
    tokenizer.add_tokens([AddedToken("<extra>", special=special)])
    tokenizer.save(str(folder / "tokenizer.json"))


# --- malformed safetensors ---------------------------------------------------------------------------------------


def raw_file(path: Path, header: Any, body: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + body)
    return path


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "header",
    [
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        [],
        {"a": 3},
        {"a": {"dtype": "F32", "shape": [2]}},
        {"a": {**GOOD, "dtype": "F7"}},
        {"a": {**GOOD, "dtype": "C64", "shape": [1]}},
        {"a": {**GOOD, "dtype": "F4", "shape": [16]}},
        {"a": {**GOOD, "shape": [-2]}},
        {"a": {**GOOD, "shape": [2.0]}},
        {"a": {**GOOD, "shape": [True, 2]}},
        {"a": {**GOOD, "shape": "ab"}},
        {"a": {**GOOD, "data_offsets": [0, 12]}},
        {"a": {**GOOD, "data_offsets": [8, 0]}},
        {"a": {**GOOD, "data_offsets": [0, 4]}},
        {"a": {**GOOD, "data_offsets": [0]}},
        {"a": {**GOOD, "shape": [10**30]}},
        {"a": {**GOOD, "shape": [2**32, 2**32]}},
        {"a": {**GOOD, "data_offsets": [-8, 0]}},
        {"a": GOOD, "b": GOOD},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}},
        b'{"a": %b, "a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}' % json.dumps(GOOD).encode(),
    ],
)
def test_malformed_headers(tmp_path: Path, header: Any) -> None:
    with pytest.raises(InputError, match="is not a valid safetensors file") as raised:
        SafetensorsFile(raw_file(tmp_path / "m.safetensors", header, bytes(8)))
    assert raised.value.why


@pytest.mark.parametrize("length", [10**18, 1000, 2**64 - 1])
def test_header_longer_than_the_file(tmp_path: Path, length: int) -> None:
    with pytest.raises(InputError, match="is not a valid safetensors file"):
        SafetensorsFile(raw_file(tmp_path / "m.safetensors", {}, length=length))


@pytest.mark.parametrize("content", [b"", b"abc"])
def test_file_shorter_than_a_header(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.safetensors").write_bytes(content)
    with pytest.raises(InputError, match="is not a valid safetensors file"):
        SafetensorsFile(tmp_path / "m.safetensors")


def test_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        SafetensorsFile(tmp_path)


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    tensors = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.array(3.5),
        "c": np.zeros((0, 4), np.float16),
        "d": np.arange(5).astype(ml_dtypes.bfloat16),
    }
    save_file(tensors, tmp_path / "m.safetensors", {"format": "pt"})
    file = SafetensorsFile(tmp_path / "m.safetensors")
    assert file.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert file.read(name).dtype == tensor.dtype
        np.testing.assert_array_equal(file.read(name), tensor)

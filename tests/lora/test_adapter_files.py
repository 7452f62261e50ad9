"""Adapters on disk: PEFT folders and onnxruntime's files, written, read, and damaged in every way."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flatbuffers
import numpy as np
import pytest
from safetensors.numpy import save_file

import genai
from genai import AdapterFormat, InputError, LoraAdapter, Model, ModelFolderError, OrtValue, StateError
from genai.lora.bind import bind
from genai.lora.names import Module, module_of
from genai.lora.parameters import AdapterParameters, input_names, write_onnx_adapter
from genai.lora.peft import write_peft
from genai.lora.read import read_adapter
from genai.lora.store import base_identity
from genai.models.folders import bundled_adapter

RANK = 4
MODULE = "model.layers.{}.self_attn.q_proj"


def tensors(layers: Any = (0, 1), rank: int = RANK, a: Any = None, b: Any = None) -> dict[str, np.ndarray]:
    rng, found = np.random.default_rng(0), {}
    for layer in layers:
        name = f"base_model.model.{MODULE.format(layer)}"
        found[f"{name}.lora_A.weight"] = rng.standard_normal(a or (rank, 256)).astype(np.float32)
        found[f"{name}.lora_B.weight"] = rng.standard_normal(b or (256, rank)).astype(np.float32)
    return found


@pytest.fixture
def peft_folder(tmp_path: Path) -> Callable[..., Path]:
    def make(arrays: dict[str, np.ndarray] | None = None, **config: Any) -> Path:
        folder = tmp_path / "adapter"
        folder.mkdir(exist_ok=True)
        given = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, **config}
        (folder / "adapter_config.json").write_text(json.dumps(given))
        save_file(tensors() if arrays is None else arrays, str(folder / "adapter_model.safetensors"))
        return folder

    return make


@pytest.fixture(scope="module")
def places(bundled: Model) -> Any:
    return bundled.lora_targets()


# --- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("model.layers.3.self_attn.q_proj", Module(3, "q_proj")),
        ("/model/layers.3/attn/q_proj/MatMul/output_0", Module(3, "q_proj")),
        ("model.layers.12.mlp.down_proj", Module(12, "down_proj")),
        ("model.layers.0.attn.qkv_proj", Module(0, "qkv_proj")),
        ("transformer.h.7.attn.c_proj", Module(7, "o_proj")),
        ("transformer.h.7.mlp.c_proj", Module(7, "down_proj")),
        ("transformer.h.7.attn.c_attn", Module(7, "qkv_proj")),
        ("model.layers.1.self_attn.dense", Module(1, "o_proj")),
        ("gpt_neox.layers.2.mlp.dense_h_to_4h", Module(2, "up_proj")),
        ("model.layers.1.feed_forward.w2", Module(1, "down_proj")),
        ("model.layers.1.mlp.shared_expert.up_proj", Module(1, "shared_expert.up_proj")),
        ("model.layers.1.mlp.experts.3.up_proj", None),
        ("model.layers.1.block_sparse_moe.experts.0.w1", None),
        ("/model/layers.0/attn/q_proj/lora_A/MatMul", None),
        ("model.layers.1.input_layernorm", None),
        ("lm_head", None),
        ("model.vision_tower.encoder.layers.3.self_attn.q_proj", None),
        ("visual.blocks.3.attn.q_proj", None),
        ("model.encoder.layers.3.self_attn.q_proj", None),
        ("model.language_model.layers.3.self_attn.q_proj", Module(3, "q_proj")),
        ("base_model.model.language_model.model.layers.3.mlp.up_proj", Module(3, "up_proj")),
        ("/model/language_model/layers.3/self_attn/q_proj/MatMul_output_0", Module(3, "q_proj")),
        ("model.layers.99999999999.self_attn.q_proj", None),
        ("", None),
    ],
)
def test_names_of_projections(name: str, module: Module | None) -> None:
    assert module_of(name) == module


# --- PEFT ------------------------------------------------------------------------------------------------------------


def test_scales(peft_folder: Callable[..., Path]) -> None:
    first, second = MODULE.format(0), MODULE.format(1)
    for config, scales in (
        ({}, (2.0, 2.0)),
        ({"use_rslora": True}, (4.0, 4.0)),
        ({"lora_alpha": 2, "alpha_pattern": {"layers.1.self_attn.q_proj": 6}}, (0.5, 1.5)),
        ({"alpha_pattern": {".*q_proj": 1}}, (0.25, 0.25)),
    ):
        pairs = read_adapter(peft_folder(**config)).pairs
        assert (pairs[first].scale, pairs[second].scale) == scales
    arrays = tensors((0,)) | tensors((1,), rank=2)
    pairs = read_adapter(peft_folder(arrays, rank_pattern={"layers.1.self_attn.q_proj": 2})).pairs
    assert (pairs[first].scale, pairs[second].scale) == (2.0, 4.0)


def test_an_adapter_trained_on_another_base(peft_folder: Callable[..., Path], bundled: Model) -> None:
    adapters = genai.Adapters(bundled)
    adapters.load(peft_folder(genai_base_sha256=base_identity(bundled.folder)), "same")
    with pytest.raises(InputError, match="was trained on another base"):
        adapters.load(peft_folder(genai_base_sha256="0" * 64), "other")
    assert adapters.names == ["same"]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"use_dora": True}, "use_dora is True"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save is"),
    ({"bias": "all"}, "bias is 'all'"),
    ({"lora_bias": True}, "lora_bias is True"),
    ({"peft_type": "LOHA"}, "peft_type is 'LOHA'"),
    ({"trainable_token_indices": [1]}, "trainable_token_indices"),
    ({"target_parameters": ["x"]}, "target_parameters"),
    ({"r": 5}, "has rank 4, but adapter_config.json has rank 5"),
    ({"r": 0}, "r is 0"),
    ({"lora_alpha": "x"}, "lora_alpha is 'x'"),
    ({"lora_alpha": math.nan}, "lora_alpha is nan"),
    ({"lora_alpha": True}, "lora_alpha is True"),
    ({"rank_pattern": []}, ""),
    ({"rank_pattern": [1]}, "rank_pattern is"),
    ({"alpha_pattern": {"(": 1}}, "is not supported"),
    ({"alpha_pattern": {"a" * 2000: 1}}, "longer than 1000"),
    ({"alpha_pattern": {".*": "x"}}, "'x'"),
    ({"alpha_pattern": {"(?!model).*q_proj": 1}}, "is not supported"),
    ({"r": 10**400}, "r is 1000"),
    ({"lora_alpha": -(10**400)}, "lora_alpha is -1000"),
    ({"lora_alpha": 1e39}, "lora_alpha is 1e.39"),
    ({"use_rslora": "false"}, "use_rslora is 'false'"),
    ({"use_bdlora": {"nblocks": 2}}, "use_bdlora is"),
    ({"kasa_config": {"beta": 1}}, "kasa_config is"),
    ({"monteclora_config": {"num_samples": 1}}, "monteclora_config is"),
    ({"velora_config": {"num_groups": 1}}, "velora_config is"),
    # These factors fit a base from which a part was taken.
    *(({"init_lora_weights": name}, "init_lora_weights is") for name in
      ("pissa", "pissa_niter_4", "OLoRA", "corda", "lora_ga", "loftq")),
    *(({"init_lora_weights": name}, "") for name in (True, "gaussian", "orthogonal", "eva")),
]  # fmt: skip


@pytest.mark.parametrize(("config", "message"), REFUSED, ids=[str(index) for index in range(len(REFUSED))])
def test_configs_that_are_refused(peft_folder: Callable[..., Path], config: dict[str, Any], message: str) -> None:
    folder = peft_folder(**config)
    if not message:
        read_adapter(folder)
        return
    with pytest.raises(InputError, match=message) as caught:
        read_adapter(folder)
    assert caught.value.why
    assert caught.value.fix


@pytest.mark.parametrize(
    ("patterns", "scales"),
    [
        ({"q_proj": 8, "layers.1.self_attn.q_proj": 16}, (2, 2)),  # the first that matches, in the config's order
        ({"layers.1.self_attn.q_proj": 16, "q_proj": 8}, (2, 4)),
        ({"proj": 8, "_proj": 8, "ttn.q_proj": 8}, (1, 1)),  # parts of names are no names
        ({"self_attn": 8, "layers.1": 8, "q_proj.": 8}, (1, 1)),  # nor are beginnings
        ({r"^model\.layers\.0\..*": 8}, (2, 1)),
        ({r"layers\.[1-9]\.self_attn\.(q|v)_proj$": 8, "k_proj|o_proj": 12}, (1, 2)),
        ({"": 8}, (1, 1)),
    ],
)
def test_patterns_as_peft_matches_them(
    peft_folder: Callable[..., Path], patterns: dict[str, float], scales: tuple[float, float]
) -> None:
    pairs = read_adapter(peft_folder(lora_alpha=4, alpha_pattern=patterns)).pairs
    assert tuple(pairs[MODULE.format(layer)].scale for layer in (0, 1)) == scales


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"target_modules": ["q_proj"], "layers_to_transform": []}, ""),
        ({"target_modules": ["q_proj"], "layers_to_transform": [0, 1], "layers_pattern": "layers"}, ""),
        ({"target_modules": ["v_proj", "self_attn.q_proj"]}, ""),
        ({"target_modules": [MODULE.format(0), MODULE.format(1)], "layers_to_transform": 0}, ""),  # whole names
        ({"target_modules": "ALL-linear", "exclude_modules": ["lm_head", "proj", "layers.0.self_attn"]}, ""),
        ({"target_modules": r".*\.layers\.\d+\.self_attn\.q_proj", "exclude_modules": "vision.*"}, ""),
        ({"target_modules": r"(?!.*vision).*q_proj", "exclude_modules": "(?=x)"}, ""),  # re2 has no look-ahead
        ({"target_modules": None, "exclude_modules": []}, ""),
        ({"target_modules": ["v_proj", "_proj"]}, "target_modules is .*layers.0.self_attn.q_proj"),
        ({"target_modules": []}, "target_modules is"),
        ({"target_modules": "q_proj"}, "target_modules is 'q_proj'"),  # a string matches the whole name
        ({"exclude_modules": ["layers.1.self_attn.q_proj"]}, "exclude_modules is .*layers.1"),
        ({"exclude_modules": r".*\.1\..*"}, "exclude_modules is .*layers.1"),
        ({"target_modules": ["q_proj"], "layers_to_transform": [0]}, r"layers_to_transform is \[0\].*layers.1"),
        ({"layers_to_transform": 1}, "layers_to_transform is 1.*layers.0"),
        ({"layers_to_transform": [0, 1], "layers_pattern": ["h", "blocks"]}, "layers_pattern is .*layers.0"),
        ({"target_modules": ".*q_proj", "layers_to_transform": [0, 1]}, "and layers_to_transform is set"),
        ({"target_modules": [1]}, r"target_modules is \[1\]"),
        ({"exclude_modules": {"a": 1}}, "exclude_modules is {"),
        ({"layers_to_transform": ["0"]}, "layers_to_transform is"),
        ({"layers_to_transform": True}, "layers_to_transform is True"),
        ({"layers_to_transform": 0, "layers_pattern": 3}, "layers_pattern is 3"),
        ({"layers_to_transform": 0, "layers_pattern": "("}, r"layers_pattern is '\('"),
    ],
)
def test_the_config_selects_modules(peft_folder: Callable[..., Path], config: dict[str, Any], message: str) -> None:
    """PEFT creates factors only for the selected modules, and ignores the other tensors of the file."""
    folder = peft_folder(**config)
    if not message:
        assert len(read_adapter(folder).pairs) == 2
        return
    with pytest.raises(InputError, match=message) as caught:
        read_adapter(folder)
    assert "adapter_config.json" in caught.value.what
    assert caught.value.why
    assert caught.value.fix


def test_a_selection_that_cannot_be_compared(peft_folder: Callable[..., Path], caplog: Any) -> None:
    read_adapter(peft_folder(target_modules="(?!.*vision).*v_proj"))
    assert "was not compared with the modules" in caplog.text


def test_more_patterns_than_can_be_tried(peft_folder: Callable[..., Path]) -> None:
    folder = peft_folder(tensors(range(600), 1, (1, 2), (2, 1)), r=1, alpha_pattern={f"x{i}": 1 for i in range(2000)})
    with pytest.raises(InputError, match="has 2000 patterns for 600 modules"):
        read_adapter(folder)


def test_a_pattern_that_would_take_for_ever(peft_folder: Callable[..., Path]) -> None:
    read_adapter(peft_folder(alpha_pattern={"(a+)+" * 20 + "b": 1}))


def renamed(old: str, new: str) -> dict[str, np.ndarray]:
    return {name.replace(old, new): array for name, array in tensors().items()}


TENSORS: list[tuple[dict[str, np.ndarray], str]] = [
    ({}, "contains no factors"),
    (renamed("lora_A", "lora_embedding_A"), "the embedding was adapted"),
    (tensors() | {"base_model.model.x.lora_magnitude_vector": np.zeros(3, np.float32)}, "DoRA"),
    (tensors() | {"base_model.model.lm_head.modules_to_save.weight": np.zeros(3, np.float32)}, "whole modules"),
    (tensors() | {"strange": np.zeros(3, np.float32)}, "neither lora_A nor lora_B"),
    ({name: array for name, array in tensors().items() if "lora_B" not in name}, "has no factor B"),
    ({name: array for name, array in tensors().items() if "0.self_attn.q_proj.lora_A" not in name}, "has no factor A"),
    (tensors(b=(256, 3)), "with the same rank"),
    (tensors(a=(4, 256, 1)), "A must be .rank, inputs."),
    ({name: array.astype(np.int8) for name, array in tensors().items()}, "is int8"),
    ({name: array > 0 for name, array in tensors().items()}, "is bool"),
    (tensors() | {"base_model.model.lm_head.base_layer.weight": np.zeros(3, np.float32)}, "the embedding or the head"),
]


@pytest.mark.parametrize(("arrays", "message"), TENSORS, ids=[str(index) for index in range(len(TENSORS))])
def test_tensors_that_are_refused(
    peft_folder: Callable[..., Path], arrays: dict[str, np.ndarray], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        read_adapter(peft_folder(arrays))


def test_two_tensors_of_one_name(peft_folder: Callable[..., Path]) -> None:
    """The safetensors library would keep the second entry, and the bytes of the first would be unknown."""
    folder = peft_folder()
    path = folder / "adapter_model.safetensors"
    whole = path.read_bytes()
    header, data = whole[8 : 8 + int.from_bytes(whole[:8], "little")], whole[8 + int.from_bytes(whole[:8], "little") :]
    first, entry = next(iter(json.loads(header).items()))
    doubled = b"{" + json.dumps({first: entry})[1:-1].encode() + b"," + header.rstrip()[1:]
    path.write_bytes(len(doubled).to_bytes(8, "little") + doubled + data)
    with pytest.raises(InputError, match=r"'base_model.* occurs twice in the header"):
        read_adapter(folder)


def test_a_file_that_is_cut_while_it_is_read(peft_folder: Callable[..., Path]) -> None:
    """The factors are copies from when the file was opened; reading a truncated memory map would crash the process."""
    folder = peft_folder(tensors(layers=range(6)))
    read, path = read_adapter(folder), folder / "adapter_model.safetensors"
    before = {name: pair.b.copy() for name, pair in read.pairs.items()}
    os.truncate(path, 0)
    for name, pair in read.pairs.items():
        np.testing.assert_array_equal(pair.b, before[name])


def test_folders_that_are_none(tmp_path: Path, peft_folder: Callable[..., Path]) -> None:
    (tmp_path / "weights.safetensors").write_bytes(b"x")
    for path, why in (
        ("nowhere", "no such folder or file"),
        ("weights.safetensors", "neither an .onnx_adapter file nor a GGUF file"),
    ):
        with pytest.raises(ModelFolderError, match="not an adapter") as caught:
            read_adapter(tmp_path / path)
        assert why in caught.value.why
    for odd in (None, 5, b"x", "x" * 5000):
        with pytest.raises(InputError, match="the adapter's path is"):
            read_adapter(odd)  # type: ignore[arg-type]
    with pytest.raises(ModelFolderError, match=r"no adapter_config\.json"):
        read_adapter(tmp_path)
    folder = peft_folder()
    whole = (folder / "adapter_model.safetensors").read_bytes()
    for length in (0, 5, 100, len(whole) - 1):
        (folder / "adapter_model.safetensors").write_bytes(whole[:length])
        with pytest.raises(InputError, match="valid safetensors"):
            read_adapter(folder)
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelFolderError, match=r"no adapter_model\.safetensors"):
        read_adapter(folder)
    (folder / "adapter_model.bin").write_bytes(b"\x80\x04N.")
    with pytest.raises(ModelFolderError, match="is a pickle"):
        read_adapter(folder)
    (folder / "adapter_config.json").write_text("[1]")
    with pytest.raises(InputError, match="the JSON value is a list"):
        read_adapter(folder)


# --- fitting a base --------------------------------------------------------------------------------------------------


def adapted(name: str, a: Any = (4, 256), b: Any = (256, 4), value: float = 0.1) -> AdapterParameters:
    from genai.lora.parameters import Pair

    pair = Pair(np.full(a, value, np.float32), np.full(b, value, np.float32))
    return AdapterParameters(Path("here"), {name: pair}, "peft")


def test_what_does_not_fit_the_base(places: Any) -> None:
    good = MODULE.format(0)
    assert sum(map(len, bind(adapted(good), places))) == 1
    for given, message in (
        (adapted(good, b=(255, 4)), "256 inputs and 256 outputs"),
        (adapted(good, a=(4, 128)), "256 inputs and 256 outputs"),
        (adapted(good, a=(0, 256), b=(256, 0)), "has rank 0"),
        (adapted(good, a=(1025, 256), b=(256, 1025)), "has rank 1025"),
        (adapted(good, value=math.nan), "not finite"),
        (adapted(good, value=math.inf), "not finite"),
        (adapted("model.layers.0.self_attn.x_proj"), "not a projection of the base"),
        (adapted("model.layers.3.self_attn.q_prj"), r"did you mean 'layers\.3\.q_proj'"),
        (adapted("model.layers.3.mlp.upp_proj"), r"did you mean 'layers\.3\.up_proj'"),
        (adapted("transformer.h.0.self_attention.query_key_value"), "genai lora merge"),
        (adapted("model.layers.77.self_attn.q_proj"), "did you mean 'layers.[0-9]+.q_proj'"),
        (adapted("lm_head"), "lm_head is not a LoRA target"),
        (adapted("model.layers.0.mlp.experts.1.w1"), "routed experts are not"),
        (adapted("model.layers.0.mlp.experts.1.up_proj"), "fix: use an adapter that was trained on this base"),
        (AdapterParameters(Path("here"), {}, "peft"), "the adapter would have no effect"),
    ):
        with pytest.raises(InputError, match=message) as caught:
            bind(given, places)
        assert caught.value.fix
    both = adapted(good)
    twice = AdapterParameters(Path("h"), {**both.pairs, "model.layers.0.attn.q_proj": both.pairs[good]}, "peft")
    with pytest.raises(InputError, match=r"are both layers\.0\.q_proj"):
        bind(twice, places)


def test_large_numbers_stay_what_they_are(places: Any) -> None:
    """Beyond float16, factors are float32."""
    large = adapted(MODULE.format(0), value=1e5)
    assert {one.a.dtype for place in bind(large, places) for one in place} == {np.dtype(np.float32)}
    for tiny in (1e-8, 1e-30):  # not zero, nor rounded to a few bits
        (factors,) = (one for place in bind(adapted(MODULE.format(0)), places, scale=tiny) for one in place)
        np.testing.assert_allclose(factors.b, 0.1 * tiny, rtol=1e-6)
    small = adapted(MODULE.format(0))
    assert {one.a.dtype for place in bind(small, places) for one in place} == {np.dtype(np.float16)}


def test_a_model_without_places(bundled: Model) -> None:
    with pytest.raises(InputError, match="Adapters needs a Model, not str"):
        genai.Adapters("pebble")  # type: ignore[arg-type]
    adapters = genai.Adapters(bundled)
    with pytest.raises(StateError):
        __import__("copy").copy(adapters)
    assert repr(adapters) == "Adapters()"


# --- onnxruntime's files ---------------------------------------------------------------------------------------------


def test_written_and_read(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    arrays = {
        f"n{index}": rng.standard_normal((index + 1, 3)).astype(dtype)
        for index, dtype in enumerate((np.float32, np.float16, np.float64))
    } | {"empty": np.zeros((4, 0), np.float32), "whole": np.arange(5)}
    made = AdapterFormat()
    made.set_adapter_version(7)
    made.set_model_version(-9)
    made.set_parameters({name: OrtValue.ortvalue_from_numpy(array) for name, array in arrays.items()})
    path = tmp_path / "x.onnx_adapter"
    made.export_adapter(path)
    again = AdapterFormat.read_adapter(path)
    assert (again.get_format_version(), again.get_adapter_version(), again.get_model_version()) == (1, 7, -9)
    assert set(again.get_parameters()) == set(arrays)
    for name, value in again.get_parameters().items():
        np.testing.assert_array_equal(value.numpy(), arrays[name])
        assert value.numpy().dtype == arrays[name].dtype
    for version in (2**31, "1", True, 1.5):
        with pytest.raises(InputError, match="32-bit signed integer"):
            made.set_adapter_version(version)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="cannot be written"):
        made.export_adapter(tmp_path / "no" / "folder")


@pytest.mark.oracle
def test_onnxruntime_reads_ours_and_we_read_theirs(tmp_path: Path) -> None:
    ort = pytest.importorskip("onnxruntime")
    rng = np.random.default_rng(1)
    arrays = {f"layer.{index}.lora_A": rng.standard_normal((index, 5)).astype(np.float32) for index in range(9)}
    AdapterFormat.of(arrays, 3, 4).export_adapter(tmp_path / "ours.onnx_adapter")
    theirs = ort.AdapterFormat.read_adapter(str(tmp_path / "ours.onnx_adapter"))
    assert (theirs.get_adapter_version(), theirs.get_model_version()) == (3, 4)
    found = {name: value.numpy() for name, value in theirs.get_parameters().items()}
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)
    made = ort.AdapterFormat()
    made.set_adapter_version(5)
    made.set_parameters({name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in arrays.items()})
    made.export_adapter(str(tmp_path / "theirs.onnx_adapter"))
    read = AdapterFormat.read_adapter(tmp_path / "theirs.onnx_adapter")
    assert read.get_adapter_version() == 5
    for name, array in arrays.items():
        np.testing.assert_array_equal(read.arrays[name], array)


def test_damaged_files(tmp_path: Path) -> None:
    """A file that is truncated anywhere, or has any byte changed, is read or refused with a GenaiError."""
    path = tmp_path / "x.onnx_adapter"
    AdapterFormat.of({"a.lora_A": np.ones((2, 3), np.float32), "b": np.ones(4, np.float16)}).export_adapter(path)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(InputError):
            AdapterFormat.read_adapter(path)
    read = refused = 0
    for place in range(len(whole)):
        for value in (0, 1, 127, 255):
            path.write_bytes(whole[:place] + bytes([value]) + whole[place + 1 :])
            try:
                AdapterFormat.read_adapter(path)
                read += 1
            except InputError as error:
                assert error.why
                refused += 1
    assert read > 100
    assert refused > 100
    for missing in (tmp_path / "none.onnx_adapter", tmp_path):
        with pytest.raises(InputError, match="cannot be read"):
            AdapterFormat.read_adapter(missing)
    (tmp_path / "t.onnx_adapter").write_bytes(b"nothing of the kind")
    with pytest.raises(InputError, match="not an adapter file"):
        LoraAdapter().Load(tmp_path / "t.onnx_adapter")


def test_a_shape_that_numpy_cannot_represent(tmp_path: Path) -> None:
    path, extent = tmp_path / "x.onnx_adapter", 12_345_678_901
    AdapterFormat.of({"a.lora_A": np.ones((0, extent), np.float32)}).export_adapter(path)
    assert AdapterFormat.read_adapter(path).arrays["a.lora_A"].shape == (0, extent)
    whole = path.read_bytes()
    path.write_bytes(whole.replace(extent.to_bytes(8, "little"), (2**62).to_bytes(8, "little")))
    with pytest.raises(InputError, match="is damaged") as caught:
        AdapterFormat.read_adapter(path)
    assert f"[0, {2**62}]" in caught.value.why


def test_parameters_that_share_bytes(tmp_path: Path) -> None:
    """Otherwise a small file could claim to contain terabytes."""
    builder = flatbuffers.Builder(1024)
    builder.StartVector(1, 4096, 8)
    builder.head = builder.Head() - 4096
    data = builder.EndVector()
    tables = []
    for index in range(3):
        name = builder.CreateString(f"bias {index}")
        builder.StartVector(8, 1, 8)
        builder.PrependInt64(1024)
        dimensions = builder.EndVector()
        builder.StartObject(4)
        for field, offset in ((0, name), (1, dimensions), (3, data)):
            builder.PrependUOffsetTRelativeSlot(field, offset, 0)
        builder.PrependInt32Slot(2, 1, 0)
        tables.append(builder.EndObject())
    builder.StartVector(4, len(tables), 4)
    for table in tables:
        builder.PrependUOffsetTRelative(table)
    parameters = builder.EndVector()
    builder.StartObject(4)
    builder.PrependInt32Slot(0, 1, 0)
    builder.PrependUOffsetTRelativeSlot(3, parameters, 0)
    builder.Finish(builder.EndObject(), file_identifier=b"TORT")
    (tmp_path / "x.onnx_adapter").write_bytes(bytes(builder.Output()))
    with pytest.raises(InputError, match="names and arrays overlap"):
        AdapterFormat.read_adapter(tmp_path / "x.onnx_adapter")


def test_factors_in_files(tmp_path: Path) -> None:
    path = tmp_path / "x.onnx_adapter"

    def read(arrays: dict[str, np.ndarray]) -> AdapterParameters:
        AdapterFormat.of(arrays).export_adapter(path)
        return read_adapter(path)

    with pytest.raises(InputError, match="has only one factor"):
        read({"model.layers.0.attn.q_proj.lora_A.MatMul.weight": np.ones((3, 2), np.float32)})
    with pytest.raises(InputError, match="is quantised"):
        read({"model.layers.0.attn.q_proj.lora_A.quant.weight": np.ones((3, 2), np.uint8)})
    name = "model.layers.0.attn.q_proj"
    a, b = np.ones((3, 2), np.float32), np.ones((2, 5), np.float32)
    with pytest.raises(InputError, match="has two factors A"):
        read({f"{name}.lora_A.MatMul.weight": a, f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b})
    with pytest.raises(InputError, match="is int64"):
        read({f"{name}.lora_A.weight": a.astype(np.int64), f"{name}.lora_B.weight": b})
    with pytest.raises(InputError, match="with the same rank"):
        read({f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b[:1]})


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_conversion_there_and_back(tmp_path: Path, bundled: Model, dtype: str) -> None:
    source = read_adapter(bundled_adapter("pirate"))
    names = input_names(source)
    assert names["model.layers.0.self_attn.q_proj"] == "model.layers.0.attn.q_proj"
    write_onnx_adapter(source, tmp_path / "x.onnx_adapter", dtype, names=names)
    middle = read_adapter(tmp_path / "x.onnx_adapter")
    write_peft(middle, tmp_path / "back", dtype)
    back, places = read_adapter(tmp_path / "back"), bundled.lora_targets()
    for one in (middle, back):
        for first, second in zip(bind(source, places), bind(one, places), strict=True):
            for x, y in zip(first, second, strict=True):
                np.testing.assert_allclose(x.b.astype(np.float32) @ x.a, y.b.astype(np.float32) @ y.a, atol=2e-3)
    with pytest.raises(InputError, match="is not a factor of a linear layer"):
        write_peft(AdapterParameters(Path("h"), {}, "onnx_adapter", {"v": np.ones(2)}), tmp_path / "no", dtype)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        write_peft(source, tmp_path / "file" / "x", dtype)


def test_conversion_to_peft_has_the_checkpoints_names(tmp_path: Path) -> None:
    """PEFT finds exactly the adapter's modules in a checkpoint from the written config."""
    source = read_adapter(bundled_adapter("pirate"))
    write_onnx_adapter(source, tmp_path / "x.onnx_adapter", "float32", names=input_names(source))
    write_peft(read_adapter(tmp_path / "x.onnx_adapter"), tmp_path / "back", "float32")
    back = read_adapter(tmp_path / "back")
    assert back.pairs.keys() == source.pairs.keys()
    config = json.loads((tmp_path / "back" / "adapter_config.json").read_text())
    assert config["target_modules"] == sorted(source.pairs)


def test_what_is_never_written(tmp_path: Path) -> None:
    name = MODULE.format(0)
    for value in (1e5, math.nan):
        large = adapted(name, value=value)
        with pytest.raises(InputError, match="has numbers up to") as caught:
            write_peft(large, tmp_path / "p", "float16")
        assert caught.value.why == "the largest float16 is 6.55e+04"
        with pytest.raises(InputError, match="has numbers up to"):
            write_onnx_adapter(large, tmp_path / "x.onnx_adapter", "float16", names={})
    assert list(tmp_path.iterdir()) == []
    good = adapted(name)
    write_peft(good, tmp_path / "p", "float16")
    write_onnx_adapter(good, tmp_path / "x.onnx_adapter", "float16", names={})
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for path in (tmp_path / "p", tmp_path / "x.onnx_adapter"):
        with pytest.raises(InputError, match="already exists"):
            write_peft(read_adapter(path), path, "float32")
    with pytest.raises(InputError, match="already exists"):
        write_onnx_adapter(read_adapter(tmp_path / "p"), tmp_path / "x.onnx_adapter", "float32", names={})
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before

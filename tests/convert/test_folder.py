"""A folder is written whole or not at all; tensors are read one at a time; every mistake is named."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from genai.convert import DecoderSpec, ExportOptions, write_model_folder
from genai.convert.folder import CONFIG, DATA, MODEL
from genai.errors import InputError, ModelFolderError
from tools.random_weights import RandomWeights

INT4 = ExportOptions()


class Altered(Mapping[str, NDArray[Any]]):
    """Random weights with one tensor replaced, or removed; counts what is read."""

    def __init__(self, spec: DecoderSpec, name: str = "", tensor: NDArray[Any] | None = None) -> None:
        self._tensors: dict[str, NDArray[Any]] = dict(RandomWeights(spec))
        self.reads: list[str] = []
        if name:
            del self._tensors[name]
        if tensor is not None:
            self._tensors[name] = tensor

    def __getitem__(self, name: str) -> NDArray[Any]:
        self.reads.append(name)
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def test_files(tiny: DecoderSpec, tmp_path: Path, byte_tokenizer_dir: Path) -> None:
    mask = os.umask(0o027)
    try:
        folder = write_model_folder(tmp_path / "out", tiny, INT4, RandomWeights(tiny), tokenizer_dir=byte_tokenizer_dir)
    finally:
        os.umask(mask)
    assert folder == tmp_path / "out"
    expected = {MODEL, DATA, CONFIG, "tokenizer.json", "tokenizer_config.json"}
    assert {file.name for file in folder.iterdir()} == expected
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert folder.stat().st_mode & 0o777 == 0o750


def test_same_weights_same_bytes(tiny: DecoderSpec, tmp_path: Path) -> None:
    one, two = (write_model_folder(tmp_path / name, tiny, INT4, RandomWeights(tiny)) for name in ("one", "two"))
    for file in one.iterdir():
        assert file.read_bytes() == (two / file.name).read_bytes()


def test_tensors_are_aligned_and_inside_the_file(tiny: DecoderSpec, tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "out", tiny, INT4, RandomWeights(tiny))
    model = onnx.load(folder / MODEL, load_external_data=False)
    size, end = (folder / DATA).stat().st_size, 0
    for tensor in model.graph.initializer:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        assert entries["location"] == DATA
        assert int(entries["offset"]) % 64 == 0
        assert int(entries["offset"]) >= end
        end = int(entries["offset"]) + int(entries["length"])
    assert end == size


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_each_tensor_is_read_once(tiny: DecoderSpec, tmp_path: Path, tied: bool, precision: Any) -> None:
    spec = replace(tiny, tie_word_embeddings=tied, qkv_bias=True, qk_norm=True)
    weights = Altered(spec)
    write_model_folder(tmp_path / "out", spec, ExportOptions(precision=precision), weights)
    assert sorted(weights.reads) == sorted(weights)


def test_tied_matrices_are_stored_once(tiny: DecoderSpec, tmp_path: Path) -> None:
    spec = replace(tiny, tie_word_embeddings=True)
    options = ExportOptions(head_precision="int8", embedding_precision="int8")
    model = onnx.load(write_model_folder(tmp_path / "out", spec, options, RandomWeights(spec)) / MODEL)
    matrices = [tensor.name for tensor in model.graph.initializer if tensor.dims[0] == spec.vocab_size]
    assert matrices == ["lm_head.MatMul.weight_Q8", "lm_head.MatMul.weight_scales"]
    users = [node.op_type for node in model.graph.node if matrices[1] in node.input]
    assert users == ["GatherBlockQuantized", "MatMulNBits"]


def test_bfloat16_weights(tiny: DecoderSpec, tmp_path: Path) -> None:
    half = {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in RandomWeights(tiny).items()}
    single = {name: tensor.astype(np.float32) for name, tensor in half.items()}
    for options in (INT4, ExportOptions(precision="fp32")):
        name = options.precision
        one = write_model_folder(tmp_path / f"{name}-half", tiny, options, half)
        two = write_model_folder(tmp_path / f"{name}-single", tiny, options, single)
        assert (one / DATA).read_bytes() == (two / DATA).read_bytes()


def test_config_matches_the_options(tiny: DecoderSpec, tmp_path: Path) -> None:
    spec = replace(tiny, sliding_window=8, sliding_layers=(1,), eos_token_ids=(2, 5))
    folder = write_model_folder(tmp_path / "out", spec, ExportOptions(fused_rope=False), RandomWeights(spec))
    model = json.loads((folder / CONFIG).read_text())["model"]
    assert model["decoder"]["inputs"]["position_ids"] == "position_ids"
    assert model["decoder"]["sliding_window"]["layers"] == [1]
    assert (model["eos_token_id"], model["pad_token_id"]) == ([2, 5], 2)


BAD_TENSORS = [
    ("model.norm.weight", None, "no tensor 'model.norm.weight'"),
    ("lm_head.weight", None, "no tensor 'lm_head.weight'"),
    ("model.layers.1.mlp.up_proj.weight", None, "no tensor 'model.layers.1.mlp.up_proj.weight'"),
    ("model.layers.0.self_attn.k_proj.weight", np.zeros((32, 33), np.float32), "shape [32, 33], expected [32, 32]"),
    ("model.layers.0.input_layernorm.weight", np.zeros((1, 32), np.float32), "shape [1, 32], expected [32]"),
    ("model.layers.0.mlp.down_proj.weight", np.zeros((32, 64), np.int8), "has type int8"),
    (
        "model.layers.1.self_attn.o_proj.weight",
        np.full((32, 64), np.nan, np.float32),
        "contains NaN or infinite values",
    ),
    ("model.embed_tokens.weight", np.full((48, 32), -np.inf, np.float32), "contains NaN or infinite values"),
    ("model.norm.weight", np.full(32, np.inf, np.float32), "contains NaN or infinite values"),
]


@pytest.mark.parametrize(("name", "tensor", "message"), BAD_TENSORS)
@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_bad_tensors(
    tiny: DecoderSpec, tmp_path: Path, name: str, tensor: NDArray[Any] | None, message: str, precision: Any
) -> None:
    with pytest.raises(InputError) as caught:
        write_model_folder(tmp_path / "out", tiny, ExportOptions(precision=precision), Altered(tiny, name, tensor))
    assert name in caught.value.what
    assert message in caught.value.what
    assert caught.value.why
    assert caught.value.fix
    assert list(tmp_path.iterdir()) == []


def test_a_missing_tensor_suggests_its_neighbours(tiny: DecoderSpec, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        write_model_folder(tmp_path / "out", tiny, INT4, Altered(tiny, "model.layers.0.mlp.gate_proj.weight"))
    assert "model.layers.1.mlp.gate_proj.weight" in caught.value.why


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch])
def test_an_existing_target_is_left_alone(tiny: DecoderSpec, tmp_path: Path, make: Any) -> None:
    make(tmp_path / "out")
    before = (tmp_path / "out").stat().st_mtime_ns
    with pytest.raises(ModelFolderError, match="already exists") as caught:
        write_model_folder(tmp_path / "out", tiny, INT4, RandomWeights(tiny))
    assert caught.value.fix
    assert (tmp_path / "out").stat().st_mtime_ns == before


@pytest.mark.parametrize("target", ["missing/out", "file/out"])
def test_a_target_that_cannot_be_made(tiny: DecoderSpec, tmp_path: Path, target: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelFolderError, match="cannot write the model folder") as caught:
        write_model_folder(tmp_path / target, tiny, INT4, RandomWeights(tiny))
    assert caught.value.why
    assert caught.value.fix
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk(tiny: DecoderSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Path.open

    def open_full(path: Path, *arguments: Any) -> Any:
        return opened(Path("/dev/full") if path.name == DATA else path, *arguments)

    monkeypatch.setattr(Path, "open", open_full)
    with pytest.raises(ModelFolderError, match="cannot write the model folder") as caught:
        write_model_folder(tmp_path / "out", tiny, INT4, RandomWeights(tiny))
    assert os.strerror(28) in caught.value.why
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_leaves_nothing(tiny: DecoderSpec, tmp_path: Path) -> None:
    class Interrupted(Altered):
        def __getitem__(self, name: str) -> NDArray[Any]:
            if name == "model.norm.weight":
                raise KeyboardInterrupt
            return super().__getitem__(name)

    with pytest.raises(KeyboardInterrupt):
        write_model_folder(tmp_path / "out", tiny, INT4, Interrupted(tiny))
    assert list(tmp_path.iterdir()) == []


def test_a_tokenizer_folder_without_tokenizer(tiny: DecoderSpec, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ModelFolderError, match=r"tokenizer\.json is missing") as caught:
        write_model_folder(tmp_path / "out", tiny, INT4, RandomWeights(tiny), tokenizer_dir=empty)
    assert caught.value.fix
    assert not (tmp_path / "out").exists()

"""The identity of a loaded model belongs to the files as they were loaded, not to their paths."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import genai
from genai.errors import InputError, ModelFolderError, StateMismatchError
from genai.evaluate.divergence import Divergence, keep_kv_quality
from genai.lora.store import base_identity
from genai.models import identity, kv_quality
from genai.models.config import Config
from genai.models.identity import LoadedFiles

TEXT = "Luna has a red ball. Tom has a blue kite. " * 8
GREEDY: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}


def of_earlier_versions(folder: Path) -> str:
    """Return the identity as versions before this one computed it, from the paths."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if path.suffix in (".onnx", ".data")):
        content = path.read_bytes()
        inner = hashlib.sha256(f"{len(content)}\0".encode())
        if len(content) <= 2**26:
            inner.update(content)
        else:
            for index in range(256):
                start = (len(content) - 2**16) * index // 255
                inner.update(content[start : start + 2**16])
        digest.update(f"{path.name}\0".encode() + inner.digest())
    return digest.hexdigest()


def replace(path: Path, content: bytes) -> None:
    """Replace a file as the toolkit's messages advise: write beside it, and rename."""
    beside = path.with_name("new")
    beside.write_bytes(content)
    beside.replace(path)


def other_weights(folder: Path) -> None:
    """Replace the graph by one that contains its weights, with floats that are larger by 30 %."""
    model = onnx.load(folder / "model.onnx")
    for tensor in model.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT and np.prod(tensor.dims) > 100:
            larger = onnx.numpy_helper.to_array(tensor) * np.float32(1.3)
            tensor.CopyFrom(onnx.numpy_helper.from_array(larger, tensor.name))
    replace(folder / "model.onnx", model.SerializeToString())


@pytest.fixture
def folder(bundled_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bundled_folder, tmp_path / "m"))


def test_equal_files_have_the_identity_of_earlier_versions(folder: Path) -> None:
    (folder / "unused.onnx").write_bytes(b"another graph")
    with genai.Model(folder, threads=1, quiet=True) as model:
        assert model.identity().model == of_earlier_versions(folder)


def test_a_large_file_is_sampled_as_in_earlier_versions(tmp_path: Path) -> None:
    (tmp_path / "a.data").write_bytes(os.urandom(2**26 + 12345))
    files = LoadedFiles(tmp_path, {})
    with (tmp_path / "a.data").open("rb", buffering=0) as file:
        files.note(tmp_path / "a.data", file)  # type: ignore[arg-type]
    assert files.identity() == of_earlier_versions(tmp_path)


def data_replaced(folder: Path) -> None:
    data = folder / "model.onnx.data"
    replace(data, bytes(reversed(data.read_bytes())))


CHANGES: dict[str, Callable[[Path], object]] = {
    "graph": other_weights,
    "data": data_replaced,
    "deleted": shutil.rmtree,
    "moved": lambda folder: folder.rename(folder.with_name("elsewhere")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_identity_is_that_of_the_loaded_files(folder: Path, change: str) -> None:
    before = of_earlier_versions(folder)
    with genai.Model(folder, threads=1, quiet=True) as model:
        CHANGES[change](folder)
        assert model.identity().model == before


def test_a_link_to_another_folder_and_another_working_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = of_earlier_versions(folder)
    other = shutil.copytree(folder, tmp_path / "other")
    data_replaced(other)
    (tmp_path / "current").symlink_to(folder, target_is_directory=True)
    monkeypatch.chdir(tmp_path)
    with genai.Model("current", threads=1, quiet=True) as model:
        (tmp_path / "next").symlink_to(other, target_is_directory=True)
        (tmp_path / "next").replace(tmp_path / "current")
        monkeypatch.chdir("/")
        assert model.identity().model == before


def test_a_state_is_not_given_to_the_model_that_took_the_place(folder: Path, tmp_path: Path) -> None:
    with genai.LLM(folder, threads=1) as llm:
        state = llm.read(TEXT)
        other_weights(folder)
        state.save_state(tmp_path / "a.state")
    with genai.LLM(folder, threads=1) as other, pytest.raises(StateMismatchError, match="another model") as caught:
        other.load_state(tmp_path / "a.state")
    assert caught.value.why.startswith(f"the weights or the graph of {folder.name} are not those")


def test_blocks_are_not_given_to_the_model_that_took_the_place(folder: Path, tmp_path: Path) -> None:
    with genai.Model(folder, threads=1, quiet=True) as model:
        other_weights(folder)
        model.keep_prefixes_in(tmp_path / "blocks")
        with genai.LLM(model) as llm:
            llm.generate(TEXT, **GREEDY)
    with genai.LLM(folder, threads=1) as alone:
        expected = alone.generate(TEXT, **GREEDY)[0].token_ids
    with genai.LLM(folder, threads=1, prefix_cache_dir=tmp_path / "blocks") as other:
        found = other.generate(TEXT, **GREEDY)[0]
    assert (found.token_ids, found.cached_tokens) == (expected, 0)


@pytest.mark.parametrize("place", ["model.onnx_data", "weights/model.bin", "onnx/model.onnx"])
def test_loaded_files_count_whatever_their_names(folder: Path, place: str) -> None:
    """Only .onnx and .data files directly in the folder were part of the identity."""
    if place.endswith(".onnx"):
        (folder / "onnx").mkdir()
        for name in ("model.onnx", "model.onnx.data"):
            (folder / name).rename(folder / "onnx" / name)
        config = (folder / "genai_config.json").read_text()
        (folder / "genai_config.json").write_text(config.replace('"model.onnx"', '"onnx/model.onnx"'))
        data = folder / "onnx" / "model.onnx.data"
    else:
        data = folder / place
        data.parent.mkdir(exist_ok=True)
        (folder / "model.onnx.data").rename(data)
        proto = onnx.load(folder / "model.onnx", load_external_data=False)
        for tensor in proto.graph.initializer:
            for entry in tensor.external_data:
                if entry.key == "location":
                    entry.value = place
        (folder / "model.onnx").write_bytes(proto.SerializeToString())
    identities = []
    for content in (data.read_bytes(), bytes(reversed(data.read_bytes()))):
        replace(data, content)
        with genai.Model(folder, threads=1, quiet=True) as model:
            identities.append(model.identity().model)
    assert identities[0] != identities[1]


def test_files_in_memory_are_those_at_loading(folder: Path) -> None:
    config = Config(folder)
    content = (folder / "model.onnx").read_bytes()
    config.add_model_data("model.onnx", content)
    with genai.Model(config, threads=1, quiet=True) as model:
        with genai.Model(config, threads=1, quiet=True) as twin:
            expected = twin.identity()
        config.add_model_data("model.onnx", content + b"\0")
        assert model.identity() == expected
        with pytest.raises(ModelFolderError, match="was replaced after the model was loaded"):
            model.decoder_as_exported()
        config.add_model_data("model.onnx", content)
        config.add_model_data("other.onnx", b"of another model")
        model.decoder_as_exported()


def test_the_graph_as_exported_is_read_from_the_same_files(folder: Path) -> None:
    with genai.Model(folder, threads=1, quiet=True) as model:
        data_replaced(folder)
        with pytest.raises(ModelFolderError, match="was replaced after the model was loaded") as caught:
            model.decoder_as_exported()
        assert caught.value.why and "load the model again" in caught.value.fix


def test_a_file_that_is_replaced_between_two_reads(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"first")
    files = LoadedFiles(tmp_path, {})
    with path.open("rb") as file:
        files.note(path, file)
    replace(path, b"first")  # equal contents in another file
    files.check()
    replace(path, b"other")
    with path.open("rb") as file, pytest.raises(ModelFolderError, match="was replaced"):
        files.note(path, file)
    path.unlink()
    with pytest.raises(ModelFolderError, match="was replaced"):
        files.check()


def test_the_base_of_an_adapter_is_that_of_the_loaded_files(folder: Path, tmp_path: Path, bundled_folder: Path) -> None:
    adapter = shutil.copytree(genai.models.folders.bundled_adapter("pirate"), tmp_path / "adapter")
    config = adapter / "adapter_config.json"

    def trained_on(base: str) -> None:
        config.write_text(json.dumps({**json.loads(config.read_text()), "genai_base_sha256": base}))

    with genai.Model(folder, threads=1, quiet=True) as model:
        adapters = genai.Adapters(model)
        trained_on("0" * 64)
        with pytest.raises(InputError, match="trained on another base"):
            adapters.load(adapter, "a")
        data_replaced(folder)
        trained_on(base_identity(folder))
        with pytest.raises(ModelFolderError, match="was replaced after the model was loaded"):
            adapters.load(adapter, "a")


def test_a_measurement_is_not_stored_for_the_model_that_took_the_place(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored: list[object] = []
    monkeypatch.setattr("genai.evaluate.divergence.record", lambda *arguments: stored.append(arguments))
    found = Divergence.__new__(Divergence)
    for name, value in (("mean", 0.0), ("mean_error", 0.0), ("tokens", kv_quality.LEAST_TOKENS)):
        object.__setattr__(found, name, value)
    with (
        genai.Model(folder, threads=1, quiet=True) as exact,
        genai.Model(folder, threads=1, quiet=True, kv_dtype="int4", kv_dtype_force=True) as packed,
    ):
        data_replaced(folder)
        said = keep_kv_quality(exact, packed, found)
    assert said is not None and "was not stored" in said and not stored


def test_one_pass_over_a_file_that_is_read_several_times(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exported graph with plain attention is read several times; its files are hashed once."""
    seen: list[str] = []
    content = identity._content
    monkeypatch.setattr(identity, "_content", lambda file: seen.append(file.name) or content(file))
    with genai.Model(folder, threads=1, quiet=True) as model:
        model.decoder_as_exported()
    assert len(seen) == len(set(seen)) == 2

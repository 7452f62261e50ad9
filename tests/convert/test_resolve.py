"""A checkpoint is built once into the cache, asked for before, and found again until its files change."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from genai.convert import ExportOptions, build as build_module, folder as folder_module, resolve_model_folder
from genai.convert.build import BuildPlan
from genai.errors import ModelFolderError, TokenizerError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("GENAI_CACHE_DIR", str(tmp_path / "cache"))
    yield tmp_path / "cache" / "genai" / "models"


@pytest.fixture
def checkpoint(golden: Any, letter_tokenizer: Path, tmp_path: Path) -> Path:
    return golden("qwen3").write_checkpoint(tmp_path / "tiny-qwen", letter_tokenizer)


def test_built_once(checkpoint: Path, cache: Path) -> None:
    questions: list[str] = []
    seen: list[BuildPlan] = []

    def ask(question: str) -> bool:
        questions.append(question)
        return True

    first = resolve_model_folder(checkpoint, ask=ask, watch=seen.append)
    again = resolve_model_folder(str(checkpoint), ask=ask, build=False)
    assert first == again
    assert first.parent == cache
    assert first.name.startswith("tiny-qwen-")
    assert len(questions) == 1
    assert "Build an INT4 model of" in questions[0]
    assert [plan.read_bytes > 0 for plan in seen] == [True]
    assert json.loads((first / "genai_config.json").read_text())["model"]["type"] == "qwen3"


def test_other_paths_are_left_alone(checkpoint: Path, tmp_path: Path) -> None:
    assert resolve_model_folder(tmp_path) == tmp_path
    assert resolve_model_folder(tmp_path / "nowhere") == tmp_path / "nowhere"
    built = resolve_model_folder(checkpoint)
    shutil.copyfile(checkpoint / "config.json", built / "config.json")
    assert resolve_model_folder(built) == built


def test_changed_files_and_options_are_built_anew(checkpoint: Path, cache: Path) -> None:
    first = resolve_model_folder(checkpoint)
    assert resolve_model_folder(checkpoint, options=ExportOptions(precision="int8")) != first
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "eos_token_id": 5}))
    assert resolve_model_folder(checkpoint) != first
    assert len(list(cache.iterdir())) == 3


def test_not_built(checkpoint: Path, cache: Path) -> None:
    with pytest.raises(ModelFolderError, match="has not been built"):
        resolve_model_folder(checkpoint, build=False)
    with pytest.raises(ModelFolderError, match="was not built"):
        resolve_model_folder(checkpoint, ask=lambda question: False)
    assert not cache.exists()


def test_another_process_was_faster(checkpoint: Path) -> None:
    """Both ask, both build; the second finds the first's folder in its way."""
    folders: list[Path] = []

    def ask(question: str) -> bool:
        if not folders:
            folders.append(Path())
            folders[0] = resolve_model_folder(checkpoint)
        return True

    assert resolve_model_folder(checkpoint, ask=ask) == folders[0]


def test_a_fault_is_found_before_the_question(checkpoint: Path) -> None:
    (checkpoint / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        resolve_model_folder(checkpoint, ask=lambda question: pytest.fail("asked"))


def test_full_disk(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(build_module.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ModelFolderError, match=r"has [0-9.]+ k?B free, but the model needs"):
        build_module.build_model(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_disk_that_fills_up(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Any, *arguments: Any) -> Any:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(folder_module.DataFile, "append", full)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ModelFolderError, match="No space left"):
        build_module.build_model(checkpoint, tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == before


def test_no_parent_folder(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match="is not a folder"):
        build_module.build_model(checkpoint, tmp_path / "nowhere" / "out")


def test_interrupt_leaves_nothing(checkpoint: Path, tmp_path: Path) -> None:
    count = 0

    def interrupt(size: int) -> None:
        nonlocal count
        count += 1
        if count == 20:
            raise KeyboardInterrupt

    before = sorted(tmp_path.iterdir())
    with pytest.raises(KeyboardInterrupt):
        build_module.build_model(checkpoint, tmp_path / "out", progress=interrupt)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="counts anonymous memory as Linux shows it")
def test_memory_does_not_grow_with_the_model(tmp_path: Path, letter_tokenizer: Path, golden: Any) -> None:
    """24 matrices of 2 MB each and more, built within the memory of a few."""
    import numpy as np
    from safetensors.numpy import save_file

    config = {**golden("llama_tied").config, "hidden_size": 510, "intermediate_size": 2048, "num_hidden_layers": 8}
    config |= {"head_dim": 10}
    from genai.convert.architectures import find
    from genai.convert.hf_config import HFConfig
    from genai.convert.tensors import tensor_shapes

    folder = tmp_path / "large"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copyfile(letter_tokenizer, folder / "tokenizer.json")
    shapes = tensor_shapes(find("llama").describe(HFConfig(config)))
    save_file({name: np.ones(shape, np.float16) for name, shape in shapes.items()}, folder / "model.safetensors")

    def anonymous() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

    peaks: list[int] = []
    build_module.build_model(folder, tmp_path / "warm", progress=lambda size: None)
    start = anonymous()
    build_module.build_model(folder, tmp_path / "out", progress=lambda size: peaks.append(anonymous() - start))
    total = sum(2 * int(np.prod(shape)) for shape in shapes.values())
    assert total > 50e6
    assert max(peaks) < 30e6

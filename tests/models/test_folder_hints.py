"""Hints for paths that are not a model folder."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from genai import LLM, Config, InferenceSession
from genai.convert.build import resolve_model_folder
from genai.convert.checkpoint import is_checkpoint
from genai.errors import InputError, ModelFolderError, did_you_mean
from genai.kernels.cpu.jit.native import LIBRARY
from genai.onnx.reader import read_model


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    assert LIBRARY.folder  # chosen now: compiled kernels stay where they are
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("GENAI_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        (
            "meta-llama/Llama-3.2-1B",
            ["no Hugging Face model of this name has been pulled", "`genai pull meta-llama/Llama-3.2-1B`", "pull=True"],
        ),
        ("https://huggingface.co/Qwen/Qwen3-0.6B/tree/main", ["`genai pull Qwen/Qwen3-0.6B`"]),
        ("hf.co/Qwen/Qwen3-0.6B", ["genai pull Qwen/Qwen3-0.6B"]),
        (
            "models/phi-3.Q4_K_M.gguf",
            ["_M.gguf: the GGUF file does not exist", "check the path"],
        ),
        ("model.onnx", [".onnx file is not a model folder", "no such file"]),
        ("zephyr3", ["`genai list` shows no model with this name", "org/name", "pebble for the bundled model"]),
        ("llama3", ["shows no model with this name", "did you mean llama-3.2-1b-instruct or llama-3.2-3b-instruct?"]),
        ("https://example.com/a.gguf", ["`genai pull https://example.com/a.gguf`"]),
        ("hf:../x", ["is not a repository name"]),
        ("llama3:8b", ["shows no model with this name"]),
        ("qwen3-0.6b", ["stands for Qwen/Qwen3-0.6B", "`genai pull qwen3-0.6b`"]),
        ("pebble+pirate", ["LLM.load_adapter"]),
        ("What is the capital of France?", ["this looks like a question", "genai_config.json"]),
        ("Tell me a story", ["this looks like a question"]),
        ("Why?\nBecause.", ["not a model folder"]),
        ("/no/such/folder", ["no such folder", "genai_config.json"]),
        ("./no/such", ["no such folder"]),
    ],
)
def test_what_was_meant(given: str, texts: list[str]) -> None:
    for read in (Config, LLM):
        with pytest.raises(ModelFolderError) as caught:
            read(given)
        assert caught.value.why and caught.value.fix
        assert "-p " not in str(caught.value)  # an option of some commands
        for text in texts:
            assert text in str(caught.value)


def test_a_file_of_a_folder(here: Path) -> None:
    folder = here / "model"
    folder.mkdir()
    for name in ("model.onnx", "model.safetensors", "pytorch_model.bin", "notes.txt"):
        (folder / name).touch()
    with pytest.raises(ModelFolderError, match=r"to describe the graph, use `genai info \S*model.onnx`"):
        Config(folder / "model.onnx")
    with pytest.raises(ModelFolderError, match=r"model.onnx: an .onnx file is not a model folder|about model.onnx"):
        Config(folder)
    with pytest.raises(ModelFolderError, match="pickle"):
        Config(folder / "pytorch_model.bin")
    with pytest.raises(ModelFolderError, match="pass the folder that contains"):
        Config(folder / "notes.txt")
    (folder / "genai_config.json").write_text("{}")
    for name in ("model.onnx", "model.safetensors"):
        with pytest.raises(ModelFolderError, match=f"pass {folder}"):
            Config(folder / name)
    with pytest.raises(ModelFolderError, match=f"genai chat {folder}"):
        read_model(folder)


def test_folders_nearby(here: Path) -> None:
    for name in ("phi-3-mini", "deep/cpu/int4"):
        (here / name).mkdir(parents=True)
    for name in ("phi-3-mini", "deep/cpu/int4"):
        (here / name / "genai_config.json").write_text("{}")
    with pytest.raises(ModelFolderError, match=r"did you mean phi-3-mini\?"):
        Config("phi-3-mimi")
    with pytest.raises(ModelFolderError, match="pass deep/cpu/int4"):
        Config("deep")
    (here / "gguf").mkdir()
    (here / "gguf/a.gguf").touch()
    with pytest.raises(ModelFolderError, match="a GGUF file must be converted first"):
        Config("gguf")


def test_folders_that_this_user_may_not_look_into(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example /etc/polkit-1/rules.d, which only root may read."""
    (here / "open" / "closed").mkdir(parents=True)
    is_file = Path.is_file

    def refused(path: Path) -> bool:
        if path.parent.name == "closed":
            raise PermissionError(13, "Permission denied", str(path))
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", refused)
    with pytest.raises(ModelFolderError, match=r"genai_config.json is missing"):
        Config(here / "open")


def test_what_hugging_face_has_downloaded(here: Path) -> None:
    snapshot = here / "hf/hub/models--Qwen--Qwen3-0.6B/snapshots/abc"
    snapshot.mkdir(parents=True)
    with pytest.raises(ModelFolderError, match=f"genai chat {snapshot}") as caught:
        Config("Qwen/Qwen3-0.6B")
    assert "to import the copy, run `genai pull Qwen/Qwen3-0.6B`" in caught.value.fix


@pytest.mark.parametrize("given", ["meta-llama/Llama-3.2-1B", "https://hf.co/Qwen/Qwen3-0.6B", "here.gguf"])
def test_what_is_no_onnx_file_says_what_converts_it(here: Path, given: str) -> None:
    (here / "here.gguf").write_bytes(b"GGUF")
    reads = [read_model, InferenceSession] if given.endswith(".gguf") else [read_model, InferenceSession, LLM]
    for read in reads:
        with pytest.raises(ModelFolderError, match=r"not (an ONNX model|a model folder)") as caught:
            read(given)
        assert "GGUF" in caught.value.why or "Hugging Face" in caught.value.why
        assert "`genai build " in caught.value.fix


def test_a_missing_onnx_file_in_a_missing_folder_is_no_name_of_a_model() -> None:
    with pytest.raises(ModelFolderError, match=r"no model file 'models/resnet.onnx'"):
        read_model("models/resnet.onnx")


def test_a_name_that_the_system_refuses() -> None:
    for read in (Config, LLM, is_checkpoint):
        with pytest.raises(ModelFolderError, match="not a model folder") as caught:
            read(Path("x" * 5000))
        assert "too long" in caught.value.why and "-p" not in caught.value.fix
    with pytest.raises(ModelFolderError, match="too long"):
        resolve_model_folder("what is this " * 300)


def test_a_checkpoint_needs_a_precision_in_python(here: Path) -> None:
    (here / "mine").mkdir()
    (here / "mine/config.json").write_text("{}")
    for given in ("mine", here / "mine"):
        with pytest.raises(ModelFolderError, match="must be built first") as caught:
            LLM(given)
        assert 'pass precision="int4" to build it once' in caught.value.fix
        assert "genai chat" not in caught.value.fix


def test_a_damaged_gguf_file_is_an_error_of_its_build(here: Path) -> None:
    """GGUF files need no precision: their weights keep their own."""
    (here / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(InputError, match="not a valid GGUF file"):
        LLM("a.gguf")


def test_a_name_of_megabytes_is_no_typo() -> None:
    """Comparing it would take many times its memory, and the name may come from an untrusted file."""
    name = "x" * 2**22
    tracemalloc.start()
    try:
        assert did_you_mean(name, ["xx"], "use another") == "use another"
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
    assert did_you_mean("lama", ["llama"]) == "did you mean 'llama'?"

"""References to models, paths, and texts that are neither."""

from __future__ import annotations

from pathlib import Path

import pytest

from genai.errors import ModelFolderError
from genai.hub.references import Reference, parse
from genai.hub.store import folder_name


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("hf:Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("hf://Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("hf:gpt2", "gpt2"),
        ("org/name@v1.0", "org/name@v1.0"),
        ("org/name@refs/pr/3", "org/name@refs/pr/3"),
        ("org/name:Q4_K_M", "org/name:Q4_K_M"),
        ("org/name@main:Q4_K_M", "org/name@main:Q4_K_M"),
        ("org/name:cpu_and_mobile/cpu-int4", "org/name:cpu_and_mobile/cpu-int4"),
        ("org/name:my model (Q8_0).gguf", "org/name:my model (Q8_0).gguf"),
        ("https://huggingface.co/Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("https://huggingface.co/Qwen/Qwen3-0.6B/tree/main", "Qwen/Qwen3-0.6B"),
        ("https://huggingface.co/gpt2", "gpt2"),
        ("hf.co/org/name/", "org/name"),
        ("https://huggingface.co/org/name/tree/v2/cpu/int4", "org/name@v2:cpu/int4"),
        ("https://huggingface.co/org/name/resolve/main/a-Q4_K_M.gguf?download=true", "org/name:a-Q4_K_M.gguf"),
        ("https://huggingface.co/org/name/blob/main/a.gguf", "org/name:a.gguf"),
        ("http://here:80/org/name", "org/name"),
        ("https://example.com/files/a.gguf", "https://example.com/files/a.gguf"),
        (f"https://example.com/a.gguf#sha256={'AB' * 32}", "https://example.com/a.gguf"),
    ],
)
def test_names(given: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://here:80")
    for text in (given, Path(given)):  # a Path swallows one of two slashes
        found = parse(text)
        assert found is not None
        assert found.name == name
        assert found.explicit == (":/" in given or given.startswith("hf"))


def test_a_checksum_comes_with_an_address() -> None:
    assert parse(f"https://example.com/a.gguf#sha256={'AB' * 32}") == Reference(
        url="https://example.com/a.gguf", digest="ab" * 32, explicit=True
    )


@pytest.mark.parametrize(
    "path",
    ["name", "./org/name", "../org/name", "/org/name", "~/org/name", "a/b/c", "models/a.gguf", "x/model.onnx", "a b/c",
     "What is 1/2?", "and/or: which one", "and/or: a.gguf", "", ".", "C:/models", "pytorch/model.bin"],
)  # fmt: skip
def test_paths_are_no_references(path: str) -> None:
    assert parse(path) is None


@pytest.mark.parametrize(
    "given",
    ["hf:", "hf:../../etc/passwd", "hf:a/b/c", "hf:a/../b", "hf:a--b/c", "hf:a/b@../x", "hf:a/b@", "hf:a b/c",
     "https://huggingface.co/", "https://huggingface.co/datasets/org/name", "https://huggingface.co/a/b/c",
     "https://example.com", "https://", "https://[::1/x", "org/name@a//b"],
)  # fmt: skip
def test_what_begins_as_a_reference_and_is_none(given: str) -> None:
    with pytest.raises(ModelFolderError, match="is not a repository name") as caught:
        parse(given)
    assert "org/name" in caught.value.why


def test_an_address_with_a_password_is_not_written_down() -> None:
    with pytest.raises(ModelFolderError) as caught:
        parse("https://me:secret@example.com/a.gguf")
    assert "password" in caught.value.why
    assert "secret" not in str(caught.value)


def test_a_checksum_that_is_none() -> None:
    with pytest.raises(ModelFolderError, match="the checksum is invalid"):
        parse("https://example.com/a.gguf#sha256=12")


def test_names_have_folders_of_their_own() -> None:
    names = [
        "org/name", "org/name@v1", "org/name@a/b", "org/name@a--b", "org/name:Q4_0", "org/name:a/b", "org/name:a.b",
        "org--name", "https://a.b/c.gguf", "https://a.b/c_gguf", "http://a.b/c.gguf", "org/name+Q4_0", "name",
        "x" * 500, "x" * 501, "a/..", "../../etc", "a/b:../c", ".", "..", "a\0b", "C:\\x",
    ]  # fmt: skip
    folders = [folder_name(name) for name in names]
    assert len({folder.lower() for folder in folders}) == len(names)
    for folder in folders:
        assert Path(folder).name == folder
        assert folder not in ("", ".", "..")
        assert len(folder) < 200
    assert folder_name("Qwen/Qwen3-0.6B") == "Qwen--Qwen3-0.6B"

"""A hub on this machine, an empty cache, and nothing of the user's own settings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from genai.hub import client
from genai.kernels.cpu.jit.native import LIBRARY
from tools.local_hub import LocalHub

CHECKPOINT = Path(__file__).resolve().parents[2] / "tools" / "bundled_model" / "checkpoint"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache's folder; nothing in it yet."""
    assert LIBRARY.folder  # chosen now: compiled kernels stay where they are
    monkeypatch.setenv("GENAI_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    for name in ("HF_HUB_CACHE", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(client, "_WAITS", (0.01,) * 4)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "cache" / "genai" / "hub"


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    """A hub that HF_ENDPOINT leads to."""
    with LocalHub() as one:
        monkeypatch.setenv("HF_ENDPOINT", one.url)
        yield one


@pytest.fixture(scope="session")
def checkpoint() -> dict[str, bytes]:
    """The files of a checkpoint that chats, but for its weights, which are no weights."""
    files = {path.name: path.read_bytes() for path in CHECKPOINT.iterdir() if path.suffix != ".safetensors"}
    return {**files, "model.safetensors": b"weights " * 1000}


@pytest.fixture(scope="session")
def chatting(checkpoint: dict[str, bytes]) -> dict[str, bytes]:
    """The same with its weights."""
    return {**checkpoint, "model.safetensors": (CHECKPOINT / "model.safetensors").read_bytes()}


def left(cache: Path) -> list[str]:
    """All files in the cache."""
    return sorted(str(path.relative_to(cache)) for path in cache.rglob("*") if path.is_file())

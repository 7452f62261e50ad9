"""Models that other tools downloaded into the cache of Hugging Face's library."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import pytest

import genai
from genai.errors import DownloadError
from genai.hub import store
from genai.hub.references import parse
from genai.hub.shared_cache import cached_listing
from tools.local_hub import LocalHub

COMMIT = "a" * 40


def downloaded(home: Path, files: Mapping[str, bytes], name: str = "org/name", revision: str = "main") -> Path:
    """A snapshot, as huggingface_hub writes it."""
    folder = home / "hub" / f"models--{name.replace('/', '--')}"
    for path, data in files.items():
        git = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        blob = folder / "blobs" / (hashlib.sha256(data).hexdigest() if len(data) > 1024 else git)
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(data)
        link = folder / "snapshots" / COMMIT / path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blob)
    (folder / "refs").mkdir()
    (folder / "refs" / revision).write_text(COMMIT)
    return folder


@pytest.fixture
def home(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path / "hf"


def pull(name: str = "org/name") -> Path:
    return genai.pull(name, quiet=True)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_copy_is_used_without_a_network(home: Path, chatting: dict[str, bytes]) -> None:
    folder = downloaded(home, chatting)
    place = pull()
    assert contents(place) == chatting
    assert place.joinpath("model.safetensors").samefile(folder / "snapshots" / COMMIT / "model.safetensors")
    with genai.LLM("org/name") as llm:
        assert llm.generate("1+1=", max_tokens=1, seed=1)


def test_a_copy_is_used_if_the_hub_cannot_be_reached(
    home: Path, checkpoint: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    downloaded(home, checkpoint)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert contents(pull()) == checkpoint


def test_nothing_is_counted_as_a_download(hub: LocalHub, home: Path, checkpoint: dict[str, bytes]) -> None:
    from genai.hub.pull import plan_pull

    downloaded(home, checkpoint)
    reference = parse("org/name")
    assert reference is not None
    assert plan_pull(reference).missing_bytes == 0
    assert hub.requests == []


def test_removing_a_model_leaves_the_copy(home: Path, checkpoint: dict[str, bytes]) -> None:
    folder = downloaded(home, checkpoint)
    before = contents(folder)
    pull()
    model = store.find("org/name")
    assert model is not None
    store.remove(model.folder)
    assert contents(folder) == before
    assert contents(pull()) == checkpoint


def test_revisions(home: Path, checkpoint: dict[str, bytes]) -> None:
    downloaded(home, checkpoint, revision="v1")
    assert contents(pull("org/name@v1")) == checkpoint
    assert contents(pull(f"org/name@{COMMIT}")) == checkpoint
    with pytest.raises(DownloadError, match="not in the cache"):
        pull("org/name")


@pytest.mark.parametrize("missing", ["model.safetensors", "config.json"])
def test_a_copy_without_all_files(home: Path, checkpoint: dict[str, bytes], missing: str) -> None:
    downloaded(home, {name: data for name, data in checkpoint.items() if name != missing})
    with pytest.raises(DownloadError, match="the copy in Hugging Face's cache is incomplete"):
        pull()


def test_a_copy_without_a_shard(home: Path, checkpoint: dict[str, bytes]) -> None:
    weights = checkpoint["model.safetensors"]
    index = b'{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}'
    files = {name: data for name, data in checkpoint.items() if name != "model.safetensors"}
    files |= {"model-00001-of-00002.safetensors": weights, "model.safetensors.index.json": index}
    downloaded(home, files)
    with pytest.raises(DownloadError, match="is incomplete") as caught:
        pull()
    assert "model-00002-of-00002.safetensors" in caught.value.why


def test_a_damaged_copy_is_not_used(home: Path, checkpoint: dict[str, bytes], cache: Path) -> None:
    folder = downloaded(home, checkpoint)
    blob = (folder / "snapshots" / COMMIT / "model.safetensors").resolve()
    blob.write_bytes(b"x" * blob.stat().st_size)
    with pytest.raises(DownloadError, match="the file was not downloaded"):
        pull()
    assert store.models() == []


def test_links_that_lead_elsewhere_are_not_followed(home: Path, tmp_path: Path, checkpoint: dict[str, bytes]) -> None:
    folder = downloaded(home, checkpoint)
    secret = tmp_path / ("b" * 64)
    secret.write_text("secret")
    snapshot = folder / "snapshots" / COMMIT
    (snapshot / "notes.json").symlink_to(secret)
    (snapshot / "plain.json").write_text("{}")
    (snapshot / "loop").symlink_to(snapshot / "loop")
    reference = parse("org/name")
    assert reference is not None
    listing = cached_listing(reference)
    assert listing is not None
    assert {file.path for file in listing.files} == set(checkpoint)


@pytest.mark.parametrize("commit", ["", "../../..", "z" * 40, "a" * 39, "a" * 400, "\0"])
def test_references_that_name_no_snapshot(home: Path, checkpoint: dict[str, bytes], commit: str) -> None:
    (downloaded(home, checkpoint) / "refs" / "main").write_text(commit)
    with pytest.raises(DownloadError, match="not in the cache"):
        pull()

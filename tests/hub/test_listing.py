"""What a hub says is believed only where it can do no harm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

import genai
from genai.errors import DownloadError
from genai.hub.listing import is_safe, listing_of, read_listing
from genai.hub.references import Reference, parse
from tools.local_hub import Fault, LocalHub

COMMIT = "a" * 40


def facts(**entry: Any) -> dict[str, Any]:
    return {"sha": COMMIT, "siblings": [{"rfilename": "config.json", "size": 2, **entry}]}


@pytest.mark.parametrize(
    "path",
    ["../x", "a/../../x", "/etc/passwd", "a//b", "", ".", "a/.", "a\\..\\b", "C:x"],
)
def test_names_that_lead_elsewhere(path: str) -> None:
    assert not is_safe(path)
    with pytest.raises(DownloadError, match="response about this repository is invalid") as caught:
        listing_of(Reference("org/name"), facts(rfilename=path))
    assert "could leave the folder" in caught.value.why


@pytest.mark.parametrize(
    "path",
    ["a\0b", "a\nb", "x" * 300, "\u6a21" * 80, "a/" * 600 + "b", "con?", "a\u202eb", "runs/12:30/events", "\ud800"],
)
def test_files_that_cannot_be_written_everywhere_are_left_out(path: str) -> None:
    assert not is_safe(path)
    found = listing_of(
        Reference("org/name"),
        {"sha": COMMIT, "siblings": [{"rfilename": path, "size": -1}, {"rfilename": "config.json", "size": 2}]},
    )
    assert [file.path for file in found.files] == ["config.json"]
    assert found.left_out == (path,)


@pytest.mark.parametrize(
    "path", ["config.json", "a/b/c.onnx", "model-00001-of-00002.safetensors", ".gitattributes", "ü b"]
)
def test_names_that_do_not(path: str) -> None:
    assert is_safe(path)


@pytest.mark.parametrize("size", [-1, 1.5, "2", None, True, 1 << 60, [2]])
def test_sizes_that_no_file_has(size: object) -> None:
    with pytest.raises(DownloadError, match="response about this repository is invalid"):
        listing_of(Reference("org/name"), facts(size=size))
    with pytest.raises(DownloadError, match="response about this repository is invalid"):
        listing_of(Reference("org/name"), facts(lfs={"size": size, "sha256": "0" * 64}))


@pytest.mark.parametrize(
    "answer",
    [
        {}, {"sha": COMMIT}, {"sha": "main", "siblings": []}, {"sha": COMMIT, "siblings": {}},
        {"sha": 5, "siblings": []},
        {"sha": COMMIT, "siblings": [None]}, {"sha": COMMIT, "siblings": ["config.json"]},
        {"sha": COMMIT, "siblings": [{"rfilename": "a", "size": 1}] * 2},
        {"sha": "../" + "a" * 37, "siblings": []},
    ],
)  # fmt: skip
def test_answers_that_are_no_listing(answer: dict[str, Any]) -> None:
    with pytest.raises(DownloadError, match="response about this repository is invalid"):
        listing_of(Reference("org/name"), answer)


def test_too_many_files() -> None:
    many = [{"rfilename": f"f{i}", "size": 1} for i in range(200_001)]
    with pytest.raises(DownloadError, match="response about this repository is invalid") as caught:
        listing_of(Reference("org/name"), {"sha": COMMIT, "siblings": many})
    assert "200,001 files" in caught.value.why


@pytest.mark.parametrize(
    ("said", "license"),
    [
        ({}, ""), ({"cardData": {"license": "mit"}}, "mit"), ({"tags": ["x", "license:apache-2.0"]}, "apache-2.0"),
        ({"cardData": {"license": "other", "license_name": "qwen"}}, "qwen"),
        ({"cardData": {"license": "other"}}, "other"),
        ({"cardData": None, "tags": 5}, ""), ({"cardData": {"license": ["a"]}}, ""),
        ({"cardData": {"license": "a\x1b[31mb"}}, "a[31mb"),
    ],
)  # fmt: skip
def test_licences(said: dict[str, Any], license: str) -> None:
    assert listing_of(Reference("org/name"), {**facts(), **said}).license == license


def test_hostile_answers_end_in_errors(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/name", {"config.json": b"{}"})
    for body in (b"<html>", b"[]", b"\xff\xfe", b"{" * 100_000, b'{"sha": ' + b"[" * 100_000):
        hub.faults["/api/"] = [Fault(body=body)]
        with pytest.raises(DownloadError, match=r"JSON|an object|response about this repository is invalid|too deeply"):
            genai.pull("org/name", quiet=True)
    monkeypatch.setattr("genai.hub.client._MOST_ANSWERS", 1 << 16)
    hub.faults["/api/"] = [Fault(body=b" " * (1 << 17))]
    with pytest.raises(DownloadError, match="exceeds 0 MiB"):
        genai.pull("org/name", quiet=True)


def test_a_huge_listing_is_read(hub: LocalHub, checkpoint: dict[str, bytes], cache: object) -> None:
    hub.add("org/name", {**checkpoint, **{f"evals/run-{i}.txt": b"x" for i in range(20_000)}})
    assert (genai.pull("org/name", quiet=True) / "config.json").is_file()
    assert len(hub.requests) == 1 + len(checkpoint) + 3  # three of the files are large ones, behind a redirection


def test_the_hub_here_is_one_to_its_own_library(hub: LocalHub, checkpoint: dict[str, bytes], tmp_path: Path) -> None:
    """What the other tests talk to speaks the protocol: huggingface_hub itself lists and fetches from it."""
    from huggingface_hub import HfApi

    hub.add("org/name", checkpoint, gated=True, token="hf_good", facts={"cardData": {"license": "mit"}})
    api = HfApi(endpoint=hub.url, token="hf_good")
    info = api.model_info("org/name", files_metadata=True)
    found = parse("org/name")
    assert found is not None and info.siblings is not None
    ours = read_listing(found, lambda text: None)
    theirs = {
        one.rfilename: (one.size, f"sha256:{one.lfs.sha256}" if one.lfs else f"git:{one.blob_id}")
        for one in info.siblings
    }
    assert {file.path: (file.size, file.digest) for file in ours.files} == theirs
    assert (ours.commit, ours.gated, ours.license) == (info.sha, bool(info.gated), "mit")
    for path, data in checkpoint.items():
        assert Path(api.hf_hub_download("org/name", path, local_dir=tmp_path / "theirs")).read_bytes() == data
    with pytest.raises(GatedRepoError):
        HfApi(endpoint=hub.url).hf_hub_download("org/name", "config.json", local_dir=tmp_path / "other")
    with pytest.raises(RepositoryNotFoundError):
        api.model_info("org/none")
    with pytest.raises(RevisionNotFoundError):
        api.model_info("org/name", revision="none")

"""The cache: lookup by name, removal, and invalid records."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import genai
from genai.common.locks import locked
from genai.errors import ModelFolderError, StateError
from genai.hub import store
from genai.hub.local import model_folder_of, pulled_model
from tools.local_hub import LocalHub

from .conftest import left


@pytest.fixture
def names(hub: LocalHub, checkpoint: dict[str, bytes]) -> list[str]:
    """Put models into the cache and return their names."""
    pulled = ["org/name", "other/name", "org/Alone-1B"]
    for name in pulled:
        hub.add(name, checkpoint)
        genai.pull(name, quiet=True)
    return pulled


def test_names_are_found(names: list[str]) -> None:
    assert [model.name for model in store.models()] == ["org/Alone-1B", "org/name", "other/name"]
    for given in ("org/Alone-1B", "hf:org/Alone-1B", "alone-1b", "Alone-1B", Path("org/Alone-1B")):
        found = pulled_model(given)
        assert found is not None and found.name == "org/Alone-1B"
    for given in ("org/none", "none", "./Alone-1B", "/Alone-1B", "", "What is this?", "x" * 5000, "a\0b", "org"):
        assert pulled_model(given) is None
    with pytest.raises(ModelFolderError, match="several models have this name"):
        pulled_model("name")


def test_names_of_branches_and_parts_are_found_without_their_org(
    hub: LocalHub, checkpoint: dict[str, bytes], cache: Path
) -> None:
    hub.add("org/name", checkpoint, revisions=("refs/pr/1",))
    genai.pull("org/name@refs/pr/1", quiet=True)
    found = pulled_model("name@refs/pr/1")
    assert found is not None and found.name == "org/name@refs/pr/1"
    assert pulled_model("1") is None


def test_sizes_while_another_process_removes_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "z").write_bytes(b"123")
    scan = os.scandir

    def late(path: Any = ".") -> Any:
        if str(path) == str(tmp_path / "a"):
            (tmp_path / "a" / "b").rmdir()
            (tmp_path / "a").rmdir()
        return scan(path)

    monkeypatch.setattr(os, "scandir", late)
    assert store.bytes_below(tmp_path) == 3
    assert not (tmp_path / "a").exists()


def test_a_removal_that_another_process_finishes(
    names: list[str], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlink = os.unlink

    def twice(path: Any, **options: Any) -> None:
        unlink(path, **options)
        unlink(path, **options)

    monkeypatch.setattr(os, "unlink", twice)
    store.remove(cache / "org--name")
    assert store.find("org/name") is None

    def refused(path: Any, **options: Any) -> None:
        raise PermissionError(13, "refused")

    monkeypatch.setattr(os, "unlink", refused)
    with pytest.raises(ModelFolderError, match="not removed"):
        store.remove(cache / "other--name")


def test_a_path_that_is_also_a_name(names: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "here" / "org" / "name"
    folder.mkdir(parents=True)
    for path in ("./org/name", "org/name/", Path("org/name")):
        assert pulled_model(path) is None
    assert model_folder_of("./org/name") == Path("org/name")
    assert pulled_model("hf:org/name") is not None


def test_a_name_with_a_typo(names: list[str]) -> None:
    for given, meant in (("Alone-2B", "org/Alone-1B"), ("naem", "other/name")):
        with pytest.raises(ModelFolderError, match="not a model folder") as caught:
            genai.Config(given)
        assert caught.value.fix == f"did you mean {meant}?"


def test_a_checkpoint_that_is_not_built(names: list[str]) -> None:
    for read in (genai.Config, genai.Model):
        with pytest.raises(ModelFolderError, match="has not been built yet") as caught:
            read("org/name")
        assert "`genai chat org/name`" in caught.value.fix


@pytest.mark.parametrize(
    "change",
    [
        {"name": "other/name"}, {"kind": "pickle"}, {"root": "../../.."}, {"root": "/etc"}, {"root": 5},
        {"files": None},
        {"files": [{"path": "../x", "size": 1, "sha256": ""}]}, {"files": [{"path": "x"}]}, {"license": None},
    ],
    ids=str,
)  # fmt: skip
def test_a_damaged_record(names: list[str], cache: Path, change: dict[str, Any]) -> None:
    record = cache / "org--name" / store.RECORD
    record.write_text(json.dumps({**json.loads(record.read_text()), **change}))
    with pytest.raises(ModelFolderError, match="is damaged") as caught:
        store.find("org/name")
    assert "genai rm org--name" in caught.value.fix
    assert [folder.name for folder in store.unfinished()] == ["org--name"]
    assert [model.name for model in store.models()] == ["org/Alone-1B", "other/name"]
    for text in ("", "[", "\xff", "[]"):
        record.write_text(text, encoding="latin-1")
        with pytest.raises(ModelFolderError, match=str(record)):
            store.find("org/name")


def test_removing(names: list[str], cache: Path) -> None:
    found = store.find("org/name")
    assert found is not None
    store.remove(found.folder)
    assert store.find("org/name") is None
    assert not any(path.startswith(("org--name/", ".")) for path in left(cache))
    assert len(store.models()) == 2


def test_nothing_outside_the_cache_is_removed(names: list[str], cache: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("x")
    (cache / "link").symlink_to(precious)
    places = [
        precious,
        cache / "link",
        cache,
        cache.parent,
        cache / ".." / ".." / "precious",
        cache / "org--name" / "name",
    ]
    for place in places:
        with pytest.raises(ModelFolderError, match="not removed"):
            store.remove(place)
    assert (precious / "file").is_file()
    # A link inside a model's folder is removed, not what it leads to.
    (cache / "org--name" / "name" / "link").symlink_to(precious)
    store.remove(cache / "org--name")
    assert (precious / "file").is_file()


def test_what_is_in_use_is_not_removed(names: list[str], cache: Path) -> None:
    with locked(cache / "org--name"), pytest.raises(StateError, match="in use"):
        store.remove(cache / "org--name")
    built = cache / "org--name" / store.BUILT
    built.mkdir()
    with locked(built), pytest.raises(StateError, match="in use"):
        store.remove(cache / "org--name")
    store.remove(cache / "org--name")


def test_removals_that_were_interrupted_are_finished(names: list[str], cache: Path, hub: LocalHub) -> None:
    (cache / ".partial" / ".removed-1" / "x").mkdir(parents=True)
    hub.add("org/more", hub.repositories["org/name"].files)
    genai.pull("org/more", quiet=True)
    assert not any((cache / ".partial").iterdir())


def test_something_in_the_place_of_a_model(hub: LocalHub, checkpoint: dict[str, bytes], cache: Path) -> None:
    hub.add("org/name", checkpoint)
    (cache / "org--name").mkdir(parents=True)
    (cache / "org--name" / "file").write_text("x")
    with pytest.raises(ModelFolderError, match="cannot be created") as caught:
        genai.pull("org/name", quiet=True)
    assert "genai rm org--name" in caught.value.fix
    assert [folder.name for folder in store.unfinished()] == ["org--name", "org--name"]
    store.remove(cache / "org--name")
    asked = len(hub.requests)
    genai.pull("org/name", quiet=True)
    assert len(hub.requests) == asked + 1  # the listing; the files were there

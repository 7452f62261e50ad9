"""Adapters that requests load and unload, only from one folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from genai.errors import OptionError
from genai.models.folders import bundled_adapter
from genai.server.serving import ServerOptions

from .conftest import Running


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    shutil.copytree(bundled_adapter("words"), folder / "numbers")
    (folder / "broken").mkdir()
    (folder / "outside").symlink_to(bundled_adapter("words"))
    return folder


@pytest.fixture(scope="module")
def open_server(serving: Callable[..., Running], folder: Path) -> Running:
    return serving(adapter_dir=folder)


def test_load_use_and_unload(open_server: Running) -> None:
    before = open_server.chat().json()["choices"]
    assert open_server.chat(model="spelled").status_code == 404
    loaded = open_server.post("/v1/load_lora_adapter", {"lora_name": "spelled", "lora_path": "numbers"})
    assert loaded.status_code == 200 and loaded.text == "Success: LoRA adapter 'spelled' added successfully."
    assert open_server.chat(model="spelled").json()["choices"][0]["message"]["content"] == "19, nineteen"
    assert open_server.chat().json()["choices"] == before
    again = open_server.post("/v1/load_lora_adapter", {"lora_name": "spelled", "lora_path": "numbers"})
    assert again.status_code == 400 and "in use" in again.json()["error"]["message"]
    gone = open_server.post("/v1/unload_lora_adapter", {"lora_name": "spelled"})
    assert gone.status_code == 200 and open_server.chat(model="spelled").status_code == 404
    assert open_server.post("/v1/unload_lora_adapter", {"lora_name": "spelled"}).status_code == 404


@pytest.mark.parametrize("path", ["../..", "/etc", "missing", "outside", "numbers/../../x", "x" * 5000, "a\0b"])
def test_paths_outside_the_folder(open_server: Running, path: str) -> None:
    answer = open_server.post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": path})
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "adapter_not_found"


def test_an_adapter_that_cannot_be_read(open_server: Running, folder: Path) -> None:
    answer = open_server.post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "broken"})
    assert answer.status_code == 400 and str(folder) not in answer.text and "adapters/broken" in answer.text
    answer = open_server.post("/v1/load_lora_adapter", {"lora_name": "pebble", "lora_path": "numbers"})
    assert answer.status_code == 400 and "in use" in answer.text
    assert open_server.post("/v1/load_lora_adapter", {"lora_name": "x"}).json()["error"]["param"] == "lora_path"


@pytest.mark.parametrize("name", ["", "a\nb", "\0", "pebble+x", "a+b", "x" * 5000])
def test_wrong_names(open_server: Running, name: str) -> None:
    answer = open_server.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": "numbers"})
    assert answer.status_code == 400 and "name" in answer.json()["error"]["message"]


def test_too_many_adapters(open_server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("genai.server.wire.adapters.MOST_ADAPTERS", 1)
    answer = open_server.post("/v1/load_lora_adapter", {"lora_name": "second", "lora_path": "numbers"})
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "too_many_adapters"


def test_many_clients_load_the_same_adapter(open_server: Running) -> None:
    def load(_: int) -> int:
        body = {"lora_name": "shared", "lora_path": "numbers"}
        return open_server.post("/v1/load_lora_adapter", body).status_code

    with ThreadPoolExecutor(8) as pool:
        assert sorted(pool.map(load, range(8))) == [200, *[400] * 7]
    open_server.post("/v1/unload_lora_adapter", {"lora_name": "shared"})


def test_a_server_that_does_not_allow_it(running: Running) -> None:
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        answer = running.post(path, {"lora_name": "words", "lora_path": "words"})
        assert answer.status_code == 403 and "--adapter-dir" in answer.json()["error"]["message"]


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="adapter_dir"):
        ServerOptions(adapter_dir=tmp_path / "missing")

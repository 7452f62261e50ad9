"""`genai ps`, `stop` and `launch`: the private folder, stale entries, and the files of clients."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from genai.cli import app
from genai.cli.servers import chosen
from genai.errors import InputError, StateError
from genai.server.client_setup import CLIENTS, setup_of
from genai.server.registry import RunningServer, _ticks, registered, runtime_folder, servers

URL = "http://127.0.0.1:8000"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("HOME", str(tmp_path))
    return runtime_folder()


@pytest.fixture
def other(folder: Path) -> Iterator[Callable[..., RunningServer]]:
    """other(url): the entry of another process."""
    started: list[subprocess.Popen[bytes]] = []

    def start(url: str = URL, **more: Any) -> RunningServer:
        process = subprocess.Popen(["sleep", "60"])
        started.append(process)
        made = RunningServer(process.pid, url, ["pebble", "words"], "2026-11-30T00:00:00+00:00", _ticks(process.pid))
        made = replace(made, encoders=[], **more)
        (folder / f"{process.pid}.json").write_text(json.dumps(asdict(made)))
        return made

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_a_server_is_listed_while_it_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert folder.stat().st_mode & 0o777 == 0o700
    with registered(URL, ["pebble"]):
        assert [(one.url, one.port, [*one.models]) for one in servers()] == [(URL, "8000", ["pebble"])]
        assert app.run(["ps"]) == 0 and URL in capsys.readouterr().out
        assert app.run(["ps", "--json"]) == 0 and json.loads(capsys.readouterr().out)[0]["url"] == URL
    assert not servers() and not [*folder.iterdir()]
    assert app.run(["ps"]) == 0 and "no server is running" in capsys.readouterr().err


def test_stale_and_damaged_entries_are_removed(folder: Path, other: Callable[..., RunningServer]) -> None:
    alive = other()
    reused = replace(alive, ticks=1)  # another process has the number now
    assert not reused.is_alive
    (folder / "9.json").write_text(json.dumps(asdict(replace(alive, pid=10))))
    (folder / "10.json").write_text("[")
    (folder / "11.json").write_text(json.dumps({**asdict(alive), "pid": 2**80}))
    assert servers() == [alive]
    assert [path.name for path in folder.iterdir()] == [f"{alive.pid}.json"]


def test_stop(folder: Path, other: Callable[..., RunningServer], capsys: pytest.CaptureFixture[str]) -> None:
    first, second = other(), other("http://127.0.0.1:8001")
    assert app.run(["stop"]) == 1 and "several servers are running" in capsys.readouterr().err
    assert app.run(["stop", "1"]) == 1 and "there is no such server" in capsys.readouterr().err
    assert app.run(["stop", "8001", "--all"]) == 2
    assert app.run(["stop", "8001"]) == 0 and not second.is_alive and first.is_alive
    assert app.run(["stop", "--all"]) == 0 and not first.is_alive
    assert app.run(["stop"]) == 1 and "no server is running" in capsys.readouterr().err


def test_a_suspended_server_is_not_waited_for(
    folder: Path, other: Callable[..., RunningServer], capsys: pytest.CaptureFixture[str]
) -> None:
    one = other()
    os.kill(one.pid, signal.SIGSTOP)
    os.waitpid(one.pid, os.WUNTRACED)  # until it is suspended
    assert app.run(["stop", "--timeout", "0.1"]) == 1
    assert "has not ended after 0.1 s" in (said := capsys.readouterr().err) and f"kill -9 {one.pid}" in said
    os.kill(one.pid, signal.SIGCONT)
    assert app.run(["stop"]) in (0, 1) and not one.is_alive


def test_a_server_is_named_by_its_model(
    folder: Path, other: Callable[..., RunningServer], capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = other(), other("http://127.0.0.1:8001", models=["smol", "words"])
    assert app.run(["stop", "words"]) == 1 and "several servers have this model" in capsys.readouterr().err
    assert app.run(["stop", "smol"]) == 0 and first.is_alive and not second.is_alive


def test_the_models_of_a_router(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with registered(URL, ["bert", "pebble", "smol"], ["bert"], loaded=[]) as note_loaded:
        assert app.run(["ps"]) == 0 and "loaded" not in capsys.readouterr().out
        note_loaded(["pebble"])
        assert app.run(["ps"]) == 0 and ": bert, pebble (loaded), smol" in capsys.readouterr().out
        assert app.run(["ps", "--json"]) == 0 and json.loads(capsys.readouterr().out)[0]["loaded"] == ["pebble"]
        assert app.run(["launch", "opencode"]) == 0
        provider = json.loads(capsys.readouterr().out)["provider"]["genai"]
        assert [*provider["models"]] == ["pebble", "smol"]
        assert app.run(["launch", "opencode", "--name", "bert"]) == 2 and "it has pebble" in capsys.readouterr().err
    with registered(URL, ["bert"], ["bert"]):
        assert app.run(["launch", "codex"]) == 1 and "no model of this server generates" in capsys.readouterr().err


def test_a_folder_that_others_can_use_is_refused(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.chmod(0o755)
    with pytest.raises(StateError, match="not private"):
        servers()
    with registered(URL, []):  # the server itself runs
        assert "`genai ps` does not list this server" in caplog.text
    folder.rmdir()
    folder.write_text("a file")
    with pytest.raises(StateError):
        runtime_folder()


@pytest.mark.parametrize("client", CLIENTS)
def test_launch_adds_settings_and_changes_no_others(client: str, tmp_path: Path) -> None:
    setup = setup_of(client, URL, "pebble", tmp_path)
    others = {"codex": 'model = "gpt"\n[tools]\nx = 1\n', "openwebui": "# mine\nPORT=3000\n"}
    earlier = others.get(client, '{"theme": "dark", "env": {"A": "b"}}')
    setup.path.parent.mkdir(parents=True)
    setup.path.write_text(earlier)
    assert setup.write() and not setup.write()
    written = setup.path.read_text()
    if client == "codex":
        content = tomllib.loads(written)
        assert content["model"] == "gpt" and content["profiles"]["genai"]["model"] == "pebble" and content["tools"]
        assert tomllib.loads(setup.text) == setup.settings
    elif client == "openwebui":
        assert written == earlier + setup.text
    else:
        content = json.loads(written)
        assert content["theme"] == "dark" and content["env"]["A"] == "b" and URL in written
    with pytest.raises(InputError, match="has another value"):
        setup_of(client, "http://127.0.0.1:9", "pebble", tmp_path).write()
    assert setup.path.read_text() == written


@pytest.mark.parametrize("client", CLIENTS)
def test_launch_for_a_server_with_keys(
    client: str, other: Callable[..., RunningServer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other(needs_key=True)
    assert app.run(["launch", client]) == 1 and "the server needs an API key" in capsys.readouterr().err
    key = "k" * 16
    (tmp_path / "keys").write_text(f"# mine\nme {key}\n")
    assert app.run(["launch", client, "--api-key-file", str(tmp_path / "keys")]) == 0
    printed = capsys.readouterr()
    assert key in (printed.err if client == "codex" else printed.out)
    if client == "codex":
        variable = tomllib.loads(printed.out)["model_providers"]["genai"]["env_key"]
        assert f"`env {variable}={key} codex" in printed.err


@pytest.mark.parametrize("name", ["localhost:8000", "127.0.0.1:8000/v1", "http://0.0.0.0:8000/", f"{URL}/v1", "8000"])
def test_names_of_a_server(name: str, other: Callable[..., RunningServer]) -> None:
    made = other(), other("http://127.0.0.1:80001")
    assert chosen(servers(), name) == made[0]


@pytest.mark.parametrize(("client", "text"), [("codex", "x = ["), ("claude", "{"), ("opencode", "[]")])
def test_damaged_files_of_clients_stay_unchanged(client: str, text: str, tmp_path: Path) -> None:
    setup = setup_of(client, URL, "pebble", tmp_path)
    setup.path.parent.mkdir(parents=True)
    setup.path.write_text(text)
    with pytest.raises(InputError):
        setup.write()
    assert setup.path.read_text() == text


def test_launch(other: Callable[..., RunningServer], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other()
    assert app.run(["launch", "codex"]) == 0
    printed = capsys.readouterr()
    assert tomllib.loads(printed.out)["profiles"]["genai"]["model"] == "pebble" and "--profile genai" in printed.err
    assert app.run(["launch", "claude", "8000", "--name", "words", "--write"]) == 0
    settings = json.loads((tmp_path / ".claude" / "settings.json").read_text())
    assert settings["env"]["ANTHROPIC_MODEL"] == "words" and settings["env"]["ANTHROPIC_BASE_URL"] == URL
    assert app.run(["launch", "claude", "--name", "words", "--write"]) == 0
    assert "has these settings already" in capsys.readouterr().err
    assert app.run(["launch", "emacs"]) == 1 and "not a known client" in capsys.readouterr().err
    assert app.run(["launch", "codex", "--name", "gpt"]) == 2 and "no such model" in capsys.readouterr().err

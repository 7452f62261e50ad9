"""`genai serve --ray`: a replica that is killed under load, sessions, and options that do not apply."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

from genai.cli import app

NAMES = ("Ann", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hal")
_SECONDS = 300  # Ray's processes start slowly on a busy machine


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
def test_a_replica_that_is_killed_under_load(tmp_path: Path) -> None:
    """Every client gets the text that it gets without the kill, and sessions stay on their replica."""
    command = [sys.executable, "-m", "genai", "serve", "--ray", "local", "--replicas", "2", "--threads", "1"]
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    process = subprocess.Popen([*command, "--port", "0"], stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stderr is not None
        said = next(line for line in process.stderr if "genai serve:" in line)
        url = said.split()[-1].removesuffix("/v1")
        threading.Thread(target=process.stderr.read, daemon=True).start()
        expected = [_reply(url, name) for name in NAMES]
        cached = [_cached(url, name) for name in NAMES]
        assert all(cached), "a turn reached another replica than the one before it"
        replicas = _replicas()
        assert len(replicas) == 2
        begun, waited = threading.Barrier(len(NAMES) + 1), threading.local()

        def wait_once() -> None:
            if not hasattr(waited, "done"):
                waited.done = True
                begun.wait(60)

        with ThreadPoolExecutor(len(NAMES)) as threads:
            running = [threads.submit(_reply, url, name, wait_once) for name in NAMES]
            begun.wait(60)
            os.kill(replicas[0], signal.SIGKILL)
            assert [one.result() for one in running] == expected
        metrics = httpx.get(f"{url}/metrics", trust_env=False).text
        assert "genai_balancer_replays_total 0" not in metrics
    finally:
        process.terminate()
        process.wait(_SECONDS)


def _reply(url: str, name: str, begun: Callable[[], object] = lambda: None) -> str:
    body: dict[str, Any] = {"stream": True, "temperature": 1, "seed": 3, "ignore_eos": True, "max_tokens": 150}
    body["messages"] = [{"role": "user", "content": f"Tell me a story about {name}."}]
    texts: list[str] = []
    address, headers = f"{url}/v1/chat/completions", {"x-session-id": name}
    with httpx.stream("POST", address, json=body, headers=headers, timeout=_SECONDS, trust_env=False) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                texts.append(json.loads(line[6:])["choices"][0]["delta"].get("content", ""))
                begun()
    return "".join(texts)


def _cached(url: str, name: str) -> int:
    """Return the number of prompt tokens that the prefix cache of the session's replica supplies."""
    question = f"Tell me a story about {name}. " + "It is long. " * 20
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 1}
    for _ in range(2):
        headers = {"x-session-id": name}
        reply = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=_SECONDS, trust_env=False)
    return int(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def _replicas() -> list[int]:
    """Return the processes of the replicas."""
    lines = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True).stdout.splitlines()
    return [int(line.split()[0]) for line in lines if "ServeReplica:genai" in line]


WRONG = [
    (["--replicas", "2"], "--replicas cannot be used without --ray"),
    (["--ray", "local", "pebble", "pebble"], "a second MODEL cannot be used with --ray"),
    (["--ray", "local", "--traces"], "--traces cannot be used with --ray"),
    (["--ray", "local", "--keep", "10m"], "--keep cannot be used with --ray"),
    (["--ray", "local", "--batch-dir", "no-such-folder"], "--batch-dir cannot be used with --ray"),
]


@pytest.mark.parametrize(("arguments", "said"), WRONG)
def test_options_that_do_not_apply(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert app.run(["serve", "--port", "0", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_missing_package(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert app.run(["serve", "--port", "0", "--ray", "local"]) == 1
    assert "pip install 'ray[serve]'" in capsys.readouterr().err

"""`genai bench serve`: its rows, and other servers that cannot be measured. Speeds themselves are not judged."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import genai
from genai.bench.serving import bench_serve
from genai.cli.app import run as run_here
from genai.server.run import serve_on_thread
from genai.server.serving import Server

SMALL: dict[str, Any] = {"clients": [2], "prompt": 8, "tokens": 4, "repeat": 1}
COLUMNS = ["side", "tok/s", "ttft p50 ms", "ttft p95 ms", "itl p50 ms", "itl p95 ms", "client CPU s"]


@pytest.fixture(scope="module")
def model(bundled_folder: Path) -> Any:
    with genai.Model(bundled_folder, threads=1) as loaded:
        yield loaded


def test_beside_another_server(model: genai.Model, bundled_folder: Path) -> None:
    done: list[tuple[int, int]] = []
    with genai.LLM(bundled_folder, threads=1) as llm, serve_on_thread(server := Server(llm)) as url:
        rows = list(bench_serve(model, **SMALL, compare=f"{url}/v1", progress=lambda *counts: done.append(counts)))
        server.close()
    assert [row["side"] for row in rows] == [f"2 clients, {name}" for name in ("engine", "server", "compared")]
    assert all([*row] == COLUMNS and row["tok/s"] > 0 and row["ttft p50 ms"] > 0 for row in rows)
    assert rows[0]["client CPU s"] is None and rows[1]["client CPU s"] > 0
    assert done == [(number, 6) for number in range(1, 7)]


def test_a_server_without_a_model_name(model: genai.Model) -> None:
    with pytest.raises(genai.InputError, match=r"http://127\.0\.0\.1:1/v1/models does not name a model"):
        list(bench_serve(model, **SMALL, compare="http://127.0.0.1:1/v1/"))


def test_wrong_options(model: genai.Model) -> None:
    for changes, said in (
        ({"compare": "llama-server"}, "compare = 'llama-server'"),
        ({"clients": [0]}, "clients = "),
        ({"tokens": 1}, "tokens = 1"),
    ):
        with pytest.raises(genai.OptionError, match=said):
            list(bench_serve(model, **{**SMALL, **changes}))
    with pytest.raises(genai.ContextOverflowError):
        list(bench_serve(model, **{**SMALL, "prompt": 1022}))
    with pytest.raises(genai.InputError, match="cannot be started"):
        list(bench_serve(model, **SMALL, compare="/no/such/program {port}"))
    quits = f"{sys.executable} -c \"print('no port {{port}}')\""
    with pytest.raises(genai.InputError, match="does not start a server") as failed:
        list(bench_serve(model, **SMALL, compare=quits))
    assert "no port" in failed.value.why


def test_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here(["bench", "serve", "-t", "1", "-c", "1", "-p", "8", "-n", "4", "-r", "1", "--json"]) == 0
    assert [row["side"] for row in json.loads(capsys.readouterr().out)] == ["1 client, engine", "1 client, server"]
    assert run_here(["bench", "serve", "-t", "1", "-c", "1", "-p", "8", "-n", "4", "--compare", "none"]) == 2
    assert "--compare 'none'" in capsys.readouterr().err

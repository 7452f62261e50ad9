"""`genai top`: the figures between two readings of real metrics, its output, and servers without metrics."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from genai.cli import app
from genai.errors import InputError
from genai.server.keys import read_keys
from genai.server.readings import ModelReading, ServerReading, figures, parse_metrics, read_metrics
from genai.server.registry import registered

from .conftest import Running


def test_figures_between_two_readings(running: Running) -> None:
    before = read_metrics(running.url)
    replies = [running.chat(f"What is {number} + 7?").json()["usage"] for number in (1, 2)]
    now = read_metrics(running.url)
    assert now.requests == before.requests + 2 and now.failed == before.failed
    (found,) = figures(now, before)
    seconds = now.seconds - before.seconds
    name = "generated_tokens_total"  # it counts the tokens that end a reply, too
    generated = now.models["pebble"].values[name] - before.models["pebble"].values[name]
    assert found.name == "pebble" and found.state == "loaded" and found.running == found.waiting == 0
    assert found.generated_tokens_per_second == pytest.approx(generated / seconds)
    cached = sum(reply["prompt_tokens_details"]["cached_tokens"] for reply in replies)
    prompt = sum(reply["prompt_tokens"] for reply in replies)
    assert found.cached_ratio == pytest.approx(cached / prompt)
    assert found.prompt_tokens_per_second == pytest.approx((prompt - cached) / seconds)
    assert found.first_token_seconds and 0 < found.first_token_seconds < seconds
    (idle,) = figures(now, now)
    assert idle.generated_tokens_per_second == 0 and idle.first_token_seconds is idle.cached_ratio is None


def test_a_restarted_server_counts_from_zero() -> None:
    readings = [
        ServerReading(at, 0, 0, {}, {"a": ModelReading(values={"generated_tokens_total": count})})
        for at, count in ((1.0, 50.0), (3.0, 8.0))
    ]
    assert figures(readings[1], readings[0])[0].generated_tokens_per_second == 4


def test_labels_and_other_lines() -> None:
    text = (
        'genai_model_state{model="a\\"\\\\b",state="loading"} 1\ngenai_model_requests_waiting{model="a\\"\\\\b"} 3\n'
        'genai_x{ 1\nvllm:y 2\ngenai_requests_running{model="c"} many\ngenai_models_bytes 5\n'
        'genai_http_requests_total{model="r",path="/v1/models",status="503"} 2\n'
    )
    found = parse_metrics(text)
    (model,) = figures(found, found)
    assert (model.name, model.state, model.waiting) == ('a"\\b', "loading", 3)
    assert found.values == {"models_bytes": 5} and (found.requests, found.failed) == (2, 2)


class Sleeps:
    """Sleeps, of which the last ends with Ctrl-C."""

    def __init__(self, left: int) -> None:
        self.left = left

    def __call__(self, _: float) -> None:
        if not self.left:
            raise KeyboardInterrupt
        self.left -= 1


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def listed(running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of the user's only server."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with registered(running.url, ["pebble"]):
        yield running.url


def test_the_command(listed: str, capsys: pytest.CaptureFixture[str]) -> None:
    for server in ([], [listed.rpartition(":")[2]], [f"{listed}/v1"]):
        assert app.run(["top", *server, "--json", "--interval", "0.1"]) == 0
        (found,) = json.loads(capsys.readouterr().out)
        assert found["url"] == listed and found["models"][0]["name"] == "pebble" and found["failed"] == 0
    assert app.run(["top", "--interval", "0.1"]) == 0  # stdout is no terminal
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{listed}  ") and "0 failed, 0 refused" in lines[0]
    assert "reply tok/s" in lines[2] and lines[4].split()[:3] == ["pebble", "loaded", "0"]


def test_the_view_is_refreshed_until_ctrl_c(listed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("genai.cli.top.time.sleep", sleeps := Sleeps(2))
    monkeypatch.setattr("sys.stdout", shown := Terminal())
    assert app.run(["top", "--interval", "0.1"]) == 0 and not sleeps.left
    assert shown.getvalue().count("pebble") >= 2


def test_no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert app.run(["top"]) == 1 and "no server is running" in capsys.readouterr().err
    with registered("http://127.0.0.1:1", ["pebble"]):
        assert app.run(["top", "--json", "--interval", "0.1"]) == 0  # other servers are shown
        assert "cannot be reached" in json.loads(capsys.readouterr().out)[0]["error"]
        assert app.run(["top", "--interval", "0.1"]) == 0 and "cannot be reached" in capsys.readouterr().out
        assert app.run(["top", "1"]) == 1 and "the server cannot be reached" in capsys.readouterr().err
    assert app.run(["top", "http://127.0.0.1:x"]) == 1 and "is not an address" in capsys.readouterr().err


def test_keys(
    serving: Callable[..., Running],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# mine\nme {'k' * 16}\n")
    url = serving(keys=read_keys(file)).url
    assert app.run(["top", url]) == 1 and "--api-key-file" in capsys.readouterr().err
    assert app.run(["top", url, "--json", "--interval", "0.1", "--api-key-file", str(file)]) == 0
    file.write_text("x" * 16)
    assert app.run(["top", url, "--api-key-file", str(file)]) == 1
    assert "the server does not know this API key" in capsys.readouterr().err
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with registered(url, ["pebble"]):
        assert app.run(["top", "--interval", "0.1"]) == 0
    assert capsys.readouterr().out == f"{url}  the metrics cannot be read: the server needs an API key\n"


class _Other(BaseHTTPRequestHandler):
    status, body = 404, b""

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.send_header("location", "/other")
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *_: object) -> None: ...


@pytest.mark.parametrize(("status", "said"), [(404, "status 404"), (302, "status 302"), (200, "other metrics")])
def test_other_servers(status: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Other, "status", status)
    with HTTPServer(("127.0.0.1", 0), _Other) as other:
        Thread(target=other.serve_forever, args=(0.01,), daemon=True).start()
        with pytest.raises(InputError, match=said):
            read_metrics(f"http://127.0.0.1:{other.server_port}")
        other.shutdown()

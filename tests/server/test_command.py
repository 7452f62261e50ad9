"""`genai serve` as a process: its address, errors before the model is loaded, and SIGTERM under load."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from genai.cli import app
from genai.errors import InputError, OptionError
from genai.server.run import Address, LoopErrors

from .test_load import NEVER_ENDS


class Process:
    """`genai serve` in a process."""

    def __init__(self, *arguments: str) -> None:
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, "-m", "genai", "serve", "--port", "0", *arguments]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        assert self.process.stderr is not None
        self.line = next(line for line in self.process.stderr if "http" in line)
        self.url = self.line.split()[-1].removesuffix("/v1")
        self.client = httpx.Client(base_url=self.url, timeout=60, trust_env=False)

    def close(self) -> str:
        """End the process, and return what else it wrote."""
        self.client.close()
        if self.process.poll() is None:
            self.process.kill()
        if self.process.stderr is None or self.process.stderr.closed:
            return ""
        _, said = self.process.communicate()
        return said


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    known: list[Process] = []

    def begin(*arguments: str) -> Process:
        known.append(Process(*arguments))
        return known[-1]

    yield begin
    for one in known:
        one.close()


def test_sigterm_ends_streams_whole(start: Callable[..., Process]) -> None:
    served = start("--name", "mine")
    assert served.line.startswith("genai serve: mine at http://127.0.0.1:")
    body = {**NEVER_ENDS, "stream": True, "max_tokens": 300}
    with served.client.stream("POST", "/v1/chat/completions", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        served.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    assert served.process.wait(30) == 0
    assert served.close() == "genai serve: finishing 1 request in at most 30 seconds; Ctrl-C stops at once\n"


def test_the_time_limit_of_sigterm(start: Callable[..., Process]) -> None:
    served = start("--drain-timeout", "0.01", "--ctx-size", "1024")
    body = {"messages": NEVER_ENDS["messages"], "ignore_eos": True, "n": 30, "temperature": 1, "stream": True}
    with served.client.stream("POST", "/v1/chat/completions", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        served.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert rest[-2] == "event: error" and json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "stopping"
    assert served.process.wait(30) == 0


def test_sigkill_ends_streams_with_an_error(start: Callable[..., Process], tmp_path: Path) -> None:
    """Clients see an error, and the next server starts at the same port, with the same log and the same batches."""
    log = tmp_path / "log"
    options = ["--request-log", str(log), "--batch-dir", str(tmp_path / "batches")]
    served = start(*options)
    assert served.client.get("/v1/models").status_code == 200
    body = {**NEVER_ENDS, "stream": True}
    with ExitStack() as stack:
        ask = served.client.stream
        streams = [stack.enter_context(ask("POST", "/v1/chat/completions", json=body)) for _ in range(3)]
        lines = [stream.iter_lines() for stream in streams]
        assert all(next(one).startswith("data: {") for one in lines)
        served.process.kill()
        for one in lines:
            with pytest.raises(httpx.TransportError):
                assert "data: [DONE]" not in [*one]
    assert served.process.wait(30) == -signal.SIGKILL
    again = start("--port", served.url.rpartition(":")[2], *options)
    assert again.url == served.url
    answer = again.client.post("/v1/chat/completions", json={"messages": NEVER_ENDS["messages"], "max_tokens": 1})
    assert answer.status_code == 200 and again.client.get("/v1/batches").json()["data"] == []
    assert again.close() == ""
    paths = [json.loads(line)["path"] for line in log.read_text(encoding="utf-8").splitlines()]
    assert paths == ["/v1/models", "/v1/chat/completions", "/v1/batches"]


def test_a_second_signal_ends_requests_at_once(start: Callable[..., Process]) -> None:
    served = start("--drain-timeout", "3600", "--ctx-size", "1024")
    body = {"messages": NEVER_ENDS["messages"], "ignore_eos": True, "n": 30, "temperature": 1, "stream": True}
    with served.client.stream("POST", "/v1/chat/completions", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        served.process.send_signal(signal.SIGINT)
        assert served.process.stderr is not None and "finishing 1 request" in served.process.stderr.readline()
        served.process.send_signal(signal.SIGINT)
        rest = [line for line in lines if line]
    assert rest[-2] == "event: error" and "a second signal" in rest[-1]
    assert served.process.wait(30) == 130
    assert served.close() == "genai serve: stopped; the running requests ended with an error\n"


WRONG: list[tuple[list[str], str]] = [
    (["--host", "0.0.0.0"], "--host 0.0.0.0 needs API keys"),
    (["--insecure"], "--insecure has no effect"),
    (["--host", "0.0.0.0", "--insecure", "--allow-host", "me"], "--allow-host cannot be used"),
    (["--host", "no such name.invalid", "--insecure"], "--host 'no such name.invalid'"),
    (["--port", "70000"], "--port 70000"),
    (["--tls-cert", "cert.pem"], "--tls-cert and --tls-key belong together"),
    (["--adapter-dir", "missing-folder"], "--adapter-dir 'missing-folder'"),
    (["--log-prompts"], "--log-prompts cannot be used without --request-log"),
    (["--request-log", "missing-folder/log"], "missing-folder/log: the request log cannot be written"),
    (["--timeout", "0"], "--timeout 0.0"),
    (["--api-key-file", "missing-file"], "missing-file"),
    (["--lora", "x=missing-adapter"], "missing-adapter"),
]


@pytest.mark.parametrize(("arguments", "said"), WRONG)
def test_errors_before_the_model_is_loaded(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("genai.llm.llm.LLM.__init__", fails)
    assert app.run(["serve", "--port", "0", *arguments]) in (1, 2)
    assert said in capsys.readouterr().err


def test_an_unknown_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["serve", "--port", "0", "no-such-model-anywhere"]) == 1
    assert "no-such-model-anywhere" in capsys.readouterr().err


def test_a_port_that_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert app.run(["serve", "--port", str(port)]) == 2
    assert f"--port {port} on 127.0.0.1 cannot be used" in capsys.readouterr().err


def test_missing_packages() -> None:
    missing = "dict.fromkeys(['msgspec', 'starlette', 'uvicorn'])"
    code = f"import sys; sys.modules |= {missing}; from genai.cli import app; sys.exit(app.run(['serve']))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 1
    assert "msgspec is not installed" in found.stderr and "pip install starlette uvicorn msgspec" in found.stderr


def test_importing_the_toolkit_imports_no_server() -> None:
    code = "import sys, genai; genai.LLM; print({'starlette', 'uvicorn', 'msgspec'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def test_tls(start: Callable[..., Process], tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    made = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", cert],
        capture_output=True,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    with pytest.raises(InputError, match="cannot be used"):
        Address(tls_cert=key, tls_key=cert).check()
    served = start("--tls-cert", str(cert), "--tls-key", str(key))
    assert " https://127.0.0.1:" in served.line
    trusted = ssl.create_default_context(cafile=str(cert))
    with httpx.Client(base_url=served.url, verify=trusted, trust_env=False) as client:
        assert client.get("/health").json() == {"status": "ok"}


def test_a_lack_of_descriptors_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    loop, handle = asyncio.new_event_loop(), LoopErrors()
    for message in ("socket.accept() out of system resource", "socket.accept() out of system resource", "other"):
        handle(loop, {"message": message})
    loop.close()
    assert [record.getMessage()[:21] for record in caplog.records] == ["new connections wait:", "other"]


def test_names_of_hosts() -> None:
    assert Address().hosts() and Address("0.0.0.0").hosts() == () and "me" in Address().hosts(("Me",))
    with pytest.raises(OptionError, match="port"):
        Address(port=-1).check()

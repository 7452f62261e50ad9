"""Who may use a server: keys, the host header, origins, bodies; and the separation of keys in the prefix cache."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import genai
from genai.errors import InputError, OptionError
from genai.server.guards import host_name, is_loopback
from genai.server.keys import read_keys
from genai.server.run import serve_on_thread
from genai.server.serving import Server, ServerOptions

from .conftest import Running
from .test_load import STORY, until

KEYS = "# keys of the team\nalice aaaaaaaaaaaaaaaaaaaa\n\nbbbbbbbbbbbbbbbbbbbb\n"


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text(KEYS, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def locked(serving: Callable[..., Running], key_file: Path) -> Running:
    return serving(keys=read_keys(key_file))


def test_keys(locked: Running) -> None:
    body = {"messages": [{"role": "user", "content": "What is 12 + 7?"}]}
    for headers in (
        {"authorization": f"Bearer {'a' * 20}"},
        {"x-api-key": "b" * 20},
        {"authorization": f"bearer {'b' * 20}"},
    ):
        assert locked.post("/v1/chat/completions", body, **headers).status_code == 200
    for headers in ({}, {"authorization": "Bearer wrong"}, {"x-api-key": "?"}, {"authorization": f"Basic {'a' * 20}"}):
        answer = locked.post("/v1/chat/completions", body, **headers)
        error = answer.json()["error"]
        assert answer.status_code == 401 and error["type"] == "authentication_error"
        assert error["code"] == "invalid_api_key" and answer.headers["www-authenticate"] == "Bearer"
    with locked.http as client:
        assert client.get("/v1/models").status_code == 401 and client.get("/health").json() == {"status": "ok"}


def test_keys_do_not_share_cached_blocks(locked: Running) -> None:
    body = {"messages": [{"role": "user", "content": "Tell me about the sea. " * 30}], "max_tokens": 1}

    def cached(key: str, **fields: Any) -> int:
        answer = locked.post("/v1/chat/completions", {**body, **fields}, authorization=f"Bearer {key * 20}").json()
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached("a") == 0 and cached("a") > 100 and cached("b") == 0 and cached("b") > 100
    assert cached("a", cache_salt="x") == 0 and cached("a", cache_salt="x") > 100 and cached("a") > 100


def test_names_of_keys(key_file: Path) -> None:
    assert [key.name for key in read_keys(key_file)] == ["alice", "key-4"]
    assert "aaaa" not in repr(read_keys(key_file))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "no key"),
        ("# only a comment", "no key"),
        ("a b c", "3 words"),
        ("short", "5 characters"),
        ("é" * 20, "ASCII"),
        (f"a {'x' * 20}\na {'y' * 20}", "repeats"),
    ],
)
def test_wrong_key_files(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "keys").write_text(content, encoding="utf-8")
    with pytest.raises(InputError, match=said):
        read_keys(tmp_path / "keys")


def test_a_missing_key_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        read_keys(tmp_path / "keys")


def test_the_host_header(serving: Callable[..., Running]) -> None:
    running = serving(allowed_hosts=("127.0.0.1", "localhost"))
    with running.http as client:
        for host in ("127.0.0.1:80", "localhost", "LOCALHOST:1"):
            assert client.get("/v1/models", headers={"host": host}).status_code == 200
        for host in ("evil.example", "evil.example:8000", "", "127.0.0.1.evil.example", "127.0.0.1@evil"):
            answer = client.get("/v1/models", headers={"host": host})
            assert answer.status_code == 403 and answer.json()["error"]["code"] == "host_not_allowed", host


def test_origins(serving: Callable[..., Running]) -> None:
    closed, opened = serving(), serving(allowed_origins=("https://chat.example",))
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    answer = closed.post("/v1/chat/completions", body, origin="https://evil.example")
    assert answer.status_code == 403 and "access-control-allow-origin" not in answer.headers
    assert closed.post("/v1/chat/completions", body, origin="null").status_code == 403
    same = closed.post("/v1/chat/completions", body, origin=closed.url)
    assert same.status_code == 200
    answer = opened.post("/v1/chat/completions", body, origin="https://chat.example")
    assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == "https://chat.example"
    with opened.http as client:
        asked = {"origin": "https://chat.example", "access-control-request-headers": "content-type, x-stainless-os"}
        preflight = client.options("/v1/chat/completions", headers=asked)
        assert preflight.status_code == 204
        assert preflight.headers["access-control-allow-headers"] == "content-type, x-stainless-os"
        assert client.options("/v1/models", headers={"origin": "https://evil.example"}).status_code == 403


FORM = {"content-type": "application/x-www-form-urlencoded"}


def test_json_in_a_form_is_read_from_programs_only(serving: Callable[..., Running]) -> None:
    """A web page can send a form, or a text, to this server without asking it."""
    running, body = serving(), b'{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}'
    with running.http as client:
        curl = client.post("/v1/chat/completions", content=body, headers={**FORM, "user-agent": "curl/8.5.0"})
        assert curl.status_code == 200
        for more in (
            {"user-agent": "Mozilla/5.0 (X11)"},
            {"sec-fetch-site": "cross-site"},
            {"referer": "https://evil.example/"},
            {"cookie": "a=b"},
            {"content-type": "text/plain"},
        ):
            page = client.post("/v1/chat/completions", content=body, headers={**FORM, **more})
            assert page.status_code == 415 and "-H 'content-type: application/json'" in page.json()["error"]["message"]


def test_bodies_are_limited(serving: Callable[..., Running]) -> None:
    running = serving(max_body=1000)
    assert running.chat("x" * 2000).status_code == 413
    with running.http as client:

        def parts() -> Any:
            for _ in range(100):
                yield b" " * 100

        answer = client.post("/v1/chat/completions", content=parts(), headers={"content-type": "application/json"})
        assert answer.status_code == 413 and "1,000 bytes" in answer.json()["error"]["message"]


def test_bodies_of_all_requests_are_limited(serving: Callable[..., Running], llm: genai.LLM) -> None:
    running = serving(max_body=1000)
    with socket.create_connection(("127.0.0.1", int(running.url.rpartition(":")[2]))) as first:
        running.server.bodies.held += 15_900
        answer = running.chat("x" * 200)
        assert answer.status_code == 429 and answer.json()["error"]["code"] == "rate_limit_exceeded"
        assert answer.headers["retry-after"] == "1"
        until(lambda: running.server.bodies.held == 15_900)  # released after the reply
        first.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 90\r\n\r\n" + b"x" * 50)
        until(lambda: running.server.bodies.held == 15_950)
    until(lambda: running.server.bodies.held == 15_900)


def test_heads_that_arrive_slowly(llm: genai.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("genai.server.connections.HEAD_SECONDS", 0.2)
    with closing(Server(llm)) as server, serve_on_thread(server) as url:
        place = ("127.0.0.1", int(url.rpartition(":")[2]))
        whole = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
        for sent in (b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nhost: localhost\r\n"):
            with socket.create_connection(place, timeout=30) as slow:
                slow.sendall(sent)
                assert slow.recv(100) == b""
        with socket.create_connection(place, timeout=30) as used:
            used.sendall(whole)
            assert used.recv(1000).startswith(b"HTTP/1.1 200")
            used.sendall(whole[:-2])
            until(lambda: used.recv(1000) == b"")


def _raw(running: Running, *parts: bytes) -> bytes:
    """Send bytes, and return everything that the server sends until it closes the connection."""
    with socket.create_connection(("127.0.0.1", int(running.url.rpartition(":")[2])), timeout=30) as connection:
        connection.sendall(b"".join(parts))
        return b"".join(iter(lambda: connection.recv(65536), b""))


def test_requests_that_proxies_could_read_otherwise(running: Running) -> None:
    """A request with two lengths is refused, and what follows it on the connection is not read."""
    head = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    second = b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n"
    lengths = b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n"
    answer = _raw(running, head, lengths, b'f\r\n{"prompt": "Hi"}'[:18] + b"\r\n0\r\n\r\n", second)
    assert answer.startswith(b"HTTP/1.1 400") and answer.count(b"HTTP/1.1") == 1
    assert b"content-length and transfer-encoding" in answer


def test_pipelined_requests(running: Running) -> None:
    """Requests that are sent without waiting get their replies in order."""
    parts = [b"GET /v1/models/pebble HTTP/1.1\r\nhost: localhost\r\n\r\n", b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n"]
    last = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    answer = _raw(running, *parts * 50, last)
    assert answer.count(b"HTTP/1.1 200") == 101
    assert [answer.count(b'"id":"pebble"'), answer.count(b'{"status":"ok"}')] == [50, 51]


def test_compressed_bodies(running: Running) -> None:
    answer = running.post("/tokenize", {"prompt": "Hi"}, **{"content-encoding": "gzip"})
    assert answer.status_code == 415 and "compressed" in answer.json()["error"]["message"]


@pytest.mark.parametrize("name", ["stop", "banned_strings"])
def test_many_strings(running: Running, name: str) -> None:
    for texts in (["a"] * 1001, ["a" * 60_000] * 2):
        answer = running.chat(**{name: texts})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == name


def test_paths_and_methods(running: Running) -> None:
    with running.http as client:
        assert client.get("/v1/nothing").json()["error"]["code"] == "unknown_path"
        assert "did you mean '/completions'?" in client.post("/completion").json()["error"]["message"]
        answer = client.get("/v1/chat/completions")
        assert answer.status_code == 405 and answer.headers["allow"] == "POST"
        assert client.get("/v1/models/nothing").status_code == 404
        assert client.get("/v1/models/").json() == client.get("/v1/models").json()


def test_replies_hide_paths(running: Running, llm: genai.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise InputError(f"{llm.model.folder}/chat_template.jinja is wrong", "it is", "mend it")

    monkeypatch.setattr("genai.server.turns.prepare_chat", fails)
    message = running.chat().json()["error"]["message"]
    assert message.startswith("pebble/chat_template.jinja is wrong")


def test_strict(serving: Callable[..., Running]) -> None:
    running = serving(strict=True)
    for fields in ({"user": "me"}, {"unknown_field": 1}, {"tools": [{"type": "web_search"}]}):
        answer = running.chat(**fields)
        assert answer.status_code == 400 and "--strict" in answer.json()["error"]["message"]


def test_hosts_and_addresses() -> None:
    assert [host_name(one) for one in ("A:1", "a", "[::1]:5", "[::1]", "")] == ["a", "a", "[::1]", "[::1]", ""]
    assert {host_name(one) for one in ("[::1].evil.example", "localhost:80@evil", "a:b", "[::1", "a b", "/a")} == {""}
    assert [is_loopback(one) for one in ("localhost", "127.0.0.5", "::1", "0.0.0.0", "example.org")] == [
        True, True, True, False, False,
    ]  # fmt: skip


@pytest.mark.parametrize(
    "options", [{"max_queue": -1}, {"max_per_key": 0}, {"max_body": 0}, {"timeout": 0}, {"drain_seconds": -1}]
)
def test_wrong_options(options: Any) -> None:
    with pytest.raises(OptionError, match=next(iter(options))):
        ServerOptions(**options)


def test_a_conversation_equals_that_of_a_cold_server(llm: genai.LLM, running: Running, serving: Any) -> None:
    """The blocks of a reply have other numerics than the same tokens in a prompt, so they are computed again."""
    padding = {"role": "system", "content": "You tell stories. " * 15}
    question = {"messages": [padding, *STORY], "temperature": 0, "max_tokens": 300}
    first = running.post("/v1/chat/completions", question).json()
    longer = [*question["messages"], first["choices"][0]["message"], {"role": "user", "content": "And now?"}]
    ask = {"messages": longer, "max_tokens": 5, "logprobs": True, "top_logprobs": 2}
    warm = running.post("/v1/chat/completions", ask).json()
    cold = running.post("/v1/chat/completions", {**ask, "cache_salt": "cold"}).json()
    assert warm["choices"] == cold["choices"]
    reused = warm["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert 0 < reused <= first["usage"]["prompt_tokens"] and not cold["usage"]["prompt_tokens_details"]["cached_tokens"]
    fast = serving(reuse_replies=True)
    assert fast.post("/v1/chat/completions", {**question, "cache_salt": "r"}).json()["choices"] == first["choices"]
    warm = fast.post("/v1/chat/completions", {**ask, "cache_salt": "r"}).json()
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] > reused


def test_the_name_of_a_server(llm: genai.LLM) -> None:
    server = Server(llm)
    assert server.name == "pebble-tools" and server.model_names == ["pebble-tools", "words"]
    assert server.fingerprint == Server(llm).fingerprint
    server.close()

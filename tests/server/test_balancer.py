"""A balancer: sessions stay on a server, replies whose server fails continue on another, and errors if none is left."""

from __future__ import annotations

import json
import re
import socketserver
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

import genai
from genai.cli import app
from genai.errors import OptionError
from genai.server.app import build_app
from genai.server.balancer import FINGERPRINT, Balancer, BalancerOptions
from genai.server.keys import read_keys
from genai.server.run import serve_on_thread
from genai.server.serving import Server, ServerOptions

from .conftest import Running
from .test_command import Process

QUESTION = [{"role": "user", "content": "Tell me a story."}]


class Killed(BaseException):
    """Ends a request without a trace, as the end of the process does."""


class Servers:
    """Two servers with one model, of which the one with the next stream fails after a number of events.

    Attributes:
        after: number of events of the next stream until its server fails; None = it does not.
        instead: an action in place of the failure.
        seen: the names of the sessions, and the servers that got their requests.
    """

    def __init__(self, llm: genai.LLM) -> None:
        self.after: int | None = None
        self.instead: Callable[[Server], None] | None = None
        self.seen: list[tuple[str, int]] = []
        servers = [Server(llm, ServerOptions(), name="pebble") for _ in range(2)]
        self.running = [Running(server, self.wrapped(number, server)) for number, server in enumerate(servers)]
        self.urls = [one.url for one in self.running]

    def wrapped(self, number: int, server: Server) -> Any:
        inner = build_app(server)

        async def application(scope: Any, receive: Any, send: Any) -> None:
            names = [value.decode() for name, value in scope["headers"] if name == b"x-session-id"]
            self.seen.append((*names, number) if names else ("", number))

            async def counted(message: Any) -> None:
                body = message.get("body", b"")
                events = body.count(b"\n\n")
                if self.after is not None and events:
                    if self.after < events:
                        # A busy server sends several events at once. The client gets those before the failure.
                        parts = [event + b"\n\n" for event in body.split(b"\n\n")]
                        before, rest = b"".join(parts[: self.after]), b"".join(parts[self.after :])[:-2]
                        self.after = None
                        if before:
                            await send({**message, "body": before, "more_body": True})
                        if self.instead is None:
                            raise Killed
                        self.instead(server)
                        message = {**message, "body": rest}
                    else:
                        self.after -= events
                await send(message)

            await inner(scope, receive, counted)

        return application

    def close(self) -> None:
        for one in self.running:
            one.close()


@pytest.fixture(scope="module")
def both(llm: genai.LLM) -> Iterator[tuple[Servers, Balancer, httpx.Client]]:
    servers = Servers(llm)
    balancer = Balancer(servers.urls)
    with serve_on_thread(balancer) as url, httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
        yield servers, balancer, client
    servers.close()


@pytest.fixture
def fresh(both: tuple[Servers, Balancer, httpx.Client]) -> Iterator[tuple[Servers, Balancer, httpx.Client]]:
    """The servers and their balancer, without earlier failures."""
    yield both
    both[0].after = both[0].instead = None
    for one in both[1].upstreams:
        one.down_until = 0.0


class Fake:
    """A server that sends fixed bytes for each request, and closes the connection or stays silent.

    Attributes:
        sent: the bytes; b"" = none.
        is_silent: True if the connection stays open, and requests of /health get no response.
        requests: number of requests without those of /health.
    """

    def __init__(self, sent: bytes = b"", *, is_silent: bool = False) -> None:
        self.sent, self.is_silent, self.requests = sent, is_silent, 0
        self._end = threading.Event()
        fake = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                is_health = b"/health" in self.request.recv(65536)
                fake.requests += not is_health
                if not (is_health and fake.is_silent):
                    self.request.sendall(fake.sent)
                if fake.is_silent:
                    fake._end.wait(60)

        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._end.set()
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def balanced(*others: str, first: Fake, **options: Any) -> Iterator[tuple[httpx.Client, Balancer]]:
    """Yield a client of a balancer, which sends the requests of the client to `first` first."""
    balancer = Balancer([*others, first.url], BalancerOptions(**options))
    names = (f"session {number}" for number in range(1000))
    name = next(one for one in names if balancer.order(f"\0{one}", is_named=True)[0].url == first.url)
    with closing(first), serve_on_thread(balancer) as url:
        with httpx.Client(base_url=url, timeout=60, trust_env=False, headers={"x-session-id": name}) as client:
            yield client, balancer


STREAMS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": QUESTION, "n": 2, "stream_options": {"include_usage": True}}),
    ("/v1/chat/completions", {"messages": QUESTION, "logprobs": True, "top_logprobs": 1, "model": "words"}),
    ("/v1/completions", {"prompt": "One day", "logprobs": 1}),
    ("/v1/messages", {"messages": QUESTION}),
    ("/v1/responses", {"input": "Tell me a story."}),
]


def parts(text: str) -> tuple[dict[Any, Any], set[str]]:
    """Return the text and the log-probabilities of each part of a stream, its other events, and its identifiers."""
    found: dict[Any, Any] = defaultdict(list)
    identifiers = set()
    for event in text.split("\n\n"):
        line = next((line for line in event.splitlines() if line.startswith("data: {")), None)
        if line is None:
            found["plain"] += [event] if event and event != ": ping" else []
            continue
        identifiers |= {*re.findall(r'"id":"(\w+-?\w+)"', line)}
        line = re.sub(r'"(id|item_id)":"[\w-]+"|"(created|created_at|completed_at)":\d+', '"x":0', line)
        data = json.loads(line[6:])
        data.pop("timings", None)
        for choice in data.get("choices", ()):
            if isinstance(logprobs := choice.get("logprobs"), dict):
                for name, values in logprobs.items():
                    found["logprobs", choice["index"], name] += values or []
                choice["logprobs"] = None
            if not choice["finish_reason"]:
                for name in ("content", "text"):
                    holder = choice.get("delta", choice)
                    found[name, choice["index"]] += holder.pop(name, "")
        delta = data.get("delta")
        if data.get("type", "").endswith("delta"):
            found[data["type"], data.get("index"), data.get("output_index")] += (
                delta if isinstance(delta, str) else delta.pop("text", "")
            )
            data.pop("sequence_number", None)
            data["delta"] = None
        elif "response" in data.get("type", ""):
            found["usage"].append(data.get("response", {}).pop("usage", None))
        for name in ("usage", "message"):
            data.get(name) and data.pop(name)
        data.pop("sequence_number", None)
        key = json.dumps(data, sort_keys=True)
        if key not in found["events"]:  # the number of deltas is not fixed
            found["events"].append(key)
    return found, identifiers


@pytest.mark.parametrize(("path", "fields"), STREAMS)
def test_a_stream_continues_on_another_server(
    path: str, fields: dict[str, Any], fresh: tuple[Servers, Balancer, httpx.Client]
) -> None:
    servers, balancer, client = fresh
    body = {"stream": True, "seed": 5, "temperature": 1, "max_tokens": 20, "ignore_eos": True, **fields}
    if path == "/v1/responses":
        body["max_output_tokens"] = body.pop("max_tokens")
    whole, _ = parts(servers.running[0].post(path, body).text)
    replays = balancer.replays
    for after in (1, 6):
        servers.after = after
        reply = client.post(path, json=body)
        assert reply.status_code == 200
        found, identifiers = parts(reply.text)
        assert dict(found) == dict(whole), after
        assert len(identifiers) == (2 if path == "/v1/responses" else 1)
    assert balancer.replays > replays


def test_replies_without_a_stream_are_repeated(fresh: tuple[Servers, Balancer, httpx.Client]) -> None:
    """The wrapped servers fail only in streams; a server that cannot be reached is passed over."""
    servers, _, _ = fresh
    balancer = Balancer(["http://127.0.0.1:1", servers.urls[0]])
    with serve_on_thread(balancer) as url, httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
        for number in range(4):
            body = {"messages": [{"role": "user", "content": f"What is {number} + 7?"}], "seed": None}
            reply = client.post("/v1/chat/completions", json=body)
            assert reply.json()["choices"][0]["message"]["content"] == str(number + 7) and reply.json()["seed"]
        assert client.get("/health").json() == {"status": "ok", "servers": {"ok": 1, "unreachable": 1}}
        lines = client.get("/metrics").text.splitlines()
        assert f'genai_balancer_requests_total{{server="{servers.urls[0]}"}} 4' in lines
        assert "genai_balancer_replays_total 0" in lines


def test_sampled_streams_get_a_seed(fresh: tuple[Servers, Balancer, httpx.Client]) -> None:
    servers, balancer, client = fresh
    replays = balancer.replays
    for fields in ({}, {"seed": None}, {"seed": -1}):
        servers.after = 6
        body = {"messages": QUESTION, "stream": True, "temperature": 1.5, "max_tokens": 20, **fields}
        reply = client.post("/v1/chat/completions", json=body).text
        assert reply.endswith("data: [DONE]\n\n") and reply.count('"role"') == 1
    assert balancer.replays == replays + 3


def test_a_server_that_stops_hands_its_streams_over(fresh: tuple[Servers, Balancer, httpx.Client]) -> None:
    servers, _, client = fresh
    body = {"messages": QUESTION, "stream": True, "max_tokens": 20, "seed": 1}
    stopped: list[Server] = []

    def stop(server: Server) -> None:
        stopped.append(server)
        server.stop_running()

    for path in ("/v1/chat/completions", "/v1/messages"):
        whole, _ = parts(servers.running[0].post(path, body).text)
        servers.after, servers.instead = 5, stop
        found, _ = parts(client.post(path, json=body).text)
        stopped.pop()._is_stopped = False
        assert dict(found) == dict(whole)


def test_sessions_stay_on_their_server(fresh: tuple[Servers, Balancer, httpx.Client]) -> None:
    servers, _, client = fresh
    servers.seen.clear()
    for turn in range(3):
        for session in range(8):
            body = {"messages": [*QUESTION * turn, *QUESTION], "max_tokens": 1}
            client.post("/v1/chat/completions", json=body, headers={"x-session-id": f"session {session}"})
    found = defaultdict(set)
    for session, number in servers.seen:
        found[session].add(number)
    assert len(found) == 8 and all(len(numbers) == 1 for numbers in found.values())
    assert {number for numbers in found.values() for number in numbers} == {0, 1}


def test_the_choice_of_a_server() -> None:
    balancer = Balancer([f"http://node{number}:8000/v1" for number in range(4)], BalancerOptions(attempts=9))
    names = [f"session {number}" for number in range(40)]
    first = {name: balancer.order(name, is_named=True)[0] for name in names}
    assert len({*first.values()}) == 4
    down = first[names[0]]
    down.note_failure()
    for name in names:  # only the sessions of the server that failed move
        order = balancer.order(name, is_named=True)
        assert len(order) == 4 and order[-1] is down and (first[name] is down or order[0] is first[name])
    down.down_until = 0
    down.running = 5
    assert balancer.order(names[0], is_named=True)[0] is down is not balancer.order(names[0], is_named=False)[0]


def test_errors_after_the_last_server(fresh: tuple[Servers, Balancer, httpx.Client]) -> None:
    servers, _, _ = fresh
    body = {"messages": QUESTION, "stream": True, "max_tokens": 20}
    with serve_on_thread(Balancer(servers.urls[:1], BalancerOptions(attempts=1))) as url:
        for path, said in (
            ("/v1/chat/completions", {"error"}),
            ("/v1/messages", {"type", "error", "request_id"}),
            ("/v1/responses", {"type", "code", "message", "param"}),
        ):
            servers.after = 4
            sent = {**body, **({"input": "x"} if "responses" in path else {})}
            *_, event, end = httpx.post(f"{url}{path}", json=sent, timeout=60, trust_env=False).text.split("\n\n")
            assert end == "" and event.startswith("event: error\n")
            assert said >= {*json.loads(event.partition("data: ")[2])} >= said - {"request_id"}


def test_a_server_with_another_model_continues_nothing(
    fresh: tuple[Servers, Balancer, httpx.Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    servers, _, client = fresh
    body = {"messages": QUESTION, "stream": True, "max_tokens": 40, "ignore_eos": True}
    for path in ("/v1/chat/completions", "/v1/messages"):
        for number in (0, 1):
            monkeypatch.setattr(servers.running[number].server, "fingerprint", f"fp_{number}")
        servers.after = 8
        reply = client.post(path, json=body).text
        assert "the servers did not end the request" in reply and reply.count("event: error") == 1


def test_what_is_on_one_server_is_found(fresh: tuple[Servers, Balancer, httpx.Client]) -> None:
    servers, _, client = fresh
    for number in (0, 1):
        stored = servers.running[number].post("/v1/responses", {"input": "What is 12 + 7?"}).json()
        assert client.get(f"/v1/responses/{stored['id']}").json()["id"] == stored["id"]
        after = client.post("/v1/responses", json={"input": "And 1 + 1?", "previous_response_id": stored["id"]})
        assert after.status_code == 200
    missing = client.get("/v1/responses/resp_unknown")
    assert missing.status_code == 404 and "resp_unknown" in missing.json()["error"]["message"]
    assert client.get("/v1/models").json()["data"][0]["id"] == "pebble"


def test_what_is_on_the_last_of_many_servers_is_found(fresh: tuple[Servers, Balancer, httpx.Client]) -> None:
    servers, _, _ = fresh
    body = b'{"error":{"message":"previous_response_not_found","code":"previous_response_not_found"}}'
    head = "HTTP/1.1 404 Not Found\r\ncontent-type: application/json\r\nconnection: close\r\n"
    missing = Fake(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    stored = servers.running[0].post("/v1/responses", {"input": "What is 12 + 7?"}).json()["id"]
    others = [Fake(missing.sent) for _ in range(3)]
    with balanced(servers.urls[0], *(one.url for one in others), first=missing, attempts=1) as (client, balancer):
        for number in range(10):
            client.headers["x-session-id"] = f"session {number}"
            assert client.get(f"/v1/responses/{stored}").json()["id"] == stored
        assert client.get("/v1/responses/none").status_code == 404 and len(balancer.upstreams) == 5
    for one in others:
        assert one.requests
        one.close()


@pytest.mark.parametrize("number_of_events", [0, 4])
def test_a_server_without_power(
    fresh: tuple[Servers, Balancer, httpx.Client], monkeypatch: pytest.MonkeyPatch, number_of_events: int
) -> None:
    """No connection is closed: only the silence shows that the server has failed."""
    servers, _, _ = fresh
    monkeypatch.setattr("genai.server.balancer.SILENT_SECONDS", 0.1)
    monkeypatch.setattr("genai.server.balancer.HEALTH_SECONDS", 0.2)
    body = {"messages": QUESTION, "stream": True, "max_tokens": 20, "seed": 5, "ignore_eos": True}
    whole = servers.running[0].post("/v1/chat/completions", body)
    head = f"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n{FINGERPRINT}: {whole.headers[FINGERPRINT]}\r\n\r\n"
    begin = b"\n\n".join([*whole.content.split(b"\n\n")[:number_of_events], b""])
    dead = Fake(head.encode() + begin if number_of_events else b"", is_silent=True)
    with balanced(servers.urls[0], first=dead) as (client, balancer):
        found = client.post("/v1/chat/completions", json=body)
        assert parts(found.text)[0] == parts(whole.text)[0] and dead.requests == 1
        assert balancer.replays == (number_of_events > 0)
        assert client.post("/v1/chat/completions", json=body).status_code == 200 and dead.requests == 1


def test_a_silent_server_that_answers_is_waited_for(
    fresh: tuple[Servers, Balancer, httpx.Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, balancer, client = fresh
    monkeypatch.setattr("genai.server.balancer.SILENT_SECONDS", 0.001)
    failed = [one.failed for one in balancer.upstreams]
    body = {"messages": QUESTION, "max_tokens": 60, "ignore_eos": True}
    assert client.post("/v1/chat/completions", json=body).json()["usage"]["completion_tokens"] == 60
    assert [one.failed for one in balancer.upstreams] == failed


@pytest.mark.parametrize("kind", ["application/octet-stream", "application/x-ndjson"])
def test_bytes_that_break_off(fresh: tuple[Servers, Balancer, httpx.Client], kind: str) -> None:
    head = f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: 99\r\n\r\n"
    with balanced(fresh[0].urls[0], first=Fake(head.encode() + b'{"a":1}\n')) as (client, _):
        if kind == "application/x-ndjson":
            lines = client.post("/api/chat", json={}).text.splitlines()
            assert json.loads(lines[0]) == {"a": 1} and len(lines) == 2 and "did not end" in lines[1]
        else:  # no client takes the part for the whole
            with pytest.raises(httpx.RemoteProtocolError):
                client.get("/v1/files/file-1/content")


def test_bodies_of_all_requests_are_limited(fresh: tuple[Servers, Balancer, httpx.Client]) -> None:
    with balanced(fresh[0].urls[0], first=Fake(), max_body=1000) as (client, balancer):
        balancer.bodies.held = 15_900
        refused = client.post("/v1/chat/completions", json={"messages": QUESTION, "user": "x" * 200})
        assert refused.status_code == 429 and "the balancer holds too many" in refused.json()["error"]["message"]
        assert client.post("/v1/chat/completions", content=b"x" * 1001).status_code == 413
        assert balancer.bodies.held == 15_900


def test_wrong_requests(fresh: tuple[Servers, Balancer, httpx.Client]) -> None:
    _, _, client = fresh
    assert client.post("/v1/load_lora_adapter", json={}).json()["error"]["code"] == "not_balanced"
    assert client.post("/v1/chat/completions", content=b"[").status_code == 400
    assert client.post("/v1/chat/completions", content=b"{}").status_code == 400
    assert client.get("/v1/models", headers={"origin": "http://elsewhere"}).status_code == 403
    assert client.options("/v1/models").status_code == 204


def test_limits_and_keys(fresh: tuple[Servers, Balancer, httpx.Client], tmp_path: Path) -> None:
    servers, _, _ = fresh
    (tmp_path / "keys").write_text("k" * 16)
    options = BalancerOptions(keys=read_keys(tmp_path / "keys"), max_body=100, allowed_hosts=("127.0.0.1",))
    balancer = Balancer(servers.urls, options)
    with serve_on_thread(balancer) as url, httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
        assert client.get("/v1/models").status_code == client.get("/metrics").status_code == 401
        assert client.get("/v1/models", headers={"host": "elsewhere"}).status_code == 403
        client.headers["authorization"] = f"Bearer {'k' * 16}"
        assert client.get("/v1/models").status_code == 200
        assert client.post("/v1/chat/completions", content=b"x" * 101).status_code == 413
        balancer.drain()
        assert client.get("/v1/models").json()["error"]["code"] == "stopping"
        assert client.get("/health").json()["status"] == "stopping"


def test_no_server_at_all() -> None:
    with serve_on_thread(Balancer(["http://127.0.0.1:1", "http://127.0.0.1:2"])) as url:
        refused = httpx.post(f"{url}/v1/chat/completions", json={"messages": QUESTION}, trust_env=False)
        assert refused.status_code == 502 and refused.json()["error"]["code"] == "no_server"
        assert httpx.get(f"{url}/health", trust_env=False).status_code == 503


def test_a_client_that_leaves_cancels_its_request(fresh: tuple[Servers, Balancer, httpx.Client]) -> None:
    servers, balancer, client = fresh
    body = {"messages": QUESTION, "stream": True, "ignore_eos": True, "n": 8}
    with client.stream("POST", "/v1/chat/completions", json=body) as stream:
        next(stream.iter_bytes())
    while balancer.num_tasks or any(one.server.admission.num_requests for one in servers.running):
        time.sleep(0.01)


@pytest.mark.parametrize("urls", [[], ["localhost:8000"], ["http://"], ["ftp://x"], ["http://x/path"], ["http://a b"]])
def test_wrong_addresses(urls: list[str]) -> None:
    with pytest.raises(OptionError):
        Balancer(urls)


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Balancer] = []
    monkeypatch.setattr("genai.server.run.serve", lambda balancer, *_: found.append(balancer))
    options = ["--port", "0", "--attempts", "2", "--max-body", "1", "--allow-host", "me"]
    assert app.run(["balance", "http://a:1/v1", "http://b:2", *options]) == 0
    (made,) = found
    assert [one.url for one in made.upstreams] == ["http://a:1", "http://b:2"] and "me" in made.options.allowed_hosts
    assert len(Balancer(["http://a:1", "http://a:1/", "http://a:1/v1"]).upstreams) == 1
    assert made.options.attempts == 2 and made.options.max_body == 2**20
    assert app.run(["balance", "a"]) == 2 and "is not the address of a server" in capsys.readouterr().err
    assert app.run(["balance", "http://a:1", "--host", "0.0.0.0"]) == 2 and "needs API keys" in capsys.readouterr().err


def test_servers_that_are_killed_under_load() -> None:
    """Every client gets the text that it gets without the kill."""
    processes = [Process(), Process()]
    try:
        asked = [[{"role": "user", "content": f"Tell me a story about {name}."}] for name in NAMES]

        def reply(url: str, messages: Any, begun: Callable[[], object] = lambda: None) -> str:
            body = {"messages": messages, "stream": True, "temperature": 1, "seed": 3, "ignore_eos": True}
            body["max_tokens"] = 150
            texts: list[str] = []
            with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60, trust_env=False) as stream:
                for line in stream.iter_lines():
                    if line.startswith("data: {"):
                        texts.append(json.loads(line[6:])["choices"][0]["delta"].get("content", ""))
                        begun()
                assert line == "" or line == "data: [DONE]"
            return "".join(texts)

        expected = [reply(processes[0].url, messages) for messages in asked]
        balancer = Balancer([one.url for one in processes])
        begun = threading.Barrier(len(NAMES) + 1)
        waited = threading.local()

        def wait_once() -> None:
            if not hasattr(waited, "done"):
                waited.done = True
                begun.wait(30)

        with serve_on_thread(balancer) as url, ThreadPoolExecutor(len(NAMES)) as threads:
            running = [threads.submit(reply, url, messages, wait_once) for messages in asked]
            begun.wait(30)
            processes[0].process.kill()
            assert [one.result() for one in running] == expected
        assert balancer.replays > 0
    finally:
        for one in processes:
            one.close()


NAMES = ("Ann", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hal")

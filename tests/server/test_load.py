"""Many clients: equal replies at any concurrency, cancelled requests, limits, deadlines, and fairness."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import genai
from genai.engine.engine import Engine
from genai.errors import RequestError
from genai.llm.samples import SampleStream
from genai.server.admission import Admission

from .conftest import Running
from .test_chat import TOOLS

STORY = [{"role": "user", "content": "Tell me a story about Luna and Tom."}]
NEVER_ENDS: dict[str, Any] = {"messages": STORY, "ignore_eos": True, "max_tokens": 900}


def _bodies() -> list[dict[str, Any]]:
    """Return requests of many kinds."""
    found: list[dict[str, Any]] = []
    for index in range(32):
        text = f"What is {index} + 7?" if index % 3 else "Tell me a story about Luna and Tom. " * (1 + index % 5)
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 8 + index % 7,
            "temperature": index % 2,
            "seed": index,
            "model": "words" if index % 4 == 1 else "pebble",
            "n": 1 + (index % 8 == 3),
            "logprobs": index % 5 == 0,
        }
        if index % 6 == 4:
            body |= {"tools": TOOLS, "tool_choice": "required", "max_tokens": 60}
        found.append(body)
    return found


def _choices(running: Running, body: dict[str, Any]) -> Any:
    answer = running.post("/v1/chat/completions", body).json()
    return answer["choices"], answer["usage"]["completion_tokens"], answer["system_fingerprint"]


def test_replies_are_equal_at_any_concurrency(running: Running) -> None:
    bodies = _bodies()
    alone = [_choices(running, body) for body in bodies]
    with ThreadPoolExecutor(32) as pool:
        together = list(pool.map(lambda body: _choices(running, body), bodies))
        streamed = list(pool.map(lambda body: _streamed(running, body), bodies))
    assert together == alone
    texts = [[choice["message"]["content"] or "" for choice in choices] for choices, _, _ in alone]
    assert streamed == texts


def _streamed(running: Running, body: dict[str, Any]) -> list[str]:
    lines = running.post("/v1/chat/completions", {**body, "stream": True}).text.split("\n\n")
    texts = [""] * body["n"]
    for line in lines:
        if line.startswith("data: {"):
            choice = json.loads(line[6:])["choices"][0]
            texts[choice["index"]] += choice["delta"].get("content") or ""
    return texts


def until(is_so: Callable[[], bool]) -> None:
    """Wait until a condition is true."""
    for _ in range(3000):
        if is_so():
            return
        time.sleep(0.01)
    raise AssertionError("it did not happen within 30 s")


def _is_empty(running: Running, llm: genai.LLM) -> bool:
    stats = llm.stats()
    return not running.server.admission.num_requests and not stats.running and not stats.waiting


def _send(running: Running, body: dict[str, Any]) -> socket.socket:
    """Send a request, and return the open connection."""
    content = json.dumps(body).encode()
    host, port = running.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    connection.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
    return connection


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_only_its_request(
    running: Running, llm: genai.LLM, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Engine.step
    # Even a busy machine notices that the client has left before the last token.
    monkeypatch.setattr(Engine, "step", lambda engine: (time.sleep(0.01), step(engine))[1])
    cancelled = llm.stats().cancelled
    leaving = _send(running, {**NEVER_ENDS, "stream": stream})
    until(lambda: llm.stats().running == 1)
    replies: list[Any] = []
    other = threading.Thread(target=lambda: replies.append(running.chat(max_tokens=20).json()))
    other.start()
    leaving.close()
    until(lambda: _is_empty(running, llm))
    other.join()
    assert replies[0]["choices"][0]["message"]["content"] == "19"
    assert llm.stats().cancelled == cancelled + 1


def test_requests_beyond_the_queue_are_refused(serving: Callable[..., Running], llm: genai.LLM) -> None:
    running = serving(max_queue=1)
    running.server.admission.most_running = 1
    first = _send(running, NEVER_ENDS)
    until(lambda: llm.stats().running == 1)
    second = _send(running, NEVER_ENDS)
    until(lambda: running.server.admission.num_waiting == 1)
    answer = running.chat(stream=True)
    assert answer.status_code == 429 and answer.json()["error"]["code"] == "rate_limit_exceeded"
    assert answer.headers["retry-after"] == "1" and answer.headers["retry-after-ms"] == "1000"
    second.close()  # it was queued
    until(lambda: running.server.admission.num_requests == 1)
    late = running.chat(timeout=0.01)
    assert late.status_code == 504 and late.headers["x-should-retry"] == "false"
    assert late.json()["error"]["code"] == "timeout"
    first.close()
    until(lambda: _is_empty(running, llm))
    assert running.chat().status_code == 200


def test_a_timeout_ends_a_reply_early(running: Running) -> None:
    running.chat()  # compiles the kernels
    choice = running.post("/v1/chat/completions", {**NEVER_ENDS, "timeout": 0.3}).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["stop_reason"] == "timeout" or len(choice["message"]["content"]) > 500


def test_a_slow_client_gets_everything(running: Running, llm: genai.LLM) -> None:
    """The engine does not wait for a client that does not read."""
    body = {**NEVER_ENDS, "stream": True, "max_tokens": 500, "temperature": 0}
    finished = llm.stats().finished
    slow = _send(running, body)
    until(lambda: llm.stats().finished == finished + 1)
    received = b""
    while b"[DONE]" not in received:
        received += slow.recv(65536)
    slow.close()
    whole = running.post("/v1/chat/completions", {**body, "stream": False}).json()["choices"][0]["message"]["content"]
    frames = [json.loads(line[6:]) for line in received.decode().split("\n") if line.startswith("data: {")]
    assert "".join(one["choices"][0]["delta"].get("content") or "" for one in frames) == whole


def test_comments_are_sent_while_a_request_waits(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    take = SampleStream.take

    async def take_late(stream: SampleStream) -> list[Any]:
        await asyncio.sleep(0.05)
        return await take(stream)

    monkeypatch.setattr(SampleStream, "take", take_late)
    monkeypatch.setattr("genai.server.sse.PING_SECONDS", 0.001)
    answer = running.chat(stream=True)
    assert ": ping\n\n" in answer.text and answer.text.endswith("data: [DONE]\n\n")


def test_an_error_after_the_first_byte_is_an_event(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("secret /etc/passwd")

    monkeypatch.setattr("genai.server.wire.chat.ChatEncoder.end", fails)
    answer = running.chat(stream=True)
    last = answer.text.rstrip().split("\n\n")[-1]
    assert answer.status_code == 200 and last.startswith("event: error\ndata: ") and "secret" not in last
    assert json.loads(last.partition("data: ")[2])["error"]["code"] == "internal_error"
    monkeypatch.setattr("genai.server.wire.chat.ChatEncoder.begin", fails)
    assert running.chat(stream=True).status_code == 500


@pytest.mark.slow
def test_unfriendly_clients() -> None:
    command = [sys.executable, "-m", "tools.server_soak", "--seconds", "30", "--connections", "60"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


# --- admission -------------------------------------------------------------------------------------------------------


def _order(arrivals: list[tuple[str, int]], most_running: int = 1) -> list[str]:
    """Return the order in which requests (key, priority) run, if all arrive at once."""
    admission, order = Admission(most_running, 100), list[str]()

    async def one(key: str, priority: int) -> None:
        with admission.seat(key) as seat:
            ticket = await admission.enter(seat, priority=priority)
            order.append(key)
            await asyncio.sleep(0)
            ticket.release()

    async def everyone() -> None:
        await asyncio.gather(*(one(key, priority) for key, priority in arrivals))

    asyncio.run(everyone())
    assert not admission.num_running and not admission.num_waiting and not admission.num_requests
    return order


def test_keys_take_turns() -> None:
    assert _order([("a", 0)] * 4 + [("b", 0)] * 2) == ["a", "b", "a", "b", "a", "a"]


def test_higher_priorities_are_first() -> None:
    assert _order([("a", 0), ("a", 0), ("b", 1), ("c", 5)]) == ["a", "c", "b", "a"]


def test_limits_of_admission() -> None:
    async def run() -> None:
        admission = Admission(2, 1, most_per_key=2)
        with admission.seat("a") as first, admission.seat("a"):
            with pytest.raises(RequestError, match="this key has 2 requests"), admission.seat("a"):
                pass
            ticket = await admission.enter(first, cost=5)  # more than fit: it runs alone
            assert admission.num_running == 2
            with pytest.raises(RequestError, match="1 requests are waiting"), admission.seat("b"):
                pass
            ticket.release()
            ticket.release()
            assert not admission.num_running
            admission.is_draining = True
            with pytest.raises(RequestError, match="stopping"), admission.seat("c"):
                pass
        assert not admission.num_requests and not admission.num_waiting and admission.refused == 2

    asyncio.run(run())


def test_a_cancelled_request_leaves_the_queue() -> None:
    async def run() -> None:
        admission = Admission(1, 5)
        with admission.seat("a") as first, admission.seat("a") as second:
            ticket = await admission.enter(first)
            waiting = asyncio.create_task(admission.enter(second))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            ticket.release()
            assert not admission.num_running
        assert not admission.num_waiting

    asyncio.run(run())

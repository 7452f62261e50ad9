"""Streams that continue without their client: replay, stop, limits, and errors."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

import genai
from genai.errors import RequestError
from genai.server.keys import ANYONE, Key
from genai.server.serving import Server
from genai.server.sse import DONE, EventStream
from genai.server.stream_store import StreamStore

from .conftest import Running

LONG = {"stream": True, "max_tokens": 60, "temperature": 0, "ignore_eos": True}
QUESTION = [{"role": "user", "content": "What is 12 + 7?"}]


def _body(**fields: Any) -> dict[str, Any]:
    return {"messages": QUESTION, "stream": True, **fields}


def _text(events: str) -> str:
    lines = [line[6:] for line in events.split("\n") if line.startswith("data: {")]
    choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def test_a_stream_is_read_again(running: Running) -> None:
    name = secrets.token_hex(8)
    first = running.post("/v1/chat/completions", _body(), **{"x-stream-id": name})
    with running.http as client:
        again = client.get(f"/v1/streams/{name}")
    assert again.headers["content-type"].startswith("text/event-stream")
    assert again.text == first.text
    assert _text(first.text) == "19"
    refused = running.post("/v1/chat/completions", _body(), **{"x-stream-id": name})
    assert refused.status_code == 409
    assert refused.json()["error"]["code"] == "stream_exists"


def test_a_stream_continues_without_its_client(running: Running) -> None:
    name = secrets.token_hex(8)
    with running.http as client:
        body = {"messages": QUESTION, **LONG}
        with client.stream("POST", "/v1/chat/completions", json=body, headers={"x-stream-id": name}) as reply:
            next(reply.iter_text())
    with running.http as client:
        found = client.get(f"/v1/streams/{name}").text
    whole = running.post("/v1/chat/completions", {**body, "stream": False}).json()
    assert _text(found) == whole["choices"][0]["message"]["content"]
    assert found.endswith("data: [DONE]\n\n")


def test_stop(running: Running) -> None:
    name = secrets.token_hex(8)
    body = {"messages": QUESTION, **LONG, "max_tokens": 400}
    with running.http as client, running.http as other:
        with client.stream("POST", "/v1/chat/completions", json=body, headers={"x-stream-id": name}) as reply:
            parts = reply.iter_text()
            found = next(parts)
            stopped = other.delete(f"/v1/streams/{name}")
            found += "".join(parts)
    assert stopped.json() == {"id": name, "object": "stream", "stopped": True}
    assert found.endswith("data: [DONE]\n\n")
    assert '"finish_reason":"length"' not in found


def test_the_speed_is_beside_the_token_counts(running: Running) -> None:
    events = running.post("/v1/chat/completions", _body(stream_options={"include_usage": True})).text
    last = json.loads(events.split("data: ")[-2])
    usage, timings = last["usage"], last["timings"]
    assert timings["predicted_n"] == usage["completion_tokens"] == 2
    assert timings["cache_n"] + timings["prompt_n"] == usage["prompt_tokens"]
    assert timings["predicted_per_second"] > 0 and timings["prompt_ms"] > 0
    events = running.post("/v1/chat/completions", _body(n=2, stream_options={"include_usage": True})).text
    assert "timings" not in json.loads(events.split("data: ")[-2])


def test_an_error_before_the_first_event_is_a_status(running: Running) -> None:
    name = secrets.token_hex(8)
    refused = running.post("/v1/chat/completions", _body(max_tokens=-5), **{"x-stream-id": name})
    assert refused.status_code == 400
    with running.http as client:
        assert client.get(f"/v1/streams/{name}").json()["error"]["code"] == "stream_not_found"


@pytest.mark.parametrize("name", ["short", "a" * 65, "a b" * 8, "../../../../../../etc"])
def test_wrong_identifiers(running: Running, name: str) -> None:
    refused = running.post("/v1/chat/completions", _body(), **{"x-stream-id": name})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "x-stream-id"


def test_unknown_streams(running: Running) -> None:
    with running.http as client:
        for method in ("GET", "DELETE"):
            assert client.request(method, "/v1/streams/unknown").status_code == 404


# --- the store, with streams of a test -------------------------------------------------------------------------------


async def _frames(count: int, gate: asyncio.Event | None = None) -> AsyncIterator[bytes]:
    for number in range(count):
        yield b"%06d" % number
        if gate is not None and number == 0:
            await gate.wait()


def _stream(frames: AsyncIterator[bytes]) -> EventStream:
    return EventStream(frames, lambda error: f"[{error}]".encode())


async def _read(stream: EventStream) -> bytes:
    return b"".join([data async for data in stream.frames])


def _with_store(llm: genai.LLM, work: Callable[[StreamStore], Any], **limits: Any) -> None:
    server = Server(llm)
    try:
        asyncio.run(work(StreamStore(server, **limits)))
    finally:
        server.close()


NAME = "a" * 16


def test_another_key_finds_no_stream(llm: genai.LLM) -> None:
    async def work(store: StreamStore) -> None:
        await _read(store.start(Key("one"), NAME, _stream(_frames(2))))
        assert await _read(store.read(Key("one"), NAME, repr)) == b"000000000001"  # type: ignore[arg-type]
        for call in (lambda: store.read(Key("two"), NAME, repr), lambda: store.stop(Key("two"), NAME)):  # type: ignore[arg-type]
            with pytest.raises(RequestError, match="is not stored"):
                call()

    _with_store(llm, work)


def test_a_stream_without_readers_is_cancelled(llm: genai.LLM) -> None:
    async def work(store: StreamStore) -> None:
        gate = asyncio.Event()
        reader = store.start(ANYONE, NAME, _stream(_frames(2, gate)))
        assert await anext(reader.frames) == b"000000"
        second = store.read(ANYONE, NAME, reader.error_frame)
        assert await anext(second.frames) == b"000000"
        await reader.frames.aclose()  # type: ignore[attr-defined]
        await asyncio.sleep(0.05)  # the second reader remains
        assert not store._streams["", NAME].has_ended
        await second.frames.aclose()  # type: ignore[attr-defined]
        await asyncio.sleep(0.05)
        assert await _read(store.read(ANYONE, NAME, reader.error_frame)) == b"000000" + DONE

    _with_store(llm, work, lonely_seconds=0.01)


def test_a_stream_that_no_client_ever_reads_is_cancelled(llm: genai.LLM) -> None:
    async def work(store: StreamStore) -> None:
        store.start(ANYONE, NAME, _stream(_frames(2, asyncio.Event())))
        await asyncio.sleep(0.05)
        assert store._streams["", NAME].has_ended

    _with_store(llm, work, lonely_seconds=0.01)


def test_events_are_removed_after_a_while(llm: genai.LLM) -> None:
    async def work(store: StreamStore) -> None:
        await _read(store.start(ANYONE, NAME, _stream(_frames(2))))
        assert len(store) == 1
        await asyncio.sleep(0.05)
        assert len(store) == store._size == 0

    _with_store(llm, work, keep_seconds=0.01)


def test_the_limit_of_bytes(llm: genai.LLM) -> None:
    async def work(store: StreamStore) -> None:
        await _read(store.start(ANYONE, NAME, _stream(_frames(10))))
        assert store._size == 60
        gate = asyncio.Event()
        reader = store.start(ANYONE, "b" * 16, _stream(_frames(100, gate)))
        assert await anext(reader.frames) == b"000000"
        gate.set()  # the reader is slower than the stream, whose first events are removed
        await store._streams["", "b" * 16].task  # type: ignore[misc]
        assert store._size <= 100 and len(store) == 1
        with pytest.raises(RequestError, match="too slow"):
            await _read(reader)
        with pytest.raises(RequestError, match="is not stored"):
            store.read(ANYONE, "b" * 16, repr)  # type: ignore[arg-type]

    _with_store(llm, work, most_bytes=100)


def test_errors_after_the_first_event_are_events(llm: genai.LLM) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield b"first "
        raise ValueError("broken")

    async def work(store: StreamStore) -> None:
        assert await _read(store.start(ANYONE, NAME, _stream(broken()))) == b"first [broken]"

    _with_store(llm, work)


def test_the_end_of_the_server(llm: genai.LLM) -> None:
    async def work() -> None:
        server = Server(llm)
        reader = server.streams.start(ANYONE, NAME, _stream(_frames(2, asyncio.Event())))
        assert await anext(reader.frames) == b"000000"
        assert server.num_tasks == 1
        server.stop_running()
        assert b"the server was stopped" in await _read(reader)
        server.close()

    asyncio.run(work())

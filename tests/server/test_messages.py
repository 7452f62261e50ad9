"""Anthropic's messages API with the official client: whole, streamed, tools, schemas, token counts and errors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

import genai
from genai.server.wire.messages_input import MessagesRequest, conversation

from .conftest import Running

QUESTION: Any = [{"role": "user", "content": "What is 12 + 7?"}]
ADD = {
    "type": "object",
    "properties": {name: {"type": "integer", "minimum": 0, "maximum": 99} for name in ("a", "b")},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOLS: Any = [{"name": "add", "description": "Add.", "input_schema": ADD}]
DRAWN: Any = {"extra_body": {"temperature": 1, "seed": 1}}
CLAUDE_CODE: dict[str, Any] = json.loads((Path(__file__).parent / "bodies" / "claude_code.json").read_text())


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=running.url, api_key="none", max_retries=0) as made:
        yield made


def events_of(text: str) -> list[dict[str, Any]]:
    """Return the data of a stream's events, whose names must equal the types."""
    found = []
    for block in text.split("\n\n"):
        if block and not block.startswith(":"):
            name, data = block.split("\n")
            found.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
    return found


def test_a_reply_is_that_of_the_model(client: anthropic.Anthropic, llm: genai.LLM) -> None:
    reply = client.messages.create(model="pebble", messages=QUESTION, max_tokens=10)
    own = llm.chat(QUESTION)
    (block,) = reply.content
    assert block.type == "text" and block.text == own.text == "19"
    assert reply.stop_reason == "end_turn" and reply.stop_sequence is None and reply.model == "pebble"
    cached = reply.usage.cache_read_input_tokens or 0
    assert reply.usage.input_tokens + cached == own.completion.prompt_tokens and reply.usage.output_tokens == 2
    assert reply._request_id is not None


def test_the_order_of_a_stream(running: Running) -> None:
    body = {"messages": QUESTION, "max_tokens": 10, "stream": True}
    events = events_of(running.post("/v1/messages", body).text)
    kinds = [event["type"] for event in events]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[3:-3]) == {"content_block_delta"} and kinds.count("message_start") == 1
    start, end = events[0]["message"]["usage"], events[-2]["usage"]
    assert start["input_tokens"] + start["cache_read_input_tokens"] > 10 and start["output_tokens"] == 0
    assert end == {**start, "output_tokens": 2}


def test_cached_tokens_are_counted_apart(client: anthropic.Anthropic) -> None:
    long: Any = [{"role": "user", "content": "Tell me about the sea. " * 20}]
    options: Any = {"model": "pebble", "messages": long, "max_tokens": 1}
    first = client.messages.create(**options).usage
    with client.messages.stream(**options) as stream:
        events = [*stream]
    start = next(event.message.usage for event in events if event.type == "message_start")
    assert start.cache_read_input_tokens and start.cache_read_input_tokens > 32
    total = start.input_tokens + start.cache_read_input_tokens
    assert total == first.input_tokens + (first.cache_read_input_tokens or 0)


def test_streams_of_the_client(client: anthropic.Anthropic) -> None:
    with client.messages.stream(model="pebble", messages=QUESTION, max_tokens=10) as stream:
        assert "".join(stream.text_stream) == "19"
        final = stream.get_final_message()
    assert final.stop_reason == "end_turn" and final.usage.output_tokens == 2


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls(client: anthropic.Anthropic, stream: bool) -> None:
    options: Any = {"model": "pebble", "messages": QUESTION, "tools": TOOLS, "max_tokens": 200, **DRAWN}
    options["tool_choice"] = {"type": "any"}
    if stream:
        with client.messages.stream(**options) as events:
            reply = events.get_final_message()
    else:
        reply = client.messages.create(**options)
    calls = [block for block in reply.content if block.type == "tool_use"]
    assert reply.stop_reason == "tool_use" and calls and len({call.id for call in calls}) == len(calls)
    assert all(
        call.name == "add" and isinstance(call.input, dict) and call.input.keys() == {"a", "b"} for call in calls
    )
    one = client.messages.create(
        **{**options, "tool_choice": {"type": "tool", "name": "add", "disable_parallel_tool_use": True}}
    )
    assert [block.type for block in one.content] == ["tool_use"]
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "19"} for call in calls]
    messages: Any = [*QUESTION, {"role": "assistant", "content": reply.content}, {"role": "user", "content": results}]
    again = client.messages.create(model="pebble", messages=messages, tools=TOOLS, max_tokens=2)
    assert again.stop_reason in ("end_turn", "max_tokens")


def test_reasons_of_the_end(client: anthropic.Anthropic, running: Running) -> None:
    stopped = client.messages.create(model="pebble", messages=QUESTION, max_tokens=9, stop_sequences=["9"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "9") and stopped.content[0].text == "1"  # type: ignore[union-attr]
    short = client.messages.create(model="pebble", messages=QUESTION, max_tokens=1)
    assert short.stop_reason == "max_tokens"
    story = {"messages": [{"role": "user", "content": "word " * 990}], "ignore_eos": True}
    assert running.post("/v1/messages", story).json()["stop_reason"] == "model_context_window_exceeded"


def test_a_schema(client: anthropic.Anthropic) -> None:
    form: Any = {"format": {"type": "json_schema", "schema": ADD}}
    reply = client.messages.create(model="pebble", messages=QUESTION, max_tokens=60, output_config=form)
    assert json.loads(reply.content[0].text).keys() == {"a", "b"}  # type: ignore[union-attr]


def test_reasoning_is_a_block(serving: Callable[..., Running], thinking_llm: genai.LLM) -> None:
    thinking = serving(thinking_llm)
    with anthropic.Anthropic(base_url=thinking.url, api_key="none", max_retries=0) as client:
        options: Any = {"model": "pebble", "messages": QUESTION, "max_tokens": 8}
        with client.messages.stream(**options, thinking={"type": "adaptive"}) as stream:
            reply = stream.get_final_message()
        (block,) = reply.content
        assert block.type == "thinking" and block.thinking and block.signature
        whole = client.messages.create(
            **options, thinking={"type": "enabled", "budget_tokens": 1024}, extra_body={"seed": 1}
        )
        assert whole.content[0].type == "thinking"
        off = client.messages.create(**options, thinking={"type": "disabled"})
        assert [block.type for block in off.content] == ["text"]
        messages: Any = [*QUESTION, {"role": "assistant", "content": reply.content}, *QUESTION]
        client.messages.create(model="pebble", messages=messages, max_tokens=1)


def test_token_counts(client: anthropic.Anthropic, llm: genai.LLM) -> None:
    own = len(llm.encode(llm.render([{"role": "system", "content": "Be brief."}, *QUESTION])))
    counted = client.messages.count_tokens(model="pebble", messages=QUESTION, system="Be brief.")
    assert counted.input_tokens == own
    assert client.messages.count_tokens(model="pebble", messages=QUESTION, tools=TOOLS).input_tokens > own
    long: Any = [{"role": "user", "content": "word " * 3000}]
    assert client.messages.count_tokens(model="pebble", messages=long).input_tokens > 3000


def test_a_request_of_claude_code(running: Running) -> None:
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219", "x-api-key": "any"}
    answer = running.post("/v1/messages?beta=true", CLAUDE_CODE, **headers)
    assert answer.status_code == 200
    events = events_of(answer.text)
    assert events[0]["message"]["usage"]["input_tokens"] > 0 and events[-1]["type"] == "message_stop"
    assert answer.headers["x-removed-headers"] == "x-anthropic-billing-header"
    ignored = answer.headers["x-ignored-fields"].split(", ")
    assert ignored == [
        "metadata", "context_management", "tools[2] (web_search_20250305)", "thinking", "output_config.effort",
    ]  # fmt: skip
    counted = {name: value for name, value in CLAUDE_CODE.items() if name not in ("max_tokens", "stream")}
    count = running.post("/v1/messages/count_tokens?beta=true", counted).json()["input_tokens"]
    usage = events[-2]["usage"]
    assert count == usage["input_tokens"] + usage["cache_read_input_tokens"]


def test_the_conversation_of_claude_code() -> None:
    ignored: list[str] = []
    request = MessagesRequest(CLAUDE_CODE["messages"], system=CLAUDE_CODE["system"])
    messages = conversation(request, ignored)
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool", "tool", "user"]
    assert messages[2]["reasoning_content"] == "I read the file." and messages[2]["content"] == "I'll read it."
    assert [call["function"]["name"] for call in messages[2]["tool_calls"]] == ["Read", "Bash"]
    assert messages[4] == {
        "role": "tool", "tool_call_id": "toolu_01B09q90qw90lq917835lq9", "content": "a.py", "name": "Bash",
    }  # fmt: skip
    assert not ignored


def test_blocks_of_other_servers() -> None:
    ignored: list[str] = []
    assistant = [{"type": "redacted_thinking", "data": "x"}, {"type": "server_tool_use", "id": "s", "name": "n"}]
    document = {"type": "document", "title": "A", "source": {"type": "text", "media_type": "text/plain", "data": "B"}}
    found = {"type": "search_result", "source": "s", "title": "t", "content": [{"type": "text", "text": "C"}]}
    request = MessagesRequest(
        [{"role": "user", "content": [document, found]}, {"role": "assistant", "content": assistant}, *QUESTION]
    )
    user, empty, _ = conversation(request, ignored)
    assert [part["text"] for part in user["content"]] == ["A\n\nB", "C"] and empty["content"] == ""
    assert ignored == ["messages[1].content[0] (redacted_thinking)", "messages[1].content[1] (server_tool_use)"]


def blocks(*found: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": [*found]}], "max_tokens": 1}


BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 1}, "messages is missing"),
    ({"messages": [], "max_tokens": 1}, "messages is empty"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "allowed: user, assistant, system"),
    ({"messages": [{"role": "user"}]}, "messages[0].content is missing"),
    ({"messages": [*QUESTION, {"role": "assistant", "content": "The"}]}, "replies begin a new message"),
    (blocks({"type": "image", "source": {"type": "url", "url": "http://a/b.png"}}), "the model reads text only"),
    (blocks({"type": "document", "source": {"type": "base64", "data": ""}}), "the model reads text only"),
    (blocks({"type": "text"}), "without text"),
    (blocks("text"), "messages[0].content[0] is not a block"),
    (blocks({"type": "tool_result"}), "tool_use_id is missing"),
    (blocks({"type": "tool_use", "id": "a", "name": "b"}, role="assistant"), "an input, which is an object"),
    ({"messages": QUESTION, "tools": [{"name": "f"}]}, "input_schema"),
    ({"messages": QUESTION, "tool_choice": {"type": "any"}}, "no tools"),
    ({"messages": QUESTION, "tool_choice": {"type": "some"}}, "allowed"),
    ({"messages": QUESTION, "thinking": {"type": "on"}}, "thinking.type"),
    ({"messages": QUESTION, "output_config": {"effort": "huge"}}, "output_config.effort"),
    ({"messages": QUESTION, "output_config": {"format": {"type": "xml"}}}, "output_config.format"),
    ({"messages": QUESTION, "output_config": {"format": {"type": "json_schema", "schema": {"type": 5}}}},
     "output_config.format"),
    ({"messages": QUESTION, "max_tokens": 0}, "max_tokens"),
    ({"messages": QUESTION, "mcp_servers": [{"type": "url"}]}, "the server runs no tools"),
    ({"messages": QUESTION, "stop_sequence": ["a"]}, "did you mean 'stop_sequences'"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "said"), BAD)
def test_wrong_requests(running: Running, body: dict[str, Any], said: str) -> None:
    for stream in ({}, {"stream": True}):
        answer = running.post("/v1/messages", {**body, **stream})
        found = answer.json()
        assert answer.status_code == 400 and found["type"] == "error", found
        assert found["error"]["type"] == "invalid_request_error" and said in found["error"]["message"], found


def test_errors_have_the_types_of_the_client(client: anthropic.Anthropic, serving: Callable[..., Running]) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(model="claude", messages=QUESTION, max_tokens=1)
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    long: Any = [{"role": "user", "content": "word " * 3000}]
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 1024 maximum"):
        client.messages.create(model="pebble", messages=long, max_tokens=1)
    strict = serving(strict=True)
    answer = strict.post("/v1/messages", {"messages": QUESTION, "metadata": {"user_id": "x"}})
    assert answer.status_code == 400 and "metadata" in answer.json()["error"]["message"]


def test_a_stream_that_fails_ends_with_an_error(client: anthropic.Anthropic, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr("genai.server.wire.messages.MessageEncoder.end", fail)
    with (
        pytest.raises(anthropic.APIStatusError) as raised,
        client.messages.stream(model="pebble", messages=QUESTION, max_tokens=9) as stream,
    ):
        stream.until_done()
    assert raised.value.body["error"]["type"] == "api_error" and "boom" not in str(raised.value)  # type: ignore[index]


def test_models_have_the_fields_of_the_client(client: anthropic.Anthropic, running: Running) -> None:
    page = client.models.list()
    assert [model.id for model in page] == ["pebble", "words"] and page.has_more is False
    model = client.models.retrieve("words")
    assert model.display_name == "words" and model.type == "model" and model.created_at.year > 2020
    assert model.max_input_tokens == 1024
    with running.http as other:
        assert "display_name" not in other.get("/v1/models/words").json()

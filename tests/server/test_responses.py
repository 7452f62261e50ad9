"""OpenAI's Responses API with the official client: whole, streamed, tools, schemas, stored replies and errors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import openai
import pytest
from openai.types.responses import ResponseStreamEvent

import genai
from genai.errors import RequestError
from genai.server.keys import ANYONE, Key
from genai.server.response_store import ResponseStore
from genai.server.serving import Server
from genai.server.wire.responses_input import ResponsesRequest, conversation, sealed
from genai.server.wire.responses_output import ResponseEncoder

from .conftest import Running

QUESTION = "What is 12 + 7?"
ADD = {
    "type": "object",
    "properties": {name: {"type": "integer", "minimum": 0, "maximum": 99} for name in ("a", "b")},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOLS: Any = [{"type": "function", "name": "add", "description": "Add.", "parameters": ADD, "strict": True}]
DRAWN: Any = {"temperature": 1, "extra_body": {"seed": 1}}
CODEX: dict[str, Any] = json.loads((Path(__file__).parent / "bodies" / "codex.json").read_text())
KINDS = {get_args(kind.model_fields["type"].annotation)[0] for kind in get_args(get_args(ResponseStreamEvent)[0])}


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def events_of(text: str) -> list[dict[str, Any]]:
    """Return the data of a stream's events, whose names and numbers must be those of the API."""
    found = []
    for block in text.split("\n\n"):
        if block and not block.startswith(":"):
            name, data = block.split("\n")
            found.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}" and found[-1]["type"] in KINDS
    assert [event["sequence_number"] for event in found] == [*range(len(found))]
    return found


def test_a_reply_is_that_of_the_model(client: openai.OpenAI, llm: genai.LLM) -> None:
    reply = client.responses.create(model="pebble", input=QUESTION, metadata={"a": "b"})
    own = llm.chat(QUESTION)
    assert reply.output_text == own.text == "19" and reply.status == "completed"
    assert reply.usage is not None and reply.usage.input_tokens == own.completion.prompt_tokens
    assert reply.usage.output_tokens == 2 and reply.metadata == {"a": "b"} and reply.tools == []


def test_the_order_of_a_stream(running: Running) -> None:
    events = events_of(running.post("/v1/responses", {"input": QUESTION, "stream": True}).text)
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert {*kinds[4:-4]} == {"output_text.delta"}
    assert "".join(event["delta"] for event in events[4:-4]) == events[-4]["text"] == "19"
    first, last = events[0]["response"], events[-1]["response"]
    assert first.keys() | {"seed"} == last.keys() and first["status"] == "in_progress" and first["output"] == []
    assert last["output"] == [events[-2]["item"]] and last["usage"]["output_tokens"] == 2


def test_streams_of_the_client(client: openai.OpenAI) -> None:
    with client.responses.stream(model="pebble", input=QUESTION) as stream:
        assert "".join(event.delta for event in stream if event.type == "response.output_text.delta") == "19"
        assert stream.get_final_response().output_text == "19"


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls(client: openai.OpenAI, stream: bool) -> None:
    options: Any = {"model": "pebble", "tools": TOOLS, "tool_choice": "required", **DRAWN}
    if stream:
        with client.responses.stream(input=QUESTION, **options) as events:
            deltas = "".join(one.delta for one in events if one.type == "response.function_call_arguments.delta")
            reply = events.get_final_response()
        assert deltas == "".join(call.arguments for call in reply.output if call.type == "function_call")
    else:
        reply = client.responses.create(input=QUESTION, **options)
    calls = [item for item in reply.output if item.type == "function_call"]
    assert reply.status == "completed" and calls and len({call.call_id for call in calls}) == len(calls)
    assert all(call.name == "add" and json.loads(call.arguments).keys() == {"a", "b"} for call in calls)
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "19"} for call in calls]
    items: Any = [{"role": "user", "content": QUESTION}, *reply.output, *results]
    again = client.responses.create(model="pebble", input=items, tools=TOOLS, max_output_tokens=4)
    after: Any = results
    chained = client.responses.create(
        model="pebble", input=after, tools=TOOLS, max_output_tokens=4, previous_response_id=reply.id,
        extra_body={"seed": again.model_extra and again.model_extra["seed"]},
    )  # fmt: skip
    assert chained.output_text == again.output_text and chained.usage and again.usage
    assert chained.usage.input_tokens == again.usage.input_tokens


def test_choices_of_tools(client: openai.OpenAI, running: Running) -> None:
    one: Any = {"type": "function", "name": "add"}
    options: Any = {"model": "pebble", "input": QUESTION, "tools": TOOLS, "parallel_tool_calls": False, **DRAWN}
    (call,) = client.responses.create(**options, tool_choice=one).output
    assert call.type == "function_call"
    allowed: Any = {"type": "allowed_tools", "mode": "required", "tools": [one]}
    other = {"type": "function", "name": "other", "parameters": {"type": "object"}}
    body = {"input": QUESTION, "tools": [*TOOLS, other], "tool_choice": allowed, "seed": 1}
    names = {item.get("name") for item in running.post("/v1/responses", body).json()["output"]}
    assert names == {"add"}


def test_a_schema(client: openai.OpenAI) -> None:
    form: Any = {"format": {"type": "json_schema", "name": "sum", "schema": ADD, "strict": True}}
    reply = client.responses.create(model="pebble", input=QUESTION, text=form, temperature=0)
    assert json.loads(reply.output_text).keys() == {"a", "b"}


def test_log_probabilities(client: openai.OpenAI) -> None:
    options: Any = {"model": "pebble", "input": QUESTION, "include": ["message.output_text.logprobs"]}
    whole: Any = client.responses.create(**options, top_logprobs=2).output[0]
    with client.responses.stream(**options, top_logprobs=2) as stream:
        streamed: Any = stream.get_final_response().output[0]
    for message in (whole, streamed):
        found = message.content[0].logprobs
        assert "".join(one.token for one in found) == "19" and all(len(one.top_logprobs) == 2 for one in found)


def test_an_incomplete_reply(client: openai.OpenAI, running: Running) -> None:
    reply = client.responses.create(model="pebble", input=QUESTION, max_output_tokens=1)
    assert reply.status == "incomplete" and reply.incomplete_details is not None
    assert reply.incomplete_details.reason == "max_output_tokens"
    body = {"input": QUESTION, "max_output_tokens": 1, "stream": True}
    last = events_of(running.post("/v1/responses", body).text)[-1]
    assert last["type"] == "response.incomplete" and last["response"]["output"][0]["status"] == "incomplete"


def test_reasoning_is_an_item(serving: Callable[..., Running], thinking_llm: genai.LLM) -> None:
    thinking = serving(thinking_llm)
    body = {
        "input": QUESTION, "reasoning": {"effort": "high", "summary": "auto"}, "max_output_tokens": 8,
        "include": ["reasoning.encrypted_content"], "stream": True,
    }  # fmt: skip
    answer = thinking.post("/v1/responses", body)
    assert answer.headers["x-ignored-fields"] == "reasoning.summary"
    events = events_of(answer.text)
    (item,) = events[-1]["response"]["output"]
    text = "".join(event["delta"] for event in events if event["type"] == "response.reasoning_text.delta")
    assert item["type"] == "reasoning" and item["content"] == [{"type": "reasoning_text", "text": text}] and text
    del item["content"]  # Codex sends back only the encrypted content
    (message,) = conversation(thinking.server, None, [item], [])
    assert message["reasoning_content"] == text
    off = thinking.post("/v1/responses", {"input": QUESTION, "reasoning": {"effort": "none"}}).json()
    assert [item["type"] for item in off["output"]] == ["message"]


def test_a_request_of_codex(running: Running) -> None:
    answer = running.post("/v1/responses", CODEX)
    assert answer.status_code == 200, answer.text
    assert events_of(answer.text)[-1]["type"] in ("response.completed", "response.incomplete")
    assert answer.headers["x-ignored-fields"].split(", ") == [
        "client_metadata", "tools[1] (custom)", "tools[2] (namespace)", "tools[3] (web_search)",
        "tools[4] (image_generation)", "text.verbosity", "reasoning.summary", "reasoning.effort",
        "input[9] (web_search_call)",
    ]  # fmt: skip
    count = running.post("/v1/responses/input_tokens", {**CODEX, "stream": None}).json()
    usage = events_of(answer.text)[-1]["response"]["usage"]
    assert count == {"object": "response.input_tokens", "input_tokens": usage["input_tokens"]}


def test_the_conversation_of_codex(running: Running) -> None:
    messages = conversation(running.server, CODEX["instructions"], CODEX["input"], [])
    roles = ["system", "user", "user", "assistant", "tool", "assistant", "tool", "user"]
    assert [message["role"] for message in messages] == roles
    assert messages[0]["content"].startswith("You are Codex") and "read-only" in messages[0]["content"]
    turn = messages[3]
    assert turn["reasoning_content"] == "I list the files." and turn["content"] == "I list them."
    assert turn["tool_calls"][0]["function"]["name"] == "exec_command" and messages[4]["name"] == "exec_command"
    assert "Begin Patch" in messages[5]["tool_calls"][0]["function"]["arguments"]["input"]


def test_encrypted_reasoning_of_other_servers_is_ignored(running: Running) -> None:
    for content in ("gAAAAABo", "genai1:*", "genai1:/w==", None):
        items = [{"type": "reasoning", "summary": [], "encrypted_content": content}, {"role": "user", "content": "Hi"}]
        assert [message["role"] for message in conversation(running.server, None, items, [])] == ["user"]
    own = {"type": "reasoning", "encrypted_content": sealed("Ähm")}
    assert conversation(running.server, None, [own], [])[0]["reasoning_content"] == "Ähm"


def test_stored_replies(client: openai.OpenAI) -> None:
    reply = client.responses.create(model="pebble", input=QUESTION)
    assert client.responses.retrieve(reply.id).output_text == "19"
    client.responses.delete(reply.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(reply.id)
    kept_out = client.responses.create(model="pebble", input=QUESTION, store=False)
    with pytest.raises(openai.BadRequestError, match="not stored") as raised:
        client.responses.create(model="pebble", input=QUESTION, previous_response_id=kept_out.id)
    assert raised.value.code == "previous_response_not_found" and raised.value.param == "previous_response_id"


def test_the_store_is_bounded_and_private() -> None:
    store, other = ResponseStore(most_responses=2, most_bytes=2000), Key("other")
    for number in range(3):
        store.put(ANYONE, {"id": f"resp_{number}"}, [])
    assert len(store) == 2 and store.find(ANYONE, "resp_2").items == []
    for key, name in ((ANYONE, "resp_0"), (other, "resp_2")):
        with pytest.raises(RequestError, match="not stored"):
            store.find(key, name)
    store.put(ANYONE, {"id": "large"}, [{"text": "x" * 1960}])
    assert len(store) == 1
    store.put(ANYONE, {"id": "larger"}, [{"text": "x" * 3000}])
    assert len(store) == 0


def test_a_stream_that_fails_ends_with_an_error(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr("genai.server.wire.responses.ResponseEncoder.end", fail)
    events = events_of(running.post("/v1/responses", {"input": QUESTION, "stream": True}).text)
    error, failed = events[-2:]
    assert error["type"] == "error" and error["code"] == "internal_error" and "boom" not in error["message"]
    assert failed["type"] == "response.failed" and failed["response"]["status"] == "failed"
    assert failed["response"]["error"]["code"] == "server_error"


def item(**fields: Any) -> dict[str, Any]:
    return {"input": [fields]}


BAD: list[tuple[dict[str, Any], str | None, str]] = [
    ({}, "input", "at least one message"),
    ({"input": []}, "input", "at least one message"),
    ({"input": 5}, "input", "str"),
    (item(role="tool", content="x"), "input", "allowed: user"),
    (item(role="user"), "input", "input[0].content"),
    (item(role="user", content=[{"type": "input_image", "image_url": "http://a/b.png"}]), "input", "text only"),
    (item(type="function_call", name="f", call_id="c"), "input", "input[0].arguments"),
    (item(type="function_call_output", output="x"), "input", "input[0].call_id"),
    (item(type="item_reference", id="msg_1"), "input", "previous_response_id"),
    ({"input": QUESTION, "max_output_tokens": 0}, "max_output_tokens", "max_output_tokens = 0"),
    ({"input": QUESTION, "top_logprobs": 21}, "top_logprobs", "0 to 20"),
    ({"input": QUESTION, "tool_choice": "required"}, "tool_choice", "no tools"),
    ({"input": QUESTION, "tool_choice": {"type": "web_search"}}, "tool_choice", "allowed_tools"),
    ({"input": QUESTION, "tools": [{"type": "function"}]}, "tools", "no name"),
    ({"input": QUESTION, "text": {"format": {"type": "xml"}}}, "text", "text.format"),
    ({"input": QUESTION, "reasoning": {"effort": 5}}, "reasoning", "reasoning.effort"),
    ({"input": QUESTION, "background": True}, "background", "connection"),
    ({"input": QUESTION, "conversation": "conv_1"}, "conversation", "no conversations"),
    ({"input": QUESTION, "previous_response_id": "resp_x"}, "previous_response_id", "not stored"),
    ({"input": QUESTION, "instruction": "Be brief."}, "instruction", "did you mean 'instructions'"),
    ({"input": "word " * 3000}, "input", "maximum context length is 1024 tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "param", "said"), BAD)
def test_wrong_requests(running: Running, body: dict[str, Any], param: str | None, said: str) -> None:
    for stream in ({}, {"stream": True}):
        answer = running.post("/v1/responses", {**body, **stream})
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["type"] == "invalid_request_error", error
        assert error["param"] == param and said in error["message"], error


def test_strict(serving: Callable[..., Running]) -> None:
    strict = serving(strict=True)
    answer = strict.post("/v1/responses", {"input": QUESTION, "tools": [{"type": "web_search"}]})
    assert answer.status_code == 400 and "web_search" in answer.json()["error"]["message"]


def test_the_head_has_the_fields_of_the_request(llm: genai.LLM) -> None:
    server = Server(llm, name="pebble")
    encoder = ResponseEncoder(server, ResponsesRequest(QUESTION, instructions="Be brief."))
    server.close()
    assert b'"instructions":"Be brief."' in encoder.begin()

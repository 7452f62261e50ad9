"""Chat completions with the official client: whole, streamed, tools, schemas, log-probabilities, and wrong requests."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionChunk

import genai
from genai.server.turns import _tokens_up_to

from .conftest import Running

QUESTION: Any = [{"role": "user", "content": "What is 12 + 7?"}]
ADD = {
    "type": "object",
    "properties": {name: {"type": "integer", "minimum": 0, "maximum": 99} for name in ("a", "b")},
    "required": ["a", "b"],
    "additionalProperties": False,
}
DRAWN: Any = {"seed": 1, "temperature": 1}
TOOLS: Any = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": ADD}}]


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_a_reply_is_that_of_the_model(client: openai.OpenAI, llm: genai.LLM) -> None:
    reply = client.chat.completions.create(model="pebble", messages=QUESTION, seed=3)
    (choice,) = reply.choices
    own = llm.chat(QUESTION)
    assert choice.message.content == own.text == "19" and choice.finish_reason == "stop"
    assert reply.usage is not None and reply.usage.prompt_tokens == own.completion.prompt_tokens
    assert reply.usage.completion_tokens == len(own.completion.token_ids)
    assert reply.model == "pebble" and reply.system_fingerprint and reply.model_extra == {"seed": 3}


def test_a_stream_begins_with_the_role_and_ends_with_the_reason(client: openai.OpenAI) -> None:
    chunks: list[ChatCompletionChunk] = list(
        client.chat.completions.create(
            model="pebble", messages=QUESTION, stream=True, stream_options={"include_usage": True}
        )
    )
    first, *middle, last, usage = chunks
    assert first.choices[0].delta.role == "assistant" and not first.choices[0].delta.content
    assert "".join(chunk.choices[0].delta.content or "" for chunk in middle) == "19"
    assert all(chunk.choices[0].finish_reason is None and chunk.choices[0].delta.role is None for chunk in middle)
    assert last.choices[0].finish_reason == "stop" and last.choices[0].delta.content is None
    assert usage.choices == [] and usage.usage is not None and usage.usage.completion_tokens == 2
    assert all(chunk.usage is None for chunk in chunks[:-1]) and len({chunk.id for chunk in chunks}) == 1


def test_usage_is_sent_only_on_request(running: Running) -> None:
    lines = [line for line in running.chat(stream=True).text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]" and "usage" not in "".join(lines)
    assert json.loads(lines[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "stop"


def test_samples(client: openai.OpenAI) -> None:
    story: Any = [{"role": "user", "content": "Tell me a story about Luna and Tom."}]
    options: Any = {"model": "pebble", "messages": story, "n": 3, "seed": 5, "temperature": 0.9, "max_tokens": 12}
    whole = client.chat.completions.create(**options)
    texts = ["", "", ""]
    for chunk in client.chat.completions.create(**options, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]
    assert len(set(texts)) > 1 and [choice.index for choice in whole.choices] == [0, 1, 2]
    assert {choice.finish_reason for choice in whole.choices} == {"length"}


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities(client: openai.OpenAI, llm: genai.LLM, stream: bool) -> None:
    options: Any = {"model": "pebble", "messages": QUESTION, "logprobs": True, "top_logprobs": 2}
    if stream:
        chunks = client.chat.completions.create(**options, stream=True)
        entries = [
            one for chunk in chunks if (found := chunk.choices[0].logprobs) is not None for one in found.content or ()
        ]
    else:
        found = client.chat.completions.create(**options).choices[0].logprobs
        assert found is not None
        entries = found.content or []
    own = llm.chat(QUESTION, logprobs=2).completion.logprobs
    assert own is not None and [entry.logprob for entry in entries] == [one.logprob for one in own]
    assert bytes(byte for entry in entries for byte in entry.bytes or ()).decode() == "19"
    assert all(len(entry.top_logprobs) == 2 and entry.top_logprobs[0].token == entry.token for entry in entries)


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls(client: openai.OpenAI, stream: bool) -> None:
    options: Any = {"model": "pebble", "messages": QUESTION, "tools": TOOLS, "tool_choice": "required", **DRAWN}
    if not stream:
        choice = client.chat.completions.create(**options).choices[0]
        calls = [(call.id, call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]  # type: ignore[union-attr]
        assert choice.finish_reason == "tool_calls"
    else:
        found: dict[int, list[str]] = {}
        reasons = []
        for chunk in client.chat.completions.create(**options, stream=True):
            for part in chunk.choices[0].delta.tool_calls or ():
                assert (part.index in found) == (part.id is None)  # the id and the name come once
                call = found.setdefault(part.index, [part.id or "", (part.function and part.function.name) or "", ""])
                call[2] += (part.function and part.function.arguments) or ""
            reasons += [chunk.choices[0].finish_reason] if chunk.choices[0].finish_reason else []
        assert reasons == ["tool_calls"] and [*found] == [*range(len(found))]
        calls = [(one[0], one[1], one[2]) for one in found.values()]
    assert calls and len({id_ for id_, _, _ in calls}) == len(calls)
    for _, name, arguments in calls:
        assert name == "add" and json.loads(arguments).keys() == {"a", "b"}


def test_a_conversation_with_tools_continues(client: openai.OpenAI) -> None:
    options: Any = {"model": "pebble", "tools": TOOLS, **DRAWN}
    first = client.chat.completions.create(
        messages=QUESTION, tool_choice="required", parallel_tool_calls=False, **options
    )
    (call,) = first.choices[0].message.tool_calls or ()
    messages = [*QUESTION, first.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "19"}]
    again = client.chat.completions.create(model="pebble", messages=messages, tools=TOOLS, max_tokens=8, temperature=0)
    assert again.choices[0].finish_reason in ("stop", "length")


def test_a_schema(client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "sum", "schema": ADD, "strict": True}}
    reply = client.chat.completions.create(model="pebble", messages=QUESTION, response_format=form, temperature=0)
    assert json.loads(reply.choices[0].message.content or "").keys() == {"a", "b"}


@pytest.fixture(scope="module")
def thinking(serving: Callable[..., Running], thinking_llm: genai.LLM) -> Running:
    return serving(thinking_llm)


def test_reasoning_has_both_names_and_is_read_back(thinking: Running, running: Running) -> None:
    body = thinking.chat(reasoning_effort="high", max_tokens=8).json()
    message = body["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] and message["content"] == ""
    usage = body["usage"]
    assert 0 < usage["completion_tokens_details"]["reasoning_tokens"] <= usage["completion_tokens"]
    lines = thinking.chat(reasoning_effort="high", max_tokens=8, stream=True, seed=body["seed"]).text
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in lines.split("\n\n") if line.startswith("data: {")]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == message["reasoning"]
    assert all(delta.get("reasoning") == delta.get("reasoning_content") for delta in deltas)
    again = thinking.post("/v1/chat/completions", {"messages": [*QUESTION, message, *QUESTION]})
    assert again.status_code == 200
    off = thinking.chat(reasoning_effort="none").json()["choices"][0]["message"]
    assert off["content"] == "19" and "reasoning" not in off
    usage = thinking.post("/v1/responses", {"input": "Hi", "reasoning": {"effort": "high"}, "max_output_tokens": 8})
    assert usage.json()["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    assert running.chat().json()["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_tokens_of_the_reasoning_are_counted(llm: genai.LLM) -> None:
    tokens, decode = llm.encode("One two three. Four five."), llm.tokenizer.backend.decode
    for count in range(1, len(tokens) + 1):
        place = len(decode(tokens[:count], skip_special_tokens=False))
        assert _tokens_up_to(decode, tokens, place) == count and _tokens_up_to(decode, tokens, 0) == 0


def test_template_variables(thinking: Running, running: Running) -> None:
    reply = thinking.chat(chat_template_kwargs={"enable_thinking": True}, max_tokens=4).json()
    assert reply["choices"][0]["message"]["reasoning"]
    wrong = thinking.chat(chat_template_kwargs={"enable_thinkin": True})
    assert wrong.status_code == 400 and "enable_thinking" in wrong.json()["error"]["message"]
    assert running.chat(reasoning_effort="low", max_tokens=1).headers["x-ignored-fields"] == "reasoning_effort"


def test_forms_of_messages(running: Running) -> None:
    parts = [{"type": "text", "text": "What is 12 + 7?", "cache_control": {"type": "ephemeral"}}]
    body = {"messages": [{"role": "user", "content": parts, "name": None}]}
    assert running.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"] == "19"
    answer = {"role": "assistant", "content": None, "refusal": None, "annotations": []}
    system = {"role": "developer", "content": "Be brief."}
    body = {"messages": [system, *QUESTION, answer, *QUESTION], "max_tokens": 1}
    assert running.post("/v1/chat/completions", body).status_code == 200


def test_adapters_are_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["pebble", "words"]
    for name in ("words", "pebble+words"):
        reply = client.chat.completions.create(model=name, messages=QUESTION)
        assert reply.choices[0].message.content == "19, nineteen" and reply.model == name
    shown = client.models.retrieve("words")
    assert shown.model_extra is not None and shown.model_extra["parent"] == "pebble"
    assert shown.model_extra["max_model_len"] == shown.model_extra["context_length"] == 1024


def test_stop_strings_and_stop_tokens(running: Running, llm: genai.LLM) -> None:
    choice = running.chat(stop="9").json()["choices"][0]
    assert choice["message"]["content"] == "1" and choice["finish_reason"] == "stop" and choice["stop_reason"] == "9"
    (nine,) = llm.encode("9", add_special_tokens=False)
    choice = running.chat(stop_token_ids=[nine]).json()["choices"][0]
    assert choice["message"]["content"] == "1" and choice["stop_reason"] == nine
    assert running.chat(logit_bias={str(nine): -100}).json()["choices"][0]["message"]["content"] != "19"


BAD: list[tuple[dict[str, Any], str | None, str]] = [
    ({"messages": []}, "messages", "empty"),
    ({"messages": "Hi"}, "messages", "array"),
    ({}, "messages", "messages"),
    ({"messages": [{"content": "Hi"}]}, "messages[0]", "role"),
    ({"messages": [*QUESTION, {"role": "bot", "content": "Hi"}]}, f"messages[{len(QUESTION)}]", "role = 'bot'"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0]", "only text"),
    ({"messages": QUESTION, "temperature": "hot"}, "temperature", "temperature"),
    ({"messages": QUESTION, "temperature": -1}, "temperature", "temperature"),
    ({"messages": QUESTION, "max_tokens": 0}, "max_tokens", "max_tokens"),
    ({"messages": QUESTION, "n": 0}, "n", "1 to 128"),
    ({"messages": QUESTION, "n": True}, "n", "1 to 128"),
    ({"messages": QUESTION, "top_logprobs": 3}, "top_logprobs", "logprobs"),
    ({"messages": QUESTION, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "0 to 20"),
    ({"messages": QUESTION, "stream": "yes"}, "stream", "bool"),
    ({"messages": QUESTION, "tool_choice": "required"}, "tool_choice", "no tools"),
    ({"messages": QUESTION, "response_format": {"type": "xml"}}, "response_format", "json_schema"),
    ({"messages": QUESTION, "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 5}}}},
     "response_format", "type"),
    ({"messages": QUESTION, "tempertaure": 1}, "tempertaure", "did you mean 'temperature'"),
    ({"messages": QUESTION, "functions": [{"name": "f"}]}, "functions", "tools"),
    ({"messages": QUESTION, "audio": {"voice": "alloy"}}, "audio", "text only"),
    ({"messages": QUESTION, "timeout": -1}, "timeout", "seconds"),
    ({"messages": QUESTION, "logit_bias": {"word": 1}}, "logit_bias", "logit_bias"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "param", "said"), BAD)
def test_wrong_requests(running: Running, body: dict[str, Any], param: str | None, said: str) -> None:
    for stream in ({}, {"stream": True}) if "stream" not in body else ({},):
        answer = running.post("/v1/chat/completions", {**body, **stream})
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["type"] == "invalid_request_error", error
        assert error["param"] == param and said in error["message"], error


FORM = {"type": "json_schema", "schema": ADD}
FORMATS: list[tuple[str, dict[str, Any]]] = [
    ("chat/completions", {"messages": QUESTION, "response_format": FORM, "tools": TOOLS, "tool_choice": "required"}),
    ("responses", {"input": "Hi", "text": {"format": FORM}, "tools": [{"type": "function", **TOOLS[0]["function"]}],
                   "tool_choice": {"type": "function", "name": "add"}}),
    ("messages", {"messages": QUESTION, "output_config": {"format": FORM}, "tool_choice": {"type": "any"},
                  "tools": [{"name": "add", "input_schema": ADD}]}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body"), FORMATS)
def test_a_format_has_no_effect_on_forced_calls(running: Running, path: str, body: dict[str, Any]) -> None:
    answer = running.post(f"/v1/{path}", body)
    assert answer.status_code == 200 and '"name":"add"' in answer.text
    assert answer.headers["x-ignored-fields"] in ("response_format", "text.format", "output_config.format")


def test_bodies_that_are_not_objects(running: Running) -> None:
    with running.http as client:
        for content in (b"", b"{", b"[]", b"\xff", b"[" * 100_000, b'{"messages": NaN}', b'{"a": ' * 5000):
            answer = client.post("/v1/chat/completions", content=content, headers={"content-type": "application/json"})
            assert answer.status_code == 400 and "body" in answer.json()["error"]["message"], content[:20]
        form = client.post("/v1/chat/completions", data={"messages": "Hi"})
        assert form.status_code == 415


def test_a_prompt_that_is_too_long(client: openai.OpenAI) -> None:
    long: Any = [{"role": "user", "content": "word " * 3000}]
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(model="pebble", messages=long)
    assert raised.value.code == "context_length_exceeded" and raised.value.param == "messages"
    assert "maximum context length is 1024 tokens. However, the prompt is too long" in raised.value.message


def test_an_unknown_model(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="pebble, words") as raised:
        client.chat.completions.create(model="gpt-4o", messages=QUESTION)
    assert raised.value.code == "model_not_found"


def test_fields_without_effect_are_named(running: Running) -> None:
    answer = running.chat(user="me", prompt_cache_key="k", invented_by_an_agent=1, temperature=0, top_p=0.9, top_k=-1)
    assert answer.status_code == 200
    assert answer.headers["x-ignored-fields"] == "user, invented_by_an_agent, top_p"
    tools = [{"type": "web_search"}, {"type": "function", "function": {"name": "f"}}]
    answer = running.chat(tools=tools, max_tokens=1)
    assert answer.status_code == 200 and answer.headers["x-ignored-fields"] == "tools[0] (web_search)"


def test_seeds(running: Running) -> None:
    first = running.chat("Tell me a story.", temperature=1, max_tokens=10).json()
    again = running.chat("Tell me a story.", temperature=1, max_tokens=10, seed=first["seed"]).json()
    assert again["choices"] == first["choices"] and first["seed"] < 2**53
    assert running.chat(seed=-5).json()["seed"] == 2**64 - 5
    assert running.chat(seed=-1).json()["seed"] < 2**53


def test_greedy_samples_are_equal(running: Running) -> None:
    for stream in (False, True):
        answer = running.chat(n=3, temperature=0, stream=stream)
        if not stream:
            choices = answer.json()["choices"]
            assert [choice["message"]["content"] for choice in choices] == ["19"] * 3
            assert [choice["index"] for choice in choices] == [0, 1, 2]
        else:
            texts = ["", "", ""]
            for line in answer.text.split("\n\n"):
                if line.startswith("data: {"):
                    choice = json.loads(line[6:])["choices"][0]
                    texts[choice["index"]] += choice["delta"].get("content") or ""
            assert texts == ["19"] * 3
    body = {"prompt": ["Once", "The cat"], "n": 2, "temperature": 0, "max_tokens": 4, "echo": True}
    choices = running.post("/v1/completions", body).json()["choices"]
    assert [choice["text"][:3] for choice in choices] == ["Onc", "Onc", "The", "The"]


@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {"choice": ["yes"]}},
        {"structured_outputs": {"regex": "yes", "json": None}},
        {"guided_choice": ["yes"]},
        {"guided_regex": "yes"},
        {"guided_grammar": 'root ::= "yes"'},
        {"choice": ["yes"]},
    ],
)
def test_structured_output_as_in_vllm(running: Running, fields: dict[str, Any]) -> None:
    assert _completed(running, **fields) == "yes"


def test_json_as_in_vllm(running: Running) -> None:
    for fields in ({"structured_outputs": {"json": {"enum": [7]}}}, {"guided_json": '{"enum": [7]}'}):
        assert _completed(running, **fields) == "7"
    wrong = running.chat(structured_outputs={"xml": "x"})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "structured_outputs"
    assert running.chat(structured_outputs=5).status_code == 400


def _completed(running: Running, **fields: Any) -> Any:
    """Return a completion; in chats, this model would not end its reasoning before the output."""
    return running.post("/v1/completions", {"prompt": "Once", **fields}).json()["choices"][0]["text"]

"""litellm: chats, streams, tools, schemas, log-probabilities, embeddings, responses, errors, retries, cancellation."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import litellm
from common import (
    KEY,
    LIMITED,
    MESSAGES,
    QUESTION,
    SERVER,
    STORY,
    TOO_LONG,
    busy,
    cancels_task,
    check_sum,
    is_running,
    long_bias,
    raised,
    wait_for,
)
from pydantic import BaseModel, Field

CALL: dict[str, Any] = {"model": "openai/pebble", "api_base": f"{SERVER}/v1", "api_key": "none", "messages": MESSAGES}
LOCKED: dict[str, Any] = {**CALL, "api_base": f"{LIMITED}/v1"}
NUMBER = {"type": "integer", "minimum": 0, "maximum": 99}
ADD = {
    "type": "object",
    "properties": {"a": NUMBER, "b": NUMBER},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": ADD}}]


class Sum(BaseModel):
    sum: int = Field(ge=0, le=99)


def chats() -> None:
    reply = litellm.completion(**CALL)
    assert reply.choices[0].message.content == "19" and reply.choices[0].finish_reason == "stop"
    assert reply.usage.completion_tokens == 2 and reply.usage.prompt_tokens > 10
    chunks = [*litellm.completion(**CALL, stream=True, stream_options={"include_usage": True})]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "19"
    built = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    assert built.choices[0].message.content == "19" and built.usage.total_tokens == reply.usage.total_tokens
    entries = litellm.completion(**CALL, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert "".join(entry.token for entry in entries).startswith("19") and len(entries[0].top_logprobs) == 2
    made = litellm.completion(**CALL, response_format=Sum).choices[0].message.content
    assert 0 <= json.loads(made)["sum"] <= 99
    samples = litellm.completion(**CALL, n=2, seed=1, temperature=1, max_tokens=3)
    assert len(samples.choices) == 2


def tools() -> None:
    options: dict[str, Any] = {**CALL, "tools": TOOLS, "tool_choice": "required", "logit_bias": long_bias(), "seed": 1}
    calls = litellm.completion(**options).choices[0].message.tool_calls
    assert len(calls) == 2 and len({call.id for call in calls}) == 2
    chunks = [*litellm.completion(**options, stream=True)]
    built = litellm.stream_chunk_builder(chunks).choices[0]
    assert built.finish_reason == "tool_calls"
    for one, other in zip(calls, built.message.tool_calls, strict=True):
        check_sum(json.loads(one.function.arguments))
        assert one.id == other.id and one.function.arguments == other.function.arguments
    results = [{"role": "tool", "tool_call_id": call.id, "content": "19"} for call in calls]
    history = [*MESSAGES, built.message.model_dump(), *results]
    assert litellm.completion(**{**options, "messages": history, "tool_choice": "none", "max_tokens": 5}).choices


def other_endpoints() -> None:
    place = {"api_base": f"{SERVER}/v1", "api_key": "none"}
    text = litellm.text_completion(
        model="text-completion-openai/pebble", prompt="Once upon a time", max_tokens=5, logit_bias=long_bias(), **place
    )
    assert text.choices[0].text and text.usage.completion_tokens == 5
    vectors = litellm.embedding(model="openai/bert", input=["A cat.", "A dog."], **place)
    assert len(vectors.data) == 2 and len(vectors.data[0]["embedding"]) > 8
    response = litellm.responses(model="openai/pebble", input=QUESTION, **place)
    assert response.output[0].content[0].text == "19"
    kinds = [event.type for event in litellm.responses(model="openai/pebble", input=QUESTION, stream=True, **place)]
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed", kinds
    claude = {"model": "anthropic/pebble", "api_base": SERVER, "api_key": "none", "messages": MESSAGES, "max_tokens": 9}
    assert litellm.completion(**claude).choices[0].message.content == "19"
    parts = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(**claude, stream=True)]
    assert "".join(parts) == "19"


def errors() -> None:
    messages = [{"role": "user", "content": TOO_LONG}]
    for extra in ({}, {"stream": True}):
        raised(
            litellm.ContextWindowExceededError,
            lambda e=extra: litellm.completion(**{**CALL, "messages": messages}, **e),
        )
    raised(litellm.NotFoundError, lambda: litellm.completion(**{**CALL, "model": "openai/other"}))
    raised(litellm.BadRequestError, lambda: litellm.completion(**CALL, temperature=-1))
    raised(litellm.AuthenticationError, lambda: litellm.completion(**{**LOCKED, "api_key": "wrong"}))
    with busy():
        raised(litellm.RateLimitError, lambda: litellm.completion(**{**LOCKED, "api_key": KEY}, max_retries=0))
    with busy():
        reply = litellm.completion(**{**LOCKED, "api_key": KEY}, max_retries=2)
        assert reply.choices[0].message.content == "19"


async def cancellation() -> None:
    options: dict[str, Any] = {**CALL, "messages": [{"role": "user", "content": STORY}], "max_tokens": 900, "n": 4}
    options["logit_bias"] = long_bias()
    async with cancels_task():
        task = asyncio.create_task(litellm.acompletion(**options))
        await asyncio.to_thread(wait_for, is_running)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    async with cancels_task():
        stream = await litellm.acompletion(**options, stream=True)
        async for _ in stream:
            break
        await stream.aclose()


chats()
tools()
other_endpoints()
errors()
asyncio.run(cancellation())

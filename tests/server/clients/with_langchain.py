"""langchain-openai: chats, streams, tools, structured output, log-probabilities, embeddings, responses, errors."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
from common import (
    KEY,
    LIMITED,
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
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field

PLACE: dict[str, Any] = {"base_url": f"{SERVER}/v1", "api_key": "none"}
BIAS = {int(token): bias for token, bias in long_bias().items()}


class Sum(BaseModel, extra="forbid"):
    """The sum."""

    sum: int = Field(ge=0, le=99)


class Pair(BaseModel, extra="forbid"):
    """Two numbers."""

    a: int = Field(ge=0, le=99)
    b: int = Field(ge=0, le=99)


@tool(args_schema=Pair)
def add(a: int, b: int) -> int:
    """Add."""
    return a + b


def chats(chat: ChatOpenAI) -> None:
    reply = chat.invoke(QUESTION)
    assert reply.content == "19" and reply.usage_metadata and reply.usage_metadata["output_tokens"] == 2
    chunks = [*chat.stream(QUESTION)]
    assert "".join(str(chunk.content) for chunk in chunks) == "19"
    assert sum((chunk.usage_metadata or {}).get("output_tokens", 0) for chunk in chunks) == 2
    assert [one.content for one in chat.batch([QUESTION, "What is 20 - 5?"])] == ["19", "15"]
    entries = chat.bind(logprobs=True, top_logprobs=2).invoke(QUESTION).response_metadata["logprobs"]["content"]
    assert len(entries[0]["top_logprobs"]) == 2
    for method in ("json_schema", "function_calling"):
        made: Any = chat.with_structured_output(Sum, method=method).invoke(QUESTION)
        assert isinstance(made, Sum), method
    calling = ChatOpenAI(model="pebble", logit_bias=BIAS, seed=1, **PLACE).bind_tools(
        [add], tool_choice="required", strict=True
    )
    reply: Any = calling.invoke(QUESTION)
    assert len(reply.tool_calls) == 2
    streamed: Any = None
    for chunk in calling.stream(QUESTION):
        streamed = chunk if streamed is None else streamed + chunk
    assert [(one["args"], one["id"]) for one in streamed.tool_calls] == [(o["args"], o["id"]) for o in reply.tool_calls]
    for call in reply.tool_calls:
        check_sum(call["args"])
    results = [ToolMessage(str(add.invoke(call["args"])), tool_call_id=call["id"]) for call in reply.tool_calls]
    assert chat.bind(max_tokens=5).invoke([HumanMessage(QUESTION), reply, *results]).usage_metadata


def other_endpoints() -> None:
    responses = ChatOpenAI(model="pebble", use_responses_api=True, **PLACE)
    assert responses.invoke(QUESTION).text == "19"
    assert "".join(chunk.text for chunk in responses.stream(QUESTION)) == "19"
    assert OpenAI(model="pebble", max_tokens=5, **PLACE).invoke("Once upon a time")
    # The client sends token ids of OpenAI's tokenizer unless check_embedding_ctx_length is False.
    embeddings = OpenAIEmbeddings(model="bert", check_embedding_ctx_length=False, **PLACE)
    vectors = embeddings.embed_documents(["A cat.", "A dog."])
    assert len(vectors) == 2 and len(embeddings.embed_query("A cat.")) == len(vectors[0]) > 8


def errors(chat: ChatOpenAI) -> None:
    raised(ContextOverflowError, lambda: chat.invoke(TOO_LONG))
    raised(openai.NotFoundError, lambda: ChatOpenAI(model="other", **PLACE).invoke(QUESTION))
    locked: dict[str, Any] = {"model": "pebble", "base_url": f"{LIMITED}/v1"}
    raised(openai.AuthenticationError, lambda: ChatOpenAI(api_key="wrong", **locked).invoke(QUESTION))
    with busy():
        raised(openai.RateLimitError, lambda: ChatOpenAI(api_key=KEY, max_retries=0, **locked).invoke(QUESTION))
    with busy():
        assert ChatOpenAI(api_key=KEY, max_retries=2, **locked).invoke(QUESTION).content == "19"


async def cancellation() -> None:
    long = ChatOpenAI(model="pebble", max_tokens=900, n=4, logit_bias=BIAS, **PLACE)
    async with cancels_task():
        task = asyncio.create_task(long.ainvoke(STORY))
        await asyncio.to_thread(wait_for, is_running)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    async with cancels_task():
        stream = long.astream(STORY)
        async for _ in stream:
            break
        await stream.aclose()


model = ChatOpenAI(model="pebble", stream_usage=True, **PLACE)
chats(model)
other_endpoints()
errors(model)
asyncio.run(cancellation())

"""Volatile headers of agents, and requests beside a chat."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import genai
from genai.server.agents import TASK_PRIORITY, is_side_task, without_headers

from .conftest import Running

HEADER = "x-anthropic-billing-header: cc_version=2.1.15.%03d; cc_entrypoint=cli; cch=%05x;"
RULES = "You are a careful agent. " * 12


def _cached(running: Running, system: Any) -> tuple[int, str]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "What is 12 + 7?"}]
    answer = running.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1})
    usage = answer.json()["usage"]["prompt_tokens_details"]
    return usage["cached_tokens"], answer.headers.get("x-removed-headers", "")


def test_volatile_headers_do_not_change_the_prefix(running: Running, serving: Callable[..., Running]) -> None:
    def systems(number: int) -> list[Any]:
        header = HEADER % (number, number * 77)
        return [f"{header}\n{RULES}", [{"type": "text", "text": header}, {"type": "text", "text": RULES}]]

    _cached(running, RULES)
    for number, system in enumerate([*systems(1), *systems(2)]):
        cached, removed = _cached(running, system)
        assert cached > 64 and removed == "x-anthropic-billing-header", number
    keeps = serving(keep_headers=True)
    _cached(keeps, systems(3)[0])
    cached, removed = _cached(keeps, systems(4)[0])
    assert cached < 64 and not removed


@pytest.mark.parametrize(
    "content", ["Say x-anthropic-billing-header: 1", " x-anthropic-billing-header: 1\nHi", "x-other-header: 1\nHi", ""]
)
def test_other_texts_stay(content: str) -> None:
    messages = [{"role": "system", "content": content}, {"role": "user", "content": f"{HEADER}\nHi"}]
    assert without_headers(messages) == (messages, [])


def test_messages_that_are_only_a_header() -> None:
    user = {"role": "user", "content": "Hi"}
    for content in (HEADER, f"{HEADER}\n\n", [{"type": "text", "text": HEADER}]):
        assert without_headers([{"role": "system", "content": content}, user])[0] == [user]
    odd = [{"role": "system", "content": None}, {"role": "system", "content": [5, {"type": "image"}]}, {}]
    assert without_headers(odd) == (odd, [])


def test_tasks_beside_a_chat() -> None:
    title = '### Task:\nGenerate a concise title.\n### Output:\nJSON format: { "title": "your title" }'
    task = {"role": "user", "content": title}
    assert is_side_task([task])
    assert not is_side_task([task, task]) and not is_side_task([]) and not is_side_task([{"role": "user"}])
    assert not is_side_task([{"role": "user", "content": "What is ### Task:\n?"}])
    for awaited in ("Respond to the user query using the provided context", "Analyze the chat history"):
        assert not is_side_task([{"role": "user", "content": title.replace("Generate", f"{awaited}: generate")}])
    assert not is_side_task([{"role": "user", "content": "### Task:\nGenerate an image prompt."}])


def test_side_tasks_evict_nothing_of_a_chat(served_folder: Path) -> None:
    """The cache holds the chat and one side task. Further side tasks take the blocks of earlier ones."""

    def cached(llm: genai.LLM, name: str, priority: int) -> int:
        (found,) = llm.generate(f"{name}. " + "It was a fine day at sea. " * 20, max_tokens=1, priority=priority)
        return found.cached_tokens

    with genai.LLM(served_folder, threads=2, cache_bytes=2**19) as small:
        assert small.stats().cache_blocks == 10
        assert cached(small, "The chat", 0) == 0
        for index in range(4):
            assert cached(small, f"Task {index}", TASK_PRIORITY) == 0
        assert cached(small, "The chat", 0) > 60
        for index in range(4):
            cached(small, f"Chat {index}", 0)
        assert cached(small, "The chat", 0) == 0


def test_a_conversation_computes_only_what_is_new(running: Running) -> None:
    """Every turn reuses the blocks of the previous prompt, and its reply equals that of a server without a cache."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": RULES + "Count the steps."}]
    before, block = 0, 32
    for turn in range(6):
        messages.append({"role": "user", "content": f"Step {turn}: what is {turn} + 7? " + "Be exact. " * 6})
        body = {"messages": messages, "max_tokens": 40, "temperature": 0.7, "seed": turn, "logprobs": True}
        warm = running.post("/v1/chat/completions", body).json()
        cold = running.post("/v1/chat/completions", {**body, "cache_salt": f"cold-{turn}"}).json()
        assert warm["choices"] == cold["choices"]
        usage = warm["usage"]
        assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        if turn:
            assert usage["prompt_tokens_details"]["cached_tokens"] == before // block * block
        before = usage["prompt_tokens"]
        messages.append(warm["choices"][0]["message"])


@pytest.mark.parametrize("name", ["cline", "open_webui", "open_webui_title"])
def test_bodies_of_agents_and_chat_pages(running: Running, name: str) -> None:
    """Cline's body was recorded from @cline/llms 0.0.86. Open WebUI's are those of its version 0.12.4.

    The texts and max_tokens are shorter.
    """
    body = json.loads((Path(__file__).parent / "bodies" / f"{name}.json").read_text(encoding="utf-8"))
    assert is_side_task(body["messages"]) == (name == "open_webui_title")
    answer = running.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    assert answer.headers.get("x-ignored-fields", "reasoning_effort") in ("reasoning_effort", "top_p, reasoning_effort")
    if body["stream"]:
        *chunks, last = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
        assert last["choices"] == [] and 0 < last["usage"]["completion_tokens"] <= 12
        assert chunks[0]["choices"][0]["delta"]["role"] == "assistant" and chunks[-1]["choices"][0]["finish_reason"]
    else:
        assert answer.json()["choices"][0]["message"]["content"]

"""Threads and tasks share one engine, and each gets the same result as alone."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import genai
from genai.llm.completion import Done

REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (prompt, {"max_tokens": 5 + 3 * index, "seed": index, "temperature": 0.7 + 0.1 * index, "ignore_eos": True})
    for index, prompt in enumerate(["Once", "A cat", "What is 12 + 7?", "Luna and Tom", "Monday, Tuesday,", "One"])
]


def alone(llm: genai.LLM) -> list[tuple[int, ...]]:
    return [llm.generate(prompt, **options)[0].token_ids for prompt, options in REQUESTS]


def test_threads(llm: genai.LLM, assert_all_given_back: Callable[[genai.Model], None]) -> None:
    expected = alone(llm)
    wrong: list[Any] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(8):
            index = rng.randrange(len(REQUESTS))
            prompt, options = REQUESTS[index]
            kind = rng.choice(["generate", "stream", "cancel"])
            if kind == "generate":
                found = llm.generate(prompt, **options)[0].token_ids
            else:
                with llm.stream(prompt, **options) as stream:
                    for _ in stream:
                        if kind == "cancel" and rng.random() < 0.5:
                            break
                found = stream.completion.token_ids
            if found != expected[index][: len(found)] or (kind != "cancel" and found != expected[index]):
                wrong.append((index, kind, found))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong
    assert_all_given_back(llm.model)


def test_tasks(llm: genai.LLM) -> None:
    expected = alone(llm)

    async def stream(prompt: str, options: dict[str, Any]) -> tuple[int, ...]:
        async with llm.astream(prompt, **options) as found:
            pieces = [piece async for piece in found]
        assert "".join(pieces) == found.completion.text
        return found.completion.token_ids

    async def run() -> tuple[list[Any], list[Any], Any]:
        whole = [llm.agenerate(prompt, **options) for prompt, options in REQUESTS]
        parts = [stream(prompt, options) for prompt, options in REQUESTS]
        chat = llm.achat("What is 12 + 7?", temperature=0)
        results = await asyncio.gather(*whole, *parts, chat)
        count = len(REQUESTS)
        return results[:count], results[count : 2 * count], results[-1]

    whole, parts, chat = asyncio.run(run())
    assert [one[0].token_ids for one in whole] == parts == expected
    assert chat.text == "19"


def test_the_event_loop_goes_on(llm: genai.LLM) -> None:
    """While tokens are generated, other tasks run, and are delayed at most for a fraction of the work."""

    async def run() -> tuple[float, float]:
        begin = time.perf_counter()
        work = asyncio.create_task(llm.agenerate(["Once"] * 4, max_tokens=300, ignore_eos=True))
        longest, last = 0.0, begin
        while not work.done():
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            longest, last = max(longest, now - last), now
        return longest, last - begin

    longest, whole = asyncio.run(run())
    assert longest < whole / 3


def test_chat_twins_agree(llm: genai.LLM) -> None:
    messages = [{"role": "system", "content": "You are terse."}, {"role": "user", "content": "What is 12 + 7?"}]
    reply = llm.chat(messages, temperature=0)

    async def twins() -> tuple[Any, list[Any]]:
        return await llm.achat(messages, temperature=0), [
            event async for event in llm.astream_chat(messages, temperature=0)
        ]

    same, events = asyncio.run(twins())
    assert same.text == reply.text and reply.message == {"role": "assistant", "content": reply.text}
    *others, done = llm.stream_chat(messages, temperature=0)
    assert others == events[:-1]
    assert isinstance(done, Done) and isinstance(events[-1], Done)
    assert done.reply.message == events[-1].reply.message == llm.chat(messages, temperature=0).message
    usage = done.usage
    assert usage.completion_tokens == len(done.completion.token_ids) > 0
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens > usage.cached_tokens >= 0
    assert done.completion.finish_reason == "stop"
    assert "".join(event.raw for event in events) == reply.completion.text
    assert "".join(llm.stream(messages, temperature=0)) == reply.completion.text


def test_two_llms_share_a_model(bundled: genai.Model, llm: genai.LLM) -> None:
    with genai.LLM(bundled) as other:
        assert alone(other) == alone(llm)

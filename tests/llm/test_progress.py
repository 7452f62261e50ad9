"""Callers that wait receive the progress of the work."""

from __future__ import annotations

import time
from typing import Any

import pytest

import genai
from genai.llm.chat import ChatSession


@pytest.fixture
def slow_steps(llm: genai.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make steps take longer than the interval of progress calls."""
    decoder = llm.model.decoder
    step = decoder.step

    def slow(*arguments: Any, **named: Any) -> Any:
        time.sleep(0.15)
        return step(*arguments, **named)

    monkeypatch.setattr(decoder, "step", slow)


def test_a_long_prompt(llm: genai.LLM, slow_steps: None) -> None:
    heard: list[tuple[int, int]] = []
    chat = ChatSession(llm, max_tokens=4)
    chat.on_prompt = lambda done, total: heard.append((done, total))
    reply = chat.ask("Tell me a story about Luna and Tom. " * 70)
    total = reply.completion.prompt_tokens
    assert total > 600 and {one for _, one in heard} == {total}
    done = [one for one, _ in heard]
    assert done == sorted(done) and done[0] >= 0 and done[-1] < total, "and nothing once the answer has begun"


def test_many_prompts(llm: genai.LLM, slow_steps: None) -> None:
    heard: list[tuple[int, int]] = []
    prompts = [llm.render(f"What is {number} + 7?") for number in range(3)]
    completions = llm.generate(prompts, n=2, temperature=0.5, progress=lambda *count: heard.append(count))
    assert len(completions) == 6
    assert {total for _, total in heard} == {6}
    done = [one for one, _ in heard]
    assert done == sorted(done) and done[0] == 0 and done[-1] == 6

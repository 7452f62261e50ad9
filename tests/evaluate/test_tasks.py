"""Held-out questions: each gets the same reply in a batch as alone."""

from __future__ import annotations

import pytest

import genai
from genai.errors import ContextOverflowError
from genai.evaluate.tasks import Question, evaluate


def question(text: str, max_tokens: int = 12) -> Question:
    return Question("any", ({"role": "user", "content": text},), "19", "contains", max_tokens)


def test_a_reply_does_not_depend_on_how_long_other_questions_are(bundled: genai.Model) -> None:
    """The padding of a short prompt is not generated text, and counts towards no limit."""
    questions = [question("Tell me a story."), question("Tell me a story about " + "a dog and " * 20 + "a cat.", 40)]
    together = [outcome.reply for outcome in evaluate(bundled, questions)]
    assert together == [evaluate(bundled, [one])[0].reply for one in questions]
    with genai.LLM(bundled) as llm:
        for one, reply in zip(questions, together, strict=True):
            assert reply == llm.chat(list(one.messages), temperature=0, max_tokens=one.max_tokens).text.strip()


def test_a_question_longer_than_the_context(bundled: genai.Model) -> None:
    with pytest.raises(ContextOverflowError, match="a question has") as caught:
        evaluate(bundled, [question("one two three " * bundled.context_size)])
    assert caught.value.why and caught.value.fix

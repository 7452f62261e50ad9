"""Held-out questions with checkable answers: asked greedily, counted per task."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..generator import Generator, GeneratorParams
from ..model import Model
from ..tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 32


def _last_number(text: str) -> str | None:
    numbers = re.findall(r"-?\d+", text)
    return numbers[-1] if numbers else None


MATCHES: Mapping[str, Callable[[str, str], bool]] = {
    "exact": lambda reply, answer: reply == answer,
    "number": lambda reply, answer: _last_number(reply) == answer.strip(),
    "contains": lambda reply, answer: answer.lower() in reply.lower(),
}


@dataclass(frozen=True)
class Question:
    """One question: its task, the messages to answer, and the answer with the way to compare it."""

    task: str
    messages: tuple[dict[str, str], ...]
    answer: str
    match: str
    max_tokens: int = DEFAULT_MAX_TOKENS


@dataclass(frozen=True)
class Outcome:
    """A question, the reply to it, and whether it was right."""

    question: Question
    reply: str
    right: bool


def read_questions(path: Path) -> list[Question]:
    """Read JSON lines {"task", "messages", "answer", "match", "max_tokens"?}.

    Raises:
        InputError: the file is missing, or a line is not of that form; the message names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read", str(error), "give a file of JSON lines") from error
    questions = [_question(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not questions:
        raise InputError(f"{path}: holds no questions", "there is nothing to ask", "give a file of JSON lines")
    return questions


def _question(path: Path, number: int, line: str) -> Question:
    form = '{"task": …, "messages": […], "answer": …, "match": "exact|number|contains"}'
    try:
        item: Any = json.loads(line)
        question = Question(
            str(item["task"]),
            tuple(item["messages"]),
            str(item["answer"]),
            str(item["match"]),
            int(item.get("max_tokens", DEFAULT_MAX_TOKENS)),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{path}, line {number}: not a question", f"{type(error).__name__}: {error}", f"write {form}"
        ) from error
    if question.match not in MATCHES:
        raise InputError(
            f"{path}, line {number}: match = {question.match!r}", f"allowed: {', '.join(MATCHES)}", f"write {form}"
        )
    return question


def evaluate(model: Model, questions: Sequence[Question], *, batch_size: int = 16) -> list[Outcome]:
    """Answer all questions greedily, `batch_size` together; outcomes in the order of the questions."""
    tokenizer = Tokenizer(model)
    order = sorted(range(len(questions)), key=lambda i: questions[i].max_tokens)
    replies: dict[int, str] = {}
    for first in range(0, len(order), batch_size):
        chosen = order[first : first + batch_size]
        replies.update(zip(chosen, _answers(model, tokenizer, [questions[i] for i in chosen]), strict=True))
    return [Outcome(q, replies[i], MATCHES[q.match](replies[i], q.answer)) for i, q in enumerate(questions)]


def _answers(model: Model, tokenizer: Tokenizer, questions: Sequence[Question]) -> list[str]:
    prompts = [
        tokenizer.encode(tokenizer.apply_chat_template(list(q.messages), add_generation_prompt=True)).tolist()
        for q in questions
    ]
    params = GeneratorParams(model)
    params.set_search_options(do_sample=False, batch_size=len(prompts))
    with Generator(model, params) as generator:
        generator.append_tokens(prompts)
        for _ in range(max(q.max_tokens for q in questions)):
            if generator.is_done():
                break
            generator.generate_next_token()
        tails = [
            generator.get_sequence(i)[len(prompt) :][: q.max_tokens]
            for i, (prompt, q) in enumerate(zip(prompts, questions, strict=True))
        ]
    return [tokenizer.decode(tail).strip() for tail in tails]


def summary(outcomes: Iterable[Outcome]) -> dict[str, dict[str, float]]:
    """Per task, and for "all": questions asked, answered right, and their share."""
    table: dict[str, dict[str, float]] = {}
    for outcome in outcomes:
        for name in (outcome.question.task, "all"):
            row = table.setdefault(name, {"asked": 0, "right": 0, "accuracy": 0.0})
            row["asked"] += 1
            row["right"] += outcome.right
    total = table.pop("all", None)
    result = dict(sorted(table.items())) | ({"all": total} if total else {})
    for row in result.values():
        row["accuracy"] = row["right"] / row["asked"]
    return result

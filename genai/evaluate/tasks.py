"""Questions with checkable answers, which a model answers greedily and which are scored per task."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from ..common.atomic_files import write_whole
from ..common.reading import read_text_file
from ..errors import ContextOverflowError, InputError
from ..models.greedy import greedy_batch
from ..models.model import Model
from ..text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 32


MATCHES: Mapping[str, Callable[[str, str], bool]] = {
    "exact": lambda reply, answer: reply == answer,
    "number": lambda reply, answer: re.findall(r"-?\d+", reply)[-1:] == [answer.strip()],
    "contains": lambda reply, answer: answer.lower() in reply.lower(),
}


@dataclass(frozen=True)
class Question:
    """A question: its task, the messages to answer, the expected answer, and the way to compare answer and reply."""

    task: str
    messages: tuple[dict[str, str], ...]
    answer: str
    match: str
    max_tokens: int = DEFAULT_MAX_TOKENS


@dataclass(frozen=True)
class Outcome:
    """A question, the reply to it, and True if the reply is right."""

    question: Question
    reply: str
    right: bool


def read_questions(path: Path) -> list[Question]:
    """Read JSON lines {"task", "messages", "answer", "match", "max_tokens"?}.

    Raises:
        InputError: the file is missing, or a line is malformed; the message names the line.
    """
    lines = read_text_file(path).split("\n")
    questions = [_question(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not questions:
        raise InputError(
            f"{path}: the file contains no questions", "all lines are empty", "use a JSON Lines file with questions"
        )
    return questions


def _question(path: Path, number: int, line: str) -> Question:
    expected_line = '{"task": …, "messages": […], "answer": …, "match": "exact|number|contains"}'
    try:
        item: Any = json.loads(line)
        question = Question(
            str(item["task"]),
            tuple(item["messages"]),
            str(item["answer"]),
            str(item["match"]),
            int(item.get("max_tokens", DEFAULT_MAX_TOKENS)),
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise InputError(
            f"{path}, line {number}: the line is not a question",
            f"{type(error).__name__}: {error}",
            f"write {expected_line}",
        ) from error
    if question.match not in MATCHES:
        raise InputError(
            f"{path}, line {number}: match = {question.match!r}",
            f"allowed: {', '.join(MATCHES)}",
            f"write {expected_line}",
        )
    return question


def evaluate(
    model: Model,
    questions: Sequence[Question],
    *,
    batch_size: int = 16,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Outcome]:
    """Answer all questions greedily, `batch_size` at a time; return the outcomes in the order of the questions.

    Args:
        progress: called with the number of answered questions and the total.
    """
    tokenizer = Tokenizer(model)
    order = sorted(range(len(questions)), key=lambda i: questions[i].max_tokens)
    replies: dict[int, str] = {}
    for first in range(0, len(order), batch_size):
        chosen = order[first : first + batch_size]
        progress(len(replies), len(order))
        replies.update(zip(chosen, _answers(model, tokenizer, [questions[i] for i in chosen]), strict=True))
    return [Outcome(q, replies[i], MATCHES[q.match](replies[i], q.answer)) for i, q in enumerate(questions)]


def _answers(model: Model, tokenizer: Tokenizer, questions: Sequence[Question]) -> list[str]:
    prompts = [
        tokenizer.encode_prompt(tokenizer.apply_chat_template(list(q.messages), add_generation_prompt=True)).tolist()
        for q in questions
    ]
    longest = max(map(len, prompts))
    room = min(model.config.search.get("max_length") or model.context_size, model.context_size) - longest
    if room < 0:
        raise ContextOverflowError(
            f"a question has {longest} tokens",
            f"the context can have at most {longest + room} tokens",
            "shorten the question, or load the model with a larger context",
        )
    steps = min(max(q.max_tokens for q in questions), room)
    with greedy_batch(model, len(prompts)) as batch:
        batch.append_tokens(prompts)
        for index in range(steps):
            if all(batch.ended):
                break
            batch.step(is_last=index == steps - 1)
        tails = [
            sequence.tokens[len(prompt) :][: q.max_tokens]
            for sequence, prompt, q in zip(batch.sequences, prompts, questions, strict=True)
        ]
    return [tokenizer.decode(tail).strip() for tail in tails]


def summary(outcomes: Iterable[Outcome]) -> dict[str, dict[str, float]]:
    """Return for each task and for "all" the numbers of questions and right answers, and the share with its interval.

    "error" is half the width of the 95% interval, which extends from "low" to "high".
    """
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
        row["low"], row["high"] = share_interval(int(row["right"]), int(row["asked"]))
        row["error"] = (row["high"] - row["low"]) / 2
    return result


def share_interval(right: int, total: int) -> tuple[float, float]:
    """Return the 95% interval of a share (Wilson 1927), which is also valid for few questions and shares of 0 or 1."""
    square = 1.959964**2 / total
    share = right / total
    middle = (share + square / 2) / (1 + square)
    half = math.sqrt(square * share * (1 - share) + square * square / 4) / (1 + square)
    return max(0.0, middle - half), min(1.0, middle + half)


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; color: #222 }
table { border-collapse: collapse; width: 100% } td, th { padding: .2em .6em; text-align: left; vertical-align: top }
td.number { text-align: right; white-space: nowrap } .track { background: #eee; height: 1em; position: relative }
.bar { background: #4a7ebb; height: 100% } .interval { background: #0006; height: 2px; position: absolute; top: .45em }
.wrong { background: #fdecea } summary { cursor: pointer; font-weight: 600; margin-top: 1em }
"""


def task_page(title: str, table: Mapping[str, Mapping[str, float]], outcomes: Sequence[Outcome]) -> str:
    """Return an HTML page without scripts or external resources; texts are escaped. `table` is a `summary`."""
    heads = "<tr><th>task</th><th>right</th><th>share</th><th></th></tr>"
    rows = "\n".join(_row(name, row) for name, row in table.items())
    tasks = sorted({outcome.question.task for outcome in outcomes})
    details = "\n".join(_details(task, [one for one in outcomes if one.question.task == task]) for task in tasks)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body>\n<h1>{escape(title)}</h1>\n<table>{heads}\n{rows}\n</table>\n"
        f"<p>The number after ± is half of the 95 % confidence interval (Wilson 1927), which is drawn as a line.</p>\n"
        f"{details}\n</body></html>\n"
    )


def write_page(path: Path, page: str) -> None:
    """Write the page. Raise InputError if the file cannot be written."""
    try:
        write_whole(path, page.encode())
    except OSError as error:
        raise InputError(f"{path}: the page cannot be written", str(error), "choose another file") from error


def _row(name: str, row: Mapping[str, float]) -> str:
    low, high = 100 * row["low"], 100 * row["high"]
    bar = f'<div class="bar" style="width:{100 * row["accuracy"]:.1f}%"></div>'
    line = f'<div class="interval" style="left:{low:.1f}%;width:{high - low:.1f}%"></div>'
    share = f"{100 * row['accuracy']:.1f} % ± {100 * row['error']:.1f}"
    return (
        f'<tr><td>{escape(name)}</td><td class="number">{row["right"]:.0f} of {row["asked"]:.0f}</td>'
        f'<td class="number">{share}</td><td style="width:50%"><div class="track">{bar}{line}</div></td></tr>'
    )


def _details(task: str, outcomes: Sequence[Outcome]) -> str:
    wrong = sum(not outcome.right for outcome in outcomes)
    rows = []
    for each in sorted(outcomes, key=lambda each: each.right):
        texts = (str(each.question.messages[-1].get("content", "")), each.reply, each.question.answer)
        cells = "".join(f"<td>{escape(text)}</td>" for text in texts)
        rows.append(f"<tr{'' if each.right else ' class=wrong'}>{cells}</tr>")
    lines = "\n".join(rows)
    return (
        f"<details><summary>{escape(task)}: {len(outcomes)} questions, {wrong} wrong</summary>\n"
        f"<table><tr><th>question</th><th>reply</th><th>expected</th></tr>\n{lines}\n</table></details>"
    )

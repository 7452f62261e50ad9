"""The frozen held-out questions (`configs/tasks/pebble.jsonl`), and the rules for judging replies."""

import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from .mixture import draw_pair
from .tasks import MIXTURE
from .tasks.facts import FACTS
from .tasks.small_talk import chat, tell_and_ask_favourite, tell_and_ask_name
from .tasks.stories import SLOTS
from .tasks.toolkit import phrasings
from .tasks.word_list import RARE
from .turn import Turn, draw

Question = dict[str, Any]

WORD_TASKS = ("spell", "reverse", "first_letter", "last_letter", "letter_count")
PER_TASK = {
    **dict.fromkeys(("add", "subtract"), 200),
    **dict.fromkeys(("compare", "count", "calendar", "sort"), 150),
    **dict.fromkeys(WORD_TASKS, 100),
    "small_talk": 150,
}
_DEFAULT_MAX_TOKENS = 32


def _question(task: str, history: list[Turn], turn: Turn) -> Question:
    messages = [
        message
        for past in history
        for message in ({"role": "user", "content": past.question}, {"role": "assistant", "content": past.reply})
    ]
    messages.append({"role": "user", "content": turn.question})
    answer = turn.reply if turn.expected is None else turn.expected
    line = {"task": task, "messages": messages, "answer": answer, "match": turn.match}
    longest = 2 * len(turn.reply) + 4 if turn.expected else len(turn.reply) + 4
    return line | ({"max_tokens": min(longest, 96)} if longest > _DEFAULT_MAX_TOKENS else {})


def _held_out_turn(task: str, rng: Random) -> Turn:
    while True:
        turn = draw(MIXTURE[task][0], rng, held_out=True)
        if task not in WORD_TASKS or _is_rare((turn.key or "").removeprefix("word:")):
            return turn


def _is_rare(word: str) -> bool:
    """Return True for a rare word that is in no story: a word in a story is a single token, which hides its letters."""
    return word in RARE and not any(word in text.split() for texts in SLOTS.values() for text in texts)


def _recall(rng: Random) -> Question:
    sampler = partial(rng.choice((tell_and_ask_name, tell_and_ask_favourite)), made_up_share=0.0)
    told, asked = draw_pair(sampler, rng, held_out=True)
    between = [draw(rng.choice((chat, MIXTURE["add"][0])), rng) for _ in range(rng.randrange(3))]
    return _question("small_talk", [told, *between], asked)


def _toolkit(rng: Random) -> Iterator[Question]:
    """Yield two held-out phrasings of every fact, or one if the fact has only one."""
    for index, fact in enumerate(FACTS):
        texts = phrasings(index, held_out=True)
        for text in rng.sample(texts, min(2, len(texts))):
            yield _question("toolkit", [], Turn(text, fact.reply))


def held_out_questions(seed: int = 20_000) -> list[Question]:
    """Return all questions without duplicates, ordered by task."""
    rng = Random(seed)
    questions: dict[str, Question] = {}
    for task, wanted in PER_TASK.items():
        found = 0
        for _ in range(100 * wanted):
            line = _recall(rng) if task == "small_talk" else _question(task, [], _held_out_turn(task, rng))
            text = json.dumps(line["messages"])
            if text not in questions:
                questions[text] = line
                found += 1
            if found == wanted:
                break
    return [*questions.values(), *_toolkit(rng)]


def write_held_out(path: Path) -> None:
    lines = [json.dumps(line, ensure_ascii=False) for line in held_out_questions()]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_questions(path: Path) -> list[Question]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def is_right(question: Question, reply: str) -> bool:
    """Judge a reply. exact: equal after stripping. number: the last integer is equal. contains: ignoring case."""
    reply, answer = reply.strip(), question["answer"]
    if question["match"] == "number":
        numbers = re.findall(r"-?\d+", reply)
        return bool(numbers) and int(numbers[-1]) == int(answer)
    if question["match"] == "contains":
        return answer.lower() in reply.lower()
    return bool(reply == answer)


def accuracy_by_task(questions: list[Question], replies: list[str]) -> dict[str, float]:
    """Return the percentage of right replies for each task."""
    marks: dict[str, list[bool]] = {}
    for question, reply in zip(questions, replies, strict=True):
        marks.setdefault(question["task"], []).append(is_right(question, reply))
    return {task: 100.0 * sum(right) / len(right) for task, right in marks.items()}

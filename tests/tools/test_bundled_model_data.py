"""The data generator of the bundled model: right answers, a strict split, the same text for the same seed."""

import json
import re
import sys
from collections.abc import Callable
from datetime import date, timedelta
from pathlib import Path
from random import Random

import pytest

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tools.bundled_model import held_out, mixture, split, turn  # noqa: E402
from tools.bundled_model.tasks import MIXTURE, words  # noqa: E402
from tools.bundled_model.tasks.calendar import DAYS  # noqa: E402
from tools.bundled_model.tasks.facts import FACTS  # noqa: E402
from tools.bundled_model.tasks.toolkit import phrasings  # noqa: E402
from tools.bundled_model.tasks.word_list import COMMON, RARE  # noqa: E402

QUESTIONS_FILE = ROOT / "configs" / "tasks" / "pebble.jsonl"


def _draw_many(task: str, how_many: int = 400, held_out_side: bool = False) -> list[turn.Turn]:
    rng = Random(f"test {task}")
    return [turn.draw(MIXTURE[task][0], rng, held_out_side) for _ in range(how_many)]


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def test_the_same_seed_gives_the_same_conversations() -> None:
    first, again, other = ([mixture.short_conversation(Random(seed)) for _ in range(20)] for seed in (3, 3, 4))
    assert first == again
    assert first != other


@pytest.mark.parametrize("held_out_side", [False, True])
@pytest.mark.parametrize("task", ["add", "subtract"])
def test_sums_and_differences_are_right(task: str, held_out_side: bool) -> None:
    for sample in _draw_many(task, held_out_side=held_out_side):
        a, b = _numbers(sample.question)
        swapped = re.search(r"^Add \d+ to|ubtract \d+ from|^Take", sample.question) is not None
        a, b = (b, a) if swapped else (a, b)
        assert int(sample.reply) == (a + b if task == "add" else a - b), sample


def test_numbers_are_sorted_and_words_are_sorted() -> None:
    for sample in _draw_many("sort"):
        items = sample.reply.split(", ")
        numeric = [int(item) for item in items] if items[0].isdigit() else None
        assert items == sorted(items) if numeric is None else numeric == sorted(numeric)
        assert all(item in sample.question for item in items)


@pytest.mark.parametrize(
    ("task", "answer"),
    [
        ("spell", lambda word: "-".join(word)),
        ("first_letter", lambda word: word[0]),
        ("last_letter", lambda word: word[-1]),
        ("letter_count", lambda word: f"{'-'.join(word)}: {len(word)}"),
        ("reverse", lambda word: f"{'-'.join(word)}, {'-'.join(word[::-1])}, {word[::-1]}"),
    ],
)
def test_word_answers_are_right(task: str, answer: Callable[[str], str]) -> None:
    for sample in _draw_many(task):
        if sample.key is not None:
            assert sample.reply == answer(sample.key.removeprefix("word:"))


def test_days_later_agree_with_the_calendar_of_the_standard_library() -> None:
    monday = date(2024, 1, 1)
    checked = 0
    for sample in _draw_many("calendar", 1500):
        shift = re.search(r"(\d+) days? (after|before|ago)|in (\d+) days?", sample.question)
        named = [day for day in DAYS if day in sample.question]
        if shift and len(named) == 1 and sample.reply in DAYS:
            amount = int(shift[1] or shift[3]) * (-1 if shift[2] in ("before", "ago") else 1)
            start = monday + timedelta(days=DAYS.index(named[0]))
            assert DAYS[(start + timedelta(days=amount)).weekday()] == sample.reply, sample
            checked += 1
    assert checked > 100


@pytest.mark.parametrize("task", [task for task in MIXTURE if task not in ("chat", "unknown", "out_of_range", "story")])
def test_training_and_held_out_keys_are_disjoint(task: str) -> None:
    training = {sample.key for sample in _draw_many(task, 1500)}
    held = {sample.key for sample in _draw_many(task, 200, held_out_side=True)}
    assert held.isdisjoint(training)
    assert None not in held


def test_no_conversation_for_training_holds_a_held_out_key() -> None:
    rng = Random(5)
    for _ in range(1500):
        for part in mixture.short_conversation(rng).turns:
            assert not split.is_held_out(part.key)


def test_swapped_sums_share_one_key() -> None:
    keys = {}
    for sample in _draw_many("add", 3000):
        a, b = _numbers(sample.question)
        if sample.key is not None:
            assert keys.setdefault(frozenset((a, b)), sample.key) == sample.key


def test_every_fact_has_many_training_phrasings_and_some_held_out() -> None:
    for index, fact in enumerate(FACTS):
        training, held = phrasings(index, held_out=False), phrasings(index, held_out=True)
        assert len(training) >= 10, fact
        assert len(held) >= 1, fact
        assert {split.normal_form(text) for text in training}.isdisjoint(split.normal_form(text) for text in held)


def test_word_lists_do_not_overlap() -> None:
    assert not set(COMMON) & set(RARE)
    assert len(set(RARE)) == len(RARE)
    assert sum(split.is_held_out(f"word:{word}") for word in RARE) >= 30


def test_made_up_words_have_a_sensible_length() -> None:
    rng = Random(1)
    assert all(3 <= len(words.made_up_word(rng)) <= 9 for _ in range(500))


def test_draw_says_when_a_side_of_the_split_is_empty() -> None:
    with pytest.raises(ValueError, match="held_out=True"):
        turn.draw(lambda rng: turn.Turn("a", "b"), Random(0), held_out=True)


def test_the_frozen_questions_are_what_the_generator_makes() -> None:
    assert held_out.read_questions(QUESTIONS_FILE) == held_out.held_out_questions()


def test_the_frozen_questions_are_well_formed() -> None:
    questions = held_out.read_questions(QUESTIONS_FILE)
    assert QUESTIONS_FILE.stat().st_size < 400_000
    assert len({json.dumps(question["messages"]) for question in questions}) == len(questions)
    for question in questions:
        assert set(question) <= {"task", "messages", "answer", "match", "max_tokens"}
        assert question["match"] in ("exact", "number", "contains")
        assert question["answer"] == question["answer"].strip() != ""
        roles = [message["role"] for message in question["messages"]]
        assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"]
    assert {question["answer"] for question in questions if question["task"] == "toolkit"} == {f.reply for f in FACTS}


@pytest.mark.parametrize(
    ("match", "answer", "reply", "right"),
    [
        ("exact", "Monday", " Monday\n", True),
        ("exact", "Monday", "Monday.", False),
        ("number", "-5", "7 - 12 = -5", True),
        ("number", "5", "none", False),
        ("number", "5", "5 or 6", False),
        ("contains", "tac", "c-a-t, t-a-c, TAC", True),
        ("contains", "tac", "cat", False),
    ],
)
def test_replies_are_judged_by_the_kind_of_match(match: str, answer: str, reply: str, right: bool) -> None:
    question = {"task": "x", "messages": [], "answer": answer, "match": match}
    assert held_out.is_right(question, reply) is right


def test_accuracy_is_counted_per_task() -> None:
    lines = [{"task": task, "messages": [], "answer": "1", "match": "number"} for task in ("a", "a", "b")]
    assert held_out.accuracy_by_task(lines, ["1", "2", "1"]) == {"a": 50.0, "b": 100.0}

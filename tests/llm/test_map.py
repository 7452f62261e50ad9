"""LLM.map: lazy input and output, each item exactly once, errors in answers, use of the prefix cache."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

import genai
from genai.errors import CacheCapacityError, GenaiError, InputError, OptionError, StateError
from genai.llm.completion import Completion, Timings
from genai.llm.map_requests import MapRequestBuilder
from genai.llm.mapping import Answer, MapFigures, MapOptions, Mapper, MapRequest, common_length

QUESTIONS = [f"What is {a} + {b}?" for a in range(2, 12) for b in range(3, 8)]


def chat(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def test_the_same_answers_as_generate_in_the_same_order(llm: genai.LLM) -> None:
    expected = llm.generate([llm.render(question) for question in QUESTIONS])
    answers = list(llm.map(QUESTIONS, chat))
    assert [answer.item for answer in answers] == QUESTIONS
    assert [answer.index for answer in answers] == list(range(len(QUESTIONS)))
    assert [answer.completion.token_ids for answer in answers] == [one.token_ids for one in expected]
    assert [answer.text for answer in answers] == [one.text for one in expected]
    loose = list(llm.map(QUESTIONS, chat, in_order=False, window=7))
    assert sorted(answer.index for answer in loose) == list(range(len(QUESTIONS)))
    assert {one.item: one.text for one in loose} == {one.item: one.text for one in answers}


def test_items_of_every_kind(llm: genai.LLM) -> None:
    ids = llm.encode("Once upon")
    items: list[Any] = [
        "Once upon", ids, chat("What is 2 + 2?"), {"prompt": "Once upon", "max_tokens": 2},
        {"messages": "What is 2 + 2?"}, {"prompt": ["Once", "upon"], "n": 2, "temperature": 1.0, "seed": 3},
    ]  # fmt: skip
    answers = list(llm.map(items, max_tokens=5))
    assert [answer.error for answer in answers] == [None] * 6
    assert answers[0].completion.token_ids == answers[1].completion.token_ids
    assert answers[2].text == answers[4].text == "4" and answers[2].replies[0].message["role"] == "assistant"
    assert answers[3].completion.token_ids == answers[0].completion.token_ids[:2] and not answers[3].replies
    samples = [(one.prompt_index, one.sample_index) for one in answers[5].completions]
    assert samples == [(0, 0), (0, 1), (1, 0), (1, 1)]
    expected = llm.generate(["Once", "upon"], n=2, temperature=1.0, seed=3, max_tokens=5)
    assert [one.token_ids for one in answers[5].completions] == [one.token_ids for one in expected]


def test_what_is_wrong_with_an_item_is_in_its_answer(llm: genai.LLM) -> None:
    wrong: list[Any] = [
        "", {"prompt": "x", "top_p": 2}, {"prompt": "x", "temprature": 1}, {"text": "x"}, 7, [],
        {"prompt": "x", "messages": []}, {"messages": []}, {"messages": [{"role": "user"}]}, "word " * 5000,
        {"messages": chat("x"), "template": {"messages": 1}}, {"prompt": "x", "tools": []}, "\ud800",
    ]  # fmt: skip
    items = [one for pair in zip(wrong, QUESTIONS, strict=False) for one in pair]
    answers = list(llm.map(items, max_tokens=3))
    assert len(answers) == 2 * len(wrong)
    for bad, good in zip(answers[::2], answers[1::2], strict=True):
        assert isinstance(bad.error, GenaiError) and bad.error.what and bad.error.why and bad.error.fix, bad.item
        assert good.error is None and good.completions
        with pytest.raises(type(bad.error)):
            _ = bad.text
        with pytest.raises(type(bad.error)):
            _ = bad.completion


def test_ask_may_refuse_an_item_and_may_fail(llm: genai.LLM) -> None:
    def ask(item: int) -> str:
        if item == 1:
            raise InputError("item 1", "is refused", "leave it out")
        if item == 4:
            raise ZeroDivisionError
        return "Once"

    answers = llm.map(range(4), ask, max_tokens=1)
    assert [answer.error is None for answer in answers] == [True, False, True, True]
    with pytest.raises(ZeroDivisionError):
        list(llm.map(range(6), ask, max_tokens=1))
    with pytest.raises(KeyError):
        list(llm.map((one for one in [{}["missing"]]), max_tokens=1))


@pytest.mark.parametrize("in_order", [True, False])
def test_an_error_of_the_items_comes_after_the_answers_to_those_before(llm: genai.LLM, in_order: bool) -> None:
    def items() -> Iterator[str]:
        yield from ["Once"] * 150
        raise ZeroDivisionError("no more")

    answers: list[int] = []
    with pytest.raises(ZeroDivisionError, match="no more"):
        answers.extend(answer.index for answer in llm.map(items(), max_tokens=2, in_order=in_order))
    assert sorted(answers) == list(range(150))
    with pytest.raises(InputError, match="items is a number") as raised:
        llm.map(5)  # type: ignore[arg-type]
    assert raised.value.why and raised.value.fix


@pytest.mark.parametrize("in_order", [True, False])
def test_an_error_of_ask_comes_after_the_answers_to_those_before(llm: genai.LLM, in_order: bool) -> None:
    """Also to those that were read in the same group, or were still running."""

    def ask(item: int) -> str:
        if item == 150:
            raise ZeroDivisionError("no more")
        return "Once"

    answers: list[int] = []
    with pytest.raises(ZeroDivisionError, match="no more"):
        answers.extend(answer.index for answer in llm.map(range(200), ask, max_tokens=2, in_order=in_order))
    assert sorted(answers) == list(range(150))


@pytest.mark.parametrize("in_order", [True, False])
def test_an_error_while_requests_are_built_comes_after_the_answers(
    llm: genai.LLM, in_order: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[int] = []
    build = MapRequestBuilder.build

    def broken(self: MapRequestBuilder, items: Any) -> Any:
        if "stop" in items:
            raise ZeroDivisionError("no more")
        return build(self, items)

    monkeypatch.setattr(MapRequestBuilder, "build", broken)
    items = ["Once"] * 150 + ["stop"]
    with pytest.raises(ZeroDivisionError, match="no more"):
        answers.extend(answer.index for answer in llm.map(items, max_tokens=2, in_order=in_order))
    assert sorted(answers) == list(range(len(answers))) and len(answers) >= 150 - 16, "all groups before"


@pytest.mark.parametrize("in_order", [True, False])
def test_a_model_that_is_closed_discards_no_finished_answer(in_order: bool) -> None:
    """The first item never ends. The others are finished before the model is closed."""
    engine = _Engine(random.Random(1))
    closed = StateError("the model is closed", "", "")

    def submit(jobs: list[Any]) -> None:
        if jobs[0].prompt[-1] == 9:
            raise closed
        if jobs[0].prompt[-1]:
            engine.generations.extend(jobs)
            engine.end_one()

    engine.submit = submit  # type: ignore[method-assign]
    prepare = lambda group: [MapRequest([_Job([item] * 3)]) for item in group]  # type: ignore[list-item]  # noqa: E731
    mapper = Mapper(iter(range(20)), lambda item: item, prepare, engine, MapOptions[int](4, 20, in_order))  # type: ignore[arg-type]
    answers: list[int] = []
    with pytest.raises(StateError, match="is closed"):
        answers.extend(answer.index for answer in mapper.answers())
    assert sorted(answers) == list(range(1, 9))
    assert not in_order or answers == sorted(answers)


def test_options_that_no_item_can_have_are_refused_at_once(llm: genai.LLM) -> None:
    with pytest.raises(OptionError, match="top_p = 2"):
        llm.map(["x"], top_p=2)
    for window in (0, -1, True, 1.5):
        with pytest.raises(OptionError, match="window"):
            llm.map(["x"], window=window)  # type: ignore[arg-type]


def test_no_more_is_read_than_a_window_ahead(llm: genai.LLM) -> None:
    taken = 0

    def endless() -> Iterator[str]:
        nonlocal taken
        while True:
            taken += 1
            yield f"What is {taken % 90} + 7?"

    answers = llm.map(endless(), chat, window=10, max_tokens=4)
    for given_, answer in enumerate(answers, 1):
        assert answer.error is None
        assert taken <= given_ + 2 * 10 + 64
        if given_ == 200:
            break
    answers.close()  # type: ignore[attr-defined]


def test_leaving_early_cancels_what_runs(llm: genai.LLM, assert_all_given_back: Callable[[genai.Model], None]) -> None:
    answers = llm.map(QUESTIONS * 3, chat)
    assert next(answers).text
    answers.close()  # type: ignore[attr-defined]
    llm.generate("x", max_tokens=1)  # the engine has been round since
    assert_all_given_back(llm.model)


def test_callbacks_and_progress(llm: genai.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[MapFigures] = []
    done: list[int] = []
    answers = list(llm.map([*QUESTIONS, ""], chat, on_answer=lambda one: done.append(one.index), progress=heard.append))
    assert sorted(done) == list(range(len(QUESTIONS) + 1)) and len(answers) == len(done)
    last = heard[-1]
    assert (last.done, last.failed) == (len(QUESTIONS) + 1, sum(one.error is not None for one in answers))
    assert last.generated_tokens == sum(len(one.completion.token_ids) for one in answers if one.error is None)
    assert last.prompt_tokens == sum(one.completion.prompt_tokens for one in answers if one.error is None)
    assert [one.done for one in heard] == sorted(one.done for one in heard) and last.seconds > 0


def test_common_beginnings_are_computed_once(bundled: genai.Model) -> None:
    """Also if prompts with common prefixes are mixed, and for the very first sequences."""
    stories = ["Luna and Tom went to the sea. " * 12, "Mia had a red kite and a small dog. " * 12]
    items = [f"{stories[place % 2]} What is {place} + 1?" for place in range(40)]
    with genai.LLM(bundled) as fresh:
        answers = list(fresh.map(items, max_tokens=2))
    shared = [len(fresh.encode(story)) // 32 * 32 for story in stories]
    cold = [one.index for one in answers if one.completion.cached_tokens < shared[one.index % 2] - 32]
    assert len(cold) <= 2, "the first of each story"


def test_a_model_that_is_closed_meanwhile(bundled_folder: Any) -> None:
    with genai.LLM(bundled_folder) as own:
        answers = own.map(QUESTIONS, chat)
        next(answers)
        own.close()
        with pytest.raises(StateError):
            list(answers)


def test_common_length() -> None:
    for first, second, expected in (([], [1], 0), ([1, 2], [1, 2], 2), ([1, 2, 3], [1, 2, 4, 5], 2), ([5], [6], 0)):
        assert common_length(first, second) == expected


# --- the policy, with an engine that is only a list -------------------------------------------------------------------


class _Job:
    """The parts of a generation that a map needs."""

    sink: Any
    is_unwanted = False
    prompt_index = 0

    def __init__(self, prompt: list[int], fails: BaseException | None = None) -> None:
        self.prompt, self.fails, self.is_over = prompt, fails, False
        self.samples = [self]
        self.num_output = 0

    @property
    def prompt_progress(self) -> tuple[int, int]:
        return (1, 1) if self.is_over else (0, 1)

    def completion(self) -> Completion:
        return Completion("t", (1,), "stop", 2, len(self.prompt), 0, Timings(), 0)


class _Engine:
    """Ends requests in any order, at any time while a map waits."""

    def __init__(self, order: random.Random) -> None:
        self.order, self.generations, self.most = order, deque[_Job](), 0

    def submit(self, generations: list[_Job]) -> None:
        self.generations.extend(generations)
        self.most = max(self.most, len(self.generations))
        while self.generations and (len(self.generations) > 5 or self.order.random() < 0.5):
            self.end_one()

    def end_one(self) -> None:
        self.generations.rotate(self.order.randrange(len(self.generations)))
        generation = self.generations.popleft()
        generation.is_over = True
        generation.sink.text(generation, "t")
        generation.sink.finished(generation, generation.fails)

    def wake(self) -> None:
        pass


class _Bell:
    """Rings when the engine ends a request, which it does while a map waits."""

    def __init__(self, engine: _Engine) -> None:
        self.engine = engine

    def put(self, item: None) -> None:
        pass

    def get(self, timeout: float) -> None:
        if self.engine.generations:
            self.engine.end_one()


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 120), st.integers(1, 20), st.integers(1, 9), st.booleans())
def test_each_item_is_answered_once(seed: int, count: int, window: int, most_running: int, in_order: bool) -> None:
    order = random.Random(seed)
    engine = _Engine(order)
    read = given_ = 0

    def items() -> Iterator[int]:
        nonlocal read
        for item in range(count):
            read += 1
            assert read - given_ <= 2 * window + most_running, "nothing grows with the number of items"
            yield item

    def prepare(group: list[int]) -> list[MapRequest | GenaiError]:
        found: list[MapRequest | GenaiError] = []
        for item in group:
            if item % 7 == 3:
                found.append(InputError("item", "wrong", "no"))
            else:
                fails = CacheCapacityError("no room", "small", "more") if item % 11 == 5 else None
                found.append(MapRequest([_Job([item % 3] * 70 + [item], fails)]))  # type: ignore[list-item]
        return found

    options = MapOptions[int](window, most_running, in_order)
    mapper = Mapper(items(), lambda item: item, prepare, engine, options)  # type: ignore[arg-type]
    mapper._bell = _Bell(engine)  # type: ignore[assignment]
    answers: list[Answer[int]] = []
    for answer in mapper.answers():
        given_ += 1
        answers.append(answer)
    indices = [answer.index for answer in answers]
    assert sorted(indices) == list(range(count)) and engine.most <= most_running
    assert not in_order or indices == list(range(count))
    for answer in answers:
        assert answer.item == answer.index
        assert (answer.error is not None) == (answer.item % 7 == 3 or answer.item % 11 == 5)

"""Replies that only repeat themselves."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from genai.cli import repetition
from genai.cli.app import run as run_here
from genai.cli.repetition import NOTED, STOPPED, RepetitionCounter, RepetitionWatch
from genai.cli.terminal import Voice

REPO = Path(__file__).parents[2]


def repeats(text: str, size: int = NOTED) -> bool:
    """Return True if the text repeats itself at any point while it is fed in pieces."""
    counter, found = RepetitionCounter(size), False
    for start in range(0, len(text), 7):
        counter.feed(text[start : start + 7])
        found = found or counter.repeats
    return found


@pytest.mark.parametrize("part", ["a", "la Femme, ", "ab", "\n", "The cat sat on the mat. It was a warm day.\n"])
@pytest.mark.parametrize("size", [NOTED, STOPPED])
def test_a_text_with_a_period_repeats_itself(part: str, size: int) -> None:
    counter = RepetitionCounter(size)
    counter.feed("The capital of France is " + part * (size // len(part) // 2))
    assert not counter.repeats
    counter.feed(part * (size // len(part)))
    assert counter.repeats
    counter.feed(" ".join(map(str, range(1000))))
    assert not counter.repeats


def test_a_few_phrases_in_changing_order_repeat_themselves() -> None:
    rng = random.Random(1)
    text = "".join("La femme au martyre" + ", la femme au martyre" * rng.randint(1, 2) + ". " for _ in range(150))
    assert repeats(text)


def test_the_count_is_sound() -> None:
    """An independent count of the different parts agrees at each point."""
    rng = random.Random(1)
    for _ in range(20):
        text = "".join(rng.choice("ab") * rng.randint(1, 40) for _ in range(20)) + "ab" * rng.randint(1, 150)
        counter = RepetitionCounter(160)
        for end, character in enumerate(text, 1):
            counter.feed(character)
            parts = {text[max(0, at - 48) : at] for at in range(max(0, end - 160) + 1, end + 1)}
            assert counter.repeats == (end >= 160 and len(parts) <= 10)


def table(rows: int) -> str:
    header = "| name | value | unit |\n|------|-------|------|\n"
    return header + "".join(f"| item {n} | {n * n % 7} | kg |\n" for n in range(rows))


@pytest.mark.parametrize(
    "text",
    [
        table(300),
        "\n".join(f"{a} + {b} = {a + b}" for a, b in itertools.product(range(30), repeat=2)),
        "static const int table[] = {" + "0, " * 500 + "};",
        "=" * 120 + "\nTitle\n" + "=" * 120 + "\n" + "-" * 200,
        "    " * 300 + "return None",
        "".join("|".join(random.Random(n).choices(["yes", "no "], k=8)) + "|\n" for n in range(300)),
        "".join(f"2024-01-{1 + n % 28:02d},0,0,0,0,0,0\n" for n in range(300)),
        "\n".join(f"def test_{n}():\n    assert f({n}) == {n}\n" for n in range(200)),
        "ha" * 400,
        (REPO / "genai" / "llm" / "llm.py").read_text(),
        (REPO / "docs" / "reference" / "cli.md").read_text(),
        (REPO / "docs" / "reference" / "operators.md").read_text(),
    ],
    ids=[
        "table",
        "sums",
        "zeros",
        "rulers",
        "indents",
        "choices",
        "dates",
        "functions",
        "laughter",
        "code",
        "options",
        "operators",
    ],
)
def test_tables_and_code_do_not_repeat_themselves(text: str) -> None:
    assert not repeats(text) and not repeats(text, STOPPED)


def test_a_reply_in_a_pipe_is_stopped_once(capsys: pytest.CaptureFixture[str]) -> None:
    stopped: list[int] = []
    watch = RepetitionWatch(Voice(), lambda: stopped.append(1), "use --repeat-penalty 1.1")
    for _ in range(1000):
        watch.feed("la Femme, ")
    assert stopped == [1]
    shown = capsys.readouterr().err
    assert shown.count("the reply was stopped") == 1
    assert (
        "its last 4,000 characters only repeat text such as" in shown
        and "Femme" in shown
        and "--repeat-penalty 1.1" in shown
    )


@pytest.mark.parametrize("command", ["chat", "generate"])
def test_commands_stop_it(command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(repetition, "STOPPED", 200)
    monkeypatch.setattr(repetition, "NOTED", 200)
    arguments = [command, "-p", "Sing.", "--regex", "(la la ){150}", "--ctx-size", "1024"]
    assert run_here(arguments) == 0
    shown = capsys.readouterr()
    assert len(shown.out) > 200 and "the reply was stopped" in shown.err
    assert run_here([*arguments, "--max-tokens", "900"]) == 0
    shown = capsys.readouterr()
    assert len(shown.out) > 890 and "the reply only repeats" in shown.err


def test_a_reply_with_a_given_length_is_only_pointed_out(capsys: pytest.CaptureFixture[str]) -> None:
    watch = RepetitionWatch(Voice(), None, "type /set repeat-penalty 1.1")
    for _ in range(1000):
        watch.feed("la Femme, ")
    assert capsys.readouterr().err.count("the reply only repeats") == 1

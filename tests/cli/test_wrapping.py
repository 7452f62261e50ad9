"""Wrapping of lines at word boundaries."""

from __future__ import annotations

import io
import random

import pytest

from genai.cli import terminal, wrapping
from genai.cli.wrapping import WordWrap, shown_on, table, wrapped

TEXT = "A story about a fox, who lived in a forest.\n\n    indented code()\nThe end, and a_rather_long_word_at_the_end."


@pytest.mark.parametrize("width", [10, 24, 60])
def test_pieces_of_any_size_come_out_the_same(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wrapping, "width_of", lambda stream: width)
    shown = set()
    for seed in range(20):
        wrap, rng, out, rest = WordWrap(io.StringIO()), random.Random(seed), "", TEXT
        while rest:
            count = rng.randint(1, 9)
            out, rest = out + wrap.feed(rest[:count]), rest[count:]
        shown.add(out + wrap.flush())
    (text,) = shown
    assert text.split() == TEXT.split(), "nothing is lost, no word is cut"
    assert all(len(line) <= width or len(line.split()) == 1 for line in text.split("\n"))


def test_other_writing_is_not_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wrapping, "width_of", lambda stream: 20)
    wrap = WordWrap(io.StringIO())
    assert len(wrap.feed("这是一个没有空格的句子")) >= 10
    assert "x" * 50 in WordWrap(io.StringIO()).feed("x" * 80)


def test_no_terminal_no_change() -> None:
    wrap = WordWrap(io.StringIO())
    assert wrap.feed(TEXT) + wrap.flush() == TEXT
    assert wrapped(TEXT, None) == TEXT


def test_hanging_lines_and_tables() -> None:
    assert wrapped("error: one two three four five", 30, 2) == "error: one two three four\n  five"
    rows = [("/set [NAME VALUE]", "show or change settings"), ("/bye", "leave")]
    assert table(rows, 32).split("\n") == ["/set [NAME VALUE]", "    show or change settings", "/bye", "    leave"]
    assert table(rows, 40).split("\n") == [
        "/set [NAME VALUE]  show or change",
        "                   settings",
        "/bye               leave",
    ]
    rows = [("  samplers", "one; two; three; four; five; six"), ("", "fix: nothing, there is nothing"), ("* a", "-")]
    assert table(rows, 34).split("\n") == [
        "  samplers  one; two; three;",
        "            four; five; six",
        "            fix: nothing, there",
        "            is nothing",
        "* a         -",
    ]


def test_a_poor_encoding() -> None:
    assert shown_on("pebble · context…", io.TextIOWrapper(io.BytesIO(), "ascii")) == "pebble - context..."
    assert shown_on("pebble · context…", io.TextIOWrapper(io.BytesIO(), "utf-8")) == "pebble · context…"


def test_questions_are_wrapped(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(terminal, "width_of", lambda stream: 30)
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    assert terminal.agreed("Download org/name at revision 0123456789 (1.2 GB)?")
    assert capsys.readouterr().err == "Download org/name at revision\n  0123456789 (1.2 GB)? [Y/n] "


@pytest.mark.parametrize(
    ("typed", "default", "expected"),
    [
        ("maybe\ny\n", False, True),
        ("what?\nNO\n", True, False),
        ("\n", True, True),
        ("\n", False, False),
        ("x\n", True, False),
    ],
)
def test_other_answers_are_asked_again(
    typed: str, default: bool, expected: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    assert terminal.agreed("Really?", default=default) is expected
    lines = typed.count("\n")
    assert capsys.readouterr().err.count("answer y or n") == (1 if typed == "x\n" else lines - 1)


class _Interrupting(io.StringIO):
    """A terminal on which the user presses Ctrl-C as soon as a text appears, before the write returns."""

    def write(self, text: str) -> int:
        super().write(text)
        if text.endswith("] "):
            raise KeyboardInterrupt
        return len(text)


class _Interrupted(io.StringIO):
    """An input that the user ends with Ctrl-C."""

    def readline(self, size: int | None = -1) -> str:
        raise KeyboardInterrupt


@pytest.mark.parametrize("kinds", [(_Interrupting, io.StringIO), (io.StringIO, _Interrupted)])
def test_an_interrupted_question_ends_its_line(
    kinds: tuple[type[io.StringIO], type[io.StringIO]], monkeypatch: pytest.MonkeyPatch
) -> None:
    screen, keyboard = kinds[0](), kinds[1]()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setattr("sys.stdin", keyboard)
    with pytest.raises(KeyboardInterrupt):
        terminal.agreed("Really?")
    assert screen.getvalue() == "Really? [Y/n] \n"

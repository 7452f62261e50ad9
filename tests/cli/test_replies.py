"""The display of replies: reasoning is separate, tool calls are named, Markdown is rendered block by block."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from genai.cli.chat.reply import show_reply
from genai.cli.terminal import Voice
from genai.errors import InputError
from genai.text.parsing import Event, ReplySplitter, Text


def shown(text: str, parser: str, capsys: pytest.CaptureFixture[str], *, markdown: bool = False) -> tuple[str, str]:
    splitter = ReplySplitter(parser)
    events = [event for character in text for event in splitter.feed(character)]
    show_reply(iter([*events, *splitter.finish()]), Voice(), markdown=markdown)
    captured = capsys.readouterr()
    return captured.out, captured.err


def test_reasoning_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    out, err = shown("<think>Easy: 19.</think>\n\nIt is 19.", "think", capsys)
    assert out == "It is 19.\n"
    assert err == "Easy: 19.\n"


def test_tool_calls_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    out, _ = shown(f"Let me see.{call}", "hermes", capsys)
    assert out == 'Let me see.[calls add({"a": 1})]\n\n'


def test_markdown_is_rendered_by_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    text = "# Title\n\nSome **bold** words.\n\n```python\nx = 1\n\ny = 2\n```\n- one\n- two"
    out, _ = shown(text, "none", capsys, markdown=True)
    assert "**" not in out
    assert "```" not in out
    assert "Some bold words." in out
    assert out.index("Title") < out.index("bold") < out.index("x = 1") < out.index("y = 2") < out.index("• two")


def test_quiet_hides_reasoning(capsys: pytest.CaptureFixture[str]) -> None:
    splitter = ReplySplitter("think")
    events = splitter.feed("<think>hm</think>yes") + splitter.finish()
    show_reply(iter(events), Voice(quiet=True), markdown=False)
    assert capsys.readouterr() == ("yes\n", "")


def test_a_reply_that_never_begins_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    def events(*first: Event) -> Iterator[Event]:
        yield from first
        raise InputError("no reply", "it was refused", "ask for something else")

    for begun in ((), (Text("It"),)):
        with pytest.raises(InputError):
            show_reply(events(*begun), Voice(), markdown=False)
        assert capsys.readouterr().out == ("It\n" if begun else "")

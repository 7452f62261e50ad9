"""The cuts between pieces make no difference, no text is lost, and no part of a marker is shown."""

from __future__ import annotations

import doctest
import importlib
import random
import time

import pytest
from hypothesis import given, settings, strategies as st

from genai.errors import InputError, OptionError
from genai.text.parsing import PARSERS, Event, Reply, ReplySplitter, Text, detect, get_parser, split_reply
from genai.text.parsing.source import JsonScanner, Source, starts_with, take_run
from genai.text.parsing.splitter import merge_pieces

SNIPPETS = [
    '{"name": "f", "arguments": {"a": "}\\"<"}}',
    '{"name": "g", "parameters": {}}',
    '[{"name": "f", "arguments": {}}]',
    "<function=f>",
    "<parameter=a>",
    '<invoke name="f">',
    '<parameter name="a">',
    "f\n",
    "functions.f:0",
    "```json\n",
    *("{", "}", "[", "]", '"', "\\", ";", "\n", "\n\n", " ", "<", "<|", "to=", "functions.f", "name", "analysis", "é🏔"),
]
MARKERS = sorted({marker for parser in PARSERS.values() for marker in parser.markers})
replies = st.lists(st.sampled_from(SNIPPETS + MARKERS) | st.text(max_size=4), max_size=12).map("".join)
parsers = st.sampled_from(sorted(PARSERS))


def stream(parser: str, pieces: list[str], in_reasoning: bool = False) -> list[Event]:
    splitter = ReplySplitter(parser, starts_in_reasoning=in_reasoning)
    return [*(event for piece in pieces for event in splitter.feed(piece)), *splitter.finish()]


def cut(text: str, seed: int) -> list[str]:
    choose = random.Random(seed)
    cuts = sorted(choose.choices(range(len(text) + 1), k=choose.randrange(8)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@settings(max_examples=300, deadline=None)
@given(replies, parsers, st.integers(0, 2**32), st.booleans())
def test_cuts_make_no_difference_and_nothing_is_lost(reply: str, parser: str, seed: int, inside: bool) -> None:
    inside = inside and PARSERS[parser].reasoning is not None
    whole = stream(parser, [reply], inside)
    assert "".join(event.raw for event in whole) == reply
    for pieces in (cut(reply, seed), list(reply)):
        events = stream(parser, pieces, inside)
        assert merge_pieces(events) == merge_pieces(whole)
        assert Reply.from_events(events) == split_reply(reply, parser, starts_in_reasoning=inside)


@pytest.mark.parametrize("parser", sorted(PARSERS))
def test_no_part_of_a_marker_is_shown(parser: str) -> None:
    openings = {"think": "<think>", "hermes": "<tool_call>", "llama3": "<|python_tag|>", "mistral": "[TOOL_CALLS]"}
    openings |= {"gpt_oss": "<|channel|>", "qwen3_coder": "<tool_call>", "glm": "<tool_call>"}
    openings |= {"minimax": "<minimax:tool_call>", "kimi": "<|tool_calls_section_begin|>"}
    openings["deepseek"] = "<｜tool▁calls▁begin｜>"
    if parser == "none":
        assert ReplySplitter(parser).feed("<thi") == [Text("<thi")]
        return
    assert parser in openings, f"tests/text/parsing/test_streaming.py: openings has no {parser!r}"
    opening = openings[parser]
    for length in range(1, len(opening)):
        splitter = ReplySplitter(parser)
        assert splitter.feed("so\n" + opening[:length]) == [Text("so")]
        # Once it turns out to be no marker, all of it is shown.
        assert merge_pieces(splitter.feed("~")) == [Text("\n" + opening[:length] + "~")]


def test_only_what_may_begin_a_marker_is_held_back() -> None:
    splitter = ReplySplitter("hermes")
    assert splitter.feed("a <b> <<tool") == [Text("a <b> <")]


@pytest.mark.parametrize(
    ("text", "length"), [('{"a": "}\\"{"} x', 13), ("[[1], {}]]", 9), ('["\\\\"]]', 6), ("{} {}", 2)]
)
def test_the_scanner_finds_the_end(text: str, length: int) -> None:
    scanner = JsonScanner()
    assert sum(scanner.feed(character) for character in text) == length
    assert scanner.complete
    assert JsonScanner().feed(text) == length


@pytest.mark.parametrize(("text", "length"), [("1", 0), ('"a"', 0), ("[}", 1), ("{x", 1), ("[1]", 3), ("[1", 2)])
def test_the_scanner_tells_what_no_value_can_be(text: str, length: int) -> None:
    scanner = JsonScanner()
    assert scanner.feed(text) == length
    assert bool(scanner.problem) == (length < len(text))
    assert scanner.complete == (text == "[1]")


def test_readers_wait_until_they_are_certain() -> None:
    source = Source()
    source.text = "  "
    assert next(take_run(source)) is None
    source.text = "<t"
    assert next(starts_with(source, ("<think>",))) is None


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("<|start|>assistant<|channel|>analysis<|message|>", "gpt_oss"),
        ("[AVAILABLE_TOOLS]{{ tools }}[TOOL_CALLS]", "mistral"),
        ("<tool_call>{{ tool_call | tojson }}</tool_call><think>", "hermes"),
        ("<tool_call><function={{ name }}><parameter={{ key }}>", "qwen3_coder"),
        ("<tool_call>{{ name }}<arg_key><think>", "glm"),
        ("<minimax:tool_call><invoke name=", "minimax"),
        ("<|tool_calls_section_begin|><|tool_call_argument_begin|>", "kimi"),
        ("<think><｜tool▁calls▁begin｜>", "deepseek"),
        ('<|start_header_id|> {"name": function name, "parameters": dictionary}', "llama3"),
        ("{{ '<|python_tag|>' }}", "llama3"),
        ("{{ content.split('</think>')[-1] }}", "think"),
        ("<|im_start|>{{ content }}", "none"),
        ("", "none"),
    ],
)
def test_detect(template: str, name: str) -> None:
    assert detect(template) == name
    assert get_parser(name).name == name


@pytest.mark.parametrize("name", [name for name in PARSERS if name != "none"])
def test_no_format_is_taken_for_another(name: str) -> None:
    """A template with all markers of a format must not match another parser that comes earlier in `PARSERS`."""
    markers = "\n".join(PARSERS[name].markers)
    before = list(PARSERS)[: list(PARSERS).index(name)]
    taking = [other for other in before if PARSERS[other].fits(markers)]
    assert not taking, f"genai/text/parsing/splitter.py: PARSERS has {taking} before {name!r}, and they fit too"
    assert detect(markers) == name, f"genai/text/parsing: `fits` of {name!r} does not know its own markers"


@pytest.mark.parametrize(
    ("parser", "prompt", "expected"),
    [
        ("think", "…assistant\n<think>\n", True),
        ("hermes", "<think>\n\n</think>\n\n", False),
        ("mistral", "[THINK]", True),
        ("llama3", "<think>", False),
    ],
)
def test_whether_the_prompt_opened_the_reasoning(parser: str, prompt: str, expected: bool) -> None:
    assert get_parser(parser).starts_in_reasoning(prompt) is expected


@pytest.mark.parametrize(
    ("parser", "span"),
    [
        ("think", "<think></think>"),
        ("hermes", '<tool_call>{"name":"f","arguments":{}}</tool_call>'),
        ("hermes", "<tool_call>x"),
        ("llama3", "<|python_tag|>x"),
        ("mistral", "[TOOL_CALLS]x"),
        ("gpt_oss", "<|channel|>final<|message|>x<|end|><|start|>"),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>1</parameter></function></tool_call>"),
        ("glm", "<tool_call>f\n<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"),
        ("minimax", "<minimax:tool_call>x"),
        ("kimi", "<|tool_calls_section_begin|>x"),
        ("deepseek", "<｜tool▁calls▁begin｜>x"),
    ],
)
def test_many_spans_in_one_piece_take_linear_time(parser: str, span: str) -> None:
    def seconds(count: int) -> float:
        start = time.thread_time()  # which other processes do not lengthen
        splitter = ReplySplitter(parser)
        events = [*splitter.feed(span * count), *splitter.finish()]
        assert sum(len(event.raw) for event in events) == len(span) * count
        return time.thread_time() - start

    # Ten times the text took a hundred times as long when all of it was searched again for every span.
    assert min(seconds(4000) for _ in range(2)) < 40 * min(seconds(400) for _ in range(5))


def test_wrong_use_is_refused() -> None:
    with pytest.raises(OptionError, match=r"'xml'(?s:.)*hermes"):
        ReplySplitter("xml")
    with pytest.raises(OptionError, match="starts_in_reasoning"):
        ReplySplitter("llama3", starts_in_reasoning=True)
    with pytest.raises(InputError, match="bytes"):
        split_reply(b"a", "think")  # type: ignore[arg-type]
    splitter = ReplySplitter("think")
    splitter.finish()
    with pytest.raises(InputError, match=r"after finish\(\)"):
        splitter.feed("a")
    with pytest.raises(InputError, match="twice"):
        splitter.finish()


def test_docstring_examples() -> None:
    module = importlib.import_module("genai.text.parsing.splitter")
    names = {"split_reply": split_reply, "ReplySplitter": ReplySplitter}
    result = doctest.testmod(module, extraglobs=names)
    assert result.attempted > 0
    assert result.failed == 0

"""Each format on replies as its models write them, and on malformed ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from genai.text.parsing import PARSERS, End, Event, Reasoning, Reply, ReplySplitter, Text, ToolCall, split_reply

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "reference" / "text.md").read_text(encoding="utf-8")

ARGUMENTS = {"code": 'if (a) { "b" } ]}</tool_call>', "city": "Zürich 🏔️", "deep": [{"x": [1, None, True]}]}
JSON = json.dumps(ARGUMENTS, ensure_ascii=False)
HARMONY = "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>"

DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
KIMI = "<|tool_calls_section_begin|><|tool_call_begin|>"


def call(name: str, key: str = "arguments", value: str = JSON) -> str:
    return f'{{"name": "{name}", "{key}": {value}}}'


# parser, reply, text, reasoning, (name, arguments, id) of the calls
CLEAN: list[tuple[str, str, str, str, list[tuple[str, Any, str | None]]]] = [
    ("none", "a <think> [TOOL_CALLS]", "a <think> [TOOL_CALLS]", "", []),
    ("think", "<think>\nwhy\n</think>\n\nyes", "yes", "why", []),
    ("think", "a<think>1</think>b<think>2</think>", "a\n\nb", "1\n\n2", []),
    ("think", "no marks </think> <thin", "no marks </think> <thin", "", []),
    ("think", "ends in lines\n\n", "ends in lines\n\n", "", []),
    (
        "hermes",
        f"<think>t</think>Wait.\n<tool_call>\n{call('f')}\n</tool_call>\n<tool_call>{call('g')}</tool_call>",
        "Wait.",
        "t",
        [("f", ARGUMENTS, None), ("g", ARGUMENTS, None)],
    ),
    ("hermes", f"<tool_call>{call('f')}", "", "", [("f", ARGUMENTS, None)]),
    (
        "hermes",
        f"<tool_call>{call('f')}\n<tool_call>{call('g', value='{}')}",
        "",
        "",
        [("f", ARGUMENTS, None), ("g", {}, None)],
    ),
    ("hermes", f"<tool_call>{call('f', value=json.dumps(JSON))}</tool_call>ok", "ok", "", [("f", ARGUMENTS, None)]),
    ("hermes", '<tool_call>{"name":"f","arguments":{"a":"x\ny"}}</tool_call>', "", "", [("f", {"a": "x\ny"}, None)]),
    ("llama3", f"<|python_tag|>{call('f', 'parameters')}<|eom_id|>", "", "", [("f", ARGUMENTS, None)]),
    (
        "llama3",
        f" {call('f', 'parameters')} ; {call('g', 'parameters')};\n",
        "",
        "",
        [("f", ARGUMENTS, None), ("g", ARGUMENTS, None)],
    ),
    ("llama3", f"Sure.\n<|python_tag|>{call('f', 'parameters')}", "Sure.", "", [("f", ARGUMENTS, None)]),
    ("llama3", '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', "", []),
    ("llama3", "{not json} at all", "{not json} at all", "", []),
    ("llama3", "  plain; text", "  plain; text", "", []),
    (
        "mistral",
        f'[TOOL_CALLS] [{call("f")[:-1]}, "id": "abc123XYZ"}}, {call("g")}]',
        "",
        "",
        [("f", ARGUMENTS, "abc123XYZ"), ("g", ARGUMENTS, None)],
    ),
    (
        "mistral",
        f"Hm [TOOL_CALLS]f[ARGS]{JSON}[TOOL_CALLS]g[CALL_ID]1a[ARGS]{JSON}",
        "Hm ",
        "",
        [("f", ARGUMENTS, None), ("g", ARGUMENTS, "1a")],
    ),
    ("mistral", "[THINK]t[/THINK]an [ARGS] array [1]", "an [ARGS] array [1]", "t", []),
    (
        "gpt_oss",
        f"<|channel|>analysis<|message|>t<|end|><|start|>assistant<|channel|>commentary<|message|>plan<|end|>"
        f"{HARMONY}{JSON}<|call|>",
        "plan",
        "t",
        [("f", ARGUMENTS, None)],
    ),
    ("gpt_oss", "<|channel|>final<|message|>Yes {1} <b<|return|>", "Yes {1} <b", "", []),
    ("gpt_oss", f" to=functions.f<|channel|>commentary json<|message|>{JSON}", "", "", [("f", ARGUMENTS, None)]),
    (
        "gpt_oss",
        "<|channel|>analysis to=python code<|message|>print(1)<|call|>",
        "",
        "",
        [("python", "print(1)", None)],
    ),
    ("gpt_oss", "no channel", "no channel", "", []),
    (
        "qwen3_coder",
        "<think>t</think>Wait.\n<tool_call>\n<function=f>\n<parameter=code>\nif a < b:\n\n    c()\n\n</parameter>\n"
        "<parameter=n>\n12\n</parameter>\n</function>\n</tool_call>\n<tool_call><function=g></function></tool_call>",
        "Wait.",
        "t",
        [("f", {"code": "if a < b:\n\n    c()\n", "n": 12}, None), ("g", {}, None)],
    ),
    ("qwen3_coder", "<function=f><parameter=a>x</parameter></function>ok", "ok", "", [("f", {"a": "x"}, None)]),
    (
        "qwen3_coder",
        "<tool_call><function=f></function><function=g>\n</function>",
        "",
        "",
        [("f", {}, None), ("g", {}, None)],
    ),
    (
        "glm",
        "<think>t</think>\n<tool_call>f\n<arg_key>a b</arg_key>\n<arg_value>1 < 2</arg_value>\n<arg_key>d</arg_key>\n"
        '<arg_value>{"x": [1, null]}</arg_value>\n</tool_call>\n<tool_call>g<arg_key>a</arg_key><arg_value></arg_value>'
        "</tool_call><tool_call>h</tool_call>",
        "",
        "t",
        [("f", {"a b": "1 < 2", "d": {"x": [1, None]}}, None), ("g", {"a": ""}, None), ("h", {}, None)],
    ),
    (
        "minimax",
        'Sure.\n<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">x\ny</parameter>\n<parameter name="b">true'
        "</parameter>\n</invoke>\n<invoke name='g'>\n</invoke>\n</minimax:tool_call>",
        "Sure.",
        "",
        [("f", {"a": "x\ny", "b": True}, None), ("g", {}, None)],
    ),
    (
        "kimi",
        f"Hm.<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{JSON}"
        "<|tool_call_end|> <|tool_call_begin|>functions.g:1 <|tool_call_argument_begin|> {}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        "Hm.",
        "",
        [("f", ARGUMENTS, "functions.f:0"), ("g", {}, "functions.g:1")],
    ),
    (
        "deepseek",
        f"<think>t</think>{DEEPSEEK}function<｜tool▁sep｜>f\n```json\n{JSON}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>"
        "function<｜tool▁sep｜>g\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        "t",
        [("f", ARGUMENTS, None), ("g", {}, None)],
    ),
    (
        "deepseek",
        f"Hm {DEEPSEEK}f<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜><｜tool▁call▁begin｜>"
        "g<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
        "Hm ",
        "",
        [("f", ARGUMENTS, None), ("g", {}, None)],
    ),
]


# Replies with a call of a tool without parameters.
EMPTY = [
    *(("hermes", f'<tool_call>{{"name": "f"{rest}}}</tool_call>') for rest in (
        "", ', "arguments": {}', ', "arguments": null', ', "arguments": ""', ', "arguments": " "',
        ', "arguments": "null"', ', "arguments": "{}"', ', "parameters": null', ', "arguments": null, "parameters": {}',
    )),
    *(("llama3", f'{{"name": "f", "{key}": {value}}}') for key in ("parameters", "arguments")
      for value in ("{}", "null", '""')),
    ("llama3", '<|python_tag|>{"name": "f"}'),
    ("llama3", '{"name": "f", "parameters": {}}; {"name": "f"}'),
    ("mistral", '[TOOL_CALLS][{"name": "f"}, {"name": "f", "arguments": null}]'),
    ("mistral", "[TOOL_CALLS]f[ARGS]{}"),
    ("mistral", "[TOOL_CALLS]f[ARGS] null"),
    ("mistral", "[TOOL_CALLS]f[ARGS][TOOL_CALLS]f[ARGS]{}"),
    ("gpt_oss", HARMONY + "{}"),
    ("gpt_oss", HARMONY + "<|call|>"),
    ("gpt_oss", HARMONY + "\n<|call|>"),
    ("gpt_oss", HARMONY + "null<|call|>"),
    ("qwen3_coder", "<tool_call>\n<function=f>\n</function>\n</tool_call>"),
    ("glm", "<tool_call>f\n</tool_call>"),
    ("glm", "<tool_call>f</tool_call>"),
    ("minimax", '<minimax:tool_call><invoke name="f"></invoke></minimax:tool_call>'),
    ("kimi", KIMI + "functions.f:0<|tool_call_argument_begin|><|tool_call_end|><|tool_calls_section_end|>"),
    ("kimi", KIMI + "functions.f:0<|tool_call_argument_begin|>null<|tool_call_end|>"),
    ("deepseek", DEEPSEEK + "f<｜tool▁sep｜><｜tool▁call▁end｜>"),
    ("deepseek", DEEPSEEK + "function<｜tool▁sep｜>f\n```json\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"),
]  # fmt: skip


@pytest.mark.parametrize(("parser", "reply"), EMPTY)
def test_calls_without_arguments(parser: str, reply: str) -> None:
    """As in messages: {} stands for missing, null and empty arguments."""
    for result in (split_reply(reply, parser), Reply.from_events(stream(parser, reply))):
        assert {(found.name, found.arguments_text) for found in result.tool_calls} == {("f", "{}")}
        assert not result.text.strip() and not result.problems


@pytest.mark.parametrize("name", PARSERS)
def test_every_format_has_a_clean_reply_and_is_documented(name: str) -> None:
    assert name in {parser for parser, *_ in CLEAN}, f"tests/text/parsing/test_formats.py: CLEAN has no {name!r}"
    table = PAGE.split("\n## Reply parsers\n")[1]
    assert f"\n| `{name}` |" in table, f"docs/reference/text.md: no row {name!r} under Reply parsers"


# parser, reply, the flagged part, part of the reason
SPOILED = [
    ("hermes", "<tool_call>{bad}</tool_call>", "is unexpected"),
    ("hermes", "\n<tool_call>not json</tool_call>", "expected, not 'n'"),
    ("hermes", "<tool_call></tool_call>", "expected, not '<'"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>', "is unexpected"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "open}}</tool_call>', "ended inside"),
    ("hermes", "<tool_call>", "ended inside"),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1}</tool_call>', "is unexpected"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {},,}</tool_call>', "malformed"),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "not list"),
    ("hermes", '<tool_call>{"name": "f", "arguments": "x"}</tool_call>', "malformed"),
    ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>', 'no "name"'),
    ("hermes", '<tool_call>["f"]</tool_call>', "not list"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>', "surrogates"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>', "malformed"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}</tool_call>", "malformed"),
    ("hermes", "<tool_call>" + "[" * 100_000 + "]" * 100_000 + "</tool_call>", "nested too deep"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}} and on</tool_call>', "other text"),
    ("llama3", '<|python_tag|>brave_search.call(query="x")', "expected, not 'b'"),
    ("llama3", '{"name": "f", "parameters": {}} and prose', "other text"),
    ("llama3", '{"name": "f", "parameters": {"a": ', "ended inside"),
    ("llama3", '{"name": "f", "parameters": {}}; {"parameters": {}}', 'no "name"'),
    ("mistral", "[TOOL_CALLS]", "a tool name"),
    ("mistral", "[TOOL_CALLS][]", "empty"),
    ("mistral", "[TOOL_CALLS][1]", "not int"),
    ("mistral", "[TOOL_CALLS]f g[ARGS]{}", "a tool name"),
    ("mistral", "[TOOL_CALLS]f[CALL_ID]{}", "a tool name"),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": ', "ended inside"),
    ("mistral", "[TOOL_CALLS]f[ARGS][1]", "not list"),
    ("gpt_oss", "<|channel|>analysis without a message", "header has no"),
    ("mistral", "[TOOL_CALLS]f[ARGS]", "ended inside"),
    ("mistral", "[TOOL_CALLS]f[ARGS]nul", "expected, not 'n'"),
    ("gpt_oss", HARMONY, "ended inside"),
    ("gpt_oss", HARMONY + "null {}", "other text"),
    ("gpt_oss", HARMONY + "{", "ended inside"),
    ("gpt_oss", HARMONY + "[]", "not list"),
    ("gpt_oss", HARMONY + "{} and on", "other text"),
    ("gpt_oss", HARMONY.replace("functions.f", "functions.") + "{}", "no name"),
    ("qwen3_coder", "<tool_call>", "ended inside"),
    ("qwen3_coder", "<tool_call></tool_call>", "a tool call is expected"),
    ("qwen3_coder", '<tool_call>{"name": "f"}</tool_call>', "a tool call is expected"),
    ("qwen3_coder", "<tool_call><function=f", "ended inside"),
    ("qwen3_coder", "<tool_call><function=></function></tool_call>", "name of a tool"),
    ("qwen3_coder", "<tool_call><function=f\n></function></tool_call>", "name of a tool"),
    ("qwen3_coder", "<tool_call><function=f>text</function></tool_call>", "other text"),
    ("qwen3_coder", "<tool_call><function=f><parameter=></parameter></function></tool_call>", "name of a parameter"),
    ("qwen3_coder", "<tool_call><function=f><parameter=a>1</function></tool_call>", "ended inside"),
    ("glm", "<tool_call>", "ended inside"),
    ("glm", "<tool_call></tool_call>", "a tool call is expected"),
    ("glm", "<tool_call>f", "ended inside"),
    ("glm", "<tool_call>f\n<arg_key>a</arg_key>1</tool_call>", "other text"),
    ("glm", "<tool_call>f\n<arg_key>a</arg_key><arg_value>1</tool_call>", "ended inside"),
    ("glm", "<tool_call><arg_key>a</arg_key></tool_call>", "a tool is expected"),
    ("minimax", "<minimax:tool_call>text</minimax:tool_call>", "a tool call is expected"),
    ("minimax", '<minimax:tool_call><invoke name="f">', "ended inside"),
    ("kimi", "<|tool_calls_section_begin|><|tool_calls_section_end|>", "a tool call is expected"),
    ("kimi", KIMI + "functions.f:0<|tool_call_end|>", "a tool name"),
    ("kimi", KIMI + ":0<|tool_call_argument_begin|>{}", "a tool name"),
    ("kimi", KIMI + "functions.f:0<|tool_call_argument_begin|>{", "ended inside"),
    ("kimi", KIMI + "functions.f:0<|tool_call_argument_begin|>{} x", "other text"),
    ("deepseek", DEEPSEEK + "f{}<｜tool▁call▁end｜>", "a tool name"),
    ("deepseek", DEEPSEEK + "f<｜tool▁sep｜>[1]<｜tool▁call▁end｜>", "not list"),
    ("deepseek", DEEPSEEK + "function<｜tool▁sep｜>f\n```json\n{", "ended inside"),
]


def stream(parser: str, reply: str) -> list[Event]:
    """Character by character."""
    splitter = ReplySplitter(parser)
    return [*(event for character in reply for event in splitter.feed(character)), *splitter.finish()]


@pytest.mark.parametrize(("parser", "reply", "text", "reasoning", "calls"), CLEAN)
def test_clean_replies(parser: str, reply: str, text: str, reasoning: str, calls: list[Any]) -> None:
    result = split_reply(reply, parser)
    assert (result.text, result.reasoning, result.problems) == (text, reasoning, ())
    assert [(found.name, found.arguments, found.id) for found in result.tool_calls] == calls
    assert [found.index for found in result.tool_calls] == list(range(len(calls)))


@pytest.mark.parametrize(("parser", "reply", "reason"), SPOILED, ids=lambda value: str(value)[:60])
def test_spoiled_calls_come_back_as_flagged_text(parser: str, reply: str, reason: str) -> None:
    result = split_reply(reply, parser)
    assert result.text == reply
    assert result.tool_calls == ()
    assert len(result.problems) == 1
    assert reason in result.problems[0]


@pytest.mark.parametrize(
    ("parser", "spoiled", "good"),
    [
        ("hermes", "<tool_call>{bad}</tool_call>", f"<tool_call>{call('g')}</tool_call>"),
        ("llama3", "<|python_tag|>print(1)", f"<|python_tag|>{call('g')}"),
        ("mistral", "[TOOL_CALLS]!", f"[TOOL_CALLS]g[ARGS]{JSON}"),
        ("gpt_oss", HARMONY + "bad<|call|>", HARMONY.replace("functions.f", "functions.g") + JSON),
        ("qwen3_coder", "<tool_call>bad</tool_call>", "<tool_call><function=g></function></tool_call>"),
        ("glm", "<tool_call>f\nbad</tool_call>", "<tool_call>g</tool_call>"),
        ("minimax", "<minimax:tool_call>bad</minimax:tool_call>", "<minimax:tool_call><invoke name=g></invoke>"),
        ("kimi", KIMI + "bad<|tool_calls_section_end|>", KIMI + "functions.g:0<|tool_call_argument_begin|>{}"),
        ("deepseek", DEEPSEEK + "bad<｜tool▁calls▁end｜>", DEEPSEEK + "g<｜tool▁sep｜>{}"),
    ],
)
def test_a_good_call_after_a_spoiled_one_is_found(parser: str, spoiled: str, good: str) -> None:
    result = split_reply(spoiled + good, parser)
    assert [found.name for found in result.tool_calls] == ["g"]
    assert len(result.problems) == 1


def test_text_after_a_spoiled_call_is_not_flagged() -> None:
    events = stream("hermes", "<tool_call>{bad}</tool_call> fine")
    assert "".join(event.text for event in events if isinstance(event, Text) and not event.problem) == " fine"


@pytest.mark.parametrize(("parser", "marks"), [("think", "<>"), ("hermes", "<>"), ("mistral", "[]")])
@pytest.mark.parametrize("repeats", [False, True])
def test_reasoning_that_the_prompt_opened(parser: str, marks: str, repeats: bool) -> None:
    name = "think" if marks == "<>" else "THINK"
    reply = (f"\n{marks[0]}{name}{marks[1]}\n" if repeats else "\n") + f"hm\n{marks[0]}/{name}{marks[1]}\n\nyes"
    result = split_reply(reply, parser, starts_in_reasoning=True)
    assert (result.reasoning, result.text, result.ended_in_reasoning) == ("hm", "yes", False)


@pytest.mark.parametrize(
    ("parser", "reply"), [("think", "<think>hm"), ("hermes", "<think>"), ("gpt_oss", "<|channel|>analysis<|message|>h")]
)
def test_the_end_tells_that_reasoning_was_open(parser: str, reply: str) -> None:
    assert stream(parser, reply)[-1] == End(in_reasoning=True)
    assert split_reply(reply, parser).text == ""


def test_closed_reasoning_is_not_open_at_the_end() -> None:
    assert stream("think", "<think>a</think>")[-1] == End(in_reasoning=False)


def test_arguments_as_text_again() -> None:
    assert json.loads(ToolCall("f", ARGUMENTS, "").arguments_text) == ARGUMENTS
    assert ToolCall("python", "print(1)", "").arguments_text == "print(1)"


def test_reasoning_is_shown_while_it_grows() -> None:
    splitter = ReplySplitter("think")
    splitter.feed("<think>")
    assert Reasoning("a") in splitter.feed("a")

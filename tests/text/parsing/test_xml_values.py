"""Values of tool calls in XML: the schema determines the type, as in vLLM's parsers."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest

from genai.text.parsing import Reply, ReplySplitter, split_reply
from genai.text.parsing.xml_values import types_of

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "s": {"type": "string"},
        "i": {"type": "integer"},
        "n": {"type": "number"},
        "b": {"type": "boolean"},
        "o": {"type": "object"},
        "a": {"type": "array"},
        "u": {"type": ["string", "null"]},
        "m": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "x": {"type": ["integer", "string"]},
        "e": {"enum": ["1", "2"]},
        "r": {"$ref": "#/$defs/size"},
        "t": {},
        "k": {"type": "integer", "nullable": True},
        "f": {"type": "float"},
    },
    "$defs": {"size": {"type": "integer"}},
}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}]
# A parameter, the text of its value, and the value. Texts that do not match their type stay texts, as in vLLM.
VALUES: list[tuple[str, str, Any]] = [
    ("s", "12", "12"),
    ("s", "null", "null"),  # vLLM returns None, although the schema allows no null
    ("s", "true", "true"),
    ("s", '{"a": 1}', '{"a": 1}'),
    ("s", '"quoted"', '"quoted"'),
    ("s", "", ""),
    ("s", " a  ", " a  "),
    ("s", "a < b && c > d </b>", "a < b && c > d </b>"),
    ("s", "&lt;p&gt;", "&lt;p&gt;"),
    ("s", "line\n\n  two\n", "line\n\n  two\n"),
    ("i", "12", 12),
    ("i", " -3\n", -3),
    ("i", "12.0", 12),
    ("i", "1.5", "1.5"),
    ("i", "twelve", "twelve"),
    ("i", "", ""),
    ("i", "null", None),
    ("n", "12", 12),
    ("n", "1.5e3", 1500.0),
    ("n", "1e999", "1e999"),
    ("b", "true", True),
    ("b", "False", False),
    ("b", "1", True),
    ("b", "yes", "yes"),
    ("o", '{"a": [1, {"b": null}]}', {"a": [1, {"b": None}]}),
    ("o", "{'a': True, 'b': None}", {"a": True, "b": None}),
    ("o", "{1: {2}}", "{1: {2}}"),
    ("o", "{broken", "{broken"),
    ("o", "", ""),
    ("a", '["a < b", "c"]', ["a < b", "c"]),
    ("a", "['x']", ["x"]),
    ("a", "[" * 3000, "[" * 3000),
    ("u", "null", None),
    ("u", "nil", "nil"),
    ("m", "None", None),
    ("m", "7", 7),
    ("x", "7", 7),
    ("x", "seven", "seven"),
    ("x", "null", "null"),
    ("e", "1", "1"),
    ("r", "5", 5),
    ("t", "5", 5),
    ("t", "[1]", [1]),
    ("t", "five", "five"),
    ("t", '"five"', '"five"'),
    ("k", "null", None),
    ("f", "2.5", 2.5),
    ("unknown", "5", 5),
    ("unknown", "five", "five"),
]


def written(parser: str, arguments: dict[str, str], name: str = "f") -> str:
    if parser == "qwen3_coder":
        parts = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in arguments.items())
        return f"<tool_call>\n<function={name}>\n{parts}</function>\n</tool_call>"
    if parser == "glm":
        parts = "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>\n{text}\n</arg_value>\n" for key, text in arguments.items()
        )
        return f"<tool_call>{name}\n{parts}</tool_call>"
    parts = "".join(f'<parameter name="{key}">\n{text}\n</parameter>\n' for key, text in arguments.items())
    return f'<minimax:tool_call>\n<invoke name="{name}">\n{parts}</invoke>\n</minimax:tool_call>'


@pytest.mark.parametrize("parser", ["qwen3_coder", "glm", "minimax"])
def test_values_have_the_types_of_the_schema(parser: str) -> None:
    for key, text, value in VALUES:
        reply = split_reply(written(parser, {key: text}), parser, tools=TOOLS)
        assert not reply.problems, (key, text)
        (call,) = reply.tool_calls
        assert json.dumps(call.arguments) == json.dumps({key: value}), (key, text)


@pytest.mark.parametrize("parser", ["qwen3_coder", "glm", "minimax"])
def test_values_are_the_same_at_every_cut(parser: str) -> None:
    reply = written(parser, {key: text for key, text, _ in VALUES if len(text) < 100} | {"s": "a\n</b>\n"}) * 2
    whole = split_reply(reply, parser, tools=TOOLS)
    assert len(whole.tool_calls) == 2
    for seed in range(60):
        cuts = sorted(Random(seed).choices(range(len(reply) + 1), k=5))
        splitter = ReplySplitter(parser, tools=TOOLS)
        pieces = [reply[start:end] for start, end in zip([0, *cuts], [*cuts, len(reply)], strict=True)]
        events = [event for piece in pieces for event in splitter.feed(piece)] + splitter.finish()
        assert Reply.from_events(events) == whole
        assert "".join(event.raw for event in events) == reply


@pytest.mark.parametrize(("parser", "marker"), [("qwen3_coder", "</parameter>"), ("glm", "</arg_value>")])
def test_markers_in_the_strings_of_objects(parser: str, marker: str) -> None:
    text = json.dumps({"a": f"x{marker}y{marker}", "b": [1]})
    (call,) = split_reply(written(parser, {"o": text}), parser, tools=TOOLS).tool_calls
    assert call.arguments == {"o": json.loads(text)}


def test_malformed_tools_have_no_types() -> None:
    for tools in ([{}], [{"name": 1}], [{"function": 3}], [{"name": "f", "parameters": []}], ["f"], None):
        (call,) = split_reply(written("glm", {"s": "12"}), "glm", tools=tools).tool_calls  # type: ignore[arg-type]
        assert call.arguments == {"s": 12}
    loop = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}
    assert types_of(loop, loop) == frozenset()

"""Tool calls, forced or free, in every known format: names and arguments are those of the tools."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

import genai
from genai.errors import GrammarError, OptionError
from genai.llm.chat import ChatSession
from genai.llm.reply_shape import ToolChoice
from genai.text.parsing import Reply, ToolCall
from genai.text.tool_functions import tool_of
from tools.schemas import problem

ADD = {
    "type": "object",
    "properties": {name: {"type": "integer", "minimum": 0, "maximum": 99} for name in ("a", "b")},
    "required": ["a", "b"],
    "additionalProperties": False,
}
# As tools often have it: words that no compiler of grammars knows.
WEATHER = {"properties": {"city": {"enum": ["Zürich", "Rome"], "if": {}}}, "required": ["city"],
           "additionalProperties": False}  # fmt: skip
SCHEMAS: dict[str, Any] = {"add": ADD, "weather": WEATHER}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "", "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
HEAD = "{% if tools %}{{ tools | tojson }}{% endif %}"
BODY = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)
TEMPLATES = {
    "hermes": "{# <tool_call> #}" + HEAD + BODY,
    "hermes-thinking": "{# <tool_call> <think> #}" + HEAD + BODY,
    "llama3": "{# <|python_tag|> #}" + HEAD + BODY,
    "mistral": "{# [TOOL_CALLS] #}" + HEAD + BODY,
    "mistral-named": "{# [TOOL_CALLS] [ARGS] #}" + HEAD + BODY,
    "gpt_oss": "{# <|channel|> <|message|> #}" + HEAD + BODY,
    "qwen3_coder": "{# <tool_call> <function= <parameter= #}" + HEAD + BODY,
    "glm": "{# <tool_call> <arg_key> #}" + HEAD + BODY,
    "glm-compact": "{# <tool_call> </arg_key><arg_value> <arg_key> #}" + HEAD + BODY,
    "minimax": "{# <minimax:tool_call> #}" + HEAD + BODY,
    "kimi": "{# <|tool_calls_section_begin|> <|tool_call_argument_begin|> #}" + HEAD + BODY,
    "deepseek": "{# <｜tool▁calls▁begin｜> #}" + HEAD + BODY,
    "deepseek-v3": "{# <｜tool▁calls▁begin｜> ```json #}" + HEAD + BODY,
}


@pytest.fixture(scope="module")
def llm_of(tmp_path_factory: pytest.TempPathFactory, bundled_folder: Path) -> Iterator[Callable[[str], genai.LLM]]:
    """llm_of(format): the bundled model with a template of a format that it was not trained on."""
    known: dict[str, genai.LLM] = {}

    def load(name: str) -> genai.LLM:
        if name not in known:
            folder = tmp_path_factory.mktemp("tools") / name
            shutil.copytree(bundled_folder, folder)
            (folder / "chat_template.jinja").write_text(TEMPLATES[name], encoding="utf-8")
            known[name] = genai.LLM(folder)
        return known[name]

    yield load
    for llm in known.values():
        llm.close()


def check(calls: Any) -> None:
    for call in calls:
        assert not problem(SCHEMAS[call.name], json.dumps(call.arguments)), call


@pytest.fixture(autouse=True)
def few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit the number of calls, because the model has not learned when to end."""
    monkeypatch.setattr("genai.text.parsing.calls.MOST_CALLS", 2)


# What formats may begin with; this model would not come to the end of it.
BEGUN = {
    "hermes-thinking": "<think>Hm.</think>\n",
    "gpt_oss": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant",
}


def ask(llm: genai.LLM, begun: str, choice: ToolChoice, seed: int, tools: Any = TOOLS) -> Reply:
    """Return the reply to a message; it starts with the given text."""
    prompt, ids = llm.render("Hi", tools=tools), llm.encode(begun)
    shape = llm.shape(prompt, tools=tools, tool_choice=choice)
    tokens = [*llm.encode(prompt), *ids]
    with llm.stream_tokens(tokens, shape=shape, num_reply=len(ids), seed=seed, temperature=1.0) as stream:
        text = begun + "".join(stream)
    assert stream.completion.finish_reason == "stop", text
    splitter = llm.splitter(prompt, tools=tools)
    return Reply.from_events([*splitter.feed(text), *splitter.finish()])


@pytest.mark.parametrize("name", TEMPLATES)
def test_calls_that_are_required(name: str, llm_of: Callable[[str], genai.LLM]) -> None:
    for seed in range(4):
        reply = ask(llm_of(name), BEGUN.get(name, ""), "required", seed)
        assert reply.tool_calls and not reply.text.strip()
        check(reply.tool_calls)


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_one_that_is_named(name: str, llm_of: Callable[[str], genai.LLM]) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    reply = ask(llm_of(name), BEGUN.get(name, ""), choice, 1)
    assert [call.name for call in reply.tool_calls] == ["weather"]
    check(reply.tool_calls)


def add(a: Literal[1, 2], b: Literal[3]) -> int:
    """Return a sum."""
    return a + b


def test_functions_are_tools(llm_of: Callable[[str], genai.LLM]) -> None:
    """A function stands for its description wherever tools are passed; its results continue the conversation."""
    llm, described = llm_of("hermes"), [tool_of(add)]
    options: Any = {"tool_choice": {"type": "function", "function": {"name": "add"}}, "seed": 1, "temperature": 1.0}
    messages = [{"role": "user", "content": "Hi"}]
    assert llm.render(messages, tools=[add]) == llm.render(messages, tools=described)
    reply = llm.chat(messages, tools=[add], **options)
    (call,) = reply.tool_calls
    assert isinstance(call.arguments, dict) and add(**call.arguments) in (4, 5)
    for event in llm.stream_chat(messages, tools=[add], **options):
        assert not isinstance(event, ToolCall) or event == call
    (answer,) = llm.map([{"messages": messages, "tools": [add], **options}])
    assert [one.tool_calls for one in answer.replies] == [reply.tool_calls]
    result = {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": str(add(**call.arguments))}
    assert llm.render([*messages, reply.message, result], tools=[add]).count(str(add(**call.arguments)))
    chat = ChatSession(llm, tools=[add], **options)
    assert chat.ask("Hi").tool_calls == reply.tool_calls and chat.tools == described


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_tool_without_parameters(name: str, llm_of: Callable[[str], genai.LLM]) -> None:
    for number, more in enumerate(({}, {"parameters": None}, {"parameters": {}})):
        tools = [{"type": "function", "function": {"name": "now", "description": "", **more}}]
        reply = ask(llm_of(name), BEGUN.get(name, ""), "required", number, tools)
        assert {(call.name, call.arguments_text) for call in reply.tool_calls} == {("now", "{}")}


@pytest.mark.parametrize("name", ["hermes", "llama3", "mistral", "mistral-named", "qwen3_coder", "deepseek"])
def test_free_replies_are_text_or_calls(name: str, llm_of: Callable[[str], genai.LLM]) -> None:
    """With a bias towards the start of a call, the reply is a call; without it, the reply is unchanged."""
    llm = llm_of(name)
    plain = llm.chat("What is 12 + 7?", temperature=0)
    assert llm.chat("What is 12 + 7?", tools=TOOLS, tool_choice="none", temperature=0).text == plain.text
    opening = {"hermes": "<tool_call>", "llama3": "{", "mistral": "[TOOL_CALLS]", "mistral-named": "[TOOL_CALLS]",
               "qwen3_coder": "<tool_call>", "deepseek": "<｜tool▁calls▁begin｜>"}[name]  # fmt: skip
    reply = ask(llm, opening, "auto", 2)
    assert reply.tool_calls
    check(reply.tool_calls)


# A call, and the text between it and a second one.
CALL_PAIRS = {
    "hermes": ('<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>', "\n<tool_call>"),
    "llama3": ('{"name": "weather", "parameters": {"city": "Rome"}}', "; {"),
    "mistral": ('[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rome"}}', ", {"),
    "mistral-named": ('[TOOL_CALLS]weather[ARGS]{"city": "Rome"}', "[TOOL_CALLS]"),
    "gpt_oss": (
        '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rome"}',
        "<|call|><|start|>assistant<|channel|>commentary to=functions.",
    ),
    "qwen3_coder": (
        "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>",
        "\n<tool_call>",
    ),
    "glm": (
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>",
        "\n<tool_call>",
    ),
}


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("name", CALL_PAIRS)
def test_calls_that_may_not_be_parallel(name: str, choice: str, llm_of: Callable[[str], genai.LLM]) -> None:
    llm, (call, between) = llm_of(name), CALL_PAIRS[name]
    prompt = llm.render("Hi", tools=TOOLS)

    def continued(begun: str, *, parallel: bool) -> str:
        shape = llm.shape(prompt, tools=TOOLS, tool_choice=choice, parallel_tool_calls=parallel)
        ids = llm.encode(begun)
        tokens = [*llm.encode(prompt), *ids]
        with llm.stream_tokens(tokens, shape=shape, num_reply=len(ids), max_tokens=5) as stream:
            return "".join(stream)

    if (name, choice) == ("gpt_oss", "auto"):  # its free replies are not constrained
        with pytest.raises(OptionError, match=r"parallel_tool_calls = False(?s:.)*'gpt_oss'"):
            continued(call, parallel=False)
        return
    continued(call + between, parallel=True)
    assert continued(call, parallel=False) in ("", "]")
    with pytest.raises(GrammarError, match="the grammar failed after"):
        continued(call + between, parallel=False)


def test_parallel_tool_calls_in_every_method(llm_of: Callable[[str], genai.LLM], monkeypatch: Any) -> None:
    llm, most = llm_of("hermes"), []
    shape = llm.shape
    monkeypatch.setattr(llm, "shape", lambda *args, **options: most.append(shape(*args, **options)) or shape("Hi"))
    message = [{"role": "user", "content": "Hi"}]
    for parallel in (False, True, None):
        options: dict[str, Any] = {"tools": TOOLS, "parallel_tool_calls": parallel}
        llm.chat("Hi", max_tokens=1, **options)
        list(llm.stream_chat("Hi", max_tokens=1, **options))
        (answer,) = llm.map([{"messages": message, **options}], max_tokens=1)
        assert answer.error is None
        ChatSession(llm, max_tokens=1, **options).ask("Hi")
    assert [one.most for one in most] == [1] * 4 + [2] * 8
    monkeypatch.undo()
    assert llm.chat("Hi", parallel_tool_calls=False, max_tokens=1).tool_calls == ()  # no tools, no calls
    for ask in (llm.chat, lambda text, **options: ChatSession(llm, **options)):
        with pytest.raises(OptionError, match=r"parallel_tool_calls = 'no'(?s:.)*pass a bool"):
            ask("Hi", tools=TOOLS, parallel_tool_calls="no")


def test_a_grammar_or_calls(llm_of: Callable[[str], genai.LLM]) -> None:
    llm = llm_of("hermes")
    reply = llm.chat("Yes or no?", tools=TOOLS, choice=["yes", "no"], max_tokens=200)
    assert reply.text in ("yes", "no") or reply.tool_calls
    with pytest.raises(OptionError, match="choice contradicts tool_choice"):
        llm.chat("Yes or no?", tools=TOOLS, choice=["yes", "no"], tool_choice="required")


def test_reasoning_comes_before_the_grammar(llm_of: Callable[[str], genai.LLM]) -> None:
    llm = llm_of("hermes-thinking")
    prompt = llm.render("Hi")
    ids, begun = llm.encode(prompt), llm.encode("<think>Well.</think>\n\n")
    shape = llm.shape(prompt)
    given: dict[str, Any] = {"shape": shape, "num_reply": len(begun), "choice": ["left", "right"]}
    assert "".join(llm.stream_tokens([*ids, *begun], **given)).strip() in ("left", "right")
    assert llm.chat("Hi", choice=["left", "right"]).text in ("left", "right")


def test_in_maps_streams_and_conversations(llm_of: Callable[[str], genai.LLM]) -> None:
    llm = llm_of("hermes")
    message = [{"role": "user", "content": "Hi"}]
    items = [{"messages": message, "tools": TOOLS, "tool_choice": "required"}, {"messages": message},
             {"messages": message, "tools": TOOLS, "tool_choice": "sometimes"}]  # fmt: skip
    first, second, third = llm.map(items, max_tokens=200, temperature=1.0, seed=3)
    check(first.replies[0].tool_calls)
    assert first.replies[0].tool_calls and not second.replies[0].tool_calls and isinstance(third.error, OptionError)
    events = list(llm.stream_chat("Hi", tools=TOOLS, tool_choice="required", max_tokens=200, seed=3, temperature=1.0))
    assert any(isinstance(event, ToolCall) for event in events)
    session = ChatSession(llm, tools=TOOLS, tool_choice="required", max_tokens=200, seed=3)
    check(session.ask("Hi").tool_calls)


def test_what_is_refused(llm_of: Callable[[str], genai.LLM], llm: genai.LLM) -> None:
    tooled = llm_of("hermes")
    for choice, tools, named in (
        ("required", None, "there are no tools"),
        ("sometimes", TOOLS, "auto"),
        ({"type": "function", "function": {"name": "ad"}}, TOOLS, "add"),
        (5, TOOLS, "auto"),
    ):
        with pytest.raises(OptionError) as raised:
            tooled.chat("Hi", tools=tools, tool_choice=choice)  # type: ignore[arg-type]
        assert named in str(raised.value)
    for tool, named in (
        ({"type": "function"}, "no name"),
        ({"name": "a", "parameters": []}, "parameters"),
        ({"name": "a", "parameters": {"properties": {"x": {"type": "strin"}}}}, "strin"),
        ({"name": "a", "strict": True, "parameters": WEATHER}, "if"),
    ):
        with pytest.raises(GrammarError) as wrong:
            tooled.chat("Hi", tools=[tool], tool_choice="required")
        assert named in str(wrong.value)
    with pytest.raises(OptionError, match="tool_choice"):
        llm.shape("Hi", tools=TOOLS, tool_choice="required")


def test_a_refused_schema_of_a_tool_is_named_with_its_place(llm_of: Callable[[str], genai.LLM]) -> None:
    tooled = llm_of("hermes")
    wrong = {"name": "wrong", "parameters": {"properties": {"a": {"items": {"type": "strin"}}}}}
    cases: list[tuple[Any, dict[str, Any]]] = [("required", {}), (None, {"json_schema": {"type": "object"}})]
    for choice, options in cases:
        with pytest.raises(GrammarError) as raised:
            tooled.chat("Hi", tools=[*TOOLS, wrong], tool_choice=choice, **options)
        assert raised.value.what == "the schema of tool 'wrong' cannot be used at /properties/a/items"
        assert "strin" in raised.value.why and raised.value.fix
    with pytest.raises(GrammarError) as raised:  # the tools are right, what the reply is held to beside them is not
        tooled.chat("Hi", tools=TOOLS, json_schema={"properties": {"b": {"type": "strin"}}})
    assert raised.value.what.startswith("json_schema ") and raised.value.what.endswith("at /properties/b")


def test_patterns_and_keys_of_tools(llm_of: Callable[[str], genai.LLM]) -> None:
    """As in json_schema, except that a minimum of keys is only refused for strict tools."""
    parts = {"x": {"type": "string", "pattern": "^[[:alpha:]]$"}}
    known = {"properties": parts, "required": ["x"], "additionalProperties": False}
    for strict, schema in ((True, known), (False, {**known, "x-words": 1, "not": {}})):
        tool = {"type": "function", "function": {"name": "f", "strict": strict, "parameters": schema}}
        for call in ask(
            llm_of("hermes"), '<tool_call>\n{"name": "f", "arguments": {"x": "', "required", 1, [tool]
        ).tool_calls:
            assert isinstance(call.arguments, dict) and call.arguments["x"] in {f"{one}]" for one in "[:alph"}
    wrong = {"properties": {"x": {"pattern": "[a--b]"}}}
    for strict, schema, named in ((False, wrong, "out of order"), (True, {"minProperties": 2}, "repeat a key")):
        tool = {"name": "f", "strict": strict, "parameters": schema}
        with pytest.raises(GrammarError, match=f"the schema of tool 'f'(?s:.*){named}"):
            llm_of("hermes").chat("A", tools=[tool], tool_choice="required", max_tokens=5)


XML = ["qwen3_coder", "glm", "glm-compact", "minimax"]
TYPED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["a", "b < c"]},
        "count": {"type": "integer", "minimum": 10, "maximum": 99},
        "flags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
        "point": {"$ref": "#/$defs/point"},
        "note": {"type": ["integer", "null"], "maximum": 9, "minimum": 0},
    },
    "required": ["kind", "count", "flags", "point", "note"],
    "additionalProperties": False,
    "$defs": {"point": {"type": "object", "properties": {"x": {"enum": [1, "</parameter>", "</arg_value>"]}},
                        "required": ["x"], "additionalProperties": False}},
}  # fmt: skip


@pytest.mark.parametrize("name", XML)
def test_arguments_in_xml_match_their_schema(name: str, llm_of: Callable[[str], genai.LLM]) -> None:
    tools = [{"type": "function", "function": {"name": "f", "strict": True, "parameters": TYPED}}]
    for seed in range(6):
        for call in ask(llm_of(name), "", "required", seed, tools).tool_calls:
            assert not problem(TYPED, json.dumps(call.arguments)), call


@pytest.mark.parametrize("name", XML)
def test_texts_in_xml(name: str, llm_of: Callable[[str], genai.LLM]) -> None:
    """A text is free, and ends with its marker; a tool without named parameters has any."""
    llm = llm_of(name)
    form = llm.parser.calls(TEMPLATES[name]) if llm.parser.calls is not None else None
    assert form is not None
    xml = form.parameters
    assert xml is not None
    head = form.opening + form.start + form.before_name
    for parameters in ({"properties": {"a": {"type": "string"}}, "required": ["a"]}, {"type": "object"}):
        tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
        begun = f"{head}f{form.before_arguments}{xml.before_name}a{xml.before_value}null < 3\n\nTRUE"
        reply = ask(llm, begun + xml.after + form.after + form.end, "required", 1, tools)
        assert reply.tool_calls[0].arguments == {"a": "null < 3\n\nTRUE"}
        assert not reply.problems


def test_rules_of_texts_in_xml_that_are_refused(llm_of: Callable[[str], genai.LLM]) -> None:
    def tool(key: str, part: Any, strict: bool) -> Any:
        return {
            "type": "function",
            "function": {"name": "f", "strict": strict, "parameters": {"properties": {key: part}}},
        }

    llm, ruled = llm_of("qwen3_coder"), {"type": "string", "pattern": "^a$"}
    assert llm.shape("A", tools=[tool("a", ruled, False)], tool_choice="required").around(None)
    for key, part, named in (("a", ruled, "'pattern' of the parameter 'a'"), ("a<b", {}, "the parameter 'a<b'")):
        with pytest.raises(GrammarError) as raised:
            llm.chat("A", tools=[tool(key, part, True)], tool_choice="required", max_tokens=5)
        assert named in raised.value.what and "XML" in raised.value.why and raised.value.fix


def test_numbers_that_no_call_could_be_held_to(llm_of: Callable[[str], genai.LLM]) -> None:
    """llguidance would end the process."""
    far = {"properties": {"x": {"type": "integer", "minimum": -(2**63), "maximum": -(2**63) + 2}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": far}}
    with pytest.raises(GrammarError, match=r"has the number .* at /properties/x/maximum"):
        llm_of("hermes").chat("A", tools=[tool], tool_choice="required", max_tokens=5)

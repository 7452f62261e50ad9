"""Tool calls, forced or free, in every known format: names and arguments are those of the tools."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import genai
from genai.errors import GrammarError, OptionError
from genai.llm.chat import ChatSession
from genai.llm.reply_shape import ToolChoice
from genai.text.parsing import Reply, ToolCall
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


def ask(llm: genai.LLM, begun: str, choice: ToolChoice, seed: int) -> Reply:
    """Return the reply to a message; it starts with the given text."""
    prompt, ids = llm.render("Hi", tools=TOOLS), llm.encode(begun)
    shape = llm.shape(prompt, tools=TOOLS, tool_choice=choice)
    tokens = [*llm.encode(prompt), *ids]
    with llm.stream_tokens(tokens, shape=shape, num_reply=len(ids), seed=seed, temperature=1.0) as stream:
        text = begun + "".join(stream)
    assert stream.completion.finish_reason == "stop", text
    splitter = llm.splitter(prompt)
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


@pytest.mark.parametrize("name", ["hermes", "llama3", "mistral", "mistral-named"])
def test_free_replies_are_text_or_calls(name: str, llm_of: Callable[[str], genai.LLM]) -> None:
    """With a bias towards the start of a call, the reply is a call; without it, the reply is unchanged."""
    llm = llm_of(name)
    plain = llm.chat("What is 12 + 7?", temperature=0)
    assert llm.chat("What is 12 + 7?", tools=TOOLS, tool_choice="none", temperature=0).text == plain.text
    opening = {"hermes": "<tool_call>", "llama3": "{", "mistral": "[TOOL_CALLS]", "mistral-named": "[TOOL_CALLS]"}[name]
    reply = ask(llm, opening, "auto", 2)
    assert reply.tool_calls
    check(reply.tool_calls)


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


def test_numbers_that_no_call_could_be_held_to(llm_of: Callable[[str], genai.LLM]) -> None:
    """llguidance would end the process."""
    far = {"properties": {"x": {"type": "integer", "minimum": -(2**63), "maximum": -(2**63) + 2}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": far}}
    with pytest.raises(GrammarError, match=r"has the number .* at /properties/x/maximum"):
        llm_of("hermes").chat("A", tools=[tool], tool_choice="required", max_tokens=5)

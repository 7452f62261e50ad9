"""Conversion of lines to requests: templates, simple lines, cells."""

from __future__ import annotations

from typing import Any

import pytest

from genai.errors import GenaiError, InputError, OptionError
from genai.llm.batch.requests import PromptFormat, PromptTemplate


def test_templates() -> None:
    template = PromptTemplate("{{{text}}} in {lang}: {text} {a.b} {{x}}")
    assert template.names == ("text", "lang", "a.b")
    filled = template.fill({"text": "{lang} ü", "lang": 3, "a.b": [1, "ü"], "unused": 0})
    assert filled == '{{lang} ü} in 3: {lang} ü [1, "ü"] {x}', "what is filled in is not filled in again"
    with pytest.raises(InputError, match="'lang'") as caught:
        template.fill({"text": "x", "langs": "y"})
    assert "'langs'" in caught.value.fix


@pytest.mark.parametrize(
    "text", ["{", "}", "{}", "{text", "{text!r}", "{0.__class__", "text", "{{text}}", "{text:>9}", "{a[0]}"]
)
def test_templates_that_are_none(text: str) -> None:
    with pytest.raises(OptionError) as caught:
        PromptTemplate(text)
    assert caught.value.why and caught.value.fix


def test_lines_with_a_template_are_data() -> None:
    asking = PromptFormat(PromptTemplate("Sum up: {text}"))
    fields = {"text": "T", "temperature": "hot", "body": 3, "messages": 4}
    assert asking.item(fields) == ({"prompt": "Sum up: T"}, "")
    chat = PromptFormat(PromptTemplate("Sum up: {text}"), as_chat=True)
    assert chat.item(fields)[0] == {"messages": [{"role": "user", "content": "Sum up: T"}]}


def test_simple_lines() -> None:
    asking, chat = PromptFormat(), PromptFormat(as_chat=True)
    assert asking.item({"prompt": "a", "max_tokens": 3, "custom_id": "x", "seed": None})[0] == {
        "prompt": "a",
        "max_tokens": 3,
    }
    assert asking.item({"text": "a"})[0] == {"prompt": "a"}
    messages = [{"role": "user", "content": "a"}]
    assert asking.item({"messages": messages, "tools": [1]})[0] == {"messages": messages, "tools": [1]}
    assert asking.item({"prompt": "a", "logit_bias": {"12": -1}})[0] == {"prompt": "a", "logit_bias": {12: -1}}
    assert chat.item({"prompt": "a", "top_k": 2})[0] == {"messages": messages, "top_k": 2}
    assert chat.item({"messages": messages})[0] == {"messages": messages}


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": []}, "prompt"),
        ({"prompt": "a", "temprature": 1}, "temprature"),
        ({"prompt": "a", "tools": []}, "tools"),
        ({"question": "a"}, "question"),
        ({"prompt": "a", "logits_processors": []}, "logits_processors"),
    ],
)
def test_lines_that_ask_nothing(fields: dict[str, Any], word: str) -> None:
    with pytest.raises(GenaiError, match=word) as caught:
        PromptFormat().item(fields)
    assert caught.value.why and caught.value.fix


def test_a_misspelt_prompt() -> None:
    with pytest.raises(GenaiError) as caught:
        PromptFormat().item({"promt": "a", "max_tokens": 3})
    assert caught.value.fix == "did you mean 'prompt'?"


def test_a_user_message_is_a_text() -> None:
    with pytest.raises(InputError, match="the prompt is"):
        PromptFormat(as_chat=True).item({"prompt": [1, 2]})


def test_cells() -> None:
    asking = PromptFormat()
    cells = {"prompt": "12", "max_tokens": "3", "stop": "4", "ignore_eos": "true", "seed": ""}
    expected = {"prompt": "12", "max_tokens": 3, "stop": "4", "ignore_eos": True}
    assert asking.item(cells, are_cells=True)[0] == expected
    with pytest.raises(InputError, match="max_tokens = 'many'"):
        asking.item({"prompt": "a", "max_tokens": "many"}, are_cells=True)


def test_a_null_adapter_is_the_base_model() -> None:
    asking, body = PromptFormat(adapter={"a": 1.0}), {"messages": [{"role": "user", "content": "Hi"}]}
    assert asking.item({"prompt": "a"})[0]["adapter"] == asking.item({"body": body})[0]["adapter"] == {"a": 1.0}
    assert asking.item({"prompt": "a", "adapter": None})[0]["adapter"] is None
    assert asking.item({"body": {**body, "adapter": None}})[0]["adapter"] is None
    # In a table, all rows have the column, so null only says that the row has no value.
    assert asking.item({"prompt": "a", "adapter": None}, is_table=True)[0]["adapter"] == {"a": 1.0}


def test_names_of_lines() -> None:
    asking = PromptFormat()
    assert [asking.custom_id(one, 7) for one in ({}, {"custom_id": "a"}, {"custom_id": 5}, {"custom_id": ""})] == [
        "line-7", "a", "5", "line-7",
    ]  # fmt: skip
    for wrong in (True, 1.5, ["a"]):
        with pytest.raises(InputError, match="custom_id"):
            asking.custom_id({"custom_id": wrong}, 7)


@pytest.mark.parametrize(("value", "word"), [(None, "null"), (float("nan"), "NaN")])
def test_a_template_asks_nothing_about_nothing(value: object, word: str) -> None:
    with pytest.raises(InputError, match=f"'text' is {word}") as caught:
        PromptFormat(PromptTemplate("Summarise: {text}")).item({"text": value})
    assert caught.value.why and caught.value.fix

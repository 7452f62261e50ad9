"""Replies as instances of Pydantic models, also requested by lines of batches."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field, field_validator

import genai
from genai.errors import GrammarError, InputError, OptionError, ReplyFormatError
from genai.llm.batch.requests import PromptFormat
from tools.schemas import problem


class Answer(BaseModel):
    """A class as users write it."""

    number: int = Field(ge=0, le=99)
    unit: Literal["m", "km"]
    tags: list[Literal["a", "b"]] = Field(max_length=2)


class Picky(BaseModel):
    """A class that rejects values that its own schema allows."""

    number: int = Field(ge=0, le=9)

    @field_validator("number")
    @classmethod
    def never(cls, value: int) -> int:
        raise ValueError("not this one")


class Function(BaseModel):
    """A class with a value that JSON cannot represent."""

    call: Callable[[], int]


def test_a_class_without_a_schema(llm: genai.LLM) -> None:
    for options in ({"schema": Function}, {"json_schema": Function}):
        with pytest.raises(GrammarError, match="the class Function has no JSON schema") as raised:
            llm.chat("What?", **options)  # type: ignore[arg-type]
        assert "PydanticInvalidForJsonSchema" in raised.value.why and raised.value.fix


def test_instances_come_back(llm: genai.LLM) -> None:
    reply = llm.chat("How far?", schema=Answer)
    assert isinstance(reply, Answer)
    found = llm.generate(["A", "B"], schema=Answer, temperature=1.0, seed=2, n=2)
    assert len(found) == 4 and all(isinstance(one, Answer) for one in found)
    assert isinstance(asyncio.run(llm.achat("How far?", schema=Answer)), Answer)
    with llm.stream("How far?", json_schema=Answer) as stream:
        assert Answer.model_validate_json("".join(stream))


def test_what_is_no_instance(llm: genai.LLM) -> None:
    with pytest.raises(ReplyFormatError, match="cut off after 3 tokens"):
        llm.chat("How far?", schema=Answer, max_tokens=3)
    with pytest.raises(ReplyFormatError, match="is not a valid Picky") as raised:
        llm.chat("How far?", schema=Picky)
    assert "not this one" in raised.value.why
    with pytest.raises(InputError, match=r"(?s)schema = list\[.*a type with parameters.*wrap it in a class"):
        llm.chat("Hi", schema=list[int])  # type: ignore[call-overload]
    with pytest.raises(InputError, match="schema"):
        llm.chat("How far?", schema={"type": "object"})  # type: ignore[call-overload]
    with pytest.raises(OptionError, match="regex contradicts schema"):
        llm.generate("A", schema=Answer, regex="a")
    assert raised.value.why.startswith("number: ")
    assert not re.search("pydantic|type=|input_value", raised.value.why)


def body(**fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Hi"}]
    return {"custom_id": "1", "url": "/v1/chat/completions", "body": {"messages": messages, **fields}}


def test_response_format_of_openai(llm: genai.LLM) -> None:
    schema = {**Answer.model_json_schema(), "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}
    given = [body(response_format=form), body(response_format={"type": "text"}),
             body(response_format={"type": "json_object"})]  # fmt: skip
    items = [PromptFormat().item(one)[0] for one in given]
    assert items[2]["json_schema"] == {"type": "object"} and "json_schema" not in items[1]
    (answer,) = llm.map(items[:1], max_tokens=100)
    assert not problem(schema, answer.text)
    for wrong in ({"type": "xml"}, {"type": "json_schema"}, "json", {"type": "json_schema", "json_schema": {}}):
        with pytest.raises(OptionError, match="response_format"):
            PromptFormat().item(body(response_format=wrong))


def test_grammars_of_lines_replace_those_of_all(llm: genai.LLM) -> None:
    lines = [{"prompt": "A"}, {"prompt": "A", "regex": "[0-9]{2}"}, {"prompt": "A", "json_schema": {"const": 5}},
             {"prompt": "A", "regex": "a("}]  # fmt: skip
    items = [PromptFormat().item(line)[0] for line in lines]
    first, second, third, fourth = llm.map(items, choice=["yes", "no"])
    assert first.text in ("yes", "no") and second.text.isdigit() and json.loads(third.text) == 5
    assert isinstance(fourth.error, GrammarError)


def test_cells_of_tables_hold_grammars() -> None:
    item, _ = PromptFormat().item({"prompt": "A", "json_schema": '{"type": "integer"}', "choice": ""}, are_cells=True)
    assert item["json_schema"] == {"type": "integer"}
    assert PromptFormat().item({"prompt": "A", "regex": "[0-9]"}, are_cells=True)[0]["regex"] == "[0-9]"

"""Python functions as tools: names, types and descriptions for the model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

import genai
from genai.errors import InputError
from genai.text.tool_functions import as_tools, tool_of


def weather(city: str, days: int | None = None, *, unit: Literal["C", "F"] = "C", plain=True) -> str:  # type: ignore[no-untyped-def]
    """Return the weather in a city.

    Slow: it asks a station.

    Args:
        city (str): the name of the city,
            such as Oslo.
        days: number of days: 1 to 7
            default: today
        unit:
        missing: not a parameter

    Returns:
        A sentence.
    """


def test_a_function_is_described() -> None:
    assert tool_of(weather) == {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Return the weather in a city.\n\nSlow: it asks a station.\n\nReturns:\n    A sentence.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "the name of the city, such as Oslo."},
                    "days": {
                        "anyOf": [{"type": "integer"}, {"type": "null"}],
                        "description": "number of days: 1 to 7 default: today",
                    },
                    "unit": {"enum": ["C", "F"]},
                    "plain": {"type": "string"},
                },
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }


class Station:
    def read(self, hours: list[int]) -> dict[str, float]:
        return {}

    def __call__(self) -> str:
        return ""


def test_methods_and_objects() -> None:
    described = {"type": "function", "function": {"name": "clock"}}
    tools = as_tools([described, Station().read])
    assert tools is not None and tools[0] is described
    assert tools[1]["function"]["parameters"]["properties"] == {
        "hours": {"type": "array", "items": {"type": "integer"}}
    }
    assert as_tools(None) is None
    assert as_tools(same := [described]) is same


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: Station, "it is a class, and a tool is a function"),
        (lambda: Station(), "it is a Station"),
        (lambda: functools.partial(weather, "Oslo"), "it is a partial"),
        (lambda: lambda *names: "", r"function <lambda> has \*names"),
    ],
)
def test_what_cannot_be_a_tool(made: Callable[[], Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        as_tools([made()])


def test_templates_write_functions(bundled_folder: Path) -> None:
    """As in transformers, apply_chat_template accepts functions."""
    template, tokenizer = "{{ tools | tojson }}", genai.Tokenizer(bundled_folder)
    written = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tools=[weather], template_str=template)
    assert '"name": "weather"' in written
    with pytest.raises(InputError, match=r"tools\[0\] is a number"):
        tokenizer.apply_chat_template(
            [{"role": "user", "content": "Hi"}],
            tools=[1],  # type: ignore[list-item]
            template_str=template,
        )

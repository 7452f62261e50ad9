"""What a template may read: messages, tools and variables, checked and copied into plain JSON types."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ..errors import InputError

REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")


def from_json(name: str, value: object) -> object:
    """The value itself, or what it is as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        parsed: object = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name} is a text that is not JSON", str(error), f"pass JSON, or {name} as a list") from error
    return parsed


def checked_messages(messages: object) -> list[dict[str, Any]]:
    """Copies of the messages, with reasoning under each name that templates know.

    Raises:
        InputError: they are not what a template can read.
    """
    if not isinstance(messages, (list, tuple)):
        raise InputError(
            f"messages is a {type(messages).__name__}",
            "a list of messages, or its JSON text, is expected",
            'for example [{"role": "user", "content": "Hello"}]',
        )
    if not messages:
        raise InputError("messages is empty", "a conversation has at least one message", "add a user message")
    return [_checked_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _checked_message(message: object, where: str) -> dict[str, Any]:
    """A copy without keys whose value is None: templates ask whether a key is there."""
    if not isinstance(message, Mapping):
        raise InputError(f"{where} is a {type(message).__name__}", "an object is expected", 'with "role" and "content"')
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InputError(
            f"{where} has the role {role!r}", "a role is a text", 'add a "role", such as "user" or "assistant"'
        )
    content = message.get("content")
    if content is None and not any(message.get(name) for name in ("tool_calls", *REASONING_NAMES)):
        raise InputError(
            f"{where} has no content", "only a message with tool_calls or reasoning may lack it", 'add a "content"'
        )
    if content is not None and not isinstance(content, (str, list, tuple)):
        raise InputError(
            f"{where} has content of type {type(content).__name__}",
            "a text, or a list of parts, is expected",
            "convert it to a str",
        )
    copy = {name: value for name, value in plain(message, where).items() if value is not None}
    reasoning = next((copy[name] for name in REASONING_NAMES if name in copy), None)
    # Servers and templates disagree about the name: every template finds the one it reads.
    return copy if reasoning is None else {"thinking": reasoning, **copy, "reasoning_content": reasoning}


def checked_tools(tools: object) -> list[Any] | None:
    """Copies of the tools.

    Raises:
        InputError: they are not a list of objects.
    """
    if tools is None:
        return None
    if not isinstance(tools, (list, tuple)) or not all(isinstance(tool, Mapping) for tool in tools):
        raise InputError(
            f"tools is a {type(tools).__name__}",
            "a list of objects (JSON schemas), or its JSON text, is expected",
            'for example [{"type": "function", "function": {"name": …}}]',
        )
    return [plain(tool, f"tools[{index}]") for index, tool in enumerate(tools)]


def plain(value: object, where: str) -> Any:
    """A copy made of plain JSON types: an untrusted template must not meet objects with methods of their own."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return dict(_plain_items(value, where))
    if isinstance(value, (list, tuple)):
        return [plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    # Subclasses (enumerations, numpy.float64) become the plain type; str() would call a method of theirs.
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    raise InputError(
        f"{where} holds a {type(value).__name__}",
        "a template reads JSON types only",
        "convert it to text, number or list",
    )


def _plain_items(value: Mapping[Any, Any], where: str) -> Iterator[tuple[str, Any]]:
    for key, item in value.items():
        if not isinstance(key, str):
            raise InputError(f"{where} has the key {key!r}", "keys are texts", "convert the key to a str")
        yield str(key), plain(item, f"{where}.{key}")

"""The events that a reply is split into, and decoding of tool calls from JSON text."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias


@dataclass(frozen=True)
class Text:
    """A piece of the reply's text.

    Attributes:
        text: the piece.
        problem: reason why this text is not a tool call although it looks like a tool call; "" for ordinary text.
    """

    text: str
    problem: str = ""

    @property
    def raw(self) -> str:
        """The generated text of this event."""
        return self.text


@dataclass(frozen=True)
class Reasoning:
    """A piece of the model's reasoning."""

    text: str

    @property
    def raw(self) -> str:
        """The generated text of this event."""
        return self.text


@dataclass(frozen=True)
class ToolCall:
    """One complete tool call.

    Attributes:
        name: name of the tool.
        arguments: the decoded JSON object; a string only for tools that take plain text (gpt-oss's built-in `python`).
        raw: the generated text of this event. If one JSON array holds several calls, the first call has the whole text.
        id: the id that the model assigned, or None.
        index: index of the call in the reply, starting at 0.
    """

    name: str
    arguments: dict[str, Any] | str
    raw: str
    id: str | None = None
    index: int = 0

    @property
    def arguments_text(self) -> str:
        """The arguments as text, in the form of OpenAI-style APIs."""
        return self.arguments if isinstance(self.arguments, str) else json.dumps(self.arguments, ensure_ascii=False)


@dataclass(frozen=True)
class Marker:
    """The markers of a span, with the adjacent line breaks. Markers are not meant for display."""

    raw: str


@dataclass(frozen=True)
class End:
    """The end of the reply.

    Attributes:
        in_reasoning: True if the reply ended inside its reasoning, so that the text is missing.
    """

    in_reasoning: bool = False

    @property
    def raw(self) -> str:
        """Always "": this event has no generated text."""
        return ""


Event: TypeAlias = Text | Reasoning | ToolCall | Marker | End


class MalformedCallError(ValueError):
    """A text is not a tool call. The error does not leave this package; the text is returned with the reason."""


def decode_json(text: str) -> Any:
    """Return a JSON value, which can be written as JSON in UTF-8 again. Line breaks inside strings are accepted.

    Raises:
        MalformedCallError: the text is not JSON, is nested too deeply, or contains NaN, a number out of range, or half
            of a surrogate pair.
    """
    try:
        value = json.loads(text, strict=False, parse_constant=_reject_constant)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except RecursionError:
        raise MalformedCallError("the JSON of the tool call is nested too deeply") from None
    except ValueError as error:
        raise MalformedCallError(f"the JSON of the tool call is malformed: {error}") from None
    return value


def decode_arguments(text: str) -> dict[str, Any]:
    """Return a call's arguments from their JSON text. An empty text and null become {}.

    Raises:
        MalformedCallError: the text is not an object.
    """
    return {} if text.strip() in ("", "null") else _check_arguments(decode_json(text))


def call_from_json(text: str, raw: str) -> ToolCall:
    """Return a call from the text of one JSON object. Raise MalformedCallError if it is not a call."""
    return call_from_value(decode_json(text), raw)


def call_from_value(value: object, raw: str) -> ToolCall:
    """Return a call from a decoded JSON object. Arguments that are themselves JSON text are decoded.

    Missing, null and empty arguments become {}: models write calls of tools without parameters in these ways.

    Raises:
        MalformedCallError: the name is missing, or the name or the arguments have the wrong type.
    """
    if not isinstance(value, dict):
        raise MalformedCallError(f"a tool call must be a JSON object, not {type(value).__name__}")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise MalformedCallError('the tool call has no "name"')
    arguments = value.get("arguments")
    if arguments is None:
        arguments = value.get("parameters")
    if isinstance(arguments, str):
        arguments = decode_json(arguments) if arguments.strip() else None
    call_id = value.get("id")
    checked = {} if arguments is None else _check_arguments(arguments)
    return ToolCall(name, checked, raw, call_id if isinstance(call_id, str) else None)


def _check_arguments(arguments: object) -> dict[str, Any]:
    if not isinstance(arguments, dict):
        raise MalformedCallError(f"the arguments of a tool call must be a JSON object, not {type(arguments).__name__}")
    return arguments


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")

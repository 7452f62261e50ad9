"""What a reply is split into, and how JSON text becomes a tool call."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias


@dataclass(frozen=True)
class Text:
    """A piece of the answer.

    Attributes:
        text: the piece.
        problem: why this text, which looked like a tool call, is none; "" for ordinary text.
    """

    text: str
    problem: str = ""

    @property
    def raw(self) -> str:
        """The generated text behind this event."""
        return self.text


@dataclass(frozen=True)
class Reasoning:
    """A piece of what the model thinks before it answers."""

    text: str

    @property
    def raw(self) -> str:
        """The generated text behind this event."""
        return self.text


@dataclass(frozen=True)
class ToolCall:
    """One complete call of a tool.

    Attributes:
        name: the tool.
        arguments: the decoded JSON object; a string only for a tool that takes plain text (gpt-oss's own `python`).
        raw: the generated text behind this event. Of several calls in one JSON array, the first has all of it.
        id: the id given by the model, or None.
        index: 0 for the first call of the reply.
    """

    name: str
    arguments: dict[str, Any] | str
    raw: str
    id: str | None = None
    index: int = 0

    @property
    def arguments_text(self) -> str:
        """The arguments as text, as OpenAI-style APIs carry them."""
        return self.arguments if isinstance(self.arguments, str) else json.dumps(self.arguments, ensure_ascii=False)


@dataclass(frozen=True)
class Marker:
    """Text that only marks where spans begin and end, with the line breaks beside it: not for the reader."""

    raw: str


@dataclass(frozen=True)
class End:
    """The reply is over.

    Attributes:
        in_reasoning: it ended before the reasoning was closed, so the answer is missing.
    """

    in_reasoning: bool = False

    @property
    def raw(self) -> str:
        """Nothing was generated for this event."""
        return ""


Event: TypeAlias = Text | Reasoning | ToolCall | Marker | End


class MalformedCallError(ValueError):
    """The text is not a tool call. It never leaves this package: the text comes back flagged with the reason."""


def decode_json(text: str) -> Any:
    """The value, which is sure to be writable as JSON in UTF-8 again. Line breaks inside strings are forgiven.

    Raises:
        MalformedCallError: not JSON, nested too deep, NaN, a number out of range, or half of a surrogate pair.
    """
    try:
        value = json.loads(text, strict=False, parse_constant=_reject_constant)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except RecursionError:
        raise MalformedCallError("the JSON of the tool call is nested too deep") from None
    except ValueError as error:
        raise MalformedCallError(f"the JSON of the tool call is malformed: {error}") from None
    return value


def decode_arguments(text: str) -> dict[str, Any]:
    """The arguments of a call, from their own JSON text; MalformedCallError if it is no object."""
    return _check_arguments(decode_json(text))


def call_from_json(text: str, raw: str) -> ToolCall:
    """A call from the text of one JSON object; MalformedCallError if it is not one."""
    return call_from_value(decode_json(text), raw)


def call_from_value(value: object, raw: str) -> ToolCall:
    """A call from a decoded JSON object. Arguments that are themselves JSON text are decoded.

    Raises:
        MalformedCallError: it has no name or no arguments, or one of another type.
    """
    if not isinstance(value, dict):
        raise MalformedCallError(f"a tool call is a JSON object, not {type(value).__name__}")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise MalformedCallError('the tool call has no "name"')
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        arguments = decode_json(arguments)
    call_id = value.get("id")
    return ToolCall(name, _check_arguments(arguments), raw, call_id if isinstance(call_id, str) else None)


def _check_arguments(arguments: object) -> dict[str, Any]:
    if not isinstance(arguments, dict):
        raise MalformedCallError(f"the arguments of a tool call are a JSON object, not {type(arguments).__name__}")
    return arguments


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")

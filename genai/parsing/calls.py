"""From JSON text to a tool call: {"name": …, "arguments" or "parameters": {…}, "id": optional}."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from .events import ToolCall


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
    """The arguments of a call, from their own JSON text.

    Raises:
        MalformedCallError: not a JSON object.
    """
    return _check_arguments(decode_json(text))


def call_from_json(text: str, raw: str) -> ToolCall:
    """A call from the text of one JSON object.

    Raises:
        MalformedCallError: it is not one.
    """
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

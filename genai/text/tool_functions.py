"""Python functions as tools: the JSON schema of a function's arguments, from its signature and its docstring."""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, Union

from ..errors import InputError, kind_of

Tool: TypeAlias = Mapping[str, Any] | Callable[..., Any]
"""A tool that a model may call: {"type": "function", "function": {"name", "description", "parameters"}}, or a function
with annotations."""

_TYPES: Mapping[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean"}
# Types of values that an enum in a schema can list.
_VALUES = (str, int, bool, type(None))
_SUPPORTED = "supported: str, int, float, bool, list, dict with str keys, Literal and unions"
# The section of a docstring that describes the parameters, and an entry of it, in the style of Google.
_SECTION = re.compile(r"(?:Args|Arguments|Parameters):\s*")
_ENTRY = re.compile(r"(\s+)\*{0,2}(\w+)\s*(?:\([^()]*\))?\s*:\s*(.*)")


def as_tools(tools: Sequence[Tool] | None) -> Sequence[Mapping[str, Any]] | None:
    """Return tools with each function replaced by its description; see `tool_of`. Other values stay unchanged.

    >>> def clock(zone: str = "UTC") -> str:
    ...     '''Return the time.'''
    >>> as_tools([clock])[0]["function"]["name"]
    'clock'
    """
    if not isinstance(tools, (list, tuple)):
        return tools  # type: ignore[return-value]  # what is no list of tools is refused where tools are checked
    if all(isinstance(tool, Mapping) for tool in tools):
        return tools
    return [tool_of(tool) if callable(tool) and not isinstance(tool, Mapping) else tool for tool in tools]


def tool_of(function: Callable[..., Any], name: str | None = None) -> dict[str, Any]:
    """Return the description of a function as a tool, in the form of OpenAI's API.

    The parameters' types come from the annotations; a parameter without one is a text. The description is the
    docstring. The entries of its section "Args:" become the descriptions of the parameters.

    Args:
        function: the function or method. Its parameters can be passed by name.
        name: the name of the tool; None = the function's name.

    Raises:
        InputError: the object is not a function or a method, is a generator, has parameters that cannot be passed by
            name, or has an annotation without a JSON schema.

    >>> def add(a: int, b: int = 1) -> int:
    ...     '''Return the sum of two numbers.'''
    >>> tool_of(add)["function"]["parameters"]["required"]
    ['a']
    """
    if not (inspect.isfunction(function) or inspect.ismethod(function)):
        kind = "a class" if isinstance(function, type) else kind_of(function)
        raise InputError(
            f"{function!r:.80} cannot be a tool",
            f"it is {kind}, and a tool is a function, or an object with a name and a JSON schema",
            "pass a function with annotations",
        )
    name = name or function.__name__
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise InputError(
            f"function {name} is a generator", "a tool returns one value", "return a list instead of yielding values"
        )
    try:
        hints = typing.get_type_hints(function)
    except Exception as error:  # annotations are arbitrary code
        why = f"its annotations cannot be read: {described(error)}"
        raise InputError(
            f"function {name} cannot be a tool", why, "define or import the names in its annotations"
        ) from error
    properties: dict[str, dict[str, Any]] = {}
    required = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise InputError(f"function {name} has {parameter}", "arguments are passed by name", "use named parameters")
        properties[parameter.name] = _schema(hints.get(parameter.name, str), f"{name}({parameter.name})")
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    about, entries = _split_docstring(inspect.getdoc(function) or "", properties)
    for parameter_name, text in entries.items():
        properties[parameter_name] = {**properties[parameter_name], "description": text}
    parameters = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": parameters}}


def described(error: BaseException) -> str:
    """Describe an exception of foreign code, even if its __str__ fails."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


def _split_docstring(text: str, names: Mapping[str, object]) -> tuple[str, dict[str, str]]:
    """Return a docstring without the section of its parameters, and the text of each parameter."""
    about: list[str] = []
    entries: dict[str, list[str]] = {}
    current: list[str] = []
    is_inside, indent = False, ""
    for line in text.splitlines():
        if _SECTION.fullmatch(line):
            is_inside, indent, current = True, "", []
        elif not is_inside or (line and not line[0].isspace()):
            is_inside = False
            about.append(line)
        elif (entry := _ENTRY.fullmatch(line)) is not None and entry[1] == (indent := indent or entry[1]):
            current = entries.setdefault(entry[2], [])
            current.append(entry[3])
        else:
            current.append(line.strip())
    joined = {name: " ".join(filter(None, lines)) for name, lines in entries.items()}
    return "\n".join(about).strip(), {name: said for name, said in joined.items() if said and name in names}


def _schema(hint: Any, where: str) -> dict[str, Any]:
    """Return the JSON schema of a type."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal and all(type(one) in _VALUES for one in inside):
        return {"enum": list(inside)}
    if origin is list:
        return {"type": "array", "items": _schema(inside[0], where)}
    if origin is dict and inside[0] is str:
        return {"type": "object", "additionalProperties": _schema(inside[1], where)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [{"type": "null"} if one is type(None) else _schema(one, where) for one in inside]}
    if origin is None:
        for known, name in {**_TYPES, list: "array", dict: "object"}.items():
            if hint is known:
                return {"type": name}
    raise InputError(f"{where} has the type {hint!r:.200}", _SUPPORTED, "use one of these types")

"""`genai chat --tools MODULE.py`: plain Python functions that the model may ask to be called, and people allow."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import sys
import types
import typing
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union

from genai.errors import InputError

# A result is part of the next prompt.
_MOST_CHARACTERS = 4000
_TYPES: Mapping[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean"}
# What a schema can list.
_VALUES = (str, int, bool, type(None))


@dataclass(frozen=True)
class ToolFunctions:
    """The public functions of a module.

    Attributes:
        functions: by name.
    """

    functions: Mapping[str, Callable[..., Any]]

    @property
    def tools(self) -> list[dict[str, Any]]:
        """As chat templates take them. Raises InputError: a function or a type that no schema says."""
        return [_tool(name, function) for name, function in self.functions.items()]

    def call(self, name: str, arguments: Any) -> str:
        """What a function returns, as text; what it raises, too: the model is to know.

        What it prints goes to stderr. Raises KeyboardInterrupt alone, which is a person's and not the function's.
        """
        function = self.functions.get(name)
        if function is None or not isinstance(arguments, dict):
            return f"Error: there is no function {name}; there are {', '.join(self.functions)}"
        try:
            with redirect_stdout(sys.stderr):
                result = function(**arguments)
                text = _text_of(asyncio.run(result) if inspect.iscoroutine(result) else result)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # sys.exit() in a function ends the function, not the chat
            text = f"Error: {_said(error)}"
        text = text if len(text) <= _MOST_CHARACTERS else text[:_MOST_CHARACTERS] + " … (cut)"
        return text.encode("utf-8", "backslashreplace").decode("utf-8")  # half a surrogate pair is no text


def _text_of(result: object) -> str:
    """A text itself, and anything else as JSON, or as Python shows it where JSON cannot say it."""
    if isinstance(result, str):
        return str(result)
    try:
        return json.dumps(result, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError):
        return str(result)


def _said(error: BaseException) -> str:
    """What an exception is, also where it cannot say it."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


def read_functions(path: Path) -> ToolFunctions:
    """The functions that a Python file defines, but for names that begin with an underscore. The file is executed.

    Raises:
        InputError: it cannot be read, fails, or defines none; or one that no schema describes.
    """
    spec = importlib.util.spec_from_file_location(f"genai_tools_{path.stem}", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise InputError(f"--tools {path}: no Python file", "its functions may be called", "name a .py file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where functions look up their annotations
    try:
        with redirect_stdout(sys.stderr):
            spec.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a file that calls sys.exit() is no reason to end without a word
        raise InputError(f"--tools {path}: {_said(error)}", "the file is executed", "correct it") from error
    named_functions = {
        name: value
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == spec.name and not name.startswith("_")
    }
    if not named_functions:
        raise InputError(f"--tools {path} defines no function", "there is nothing to call", "define one")
    functions = ToolFunctions(named_functions)
    _ = functions.tools
    return functions


def _tool(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise InputError(f"function {name} yields", "a result is one value", "return a list")
    try:
        hints = typing.get_type_hints(function)
    except Exception as error:  # whatever is written there is evaluated
        why = f"its annotations cannot be read: {_said(error)}"
        raise InputError(f"function {name}", why, "define or import what they name") from error
    properties, required = {}, []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise InputError(f"function {name} takes {parameter}", "arguments are given by name", "name each of them")
        properties[parameter.name] = _schema(hints.get(parameter.name, str), f"{name}({parameter.name})")
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    about = inspect.getdoc(function) or ""
    return {"type": "function", "function": {"name": name, "description": about, "parameters": parameters}}


def _schema(hint: Any, where: str) -> dict[str, Any]:
    """The JSON schema of a type."""
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
    known = "str, int, float, bool, list, dict with keys of str, Literal and unions are understood"
    raise InputError(f"{where} has the type {hint!r:.200}", known, "use these")

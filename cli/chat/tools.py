"""`genai chat --tools MODULE.py`: plain Python functions that the model may ask to be called, and people allow."""

from __future__ import annotations

import importlib.util
import inspect
import json
import sys
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union

from genai.errors import InputError

# A result is part of the next prompt.
_MOST_CHARACTERS = 4000
_TYPES: Mapping[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean"}


@dataclass(frozen=True)
class ToolFunctions:
    """The public functions of a module.

    Attributes:
        functions: by name.
    """

    functions: Mapping[str, Callable[..., Any]]

    @property
    def tools(self) -> list[dict[str, Any]]:
        """As chat templates take them. Raises InputError: a parameter of a type that no schema says."""
        return [_tool(name, function) for name, function in self.functions.items()]

    def call(self, name: str, arguments: Any) -> str:
        """What a function returns, as text; what it raises, too: the model is to know."""
        function = self.functions.get(name)
        if function is None or not isinstance(arguments, dict):
            return f"Error: there is no function {name}; there are {', '.join(self.functions)}"
        try:
            result = function(**arguments)
            text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
        except Exception as error:
            text = f"Error: {type(error).__name__}: {error}"
        return text if len(text) <= _MOST_CHARACTERS else text[:_MOST_CHARACTERS] + " … (cut)"


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
        spec.loader.exec_module(module)
    except Exception as error:
        what = f"--tools {path}: {type(error).__name__}: {error}"
        raise InputError(what, "the file is executed", "correct it") from error
    found = {
        name: value
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == spec.name and not name.startswith("_")
    }
    if not found:
        raise InputError(f"--tools {path} defines no function", "there is nothing to call", "define one")
    functions = ToolFunctions(found)
    _ = functions.tools
    return functions


def _tool(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(function)
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
    if hint in _TYPES:
        return {"type": _TYPES[hint]}
    if origin is Literal:
        return {"enum": list(inside)}
    if origin is list and inside:
        return {"type": "array", "items": _schema(inside[0], where)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [{"type": "null"} if one is type(None) else _schema(one, where) for one in inside]}
    if hint in (list, dict) or origin is dict:
        return {"type": "array" if hint is list else "object"}
    known = "str, int, float, bool, list, dict, Literal and unions are understood"
    raise InputError(f"{where} has the type {hint!r}", known, "use these")

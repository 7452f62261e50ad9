"""`genai chat --tools MODULE.py`: Python functions that the model may call, with the user's permission."""

from __future__ import annotations

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

# Results are truncated to this length, because they become part of the next prompt.
_MOST_CHARACTERS = 4000
_TYPES: Mapping[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean"}
# Types of values that an enum in a schema can list.
_VALUES = (str, int, bool, type(None))


@dataclass(frozen=True)
class ToolFunctions:
    """The public functions of a module.

    Attributes:
        functions: the functions by name.
    """

    functions: Mapping[str, Callable[..., Any]]

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The tools for chat templates. Raises InputError if a function or type has no schema."""
        return [_tool(name, function) for name, function in self.functions.items()]

    def call(self, name: str, arguments: Any) -> str:
        """Call a function and return its result, or the error that it raised, as text for the model.

        Text that the function prints goes to stderr. Only KeyboardInterrupt propagates, because the user causes it.
        """
        function = self.functions.get(name)
        if function is None or not isinstance(arguments, dict):
            return f"Error: there is no function {name}; the functions are {', '.join(self.functions)}"
        try:
            with redirect_stdout(sys.stderr):
                result = function(**arguments)
                if inspect.iscoroutine(result):
                    import asyncio  # loads slowly, and few functions need it

                    result = asyncio.run(result)
                text = _text_of(result)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # sys.exit() in a function ends the function, not the chat
            text = f"Error: {_said(error)}"
        text = text if len(text) <= _MOST_CHARACTERS else text[:_MOST_CHARACTERS] + " … (truncated)"
        return text.encode("utf-8", "backslashreplace").decode("utf-8")  # a lone surrogate cannot be encoded


def _text_of(result: object) -> str:
    """Return a string unchanged, and any other result as JSON, or as str() if it is not serialisable."""
    if isinstance(result, str):
        return str(result)
    try:
        return json.dumps(result, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError):
        return str(result)


def _said(error: BaseException) -> str:
    """Describe an exception, even if its __str__ fails."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


def read_functions(path: Path) -> ToolFunctions:
    """Execute a Python file and return the functions that it defines and whose names do not begin with an underscore.

    Raises:
        InputError: the file cannot be read, fails, defines no function, or has a function without a schema.
    """
    spec = importlib.util.spec_from_file_location(f"genai_tools_{path.stem}", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise InputError(
            f"--tools {path}: not a Python file", "the tools are functions in a Python file", "pass a .py file"
        )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # typing.get_type_hints looks up annotations here
    try:
        with redirect_stdout(sys.stderr):
            spec.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # includes SystemExit: a file that calls sys.exit() must not end the chat silently
        raise InputError(
            f"--tools {path}: {_said(error)}", "the file is executed to find its functions", "fix the error in the file"
        ) from error
    named_functions = {
        name: value
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == spec.name and not name.startswith("_")
    }
    if not named_functions:
        raise InputError(
            f"--tools {path} defines no public function",
            "tools are public functions",
            "define a function without a leading underscore",
        )
    functions = ToolFunctions(named_functions)
    _ = functions.tools
    return functions


def _tool(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise InputError(
            f"function {name} is a generator", "a tool returns one value", "return a list instead of yielding values"
        )
    try:
        hints = typing.get_type_hints(function)
    except Exception as error:  # annotations are arbitrary code
        why = f"its annotations cannot be read: {_said(error)}"
        raise InputError(
            f"function {name} cannot be a tool", why, "define or import the names in its annotations"
        ) from error
    properties, required = {}, []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise InputError(f"function {name} has {parameter}", "arguments are passed by name", "use named parameters")
        properties[parameter.name] = _schema(hints.get(parameter.name, str), f"{name}({parameter.name})")
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    about = inspect.getdoc(function) or ""
    return {"type": "function", "function": {"name": name, "description": about, "parameters": parameters}}


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
    known = "supported: str, int, float, bool, list, dict with str keys, Literal and unions"
    raise InputError(f"{where} has the type {hint!r:.200}", known, "use one of these types")

"""Environment variables for options. Every option has a variable, and errors name the variable that set a value."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from genai.errors import GenaiError

_WITHOUT = ("help", "help_all", "version", "install_completion", "show_completion")
# Options whose argument in Python has another name.
_IN_PYTHON = {"ctx_size": "context_size", "form": "format", "kv_force": "kv_dtype_force", "kv_type": "kv_dtype"}


def python_name(name: str) -> str:
    """Return the name in Python of an option."""
    return _IN_PYTHON.get(name, name)


def bind_variables(parameters: Iterable[Any]) -> None:
    """Bind each option of a command to an environment variable: --top-k to GENAI_TOP_K."""
    for parameter in parameters:
        if parameter.param_type_name == "option" and parameter.name not in _WITHOUT:
            longest = max(parameter.opts, key=len)
            parameter.show_envvar = False  # docs/reference/environment.md lists them
            parameter.envvar = "GENAI_" + longest.removeprefix("--").replace("-", "_").upper()
        elif parameter.name == "model":
            parameter.envvar, parameter.show_envvar = "GENAI_MODEL", False
            if parameter.nargs == -1:  # typer would split the value at white space, which paths may contain
                parameter.value_from_envvar = partial(_whole_value, parameter)


def _whole_value(parameter: Any, ctx: Any) -> list[str] | None:
    value = parameter.resolve_envvar_value(ctx)
    return None if value is None else [value]


def is_from_variable(ctx: Any, parameter: Any) -> bool:
    """Return True if a parameter's value comes from its variable."""
    return is_variable(ctx, parameter.name)


def is_variable(ctx: Any, name: str) -> bool:
    """Return True if the value of the parameter with this Python name comes from its variable."""
    return "ENVIRONMENT" in str(ctx.get_parameter_source(name))


def name_variables(error: GenaiError, ctx: Any) -> None:
    """Make an error name the variables that set the options in the error."""
    for parameter in ctx.command.params:
        if is_from_variable(ctx, parameter):
            _name_variable(error, parameter, ctx.params[parameter.name])


def _name_variable(error: GenaiError, parameter: Any, value: Any) -> None:
    """Make an error name an option's variable if the error is about that option."""
    variable = parameter.envvar
    if parameter.param_type_name == "argument":  # errors refer to the model by its path
        if _is_about(error.what, value, "model"):
            error.what += f" (set by {variable})"
        return
    flags = "|".join(map(re.escape, [*parameter.opts, *parameter.secondary_opts]))
    flag = re.compile(rf"(?<![\w-])({flags})(?![\w-])")
    message, why = (flag.sub(variable, part) for part in (error.what, error.why))
    name = _IN_PYTHON.get(parameter.name, parameter.name)
    if variable not in message and (_is_called(message, name) or _is_about(message, value, name)):
        message += f" (set by {variable})"
    if (message, why) != (error.what, error.why):
        longest = max(parameter.opts, key=len)
        error.what, error.why = message, why
        error.fix += f"; {longest} overrides the environment variable {variable}"


def _is_called(message: str, name: str) -> bool:
    """Return True if an error begins with an option's name, as in "context size = 0", "samplers contains 'x'"."""
    return message.startswith((f"{name} = ", f"{name.replace('_', ' ')} = ", f"{name} contains "))


def _is_about(message: str, value: Any, name: str) -> bool:
    """Return True if an error begins with an option's value, or with its name and value. Parts of words do not match.

    If the value is a path, the error may begin with a longer path inside it.
    """
    called = "|".join({re.escape(name), re.escape(name.replace("_", " "))})
    for part in _parts(value):
        quoted, plain = re.escape(repr(part)), re.escape(part)
        as_beginning = rf"({quoted}|{plain}(?=$|[:/\\]))"
        after_name = rf"(.* )?({called}) (is )?({quoted}|{plain}(?=$|[: ]))"
        if re.match(f"{as_beginning}|{after_name}", message):
            return True
    return False


def _parts(value: Any) -> list[str]:
    """Return the parts of a value that errors may name: each of several values, and the path in NAME=PATH:SCALE."""
    if isinstance(value, list | tuple):
        return [part for one in value for part in _parts(one)]
    if not isinstance(value, str | Path) or not str(value):
        return []
    text = str(value)
    path = text.partition("=")[2]
    parts = {text, str(Path(text).expanduser()), path, path.rpartition(":")[0]}
    return sorted(parts - {""})

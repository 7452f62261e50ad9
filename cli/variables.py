"""Environment variables of options: every option has one, and errors call what was given by its name."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from genai.errors import GenaiError

_WITHOUT = ("help", "version", "install_completion", "show_completion")
# Options that Python calls something else.
_IN_PYTHON = {"ctx_size": "context_size", "form": "format", "kv_force": "kv_dtype_force", "kv_type": "kv_dtype"}


def bind_variables(parameters: Iterable[Any]) -> None:
    """Let options of a command be given by variables, too: --top-k by GENAI_TOP_K."""
    for parameter in parameters:
        if parameter.param_type_name == "option" and parameter.name not in _WITHOUT:
            longest = max(parameter.opts, key=len)
            parameter.show_envvar = False  # they have a page of their own
            parameter.envvar = "GENAI_" + longest.removeprefix("--").replace("-", "_").upper()
        elif parameter.name == "model":
            parameter.envvar, parameter.show_envvar = "GENAI_MODEL", False


def is_from_variable(ctx: Any, parameter: Any) -> bool:
    """Whether a parameter's value is that of its variable."""
    return is_variable(ctx, parameter.name)


def is_variable(ctx: Any, name: str) -> bool:
    """The same for a parameter by its name in Python."""
    return "ENVIRONMENT" in str(ctx.get_parameter_source(name))


def name_variables(error: GenaiError, ctx: Any) -> None:
    """Where an error speaks of options that their variables gave, let it speak of the variables."""
    for parameter in ctx.command.params:
        if is_from_variable(ctx, parameter):
            _name_variable(error, parameter, ctx.params[parameter.name])


def _name_variable(error: GenaiError, parameter: Any, value: Any) -> None:
    """Where an error speaks of an option that its variable gave, let it speak of the variable."""
    variable = parameter.envvar
    if parameter.param_type_name == "argument":  # errors speak of the model by its name
        if _is_about(error.what, value, "model"):
            error.what += f" (of the variable {variable})"
        return
    flags = "|".join(map(re.escape, [*parameter.opts, *parameter.secondary_opts]))
    flag = re.compile(rf"(?<![\w-])({flags})(?![\w-])")
    message, why = (flag.sub(variable, part) for part in (error.what, error.why))
    name = _IN_PYTHON.get(parameter.name, parameter.name)
    if variable not in message and (_is_called(message, name) or _is_about(message, value, name)):
        message += f" (of the variable {variable})"
    if (message, why) != (error.what, error.why):
        longest = max(parameter.opts, key=len)
        error.what, error.why = message, why
        error.fix += f"; {variable} is a variable of the environment, over which {longest} wins"


def _is_called(message: str, name: str) -> bool:
    """Whether an error begins with an option by its name, as in "context size = 0", "samplers names 'x'"."""
    return message.startswith((f"{name} = ", f"{name.replace('_', ' ')} = ", f"{name} names "))


def _is_about(message: str, value: Any, name: str) -> bool:
    """Whether an error begins with what an option was given, or with its name and that: a letter in a word is not it.

    Where a path was given, it may go on to a file that lies there.
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
    """What of an option's value errors may name: each of several, and the path in NAME=PATH:SCALE."""
    if isinstance(value, list | tuple):
        return [part for one in value for part in _parts(one)]
    if not isinstance(value, str | Path) or not str(value):
        return []
    text = str(value)
    path = text.partition("=")[2]
    parts = {text, str(Path(text).expanduser()), path, path.rpartition(":")[0]}
    return sorted(parts - {""})

"""Environment variables of options: every option has one, and errors call what was given by its name."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from genai.errors import GenaiError

_WITHOUT = ("help", "version", "install_completion", "show_completion")
# Options that Python calls something else.
_IN_PYTHON = {"ctx_size": "context_size", "kv_force": "kv_dtype_force", "kv_type": "kv_dtype"}


def bind_variables(command: Any) -> None:
    """Let options of a command and those below it be given by variables, too: --top-k by GENAI_TOP_K."""
    for parameter in command.params:
        if parameter.param_type_name == "option" and parameter.name not in _WITHOUT:
            longest = max(parameter.opts, key=len)
            parameter.show_envvar = False  # they have a page of their own
            parameter.envvar = "GENAI_" + longest.removeprefix("--").replace("-", "_").upper()
        elif parameter.name == "model":
            parameter.envvar, parameter.show_envvar = "GENAI_MODEL", False
    invoke = command.invoke
    command.invoke = lambda ctx: _invoked(invoke, ctx)
    for child in getattr(command, "commands", {}).values():
        bind_variables(child)


def is_from_variable(ctx: Any, parameter: Any) -> bool:
    """Whether a parameter's value is that of its variable."""
    return "ENVIRONMENT" in str(ctx.get_parameter_source(parameter.name))


def _invoked(invoke: Callable[[Any], Any], ctx: Any) -> Any:
    try:
        return invoke(ctx)
    except GenaiError as error:
        for parameter in ctx.command.params:
            if is_from_variable(ctx, parameter):
                _name_variable(error, parameter, ctx.params[parameter.name])
        raise


def _name_variable(error: GenaiError, parameter: Any, value: Any) -> None:
    """Where an error speaks of an option that its variable gave, let it speak of the variable."""
    if parameter.param_type_name == "argument":  # errors speak of the model by its name
        if value is not None and str(value) in error.what:
            error.what += f" (of the variable {parameter.envvar})"
        return
    flags = "|".join(map(re.escape, [*parameter.opts, *parameter.secondary_opts]))
    flag, variable = re.compile(rf"(?<![\w-])({flags})(?![\w-])"), parameter.envvar
    what, why = (flag.sub(variable, part) for part in (error.what, error.why))
    if what.startswith(f"{_IN_PYTHON.get(parameter.name, parameter.name)} = "):
        what += f" (of the variable {variable})"
    if (what, why) != (error.what, error.why):
        longest = max(parameter.opts, key=len)
        error.what, error.why = what, why
        error.fix += f"; {variable} is a variable of the environment, over which {longest} wins"

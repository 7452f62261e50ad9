"""Base classes of all `genai` commands. They add our help pages, and an environment variable for every option."""

from __future__ import annotations

import re
from collections.abc import Callable
from copy import copy
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from genai.errors import GenaiError

from .completions import complete
from .help_page import check_dashes, write_example, write_options
from .places import with_flags_named
from .variables import bind_variables, name_variables

F = TypeVar("F", bound=Callable[..., Any])
_EVERYTHING = "genai.help_all"


class _Shared:
    """A mixin for commands and groups. In the list of base classes, it precedes the class from typer."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        command: Any = self
        # typer would truncate its automatic short help at the window's width.
        command.short_help = re.split(r"(?<=[.:]) |\n\n", command.help or "", maxsplit=1)[0].rstrip(":.") + "."
        bind_variables(command.params)
        complete(command.params)
        for parameter in command.params:
            if parameter.param_type_name == "argument" and parameter.metavar is None:
                parameter.metavar = parameter.name.upper()

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse arguments. Some of typer's errors do not name their command, so add it."""
        check_dashes(self, ctx.command_path, args)
        try:
            parsed: list[str] = super().parse_args(ctx, args)  # type: ignore[misc]
            return parsed
        except Exception as error:
            if getattr(error, "ctx", ctx) is None:
                error.ctx = ctx  # type: ignore[attr-defined]
            raise

    def invoke(self, ctx: Any) -> Any:
        """Run the command. Errors name the environment variables that set the options."""
        try:
            return super().invoke(ctx)  # type: ignore[misc]
        except GenaiError as error:
            name_variables(error, ctx)
            with_flags_named(error, ctx)
            raise


class Command(_Shared, TyperCommand):
    """A command. `--help` shows the options that most users need; `--help-all` shows all options."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, with `--help` and `--help-all` last."""
        parameters = super().get_params(ctx)
        help_option = self.get_help_option(ctx)
        if help_option is None:
            return parameters
        help_all: Any = copy(help_option)
        help_all.name, help_all.opts, help_all.secondary_opts = "help_all", ["--help-all"], []
        help_all.help, help_all.callback = "Show all options and exit.", _show_all
        return [*parameters, help_all]

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """Write the command's description and an example."""
        super().format_help_text(ctx, formatter)
        write_example(ctx, formatter)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options."""
        write_options(self, ctx, formatter, everything=ctx.meta.get(_EVERYTHING, False))


def _show_all(ctx: Any, parameter: Any, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        ctx.meta[_EVERYTHING] = True
        typer.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


class Group(_Shared, TyperGroup):
    """A command with subcommands."""


class App(typer.Typer):
    """A typer application whose commands are `Command` and `Group` objects."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(cls=Group, **settings)

    def command(self, name: str | None = None, **settings: Any) -> Callable[[F], F]:
        """Return a decorator that registers a function as a command."""
        return super().command(name, cls=Command, **settings)

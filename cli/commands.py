"""What every command of `genai` has: help of ours, and a variable of the environment per option."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from genai.errors import GenaiError

from .help_page import write_options
from .variables import bind_variables, name_variables

F = TypeVar("F", bound=Callable[..., Any])


class _Shared:
    """The part that commands and groups share. Mixed in before a class of typer's."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        command: Any = self
        # Whole, where an automatic one is cut at the window's width.
        command.short_help = re.split(r"(?<=[.:]) |\n\n", command.help or "", maxsplit=1)[0].rstrip(":.") + "."
        bind_variables(command.params)
        for parameter in command.params:
            if parameter.param_type_name == "argument" and parameter.metavar is None:
                parameter.metavar = parameter.name.upper()

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As typer parses them; errors know their command, which some of typer's do not."""
        try:
            parsed: list[str] = super().parse_args(ctx, args)  # type: ignore[misc]
            return parsed
        except Exception as error:
            if getattr(error, "ctx", ctx) is None:
                error.ctx = ctx  # type: ignore[attr-defined]
            raise

    def invoke(self, ctx: Any) -> Any:
        """Run it; errors name the variables that options came from."""
        try:
            return super().invoke(ctx)  # type: ignore[misc]
        except GenaiError as error:
            name_variables(error, ctx)
            raise


class Command(_Shared, TyperCommand):
    """A command."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write its options in groups."""
        write_options(self, ctx, formatter)


class Group(_Shared, TyperGroup):
    """Commands below a command."""


class App(typer.Typer):
    """Commands in the making."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(cls=Group, **settings)

    def command(self, name: str | None = None, **settings: Any) -> Callable[[F], F]:
        """Make a function a command."""
        return super().command(name, cls=Command, **settings)

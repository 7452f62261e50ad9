"""Flags that several commands share: declared once, they arrive in a command as one argument."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_type_hints

Command = Callable[..., None]


def flag_groups(command: Command) -> Command:
    """Decorator: an argument whose type is a dataclass stands for one flag per field."""
    for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
        if isinstance(parameter.annotation, type) and dataclasses.is_dataclass(parameter.annotation):
            command = _with_group(command, name, parameter.annotation)
    return command


def _with_group(command: Command, name: str, group: Any) -> Command:
    types = get_type_hints(group, include_extras=True)
    flags = [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=types[field.name]
        )
        for field in dataclasses.fields(group)
    ]
    return with_flags(command, name, flags, lambda given: group(**given))


def with_flags(
    command: Command, name: str, flags: Sequence[inspect.Parameter], gather: Callable[[Mapping[str, Any]], Any]
) -> Command:
    """The command with flags where it has the argument `name`, which `gather` makes of their values."""
    shown: list[inspect.Parameter] = []
    for own in inspect.signature(command, eval_str=True).parameters.values():
        shown += flags if own.name == name else [own.replace(kind=inspect.Parameter.KEYWORD_ONLY)]

    @functools.wraps(command)
    def expanded(**arguments: Any) -> None:
        given = {flag.name: arguments.pop(flag.name) for flag in flags}
        command(**arguments, **{name: gather(given)})

    expanded.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    expanded.__annotations__ = {flag.name: flag.annotation for flag in shown}
    return expanded

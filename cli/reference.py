"""The command-line reference, written from the commands themselves: `python -m genai.cli.reference > docs/cli.md`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_HEAD = """\
# The command line

Written from the code by `python -m genai.cli.reference`; a test compares the two.

stdout carries only the result; messages, figures and progress go to stderr. Exit codes: 0 done, 1 failed, 2 wrong
usage, 130 interrupted. Every option below can also be set by a variable, named in the last column; a flag wins over
it, and several values are separated by spaces. Shell completion: `genai --install-completion`.
"""


def reference() -> str:
    """The whole reference in Markdown."""
    from .app import command

    return "\n".join([_HEAD, *_sections(command(), "genai")])


def _sections(command: Any, name: str) -> Iterator[str]:
    children = getattr(command, "commands", {})
    if not children:
        yield from _section(command, name)
    for child in children:
        yield from _sections(children[child], f"{name} {child}")


def _section(command: Any, name: str) -> Iterator[str]:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    usage = " ".join([name, "[OPTIONS]", *(p.name.upper() if p.required else f"[{p.name.upper()}]" for p in arguments)])
    yield f"## {name}\n\n{command.help}\n\n```\n{usage}\n```\n"
    yield "| option | meaning | default | variable |\n|---|---|---|---|"
    for parameter in command.params:
        if parameter.name != "help":
            yield _row(parameter)
    yield ""


def _row(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        names = f"`{parameter.name.upper()}`"
    else:
        names = ", ".join(f"`{name}`" for name in [*parameter.opts, *parameter.secondary_opts])
    help_text = (getattr(parameter, "help", None) or "").replace("|", "\\|")
    default = parameter.default if isinstance(parameter.default, int | float | str) else None
    shown = "" if default is None or default is False else f"`{'on' if default is True else default}`"
    variable = f"`{parameter.envvar}`" if parameter.envvar else ""
    return f"| {names} | {help_text} | {shown} | {variable} |"


if __name__ == "__main__":
    print(reference(), end="")

"""Writes docs/cli.md and docs/environment.md from the commands: `python -m tools.command_table [--check]`.

The first has the commands and their options, the second the variables.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent.parent / "docs"
_HEAD = """\
# The command line

Written from the code by `python -m tools.command_table`; a test compares the two.

stdout carries only the result; messages, figures and progress go to stderr. Exit codes: 0 done, 1 failed, 2 wrong
usage, 130 interrupted. Every option can also be set by a variable: see [environment.md](environment.md). Shell
completion: `genai --install-completion`.
"""
_ENVIRONMENT = """\
# Environment variables

Written from the code by `python -m tools.command_table`; a test compares the two.

| variable | meaning |
|---|---|
| `GENAI_CACHE_DIR` | Where kernels, pulled and built models are kept [default: `$XDG_CACHE_HOME`, else `~/.cache`]. |
| `GENAI_CPU_ISA` | Compute as a lesser machine would: amx, vnni, avx2 or portable. |
| `XDG_STATE_HOME` | Where the chat's history is kept [default: `~/.local/state`]. |
| `HF_TOKEN` | Token for gated and private models; else the one that `hf auth login` keeps. |
| `HF_ENDPOINT` | The hub's address [default: `https://huggingface.co`]. |
| `HF_HUB_OFFLINE` | 1 forbids the network: names are looked for in the cache alone. |
| `HF_HOME`, `HF_HUB_CACHE` | Where Hugging Face's library keeps downloads: `genai pull` takes over what is there. |
| `NO_COLOR`, `TERM=dumb` | No colours and no dimmed text; with the latter the chat draws nothing. |

## Options of commands

A flag wins over its variable. Several values are separated by spaces; what is on or off takes 1 or 0. A variable
applies to every command that has the option, so set one only for a single command, or where it is to hold for all.

| variable | option | of genai |
|---|---|---|
"""


def reference() -> str:
    """The whole reference in Markdown."""
    from genai.cli.app import command

    return "\n".join([_HEAD, *(_section(one, f"genai {name}") for name, one in _leaves(command(), ""))])


def environment() -> str:
    """The page of variables in Markdown."""
    from genai.cli.app import command

    found: dict[tuple[str, str], list[str]] = {}
    for name, one in _leaves(command(), ""):
        for parameter in one.params:
            if parameter.envvar and not _is_hidden(parameter):
                found.setdefault((parameter.envvar, _names(parameter)), []).append(name)
    rows = [f"| `{variable}` | {names} | {', '.join(of)} |" for (variable, names), of in sorted(found.items())]
    return _ENVIRONMENT + "\n".join(rows) + "\n"


def _leaves(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    children = getattr(command, "commands", {})
    if not children:
        yield name.strip(), command
    for child in children:
        yield from _leaves(children[child], f"{name} {child}")


def _section(command: Any, name: str) -> str:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    usage = " ".join([name, "[OPTIONS]", *(p.name.upper() if p.required else f"[{p.name.upper()}]" for p in arguments)])
    rows = [_row(parameter) for parameter in command.params if parameter.name != "help" and not _is_hidden(parameter)]
    table = "\n".join(["| option | meaning | default |", "|---|---|---|", *rows])
    return f"## {name}\n\n{command.help}\n\n```\n{usage}\n```\n\n{table}\n"


def _is_hidden(parameter: Any) -> bool:
    """Whether it is an earlier name of another option."""
    return bool(getattr(parameter, "hidden", False))


def _names(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{parameter.name.upper()}`"
    return ", ".join(f"`{name}`" for name in [*parameter.opts, *parameter.secondary_opts])


def _row(parameter: Any) -> str:
    help_text = (getattr(parameter, "help", None) or "").replace("|", "\\|")
    default = parameter.default if isinstance(parameter.default, int | float | str) else None
    shown = "" if default is None or default is False else f"`{'on' if default is True else default}`"
    return f"| {_names(parameter)} | {help_text} | {shown} |"


def main() -> None:
    """Write the pages, or with --check compare them."""
    for name, text in (("cli.md", reference()), ("environment.md", environment())):
        if "--check" in sys.argv:
            if (DOCS / name).read_text(encoding="utf-8") != text:
                sys.exit(f"{DOCS / name} is not what the commands say")
        else:
            (DOCS / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

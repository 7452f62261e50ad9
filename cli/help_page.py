"""Help pages that group the options and never truncate them, and the messages of usage errors."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from shlex import quote
from typing import Any

from genai.errors import ModelFolderError, OptionError

from .completions import FILES, takes_model
from .short_help import SHORT_HELP
from .variables import is_from_variable

MODEL, SAMPLING, OUTPUT, ADVANCED = "Model", "Sampling", "Output", "Advanced"
_KINDS = {"int": "N", "float": "NUMBER", "str": "TEXT", "path": "PATH"}
_KIND = r"<(?:list\[)?(\w+)(?: range)?\]?>"
# Replaces hyphens while lines are wrapped, because textwrap would break "--no-stats" after "--no-".
_WHOLE = "\ue000"
# Names that other programs use for our commands.
_OTHER_NAMES = {
    "ask": "generate",
    "convert": "build",
    "create": "build",
    "delete": "rm",
    "describe": "info",
    "download": "pull",
    "inspect": "info",
    "kill": "stop",
    "list": "ls",
    "ls": "list",
    "perplexity": "eval",
    "ps": "list",
    "remove": "rm",
    "show": "info",
}
# Names that other programs use for our options.
OTHER_OPTIONS = {
    "--context-length": "--ctx-size",
    "--file": "--prompt",
    "--max-length": "--max-tokens",
    "--max-new-tokens": "--max-tokens",
    "--n-predict": "--max-tokens",
    "--num-ctx": "--ctx-size",
    "--num-predict": "--max-tokens",
    "--temp": "--temperature",
    "--repetition-penalty": "--repeat-penalty",
    "--verbosity": "--verbose",
}


def write_example(ctx: Any, formatter: Any) -> None:
    """Write an example of a command."""
    if (short := SHORT_HELP.get(ctx.command_path)) is not None:
        with formatter.section("Example"):
            formatter.write(f"{'':{formatter.current_indent}}{short.example}\n")


def write_options(command: Any, ctx: Any, formatter: Any, *, everything: bool = True) -> None:
    """Write the arguments and options of a command.

    Args:
        command: the command.
        ctx: its context.
        formatter: the page.
        everything: True to write all options, in groups; False to write the options of the short help.
    """
    every = command.get_params(ctx)
    rows = {parameter: row for parameter in every if (row := _row(parameter, ctx)) is not None}
    arguments = [row for parameter, row in rows.items() if parameter.param_type_name == "argument"]
    options = [parameter for parameter in rows if parameter.param_type_name != "argument"]
    short = () if everything or ctx.command_path not in SHORT_HELP else SHORT_HELP[ctx.command_path].options
    _write_section(formatter, "Arguments", arguments)
    if short:
        by_name = {name: parameter for parameter in options for name in parameter.opts}
        shown = [by_name[name] for name in (*short, "--help", "--help-all")]
        _write_section(formatter, "Options", [rows[parameter] for parameter in shown])
        more = f"{ctx.command_path} --help-all lists all {len(options)} options."
    else:
        names = ("", MODEL, SAMPLING, OUTPUT, ADVANCED)
        groups: dict[str, list[Any]] = {name: [] for name in names}
        for parameter in options:
            groups[getattr(parameter, "rich_help_panel", None) or ""].append(rows[parameter])
        for name, group in groups.items():
            _write_section(formatter, f"{name} options" if name else "Options", group)
        more = "Environment variables such as GENAI_THREADS=2 also set options. The command line takes precedence."
    formatter.write_paragraph()
    formatter.write_text(more)


def _row(parameter: Any, ctx: Any) -> tuple[str, str] | None:
    """Return the names and the text of a parameter, or None if it is hidden."""
    record = parameter.get_help_record(ctx)
    if record is None:
        return None
    # Show types in the usual form: "<int range>" becomes N.
    named = re.sub(_KIND, lambda found: _kind(parameter, found[1].lower()), record[0])
    if takes_model(parameter) and parameter.param_type_name == "argument":
        named = named.removesuffix(" MODEL")  # the name of the argument says what it is
    return named, record[1].replace("-", _WHOLE)


def _kind(parameter: Any, kind: str) -> str:
    """Return the usual form of a parameter's type."""
    if takes_model(parameter):
        return "MODEL"
    if parameter.name in FILES and kind == "str":
        return "FILE"
    return _KINDS.get(kind, kind.upper())


def _write_section(formatter: Any, name: str, rows: list[tuple[str, str]]) -> None:
    if rows:
        with formatter.section(name):
            formatter.write_dl(rows)
            formatter.buffer[:] = [piece.replace(_WHOLE, "-") for piece in formatter.buffer]


def usage_error(error: Any) -> OptionError:
    """Convert an error that typer found in the command line to an OptionError."""
    message = _plainer(error.format_message().rstrip("."))
    ctx = getattr(error, "ctx", None)
    path = ctx.command_path if ctx is not None else "genai"
    hint = f"`{path} -h` shows the options"
    wrong = getattr(error, "option_name", "")
    if type(error).__name__ == "NoSuchOption" and ctx is not None:
        known = [name for one in ctx.command.params for name in (*one.opts, *one.secondary_opts) if name[:2] == "--"]
        if wrong in ("-m", "--model") and any(one.name == "model" for one in ctx.command.params):
            return OptionError(f"{path} has no option {wrong}", "MODEL is an argument", f"use `{path} MODEL`; {hint}")
        near = list(_resembling(wrong, known))
        fix = f"did you mean {' or '.join(near)}? {hint}" if near else hint
        return OptionError(f"{path} has no option {wrong}", "the command accepts only the options in its help", fix)
    if (unknown := re.match(r"No such command '(.*?)'", message)) and ctx is not None:
        return _unknown_command(ctx, unknown[1])
    extra = re.match(r"Got unexpected extra arguments? ?\(?s?\)? ?\((.*)\)$", message)
    if extra and ctx is not None and any("--prompt" in one.opts for one in ctx.command.params):
        first = next((str(value) for name, value in ctx.params.items() if name == "model" and value), "")
        if first and _may_be_model(first):
            return OptionError(
                f"{path}: unexpected text after MODEL: {extra[1]}",
                "the command accepts only one argument, MODEL",
                f'pass the text with -p: `{path} {quote(first)} -p "{extra[1]}"`',
            )
        text = f"{first} {extra[1]}".strip()
        return OptionError(
            f"{path}: unexpected text after MODEL: {extra[1]}",
            "the command accepts only one argument, MODEL",
            f'pass the text with -p: `{path} -p "{text}"`',
        )
    parameter = getattr(error, "param", None)
    why = "the command line cannot be parsed"
    if type(error).__name__ == "MissingParameter" and parameter is not None and parameter.help:
        why = f"it is required: {parameter.help.rstrip('.')}"
    if parameter is not None and ctx is not None and is_from_variable(ctx, parameter):
        message += f" (set by {parameter.envvar})"
    return OptionError(f"{path}: {message}", why, f"`{path} -h` shows the usage")


# Wordings of typer, and plainer ones.
_PLAINER = (
    (re.compile(r"Input should be a valid integer.*"), "a whole number is expected"),
    (re.compile(r"Input should be a valid number.*"), "a number is expected"),
    (re.compile(r"Input should be "), "the value must be "),
)


def _plainer(message: str) -> str:
    for pattern, text in _PLAINER:
        message = pattern.sub(text, message)
    return message


def check_dashes(command: Any, path: str, arguments: Sequence[str]) -> None:
    """Raise OptionError if a long option has one dash, as in llama.cpp: -temperature would be -t with a value."""
    options = [one for one in command.params if one.param_type_name == "option"]
    names = {name: one for one in options for name in (*one.opts, *one.secondary_opts)}
    before = ""
    for argument in arguments:
        if argument == "--":
            return
        name = argument.partition("=")[0]
        long = f"-{name}".replace("_", "-")
        meant = OTHER_OPTIONS.get(long, long)
        is_value = before in names and not names[before].is_flag
        if re.fullmatch(r"-[a-z][a-z-_]{2,}", name) and not is_value and meant in names:
            raise OptionError(
                f"{path} has no option {name}", "options with several letters begin with two dashes", f"use {meant}"
            )
        before = argument


def _may_be_model(text: str) -> bool:
    from genai.hub.local import may_be_model

    try:
        return may_be_model(text)
    except ModelFolderError:  # for example, a name that several models have
        return True


def _unknown_command(ctx: Any, name: str) -> OptionError:
    """Return the error for a command that does not exist, with the command that is meant, or with all commands."""
    path, known = ctx.command_path, ctx.command.list_commands(ctx)
    other = _OTHER_NAMES.get(name.lower())
    if name.lower() in ("help", "version"):
        alike = [f"--{name.lower()}"]
    else:
        alike = [other] if other is not None and other in known else difflib.get_close_matches(name.lower(), known, 1)
    hint = f"`{path} -h` describes the commands"
    fix = f"did you mean `{path} {alike[0]}`? {hint}" if alike else hint
    return OptionError(f"{path} has no command {name!r:.80}", f"the commands are {', '.join(known)}", fix)


def _resembling(wrong: str, known: list[str]) -> Iterator[str]:
    """Yield up to three options that look similar or share a word, the most similar first."""
    wrong = "--" + wrong.lstrip("-").replace("_", "-").lower()
    if OTHER_OPTIONS.get(wrong) in known:
        yield OTHER_OPTIONS[wrong]
        return
    words = set(wrong[2:].split("-"))
    close = difflib.get_close_matches(wrong, known, 3, 0.75)
    begins = [name for name in known if name.startswith(wrong) or wrong.startswith(name)]
    shared = [name for name in known if len(words & set(name[2:].split("-")) - {"no", "n"}) > 0]
    shared.sort(key=lambda name: -difflib.SequenceMatcher(None, wrong, name).ratio())
    yield from list(dict.fromkeys([*close, *begins, *shared]))[:3]

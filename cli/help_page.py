"""Help pages: options in groups, no line cut, at any width; and what usage errors say."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from typing import Any

from genai.errors import OptionError

from .variables import is_from_variable

MODEL, SAMPLING, OUTPUT, ADVANCED = "Model", "Sampling", "Output", "Advanced"
_KINDS = {"int": "N", "float": "NUMBER", "str": "TEXT", "path": "PATH"}
_KIND = r"<(?:list\[)?(\w+)(?: range)?\]?>"
# Stands for a hyphen while lines are made, which would be broken behind one: "--no-" is not an option.
_WHOLE = "\ue000"
# What other programs call an option of ours.
_ELSEWHERE = {
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


def write_options(command: Any, ctx: Any, formatter: Any) -> None:
    """Write the arguments and options of a command, in groups."""
    groups: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
    for name in (MODEL, SAMPLING, OUTPUT, ADVANCED):
        groups[f"{name} options"] = []
    for parameter in command.get_params(ctx):
        record = parameter.get_help_record(ctx)
        if record is not None:
            panel = getattr(parameter, "rich_help_panel", None)
            group = f"{panel} options" if panel else "Options"
            if parameter.param_type_name == "argument":
                group = "Arguments"
            # Types as people write them: "<int range>" is N.
            named = re.sub(_KIND, lambda found: _KINDS.get(found[1].lower(), found[1].upper()), record[0])
            groups[group].append((named, record[1].replace("-", _WHOLE)))
    for name, rows in groups.items():
        if rows:
            with formatter.section(name):
                formatter.write_dl(rows)
                formatter.buffer[:] = [piece.replace(_WHOLE, "-") for piece in formatter.buffer]
    with formatter.section("Environment"):
        formatter.write_text("Every option has a variable too, such as GENAI_THREADS=2. The option itself wins.")


def usage_error(error: Any) -> OptionError:
    """What typer found wrong with the command line, as an error of ours."""
    message = error.format_message().rstrip(".")
    ctx = getattr(error, "ctx", None)
    path = ctx.command_path if ctx is not None else "genai"
    hint = f"`{path} -h` lists them"
    wrong = getattr(error, "option_name", "")
    if type(error).__name__ == "NoSuchOption" and ctx is not None:
        known = [name for one in ctx.command.params for name in (*one.opts, *one.secondary_opts) if name[:2] == "--"]
        near = list(_resembling(wrong, known))
        fix = f"did you mean {' or '.join(near)}? {hint}" if near else hint
        return OptionError(f"{path} has no option {wrong}", "it is not one of its options", fix)
    extra = re.match(r"Got unexpected extra arguments? ?\(?s?\)? ?\((.*)\)$", message)
    if extra and ctx is not None and any("--prompt" in one.opts for one in ctx.command.params):
        first = next((str(value) for name, value in ctx.params.items() if name == "model" and value), "")
        text = f"{first} {extra[1]}".strip()
        return OptionError(
            f"{path}: too much behind MODEL: {extra[1]}",
            "one model folder is expected there",
            f'a text goes in quotes behind -p: `{path} -p "{text}"`',
        )
    parameter = getattr(error, "param", None)
    if parameter is not None and ctx is not None and is_from_variable(ctx, parameter):
        message += f" (of the variable {parameter.envvar})"
    return OptionError(
        f"{path}: {message}", "the command line is not understood", f"`{path} -h` shows how it is written"
    )


def _resembling(wrong: str, known: list[str]) -> Iterator[str]:
    """Options that look alike, or share a word; the nearest first, three at most."""
    wrong = "--" + wrong.lstrip("-").replace("_", "-").lower()
    if _ELSEWHERE.get(wrong) in known:
        yield _ELSEWHERE[wrong]
        return
    words = set(wrong[2:].split("-"))
    close = difflib.get_close_matches(wrong, known, 3, 0.75)
    begins = [name for name in known if name.startswith(wrong) or wrong.startswith(name)]
    shared = [name for name in known if len(words & set(name[2:].split("-")) - {"no", "n"}) > 0]
    shared.sort(key=lambda name: -difflib.SequenceMatcher(None, wrong, name).ratio())
    yield from list(dict.fromkeys([*close, *begins, *shared]))[:3]

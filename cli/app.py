"""Builds the commands, and turns errors into messages and exit codes."""

from __future__ import annotations

import os
import sys
from typing import Any

import typer
import typer.main

from . import bench, build, doctor, evaluate, generate, info
from . import run as run_command
from .chat.command import chat
from .terminal import ReaderGone, say

app = typer.Typer(
    name="genai",
    help="Run, chat with and measure generative language models from ONNX graphs.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("chat")(chat)
app.command("generate")(generate.generate)
app.command("info")(info.info)
app.command("run")(run_command.run)
app.command("build")(build.build)
app.command("doctor")(doctor.doctor)
app.add_typer(bench.app, name="bench")
app.add_typer(evaluate.app, name="eval")


def command() -> Any:
    """The whole command line. Every option can also be set by a variable: --top-k by GENAI_TOP_K."""
    root = typer.main.get_command(app)
    _bind_variables(root)
    return root


def _bind_variables(command: Any) -> None:
    for parameter in command.params:
        if parameter.param_type_name == "option" and parameter.name not in _NOT_FROM_ENVIRONMENT:
            longest = max(parameter.opts, key=len)
            parameter.envvar = "GENAI_" + longest.removeprefix("--").replace("-", "_").upper()
        elif parameter.name == "model":
            parameter.envvar = "GENAI_MODEL"
    for child in getattr(command, "commands", {}).values():
        _bind_variables(child)


_NOT_FROM_ENVIRONMENT = ("help", "version", "install_completion", "show_completion")


def _version(wanted: bool) -> None:
    if wanted:
        from genai import __version__

        typer.echo(f"genai {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Show the version and exit."
    ),
) -> None:
    """Run, chat with and measure generative language models from ONNX graphs."""


def run(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    from genai.errors import GenaiError, OptionError

    try:
        command().main(arguments, prog_name="genai", standalone_mode=True)
    except OptionError as error:
        say(f"error: {error}")
        return 2
    except GenaiError as error:
        say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    except ReaderGone:
        # Point stdout elsewhere, or the interpreter complains at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except MemoryError:
        say("error: out of memory\n  why: the model and its cache need more than is free\n  fix: use a smaller model")
        return 1
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1
    return 0

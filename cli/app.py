"""The `genai` application: registers the commands and turns errors into messages and exit codes."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import typer
import typer.main

from genai.common.log import to_stderr
from genai.common.start import out_of_memory
from genai.errors import GenaiError, OptionError

from .commands import App
from .help_page import usage_error
from .streams import OutputLost, drop_output
from .terminal import say

# The functions of the commands, and the groups of commands, by the modules that define them. Only the module of the
# command that runs is imported.
_COMMANDS = {
    "chat": "chat.command:chat",
    "generate": "generate:generate",
    "batch": "batch:batch",
    "serve": "serve:serve",
    "balance": "balance:balance",
    "ps": "servers:ps",
    "stop": "servers:stop",
    "top": "top:top",
    "launch": "servers:launch",
    "embed": "embed:embed",
    "rerank": "embed:rerank",
    "info": "info:info",
    "pull": "models:pull",
    "list": "models:list_models",
    "show": "models:show",
    "rm": "models:rm",
    "run": "run:run",
    "build": "build:build",
    "quantize": "quantize:quantize",
    "quantize-onnx": "quantize_onnx:quantize_onnx",
    "doctor": "doctor:doctor",
    "bench": "bench:app",
    "lora": "lora:app",
    "eval": "evaluations:app",
}


def command(only: str = "") -> Any:
    """Return the root command, with the command `only`, or with all commands if there is no command of this name.

    Every option can also be set by an environment variable: --top-k by GENAI_TOP_K.
    """
    app = App(
        name="genai",
        help="Run, chat with, evaluate and benchmark generative language models from ONNX graphs.",
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(root)
    for name in (only,) if only in _COMMANDS else _COMMANDS:
        module, _, attribute = _COMMANDS[name].partition(":")
        found = getattr(import_module(f".{module}", __package__), attribute)
        if isinstance(found, App):
            app.add_typer(found, name=name)
        else:
            app.command(name)(found)
    return typer.main.get_command(app)


def _version(is_wanted: bool) -> None:
    if is_wanted:
        from genai import __version__

        typer.echo(f"genai {__version__}")
        raise typer.Exit


def root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    """Run, chat with, evaluate and benchmark generative language models from ONNX graphs."""


def run(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code. The library's logs, warnings and progress go to stderr."""
    with to_stderr(), warnings.catch_warnings():
        warnings.showwarning = partial(_show_warning, warnings.showwarning)
        return _run(arguments)


def _show_warning(
    otherwise: Callable[..., None], message: Warning | str, category: type[Warning], *where: Any, **more: Any
) -> None:
    """Print a warning to the user without the line of a program; other warnings are for programmers."""
    if category is UserWarning:
        say(f"genai: {message}")
    else:
        otherwise(message, category, *where, **more)


def _run(arguments: list[str] | None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    named = next((argument for argument in given if not argument.startswith("-")), "")
    try:
        code = command(named).main(given, prog_name="genai", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except GenaiError as error:
        say(f"error: {error}")
        return 2 if isinstance(error, OptionError) else 1
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    except OutputLost as lost:
        drop_output()
        if lost.reason is None:
            return 0
        say(f"error: the output cannot be written\n  why: {lost.reason}\n  fix: redirect stdout to a writable file")
        return 1
    except MemoryError:
        say("error: out of memory\n  why: the model and its cache exceed the free memory\n  fix: use a smaller model")
        return 1
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1
    except typer.Abort:
        return 1
    except (OSError, ImportError) as error:
        if (memory := out_of_memory(error)) is not None:
            say(f"error: {memory}")
            return 1
        if not isinstance(error, OSError):
            raise
        path, refused = str(error.filename or "a file"), error.strerror or error
        say(f"error: {path:.200}: {refused}\n  why: a system call failed\n  fix: check the path and its permissions")
        return 1
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        if type(error).__name__ == "NoArgsIsHelpError":
            say(error.format_message())
        else:
            say(f"error: {usage_error(error)}")
        return 2

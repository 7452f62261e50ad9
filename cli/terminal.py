"""Input and output of commands: the result goes to stdout; messages, the footer and progress to stderr."""

from __future__ import annotations

import os
import select
import signal
import stat
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from genai.common.progress import Task, quietly, task
from genai.common.progress_line import at_line_start
from genai.errors import ChatTemplateError, InputError

from .help_page import OUTPUT
from .wrapping import WordWrap, harmless, is_plain, shown_on, table, width_of, wrapped

if TYPE_CHECKING:
    from genai.common.plots import Chart
    from genai.llm.batch.cluster import Cluster
    from genai.llm.completion import Completion
    from genai.llm.llm import LLM

# A message is printed if a pipe sends nothing for this long.
_SILENT_SECONDS = 2.0


def agreed(question: str, *, default: bool = True) -> bool:
    """Ask a yes-or-no question on the terminal, again after another answer.

    An empty line means the default; the end of the input means no.
    """
    while answer := typed_line(f"{question} {'[Y/n]' if default else '[y/N]'} "):
        if (word := answer.strip().lower()) in ("", "y", "yes", "n", "no"):
            return default if not word else word[0] == "y"
        say("answer y or n")
    print(file=sys.stderr)
    return False


def typed_line(prompt: str) -> str:
    """Return a line that the user types after a prompt, with its line end; "" at the end of the input.

    After Ctrl-C, the line of the prompt is ended, so that the next message starts a line.
    """
    shown = wrapped(prompt.rstrip(" "), width_of(sys.stderr), 2) + prompt[len(prompt.rstrip(" ")) :]
    try:  # the user can press Ctrl-C as soon as the prompt appears, before print returns
        print(shown_on(shown, sys.stderr), end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
    except KeyboardInterrupt:
        print(file=sys.stderr)
        at_line_start()
        raise
    at_line_start()
    return line


@contextmanager
def generating(*, quiet: bool, streamed: bool = True) -> Iterator[Task]:
    """Show that a prompt is processed, and then that text is generated, until the text itself appears.

    Yields the task of the prompt, which the caller closes when the prompt has been processed.

    Args:
        quiet: True to show nothing.
        streamed: True if the text appears as it is generated, in parts that do not end in a line end.
    """
    until_output = streamed and sys.stdout.isatty()
    with quietly(quiet), task("Generating", until_output=until_output), task("Processing the prompt") as prompt:
        yield prompt


def say(message: str, *, exactly: bool = False) -> None:
    """Print to stderr. On a terminal, wrap at word boundaries unless `exactly` is set."""
    if not exactly:
        message = wrapped(message, width_of(sys.stderr), 2)
    print(shown_on(message, sys.stderr), file=sys.stderr, flush=True)


def emit(text: str, end: str = "") -> None:
    """Print to stdout and flush. Raises OutputLost if stdout accepts no more data."""
    sys.stdout.write(text + end)
    sys.stdout.flush()


class TextWriter:
    """A writer of generated text to stdout as it arrives. On a terminal, words are not broken across lines."""

    def __init__(self) -> None:
        self._wrap = WordWrap(sys.stdout) if width_of(sys.stdout) is not None else None

    def write(self, text: str) -> None:
        """Write a part of the text; on a terminal, an unfinished word is held back."""
        text = harmless(text, sys.stdout)
        emit(self._wrap.feed(text) if self._wrap else text)

    def end(self) -> None:
        """Write the rest of the text, and end the line."""
        emit(self._wrap.flush() if self._wrap else "", "\n")


def emit_text(text: str) -> None:
    """Print a whole generated text to stdout like a TextWriter."""
    writer = TextWriter()
    writer.write(text)
    writer.end()


def emit_line(text: str) -> None:
    """Print a line to stdout, wrapped at word boundaries on a terminal."""
    emit(wrapped(text, width_of(sys.stdout), 2), "\n")


def emit_figures(figures: str | Iterable[tuple[str, str]]) -> None:
    """Print text such as JSON, or a table of names and values."""
    emit(figures if isinstance(figures, str) else table(list(figures), width_of(sys.stdout)), "\n")


@contextmanager
def interrupts_end_the_process() -> Iterator[None]:
    """Let Ctrl-C kill the process immediately, without an exception. While a model is loading, there is nothing to
    save, and an exception inside a compiler callback would be lost."""
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def termination_raises() -> Iterator[None]:
    """Turn SIGTERM into SystemExit, so that unfinished output is deleted or finished output is written."""
    on_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    try:
        if on_main:
            signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        yield
    finally:
        if on_main:
            signal.signal(signal.SIGTERM, before)


def read_stdin() -> str:
    """Read all of stdin as strict UTF-8. In some locales, Python would decode invalid bytes to surrogates."""
    from genai.common.reading import bounded_bytes

    if sys.stdin.isatty():
        say("(type the text, then press Enter and Ctrl-D)")
    try:
        return bounded_bytes(sys.stdin.buffer, "stdin", InputError).decode("utf-8")
    except OSError as error:
        raise InputError(
            "stdin cannot be read", str(error), "pipe text into the command, or redirect stdin from /dev/null"
        ) from error
    except UnicodeDecodeError as error:
        raise InputError("stdin is not UTF-8 text", str(error), "convert the text to UTF-8 first") from error


def with_stdin(questions: list[str]) -> list[str]:
    """Return the questions, each preceded by the text from stdin, if any."""
    about = read_stdin().strip() if stdin_has_text() else ""
    return ["\n\n".join(filter(None, (about, question))) for question in questions]


def stdin_has_text() -> bool:
    """Return True if stdin is a pipe or a file, and so may contain text in addition to the command line.

    A pipe does not reveal whether it will send data, so the caller waits for it. If the pipe is silent, a message says
    that the command is waiting.
    """
    try:
        number = sys.stdin.fileno()
        mode = os.fstat(number).st_mode
    except (OSError, ValueError):
        return False
    if not (stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)):
        return False
    if os.name == "posix" and not select.select([number], [], [], _SILENT_SECONDS)[0]:
        say("(waiting for text from stdin; to run without it, redirect stdin from /dev/null)")
    return True


@dataclass(frozen=True)
class Voice:
    """A writer of a command's messages on stderr.

    Attributes:
        quiet: True to print only errors.
        verbose: True to print details also.
    """

    quiet: bool = False
    verbose: bool = False

    def say(self, message: str, *, exactly: bool = False) -> None:
        """Print a message, or the result of a slash-command; see `say`."""
        if not self.quiet:
            say(message, exactly=exactly)

    def detail(self, message: str) -> None:
        """Print a detail, if `verbose`."""
        if self.verbose and not self.quiet:
            say(message)

    def aside(self, text: str) -> None:
        """Print streamed text, dimmed on a terminal: the model's reasoning before its reply."""
        if self.quiet:
            return
        text = harmless(text, sys.stderr)
        sys.stderr.write(text if is_plain(sys.stderr) else f"\x1b[2m{text}\x1b[0m")
        sys.stderr.flush()

    def error(self, error: Exception) -> None:
        """Print an error after which the command continues."""
        say(f"error: {error}")


def need_chat_template(llm: LLM | Cluster, tools: Sequence[Mapping[str, Any]] | None = None) -> None:
    """Raise ChatTemplateError if the model has no chat template, or if its template does not support the tools."""
    if not llm.tokenizer.chat_template:
        folder = llm.model.folder
        raise ChatTemplateError(
            f"{folder} has no chat template",
            "without a template, the messages of a chat cannot be formatted; the model may be a base model",
            f"continue text with `genai generate {folder} -p TEXT`, "
            "or add the model's chat_template.jinja to the folder",
        )
    if tools:
        llm.tokenizer.chat_prompt([{"role": "user", "content": "Hi"}], tools=tools)


def state_folder() -> Path:
    """Return the folder for data that outlives a chat. Raises RuntimeError if there is no home folder."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "genai"


def dump_prompt(
    llm: LLM,
    text: str,
    *,
    with_pieces: bool = False,
    add_special_tokens: bool | None = None,
    literal: bool | None = None,
) -> None:
    """Print the exact text and token ids of a prompt; with pieces, also each token's vocabulary entry."""
    ids = llm.encode(text, add_special_tokens=add_special_tokens, literal=literal)
    tokens = [f"{id_}:{llm.tokenizer.token_text(id_)!r}" if with_pieces else str(id_) for id_ in ids]
    say(text, exactly=True)
    say(f"[{len(ids)} tokens] {' '.join(tokens)}")


def footer(completion: Completion, context_size: int, seed: int | None = None) -> str:
    """Format statistics: 182 tok · 41.3 tok/s · ttft 0.21 s · prompt 934 (812 cached) · ctx 1116/8192 · eos."""
    num_tokens = len(completion.token_ids)
    ended = "eos" if isinstance(completion.stopped_by, int) else completion.finish_reason
    parts = [
        f"{num_tokens} tok",
        *([f"{completion.tokens_per_second:.1f} tok/s"] if num_tokens > 1 else []),
        f"ttft {completion.timings.time_to_first_token:.2f} s",
        f"prompt {completion.prompt_tokens} ({completion.cached_tokens} cached)",
        *(
            [f"accepted {completion.accepted_tokens}/{completion.proposed_tokens}"]
            if completion.proposed_tokens
            else []
        ),
        f"ctx {completion.prompt_tokens + num_tokens - completion.forgotten_tokens}/{context_size}",
        *([f"{completion.forgotten_tokens} dropped"] if completion.forgotten_tokens else []),
        "interrupted" if ended == "cancelled" else ended,
    ]
    if completion.timings.compile_seconds >= 0.05:
        parts.append(f"compiled kernels {completion.timings.compile_seconds:.1f} s")
    if seed is not None:
        parts.append(f"seed {seed}")
    if (peak := peak_megabytes()) is not None:
        parts.append(f"peak {peak:.0f} MB")
    return " · ".join(parts)


def peak_megabytes() -> float | None:
    """Return this process's peak resident memory in MB; None if the system does not report it."""
    from genai.common.cores import system_file

    # getrusage is not used on Linux, because a process inherits the maximum from its parent.
    for line in system_file(Path("/proc/self/status")).splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e6
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6


def _checked(path: Path | None) -> Path | None:
    if path is not None:
        from genai.common.plots import check_file

        check_file(path)
    return path


PlotFile = Annotated[
    Path | None,
    typer.Option(
        "--plot",
        callback=_checked,
        help="Write a plot to this .svg or .png file (needs matplotlib).",
        rich_help_panel=OUTPUT,
    ),
]


def show_chart(chart: Chart, file: Path | None, *, as_json: bool) -> None:
    """Save a chart to a file; without a file, draw it as text below the table on a terminal."""
    if file is not None:
        chart.save(file)
    elif not as_json and (width := width_of(sys.stdout)):
        emit(f"\n{shown_on(chart.text(width - 1), sys.stdout)}", "\n")

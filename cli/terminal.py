"""What commands read and print: the result on stdout; messages, the footer and progress on stderr."""

from __future__ import annotations

import os
import select
import signal
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from genai.common.progress_line import ProgressLine
from genai.errors import ChatTemplateError, InputError

from .help_page import OUTPUT
from .wrapping import harmless, is_plain, shown_on, table, width_of, wrapped

if TYPE_CHECKING:
    from genai.common.plots import Chart
    from genai.llm.batch.cluster import Cluster
    from genai.llm.completion import Completion
    from genai.llm.llm import LLM

# A pipe that gives nothing for so long is mentioned.
_SILENT_SECONDS = 2.0


# Work that takes no longer shows no progress.
SHOWN_AFTER = 1.0


def reading_line() -> ProgressLine:
    """Says how far a prompt is read, where that takes long."""
    return ProgressLine("Reading the prompt", amount=lambda count: f"{count:,.0f}", after=SHOWN_AFTER)


def agreed(question: str) -> bool:
    """Ask on the terminal what is meant to be answered with yes; the end of the input (Ctrl-D) is no."""
    print(f"{question} [Y/n] ", end="", file=sys.stderr, flush=True)
    answer = sys.stdin.readline()
    if not answer:
        print(file=sys.stderr)
        return False
    return answer.strip().lower() in ("", "y", "yes")


def say(message: str, *, exactly: bool = False) -> None:
    """Print to stderr, on a terminal in lines of whole words; or exactly as it is."""
    if not exactly:
        message = wrapped(message, width_of(sys.stderr), 2)
    print(shown_on(message, sys.stderr), file=sys.stderr, flush=True)


def emit(text: str, end: str = "") -> None:
    """Print to stdout at once; OutputLost says that it takes no more."""
    sys.stdout.write(text + end)
    sys.stdout.flush()


def emit_line(text: str) -> None:
    """Print to stdout, on a terminal in lines of whole words."""
    emit(wrapped(text, width_of(sys.stdout), 2), "\n")


def emit_figures(figures: str | Iterable[tuple[str, str]]) -> None:
    """Print a text, such as JSON, or names and what is said of them."""
    emit(figures if isinstance(figures, str) else table(list(figures), width_of(sys.stdout)), "\n")


@contextmanager
def interrupts_end_the_process() -> Iterator[None]:
    """Ctrl-C ends the process at once, without an exception: while a model is loaded there is nothing to save, and an
    exception inside a callback of the compiler would be lost."""
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def read_stdin() -> str:
    """All of stdin, strictly as UTF-8: depending on the locale, Python would let other bytes through in disguise."""
    from genai.common.reading import bounded_bytes

    try:
        return bounded_bytes(sys.stdin.buffer, "stdin", InputError).decode("utf-8")
    except OSError as error:
        raise InputError("stdin cannot be read", str(error), "give it a text, or < /dev/null") from error
    except UnicodeDecodeError as error:
        raise InputError("stdin is not UTF-8 text", str(error), "convert the text to UTF-8 first") from error


def with_stdin(questions: list[str]) -> list[str]:
    """The questions; where stdin brings a text, each behind it."""
    about = read_stdin().strip() if stdin_has_text() else ""
    return ["\n\n".join(filter(None, (about, question))) for question in questions]


def stdin_has_text() -> bool:
    """Whether stdin is a pipe or a file, from which a text may come beside what the command line says.

    Nobody knows of a pipe whether one will, so a silent one is waited for, and that is said.
    """
    try:
        number = sys.stdin.fileno()
        mode = os.fstat(number).st_mode
    except (OSError, ValueError):
        return False
    if not (stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)):
        return False
    if os.name == "posix" and not select.select([number], [], [], _SILENT_SECONDS)[0]:
        say("(waiting for the text from stdin; < /dev/null says that there is none)")
    return True


@dataclass(frozen=True)
class Voice:
    """What a command says on stderr besides its result.

    Attributes:
        quiet: only errors are said.
        verbose: details too.
    """

    quiet: bool = False
    verbose: bool = False

    def say(self, message: str, *, exactly: bool = False) -> None:
        """A message, or an answer to a command, on a line of its own; see `say`."""
        if not self.quiet:
            say(message, exactly=exactly)

    def detail(self, message: str) -> None:
        """Something that few want to know."""
        if self.verbose and not self.quiet:
            say(message)

    def aside(self, text: str) -> None:
        """Text as it comes, dimmed on a terminal: what the model thinks before it answers."""
        if self.quiet:
            return
        text = harmless(text, sys.stderr)
        sys.stderr.write(text if is_plain(sys.stderr) else f"\x1b[2m{text}\x1b[0m")
        sys.stderr.flush()

    def error(self, error: Exception) -> None:
        """An error after which the command goes on."""
        say(f"error: {error}")


def need_chat_template(llm: LLM | Cluster, tools: Sequence[Mapping[str, Any]] | None = None) -> None:
    """Before messages become a prompt; one that has tools in it, if there are any."""
    if not llm.tokenizer.chat_template:
        folder = llm.model.folder
        raise ChatTemplateError(
            f"{folder}: there is no chat template",
            "without one a model can continue texts, but not tell who says what; it may be a base model",
            f"continue a text with `genai generate {folder} -p TEXT`, "
            "or put the model's chat_template.jinja into the folder",
        )
    if tools:
        llm.tokenizer.chat_prompt([{"role": "user", "content": "Hi"}], tools=tools)


def state_folder() -> Path:
    """Where what outlives a chat is kept. Raises RuntimeError: there is no home folder."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "genai"


def dump_prompt(llm: LLM, text: str, *, with_pieces: bool = False) -> None:
    """The exact text and token ids that a model is given; with pieces, also the vocabulary entry of each token."""
    ids = llm.encode(text)
    tokens = [f"{id_}:{llm.tokenizer.token_text(id_)!r}" if with_pieces else str(id_) for id_ in ids]
    say(text, exactly=True)
    say(f"[{len(ids)} tokens] {' '.join(tokens)}")


def footer(completion: Completion, context_size: int, seed: int | None = None) -> str:
    """One line of figures: 182 tok · 41.3 tok/s · ttft 0.21 s · prompt 934 (812 cached) · ctx 1116/8192 · eos."""
    num_tokens = len(completion.token_ids)
    ended = "eos" if isinstance(completion.stopped_by, int) else completion.finish_reason
    parts = [
        f"{num_tokens} tok",
        *([f"{completion.tokens_per_second:.1f} tok/s"] if num_tokens > 1 else []),
        f"ttft {completion.timings.time_to_first_token:.2f} s",
        f"prompt {completion.prompt_tokens} ({completion.cached_tokens} cached)",
        *([f"guessed {completion.accepted_tokens}/{completion.proposed_tokens}"] if completion.proposed_tokens else []),
        f"ctx {completion.prompt_tokens + num_tokens - completion.forgotten_tokens}/{context_size}",
        *([f"{completion.forgotten_tokens} forgotten"] if completion.forgotten_tokens else []),
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
    """The most memory this process has held, in MB (resident set); None where the system does not say."""
    from genai.common.cores import system_file

    # Not getrusage: a process inherits its maximum from whoever started it.
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
        help="Draw a plot into a .svg or .png file (needs matplotlib).",
        rich_help_panel=OUTPUT,
    ),
]


def show_chart(chart: Chart, file: Path | None, *, as_json: bool) -> None:
    """Draw it into the file; without one, as text on a terminal, below the table."""
    if file is not None:
        chart.save(file)
    elif not as_json and (width := width_of(sys.stdout)):
        emit(f"\n{shown_on(chart.text(width - 1), sys.stdout)}", "\n")

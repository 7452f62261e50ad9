"""What commands say besides their result: messages and the footer, on stderr."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from genai.completion import Completion
    from genai.llm import LLM


def say(message: str) -> None:
    """Print to stderr; a closed stderr is no reason to fail."""
    try:
        print(message, file=sys.stderr, flush=True)
    except (BrokenPipeError, ValueError):
        return


class ReaderGone(Exception):
    """Whoever read stdout went away, as `| head` does. No OSError, so that typer leaves it to us."""


def emit(text: str, end: str = "") -> None:
    """Print to stdout at once.

    Raises:
        ReaderGone: nobody reads it any more.
    """
    try:
        sys.stdout.write(text + end)
        sys.stdout.flush()
    except BrokenPipeError:
        raise ReaderGone from None


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
    """All of stdin, strictly as UTF-8: depending on the locale, Python would let other bytes through in disguise.

    Raises:
        InputError: it is not UTF-8.
    """
    from genai.errors import InputError

    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError("stdin is not UTF-8 text", str(error), "convert the text to UTF-8 first") from error


@dataclass(frozen=True)
class Voice:
    """What a command says on stderr besides its result.

    Attributes:
        quiet: only errors are said.
        verbose: details too.
    """

    quiet: bool = False
    verbose: bool = False

    def say(self, message: str) -> None:
        """A message, or an answer to a command, on a line of its own."""
        if not self.quiet:
            say(message)

    def detail(self, message: str) -> None:
        """Something that few want to know."""
        if self.verbose and not self.quiet:
            say(message)

    def aside(self, text: str) -> None:
        """Text as it comes, dimmed on a terminal: what the model thinks before it answers."""
        if self.quiet:
            return
        try:
            sys.stderr.write(f"\x1b[2m{text}\x1b[0m" if sys.stderr.isatty() else text)
            sys.stderr.flush()
        except (BrokenPipeError, ValueError):
            return

    def error(self, error: Exception) -> None:
        """An error after which the command goes on."""
        say(f"error: {error}")


def need_chat_template(llm: LLM) -> None:
    """Before messages become a prompt.

    Raises:
        ChatTemplateError: the model has no chat template; what to do is said in terms of commands.
    """
    from genai.errors import ChatTemplateError

    if not llm.tokenizer.chat_template:
        folder = llm.model.folder
        raise ChatTemplateError(
            f"{folder}: there is no chat template",
            "without one a model can continue texts, but not tell who says what; it may be a base model",
            f"continue a text with `genai generate {folder} -p TEXT`, "
            "or put the model's chat_template.jinja into the folder",
        )


def dump_prompt(llm: LLM, text: str, *, with_pieces: bool = False) -> None:
    """The exact text and token ids that a model is given; with pieces, also the vocabulary entry of each token."""
    ids = llm.encode(text)
    shown = [f"{id_}:{llm.tokenizer.token_text(id_)!r}" if with_pieces else str(id_) for id_ in ids]
    say(text)
    say(f"[{len(ids)} tokens] {' '.join(shown)}")


def footer(completion: Completion, context_size: int, seed: int | None = None) -> str:
    """One line of figures: 182 tok · 41.3 tok/s · ttft 0.21 s · prompt 934 (812 cached) · ctx 1116/8192 · eos."""
    num_tokens = len(completion.token_ids)
    ended = "eos" if isinstance(completion.stopped_by, int) else completion.finish_reason
    parts = [
        f"{num_tokens} tok",
        *([f"{completion.tokens_per_second:.1f} tok/s"] if num_tokens > 1 else []),
        f"ttft {completion.timings.time_to_first_token:.2f} s",
        f"prompt {completion.prompt_tokens} ({completion.cached_tokens} cached)",
        f"ctx {completion.prompt_tokens + num_tokens}/{context_size}",
        "interrupted" if ended == "cancelled" else ended,
    ]
    if seed is not None:
        parts.append(f"seed {seed}")
    return " · ".join([*parts, f"peak {peak_megabytes():.0f} MB"])


def peak_megabytes() -> float:
    """The most memory this process has held, in MB (resident set)."""
    try:
        # Not getrusage: a process inherits its maximum from whoever started it.
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")) * 1024 / 1e6
    except (OSError, StopIteration):
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6

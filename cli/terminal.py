"""What commands say besides their result: messages and the footer, on stderr."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from genai.reply import ReplyStats


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


def footer(stats: ReplyStats, *, seed: int | None = None) -> str:
    """One line of figures: 182 tok · 41.3 tok/s · ttft 0.21 s · prompt 934 (812 cached) · ctx 1116/8192 · eos."""
    parts = [
        f"{stats.new_tokens} tok",
        f"{stats.tokens_per_second:.1f} tok/s",
        f"ttft {stats.time_to_first_token:.2f} s",
        f"prompt {stats.prompt_tokens} ({stats.cached_tokens} cached)",
        f"ctx {stats.context_used}/{stats.context_length}",
        stats.finish_reason,
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

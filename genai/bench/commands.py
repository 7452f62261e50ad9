"""The first seconds of commands on a terminal: the time to a first sign, and to the first output."""

from __future__ import annotations

import os
import re
import select
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from ..errors import GenaiError, NotSupportedYetError
from .speed import Progress, silent

_TIMEOUT_SECONDS = 600
_SIZE = (24, 100)
# The status line: a spinner and a text, or the spaces that erase it, from the start of a line of the terminal.
_STATUS = re.compile(rb"\r(?:[|/\\-](?: [^\r\n]*)?|[ ]*)(?=\r|\Z)")
_IMPORT = "import time; began = time.perf_counter(); import genai; print(time.perf_counter() - began)"


def can_measure() -> bool:
    """Return True if the system has pseudo-terminals."""
    return os.name == "posix"


def bench_commands(
    commands: Mapping[str, Sequence[str]], *, repeat: int = 5, progress: Progress = silent
) -> Iterator[dict[str, str | float]]:
    """Measure the seconds from the start of a process to its first byte and to its first output.

    Each command is started once without being measured, because the first start also reads files from the disk. The
    first byte may be part of the status line; the first output is not. A command is stopped at its first output.

    Args:
        commands: the arguments of `genai`, by name.
        repeat: number of starts that are measured.

    Yields:
        The command's name, and the medians and maximums of both times.

    Raises:
        NotSupportedYetError: the system has no pseudo-terminals.
        GenaiError: a command ended without any output.
    """
    if not can_measure():
        raise NotSupportedYetError(
            "the start of commands cannot be measured",
            "commands are started on a pseudo-terminal, which this system does not have",
            "measure the model only (--no-commands), or measure on Linux or macOS",
        )
    done, total = 0, len(commands) * (repeat + 1)
    for name, arguments in commands.items():
        times = []
        for _ in range(repeat + 1):
            progress(done, total)
            times.append(first_seconds(arguments))
            done += 1
        signs, outputs = zip(*times[1:], strict=True)
        yield {
            "command": name,
            "sign s": statistics.median(signs),
            "slowest sign s": max(signs),
            "output s": statistics.median(outputs),
            "slowest output s": max(outputs),
        }


def import_seconds(repeat: int = 5) -> float:
    """Return the median of the seconds that `import genai` takes in a new process."""
    command = [sys.executable, "-c", _IMPORT]
    runs = [subprocess.run(command, check=True, capture_output=True, text=True).stdout for _ in range(repeat + 1)]
    return statistics.median(map(float, runs[1:]))


def first_seconds(arguments: Sequence[str]) -> tuple[float, float]:
    """Start `genai` on a pseudo-terminal; return the seconds to the first byte and to the first output."""
    import fcntl  # these modules exist only where there are pseudo-terminals
    import pty
    import struct
    import termios

    terminal, end = pty.openpty()
    try:
        fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", *_SIZE, 0, 0))
        # A question about the position of the cursor would wait for a reply.
        environment = {**os.environ, "TERM": "xterm", "GENAI_QUIET": "0", "PROMPT_TOOLKIT_NO_CPR": "1"}
        began = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "genai", *arguments], stdin=end, stdout=end, stderr=end, env=environment,
            start_new_session=True,
        )  # fmt: skip
        try:
            return _times(terminal, end, began, arguments)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    finally:
        os.close(terminal)
        with suppress(OSError):
            os.close(end)


def _times(terminal: int, end: int, began: float, arguments: Sequence[str]) -> tuple[float, float]:
    os.close(end)
    first, seen = None, b""
    while select.select([terminal], [], [], max(0.0, began + _TIMEOUT_SECONDS - time.perf_counter()))[0]:
        try:
            part = os.read(terminal, 65536)
        except OSError:  # the command has ended
            break
        now = time.perf_counter() - began
        first = now if first is None else first
        seen += part
        if has_output(seen):
            return first, now
    raise GenaiError(
        f"genai {' '.join(arguments)}: no output appeared",
        f"the terminal shows {seen[-200:]!r}",
        "run the command in a terminal to see the reason",
    )


def has_output(seen: bytes) -> bool:
    """Return True if a terminal received more than the status line."""
    return bool(_STATUS.sub(b"", seen).strip(b"\r"))

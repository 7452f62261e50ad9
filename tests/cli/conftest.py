"""Real terminals for tests of the command line."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


class Terminal:
    """A command in a pseudo-terminal; `screen` is all its output, without colours and cursor movements."""

    def __init__(self, *arguments: str, environment: dict[str, str]) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.execve(sys.executable, [sys.executable, "-m", "genai", *arguments], environment)
        self.resize(100, 40)
        self.seen = ""

    def wait_for(self, pattern: str, seconds: float = 300) -> str:
        """Read until a pattern appears after the last match; return the text up to the end of this match."""
        deadline = time.monotonic() + seconds
        while not (match := re.search(pattern, _plain(self.seen), re.S)):
            ready, _, _ = select.select([self.fd], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"{pattern!r} did not appear; the screen shows {_plain(self.seen)!r}"
            try:
                self.seen += os.read(self.fd, 65536).decode("utf-8", "replace")
            except OSError:
                raise AssertionError(f"ended before {pattern!r}; the screen shows {_plain(self.seen)!r}") from None
        text = _plain(self.seen)
        self.seen = text[match.end() :]
        return text[: match.end()]

    def type(self, text: str) -> None:
        """Press keys."""
        os.write(self.fd, text.encode())

    def enter(self, text: str, pattern: str) -> str:
        """Type a line; wait for `pattern` and the next prompt; return the text displayed until then."""
        self.type(text + "\r")
        return self.wait_for(pattern + r".*>>>")

    def resize(self, columns: int, rows: int) -> None:
        """Change the window size, as a user who drags its corner does."""
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def echoes(self) -> bool:
        """Return True if the terminal is in its normal mode, in which the system echoes keys and edits lines."""
        return bool(termios.tcgetattr(self.fd)[3] & termios.ECHO)

    def exit_code(self, seconds: float = 300) -> int:
        """Wait for the command to end; return its exit code."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.pid = 0
                return os.waitstatus_to_exitcode(status)
            if select.select([self.fd], [], [], 0.05)[0]:
                try:
                    self.seen += os.read(self.fd, 65536).decode("utf-8", "replace")
                except OSError:
                    time.sleep(0.05)
        raise AssertionError(f"did not end; the screen shows {_plain(self.seen)!r}")

    def close(self) -> None:
        """Kill the command if it still runs."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.fd)


def _plain(text: str) -> str:
    """Return the text without escape sequences, including an incomplete one at the end."""
    text = re.sub(r"\x1b\][^\x07]*\x07|\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[()][A-B0]|\x1b[=>78]", "", text)
    return re.sub(r"\x1b(\[[0-9;?]*)?$", "", text).replace("\r", "")


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    """Return a function terminal(*arguments) that runs the command line in a pseudo-terminal with its own history."""
    opened: list[Terminal] = []
    environment = {
        **{name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")},
        "TERM": "xterm",
        "XDG_STATE_HOME": str(tmp_path / "state"),
        # The test does not answer queries for the cursor position.
        "PROMPT_TOOLKIT_NO_CPR": "1",
        "GENAI_MODEL": "pebble",  # a chat without a model asks which model to use; see tests/hub/test_offer.py
    }

    def open_terminal(*arguments: str, **extra: str) -> Terminal:
        opened.append(Terminal(*arguments, environment={**environment, **extra}))
        return opened[-1]

    yield open_terminal
    for one in opened:
        one.close()

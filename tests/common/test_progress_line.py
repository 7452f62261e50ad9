"""The status line of a terminal: one line for all tasks, which makes room for other output."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from genai.common import progress_line
from genai.common.forks import STATUS_THREAD
from genai.common.progress_line import ProgressLine, StatusLine, at_line_start, other_output, tell

Start = Callable[..., ProgressLine]


class Terminal(io.StringIO):
    """A terminal of one screen, on which a line may be overwritten but not be longer than the screen is wide."""

    def __init__(self, columns: int = 90) -> None:
        super().__init__()
        self.columns, self.lines, self._column = columns, [""], 0

    def isatty(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        for character in text:
            if character == "\r":
                self._column = 0
            elif character == "\n":
                self.lines.append("")
                self._column = 0
            else:
                line = self.lines[-1].ljust(self._column)
                self.lines[-1] = line[: self._column] + character + line[self._column + 1 :]
                self._column += 1
                assert self._column < self.columns, "the terminal would begin a new line"
        return super().write(text)

    @property
    def shown(self) -> list[str]:
        return [line.rstrip() for line in self.lines]

    @property
    def last(self) -> str:
        """The last line, without the spinner."""
        return self.shown[-1][2:]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setenv("COLUMNS", "90")
    return now


@pytest.fixture
def terminal(clock: list[float]) -> Terminal:
    return Terminal()


@pytest.fixture
def line(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> StatusLine:
    """The process's line, which is drawn only when the test says so."""
    found = StatusLine(terminal, animated=False)
    monkeypatch.setattr(progress_line, "_line", found)
    return found


@pytest.fixture
def start(line: StatusLine) -> Start:
    """Return a function that starts a task on the line."""
    return partial(ProgressLine, line=line)


def test_a_bar_with_the_time_left_that_vanishes(
    clock: list[float], line: StatusLine, terminal: Terminal, start: Start
) -> None:
    progress = start("Packing", 200)
    progress.add(50)
    assert terminal.shown == [""], "short work shows nothing"
    clock[0] += 2
    progress.add(50)
    assert terminal.last == "Packing [############------------]  50%  100 of 200, 2 s left"
    clock[0] += 0.01
    progress.add(1)
    assert terminal.last.endswith("100 of 200, 2 s left"), "not for every step"
    clock[0] += 400
    progress.add(1)
    assert terminal.last == "Packing [############------------]  51%  102 of 200, 6 min left"
    progress.add(98)
    assert "[########################] 100%  200 of 200" in terminal.getvalue()
    assert terminal.shown == [""], "the total is reached, so the task is over"


def test_no_time_is_estimated_from_almost_nothing(
    clock: list[float], line: StatusLine, terminal: Terminal, start: Start
) -> None:
    progress = start("Building", 1e9, amount=lambda count: f"{count / 1e9:.2f} GB")
    clock[0] += 1
    progress.add(16)
    assert terminal.last == "Building [------------------------]   0%  0.00 GB of 1.00 GB"


def test_work_without_a_total(clock: list[float], line: StatusLine, terminal: Terminal, start: Start) -> None:
    progress = start("Loading pebble")
    spinners = set()
    for _ in range(8):
        clock[0] += 0.5
        line.draw_if_due(clock[0])
        spinners.add(terminal.shown[-1][0])
    assert terminal.last == "Loading pebble (4 s)" and spinners == set("|/-\\")
    progress.count("12 lines")
    clock[0] += 0.2
    progress.count("13 lines")
    assert terminal.last == "Loading pebble 13 lines (4 s)"
    progress.close()
    progress.close()
    assert terminal.shown == [""]


def test_nested_tasks_share_the_line(clock: list[float], line: StatusLine, terminal: Terminal, start: Start) -> None:
    with start("Loading a model with a long name"):
        clock[0] += 1
        line.draw_if_due(clock[0])
        with start("Compiling", 4) as inner:
            clock[0] += 3
            inner.show(2, 4)
            assert terminal.last == "Compiling [############------------]  50%  2 of 4, 3 s left"
        assert terminal.last == "Loading a model with a long name (4 s)"
        outer_ended_first = start("Packing", 10)
    assert terminal.last.startswith("Packing"), "it is still going on"
    outer_ended_first.close()
    assert terminal.shown == [""]


def test_what_the_outer_task_reports_does_not_replace_the_inner(
    clock: list[float], line: StatusLine, terminal: Terminal, start: Start
) -> None:
    with start("Measuring", 5) as outer, start("Compiling", 4) as inner:
        clock[0] += 1
        inner.show(1, 4)
        clock[0] += 1
        outer.show(3, 5)
        assert "Compiling" in terminal.last and "Measuring" not in terminal.getvalue()
    assert terminal.shown == [""]


def test_short_tasks_in_a_row_are_one_pause(
    clock: list[float], line: StatusLine, terminal: Terminal, start: Start
) -> None:
    """What counts is how long the terminal has shown nothing, not how long each task takes."""
    for number in range(3):
        with start(f"Step {number}"):
            clock[0] += 0.2
            line.draw_if_due(clock[0])
    assert "Step 0" not in terminal.getvalue() and "Step 1" in terminal.getvalue() and "Step 2" in terminal.getvalue()
    clock[0] += 60  # the program does something else, such as waiting for a question
    with start("Step 3"):
        clock[0] += 0.2
        line.draw_if_due(clock[0])
        assert "Step 3" not in terminal.getvalue()


def test_other_output_replaces_the_line(clock: list[float], line: StatusLine, terminal: Terminal, start: Start) -> None:
    with start("Pulling a rather long name"):
        clock[0] += 1
        line.draw_if_due(clock[0])
        tell("a remark", stream=terminal)
        assert terminal.shown == ["a remark", ""]
        clock[0] += 0.1
        line.draw_if_due(clock[0])
        assert terminal.shown == ["a remark", ""], "output is a sign of life, too"
        clock[0] += 0.3
        line.draw_if_due(clock[0])
        assert terminal.shown[0] == "a remark" and terminal.last == "Pulling a rather long name (1 s)"
    assert terminal.shown == ["a remark", ""]


@pytest.mark.parametrize("question", ["Really? [Y/n] ", "\x1b[1mReally?\x1b[0m", ">>> "])
def test_the_line_stays_away_from_a_question(
    clock: list[float], line: StatusLine, terminal: Terminal, start: Start, question: str
) -> None:
    with start("Pulling"):
        with other_output(terminal, question.encode()):
            pass
        clock[0] += 60
        line.draw_if_due(clock[0])
        assert terminal.getvalue() == ""
        at_line_start()  # the user has pressed Enter
        line.draw_if_due(clock[0])
        assert terminal.last == "Pulling (60 s)"
        for data in (b"\x1b[?2004l", b""):  # no cursor moves
            with other_output(terminal, data):
                pass
        clock[0] += 1
        line.draw_if_due(clock[0])
        assert terminal.last == "Pulling (61 s)"


def test_the_first_sign_is_there_at_once_until_there_is_another(
    clock: list[float], line: StatusLine, terminal: Terminal, start: Start
) -> None:
    first = start("Starting", is_first=True)
    assert terminal.last == "Starting"
    with start("Loading"):
        assert terminal.last == "Loading"
    assert terminal.shown == [""]
    first.close()
    start("Starting", is_first=True)
    tell("hello", stream=terminal)
    clock[0] += 60
    line.draw_if_due(clock[0])
    assert terminal.shown == ["hello", ""]


@pytest.mark.parametrize("file", [False, True])
def test_tasks_that_last_until_the_output(
    clock: list[float], line: StatusLine, terminal: Terminal, start: Start, file: bool
) -> None:
    output = io.StringIO() if file else terminal
    with start("Generating", until_output=True):
        clock[0] += 1
        line.draw_if_due(clock[0])
        assert terminal.last == "Generating (1 s)"
        with other_output(output, b"The text\n"):
            pass
        clock[0] += 60
        line.draw_if_due(clock[0])
        assert terminal.shown == [""]


@pytest.mark.parametrize("columns", [1, 2, 20, 60, 120])
def test_it_never_wraps(clock: list[float], monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    terminal = Terminal(max(columns, 2))
    line = StatusLine(terminal, animated=False)
    progress = ProgressLine("Compiling CPU kernels (once per kernel)", line=line)
    for number in range(1, 20):
        clock[0] += 1
        progress.show(number, 20, "something in other words")
        assert columns < 60 or "s left" in terminal.last
    progress.close()
    assert terminal.shown == [""]


def test_wide_characters_take_two_columns(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    terminal = Terminal(20)
    line = StatusLine(terminal, animated=False)
    with ProgressLine("Loading 模型模型模型模型", line=line):
        clock[0] += 1
        line.draw_if_due(clock[0])
        assert terminal.last == "Loading 模型模型"  # 2 + 8 + 8 columns


def test_control_characters_in_names_reach_no_terminal(
    clock: list[float], line: StatusLine, terminal: Terminal, start: Start
) -> None:
    with start("Loading \x1b[2Jmodel\r\n\u202e"):
        clock[0] += 0.5
        line.draw_if_due(clock[0])
        assert terminal.last == "Loading ?[2Jmodel???"


def test_what_ctrl_c_leaves_is_erased(clock: list[float], line: StatusLine, terminal: Terminal, start: Start) -> None:
    with start("Building"):
        clock[0] += 1
        line.draw_if_due(clock[0])
        terminal.write("^C")  # as the terminal itself does
    assert terminal.shown == [""]


def test_nothing_where_nobody_looks(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(sys, "stderr", file)
    with ProgressLine("Working", 10) as progress:
        clock[0] += 60
        progress.add(5)
    assert file.getvalue() == ""


def test_a_terminal_that_went_away(clock: list[float], line: StatusLine, terminal: Terminal, start: Start) -> None:
    progress = start("Working", 10)
    clock[0] += 60
    terminal.close()
    progress.add(5)
    progress.close()


# --- with the thread that redraws the line ---------------------------------------------------------------------------


def status_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == STATUS_THREAD]


@pytest.fixture
def soon() -> Iterator[Callable[[Callable[[], object]], None]]:
    def wait(condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    yield wait
    wait(lambda: not status_threads())


def test_the_line_moves_while_the_program_reports_nothing(
    monkeypatch: pytest.MonkeyPatch, soon: Callable[..., Any]
) -> None:
    terminal = Terminal()
    monkeypatch.setenv("COLUMNS", "90")
    monkeypatch.setattr(sys, "stderr", terminal)
    with ProgressLine("Working"), ProgressLine("Compiling"):
        soon(lambda: terminal.getvalue().count("Compiling") > 3)
        assert len(status_threads()) == 1
    assert terminal.shown == [""]
    soon(lambda: not status_threads())
    with ProgressLine("Again"):
        soon(lambda: "Again" in terminal.getvalue())
    assert terminal.shown == [""]


FORKING = """
import os
from genai.common import shown_tasks
from genai.common.progress_line import ProgressLine

shown_tasks.SHOWN_AFTER = 0.0
with ProgressLine("Working"):
    for _ in range(50):
        child = os.fork()
        if not child:
            with ProgressLine("In the child"):  # the parent's lock is renewed, and its tasks are forgotten
                pass
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
print("done")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals on Windows")
def test_forks_do_not_inherit_the_line() -> None:
    """A process may fork while the thread draws: the child neither waits for its lock nor continues its tasks."""
    master, slave = pty.openpty()
    process = subprocess.Popen([sys.executable, "-W", "ignore", "-c", FORKING], stderr=slave, stdout=subprocess.PIPE)
    os.close(slave)
    written = b""
    try:
        while part := os.read(master, 65536):
            written += part
    except OSError:
        pass
    os.close(master)
    assert process.communicate(timeout=60)[0] == b"done\n" and process.returncode == 0
    assert written.count(b"In the child") == 50
    assert written.count(b"\n") == 0

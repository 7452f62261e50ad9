"""The line that shows the progress of a long task."""

from __future__ import annotations

import io
import time

import pytest

from genai.common.progress_line import ProgressLine


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setenv("COLUMNS", "90")
    return now


def test_a_bar_with_the_time_left_that_vanishes(clock: list[float]) -> None:
    terminal = Terminal()
    progress = ProgressLine("Packing", 200, after=1.0, stream=terminal)
    progress.add(50)
    assert terminal.getvalue() == "", "short work shows nothing"
    clock[0] = 2.0
    progress.add(50)
    assert terminal.getvalue() == "\rPacking [############------------]  50%  100 of 200, 2 s left"
    clock[0] = 2.01
    progress.add(1)
    assert terminal.getvalue().count("\r") == 1, "not for every step"
    progress.add(99)
    lines = terminal.getvalue().split("\r")
    assert lines[2].startswith("Packing [########################] 100%  200 of 200")
    assert lines[3].strip() == lines[4] == "", "spaces, for terminals that cannot erase"


@pytest.mark.parametrize("columns", [20, 60, 120])
def test_it_never_wraps(clock: list[float], monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    terminal = Terminal()
    progress = ProgressLine("Compiling CPU kernels (once per kernel)", stream=terminal)
    for clock[0] in range(1, 20):
        progress.show(clock[0], 20, "something in other words")
    lines = terminal.getvalue().split("\r")[1:]
    assert all(len(line) < columns for line in lines)
    assert columns < 60 or all("s left" in line for line in lines)


def test_nothing_where_nobody_looks(clock: list[float]) -> None:
    file = io.StringIO()
    with ProgressLine("Working", 10, stream=file) as progress:
        progress.add(5)
    assert file.getvalue() == ""


def test_a_terminal_that_went_away(clock: list[float]) -> None:
    terminal = Terminal()
    progress = ProgressLine("Working", 10, stream=terminal)
    terminal.close()
    progress.shows = True
    progress.add(5)
    progress.close()

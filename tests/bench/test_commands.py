"""The first seconds of commands: what counts as output, and what is reported."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from genai.bench import commands, speed
from genai.bench.commands import bench_commands, first_seconds, has_output, import_seconds
from genai.cli.app import command, run
from genai.errors import GenaiError, NotSupportedYetError

Capture = pytest.CaptureFixture[str]
needs_terminals = pytest.mark.skipif(os.name != "posix", reason="no pseudo-terminals")


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (b"", False),
        (b"\r/ Starting genai chat", False),
        (b"\r/ Starting genai chat\r- Loading pebble        \r                  \r", False),
        (b"\r/ Building [####----]  50%  1 of 2, 3 s left\r|", False),
        (b"\r/ Starting genai\r                  \rgenai 0.1.0\r\n", True),
        (b"\r                  \r1", True),
        (b"usage", True),
        (b"\r/ Starting\r\n", True),
        (b"\r\x1b[?2004h", True),
    ],
)
def test_the_status_line_is_no_output(seen: bytes, expected: bool) -> None:
    assert has_output(seen) == expected


@needs_terminals
def test_a_sign_comes_before_the_output() -> None:
    sign, output = first_seconds(["--version"])
    assert 0 < sign <= output < 600
    assert 0 < import_seconds(1) < 600


@needs_terminals
def test_a_command_that_shows_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    silent = tmp_path / "silent"
    silent.write_text("#!/bin/sh\nexit 0\n")
    silent.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(silent))
    with pytest.raises(GenaiError, match="genai list: no output appeared"):
        first_seconds(["list"])


def test_medians_without_the_first_start(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([(9.0, 9.0), (0.1, 1.0), (0.3, 3.0), (0.2, 2.0), (9.0, 9.0), (0.5, 0.5), (0.7, 0.9), (0.6, 0.7)])
    shown: list[tuple[int, int]] = []
    monkeypatch.setattr(commands, "first_seconds", lambda arguments: next(times))
    names = {"one": ["one"], "two": ["two"]}
    rows = list(bench_commands(names, repeat=3, progress=lambda *numbers: shown.append(numbers)))
    heads = ("command", "sign s", "slowest sign s", "output s", "slowest output s")
    expected = [("one", 0.2, 0.3, 2.0, 3.0), ("two", 0.6, 0.7, 0.7, 0.9)]
    assert rows == [dict(zip(heads, values, strict=True)) for values in expected]
    assert shown == [(done, 8) for done in range(8)]


def test_without_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "can_measure", lambda: False)
    with pytest.raises(NotSupportedYetError, match="the start of commands cannot be measured"):
        next(bench_commands({"list": ["list"]}))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The arguments of the commands that were started; nothing is really measured."""
    started: list[list[str]] = []

    def rows(found: dict[str, Sequence[str]], **options: object) -> Iterator[dict[str, str | float]]:
        started.extend(map(list, found.values()))
        for name in found:
            yield {"command": name, "sign s": 0.06, "slowest sign s": 0.1, "output s": 1.234, "slowest output s": 2.0}

    monkeypatch.setattr(commands, "bench_commands", rows)
    monkeypatch.setattr(commands, "import_seconds", lambda repeat: 0.02)
    monkeypatch.setattr(speed, "_run", lambda *arguments: [0.1, 0.2, 0.3, 0.0])
    return started


def test_every_command_is_started(measured: list[list[str]], capsys: Capture) -> None:
    assert run(["bench", "startup", "-r", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) < 60
    assert lines[0].startswith("processor") and any(line.split() == ["import", "s", "0.02"] for line in lines)
    for name, one in command().commands.items():
        for inner in getattr(one, "commands", [""]):
            assert " ".join(filter(None, ["genai", name, inner, "--help"])) in lines
    assert lines[lines.index("genai chat") + 1].split() == ["0.06", "0.1", "1.234", "2"]
    assert ["chat"] in measured and ["--version"] in measured


def test_figures_as_json(measured: list[list[str]], capsys: Capture) -> None:
    assert run(["bench", "startup", "-r", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["first token s"], found["import s"], found["commands"][2]["command"]) == (0.3, 0.02, "genai chat")
    assert found["processor"]


def test_without_the_commands(measured: list[list[str]], capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(["bench", "startup", "-r", "1", "--no-commands"]) == 0
    monkeypatch.setattr(commands, "can_measure", lambda: False)
    assert run(["bench", "startup", "-r", "1"]) == 0
    assert not measured and "genai" not in capsys.readouterr().out

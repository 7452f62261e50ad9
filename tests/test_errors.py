"""The display of errors: always three parts, whatever the parts contain."""

from __future__ import annotations

import re

import pytest

from genai.cli import app
from genai.errors import DeviceError, GenaiError, InputError

LOG = "kernels.cu(3): error: x is undefined\n  why\n    fix: none\n\n1 error detected\n"


@pytest.mark.parametrize("part", ["what", "why", "fix"])
def test_lines_of_a_part_stand_below_it(part: str) -> None:
    parts = {"what": "kernels do not compile", "why": "the compiler refused them", "fix": "report it"} | {part: LOG}
    shown = str(DeviceError(**parts))
    begun = [line for line in shown.splitlines() if not line.startswith(" " * 7)]
    assert [re.match("  why: |  fix: |", line)[0] for line in begun if line] == ["", "  why: ", "  fix: "]  # type: ignore[index]
    assert "\n         why\n           fix: none\n\n       1 error detected" in shown
    assert not re.search(r"[ \n]\Z| \n", shown)


def test_an_error_within_another() -> None:
    inner = InputError("a file is damaged", "its end is missing", "copy it again")
    shown = str(GenaiError("no model", str(inner), "see above"))
    why = "  why: a file is damaged\n         why: its end is missing\n         fix: copy it again"
    assert shown == f"no model\n{why}\n  fix: see above"


def test_parts_that_are_missing() -> None:
    assert str(GenaiError("what")) == "what" and str(GenaiError("", "", "do it")) == "\n  fix: do it"


def test_on_the_command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def command(name: str) -> None:
        raise DeviceError("kernels do not compile", LOG, "report it")

    monkeypatch.setattr(app, "command", command)
    assert app.run([]) == 1
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "error: kernels do not compile" and said[-1] == "  fix: report it"
    assert [line for line in said if line.startswith("  why: ")] == ["  why: kernels.cu(3): error: x is undefined"]
    assert all(line.startswith(" " * 7) for line in said[2:-1] if line)

"""Two lines of an input must not have the same custom_id."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from genai.errors import InputError
from genai.llm.batch.lines import open_lines
from genai.llm.batch.run import run_batch


def _lines(*names: Any) -> str:
    return "".join(f"{json.dumps({'custom_id': name, 'prompt': 'a'}) if name != '' else 'no JSON'}\n" for name in names)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("in.jsonl", _lines("a", "b", "a"), "lines 1 and 3 have the same custom_id 'a'"),
        ("in.jsonl", _lines("line-2", None), "lines 1 and 2 have the same custom_id 'line-2'"),
        ("in.jsonl", _lines(1, "", "1"), "lines 1 and 3 have the same custom_id '1'"),
        ("in.jsonl", _lines(*"aaaaaaabb"), "lines 1, 2, 3, 4, 5 and 2 others have.*1 more such IDs: 'b'"),
        ("in.csv", "custom_id,prompt\nx,a\ny,b\nx,c\n", "rows 1 and 3 have the same custom_id 'x'"),
    ],
)
def test_equal_ids_are_refused_at_the_start(name: str, text: str, message: str, tmp_path: Path, fake: Any) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=f"(?s){name}: {message}.*give each line a different custom_id"):
        run_batch(fake, open_lines(tmp_path / name), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_different_ids_are_checked_once(tmp_path: Path, fake: Any) -> None:
    """Lines that are not valid have no ID; each fails with its own error."""
    (tmp_path / "in.jsonl").write_text(_lines("a", "", "", None, ["a"], ["a"]))
    lines = open_lines(tmp_path / "in.jsonl")
    assert run_batch(fake, lines, tmp_path / "out").figures.done == 6
    assert lines.has_unique_ids


def test_hashes_that_are_equal_by_chance(tmp_path: Path, fake: Any) -> None:
    (tmp_path / "in.jsonl").write_text(_lines("a", "b"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("genai.llm.batch.custom_ids.hash", lambda name: 7, raising=False)
        assert run_batch(fake, open_lines(tmp_path / "in.jsonl"), tmp_path / "out").figures.done == 2


def test_the_second_line_of_stdin_fails(tmp_path: Path, fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(_lines("a", "b", "a").encode())))
    report = run_batch(fake, open_lines(Path("-")), tmp_path / "out")
    assert [one.number for one in report.failures] == [3]
    errors = [json.loads(line)["error"] for line in (tmp_path / "out").read_text().splitlines()]
    assert re.search("an earlier line has the same", next(error["why"] for error in errors if error))

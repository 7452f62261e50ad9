"""Outputs that are tables: columns, resuming from the journal, and what is refused."""

from __future__ import annotations

import csv
import io
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from genai.errors import InputError, MissingPackageError, OptionError
from genai.llm.batch.lines import open_lines
from genai.llm.batch.requests import PromptFormat, PromptTemplate
from genai.llm.batch.run import run_batch
from genai.llm.batch.tables import ENDINGS, journal_path, output_format, write_table
from tests.llm.batch.test_run import run_fake, write_input

TABLES = [".csv", ".tsv", ".parquet", ".CSV"]


def rows(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        found: list[dict[str, Any]] = pytest.importorskip("pyarrow.parquet").read_table(path).to_pylist()
        return [{name: value for name, value in row.items() if value is not None} for row in found]
    with path.open(newline="", encoding="utf-8") as file:
        read = csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ",")
        numbers = ("line", "choice", "prompt_tokens", "completion_tokens", "seed")
        return [
            {name: int(cell) if name in numbers else cell for name, cell in row.items() if cell != ""} for row in read
        ]


@pytest.mark.parametrize("ending", TABLES)
def test_a_table_has_a_row_for_each_line_in_order(tmp_path: Path, fake: Any, ending: str) -> None:
    write_input(tmp_path / "in.jsonl", 95, wrong=10)
    output = tmp_path / f"out{ending}"
    report = run_batch(fake, open_lines(tmp_path / "in.jsonl"), output)
    found = rows(output)
    assert [row["line"] for row in found] == list(range(1, 96)) and report.reordered
    assert found[4] == {
        "line": 5, "custom_id": "id-4", "choice": 0, "reply": "4 tpmorp", "finish_reason": "stop", "prompt_tokens": 3,
        "completion_tokens": 8, "seed": 7,
    }  # fmt: skip
    assert found[9].keys() == {"line", "custom_id", "error"} and "not JSON" in found[9]["error"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["in.jsonl", output.name, f"{output.name}.jsonl"])


@pytest.mark.parametrize("ending", [".csv", ".parquet"])
def test_a_table_is_resumed_from_its_journal(tmp_path: Path, fake: Any, ending: str) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / f"out{ending}"
    write_input(source, 95)
    run_batch(fake, open_lines(source), output)
    complete = rows(output)
    with pytest.raises(InputError, match="already exists"):
        run_batch(fake, open_lines(source), output)
    journal = journal_path(output)
    whole = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(whole[:50]) + whole[50][:9])  # as after SIGKILL
    output.unlink()
    with pytest.raises(InputError, match="already exists"):
        run_batch(fake, open_lines(source), output)
    report = run_batch(fake, open_lines(source), output, begin="resume")
    assert report.kept == 50 and report.cut and rows(output) == complete
    write_input(source, 100)  # the same lines, and five more
    report = run_batch(fake, open_lines(source), output, begin="resume")
    assert report.kept == 95 and len(rows(output)) == 100
    journal.unlink()
    with pytest.raises(InputError, match="cannot be resumed") as caught:
        run_batch(fake, open_lines(source), output, begin="resume")
    assert journal.name in caught.value.why and "--force" in caught.value.fix
    assert run_batch(fake, open_lines(source), output, begin="force").kept == 0 and len(rows(output)) == 100


@pytest.mark.parametrize("ending", [".csv", ".parquet"])
def test_a_killed_run_loses_no_row(tmp_path: Path, ending: str) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / f"out{ending}"
    write_input(source, 10_000, wrong=50)
    journal, order, answered = journal_path(output), random.Random(3), 0
    for _ in range(4):
        process = run_fake(source, output)
        size = journal.stat().st_size if journal.exists() else 0
        deadline = time.monotonic() + 30
        while process.poll() is None and time.monotonic() < deadline:
            if journal.exists() and journal.stat().st_size != size:
                break
        time.sleep(order.uniform(0, 0.03))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        lines = journal.read_bytes().count(b"\n")
        assert lines >= answered, "a response that was written is lost"
        answered = lines
    last = run_fake(source, output)
    assert last.communicate() and last.returncode == 0
    assert [row["line"] for row in rows(output)] == list(range(1, 10_001))
    assert not [path.name for path in tmp_path.iterdir() if path.name.endswith((".part", ".partial"))]


@pytest.mark.parametrize("ending", [".csv", ".parquet"])
def test_choices_tool_calls_and_odd_texts(tmp_path: Path, ending: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    usage = {"prompt_tokens": 3, "completion_tokens": 9}
    choices = [
        {"index": 0, "message": {"content": 'a "b",\n\tc\ud800'}, "finish_reason": "stop"},
        {
            "index": 1,
            "message": {"content": None, "reasoning_content": "hm", "tool_calls": [call]},
            "finish_reason": "tool_calls",
        },
    ]
    body = {"choices": choices, "usage": usage, "seed": 2**64 - 1}
    line = {"id": "batch_req_00000000_12_00", "error": None, "custom_id": "x", "response": {"body": body}}
    journal, output = tmp_path / "j", tmp_path / f"out{ending}"
    journal.write_text(json.dumps(line) + "\n")
    write_table(journal, output)
    first, second = rows(output)
    assert first == {
        "line": 12, "custom_id": "x", "choice": 0, "reply": 'a "b",\n\tc\\ud800', "finish_reason": "stop",
        "seed": 2**64 - 1, **usage,
    }  # fmt: skip
    assert json.loads(second.pop("tool_calls")) == [call]
    assert second == {
        "line": 12, "custom_id": "x", "choice": 1, "reasoning": "hm", "finish_reason": "tool_calls", "seed": 2**64 - 1,
    }  # fmt: skip


@pytest.mark.parametrize("name", ["out.xlsx", "out.txt", "out.jsonl.gz", "out.1"])
def test_other_endings_are_refused(tmp_path: Path, fake: Any, name: str) -> None:
    write_input(tmp_path / "in.jsonl", 3)
    with pytest.raises(OptionError, match=f"ends in {Path(name).suffix}") as caught:
        run_batch(fake, open_lines(tmp_path / "in.jsonl"), tmp_path / name)
    assert all(ending in caught.value.why for ending in ENDINGS)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_other_endings_of_inputs_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "in.xlsx"
    path.write_text("a\n")
    with pytest.raises(OptionError, match=r"ends in \.xlsx") as caught:
        open_lines(path)
    assert all(word in f"{caught.value.why} {caught.value.fix}" for word in (".parquet", ".json", "tsv", "format"))
    assert [line.content for line in open_lines(path, "text")] == [b"a"]
    path = path.rename(tmp_path / "in.json")
    path.write_text('{"prompt": "a"}\n')
    assert [open_lines(path).fields(line) for line in open_lines(path)] == [{"prompt": "a"}]


def test_parquet_needs_pyarrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingPackageError, match=r"out\.parquet") as caught:
        output_format(Path("out.parquet"))
    assert "pip install pyarrow" in caught.value.fix


def test_a_table_that_cannot_be_written_leaves_its_journal(
    tmp_path: Path, fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_input(tmp_path / "in.jsonl", 30)
    output = tmp_path / "out.csv"
    replace = Path.replace

    def full(self: Path, target: Path) -> Path:
        if target == output:
            raise OSError(28, os.strerror(28))
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(InputError, match="cannot be written") as caught:
        run_batch(fake, open_lines(tmp_path / "in.jsonl"), output)
    assert "out.csv.jsonl" in caught.value.fix and "space" in caught.value.why
    monkeypatch.undo()
    assert run_batch(fake, open_lines(tmp_path / "in.jsonl"), output, begin="resume").kept == 30
    assert len(rows(output)) == 30


@pytest.mark.parametrize("ending", [".csv", ".parquet", "stdin"])
def test_unknown_columns_are_one_error_at_the_start(
    tmp_path: Path, fake: Any, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def table(**columns: str) -> Any:
        path, cells = tmp_path / f"in{ending}", (columns, columns.values(), columns.values())
        if ending == ".parquet":
            arrow = pytest.importorskip("pyarrow")
            parquet = pytest.importorskip("pyarrow.parquet")
            parquet.write_table(arrow.table({name: [cell] * 2 for name, cell in columns.items()}), path)
            return open_lines(path)
        text = "".join(",".join(row) + "\n" for row in cells)
        if ending == "stdin":
            monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(text.encode())))
            return open_lines(Path("-"), "csv")
        path.write_text(text)
        return open_lines(path)

    output = tmp_path / "out.csv"
    template = PromptFormat(PromptTemplate("Sum {qestion}"))
    with pytest.raises(InputError, match="no column 'qestion'") as caught:
        run_batch(fake, table(id="1", question="b"), output, template)
    assert caught.value.why == "the columns are id, question" and "'question'" in caught.value.fix
    with pytest.raises(InputError, match="no column for the prompt") as caught:
        run_batch(fake, table(question="b"), output)
    assert "the columns are question" in caught.value.why
    with pytest.raises(OptionError, match="unknown columns 'max_token', 'b'") as unknown:
        run_batch(fake, table(prompt="a", max_token="3", b="4"), output)
    assert "prompt, max_token, b" in unknown.value.why and "'max_tokens'" in unknown.value.fix
    assert not output.exists() and not journal_path(output).exists()
    report = run_batch(fake, table(prompt="a", custom_id=""), output)
    assert (report.figures.done, report.figures.failed, len(rows(output))) == (2, 0, 2)
